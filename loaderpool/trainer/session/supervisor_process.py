"""The trainer's ends of one supervisor: what arrives is read here, its end is noticed here, and it is ended here."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence

from loaderpool.errors import PoolBrokenError
from loaderpool.memory.arena import Arena
from loaderpool.plan.generator_positions import item_name
from loaderpool.system import clock, ctrl_c, fault_points, machine
from loaderpool.system.machine import StopWatch
from loaderpool.system.process import RestartLimit
from loaderpool.trainer.session.launch import SUPERVISOR, Program, Surroundings, launch
from loaderpool.trainer.session.lease import ReturnPipe
from loaderpool.trainer.session.supervisor_handle import (
    ControlPipe,
    KnownProcess,
    Ready,
    SupervisorHandle,
    tickets_after,
)
from loaderpool.transport.messages import READ_BYTES, Words, decode_all
from loaderpool.transport.pipes import Attachment, Lost, receive_notice

# Supervisors in a row that may die before a consumer has taken anything. Smaller: a few kills from outside, while one
# of them starts, end the pool. Larger: the longer a sample that takes its supervisor along is tried.
_WITHOUT_PROGRESS = 8


class SupervisorDeaths:
    """Counts the deaths of a session's supervisors; the caller holds the session's lock.

    Args:
        max_restarts: how many are made good, and within how many seconds; None: any number.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._limit, self._max_restarts = RestartLimit(max_restarts), max_restarts
        self._without_progress = 0  # since a consumer took anything
        self._deliveries = 0  # that consumers had taken at the latest one
        self._indices: tuple[int, ...] = ()  # at which the workers were at the latest one

    def note(self, indices: Iterable[int], deliveries: int) -> None:
        """A supervisor died.

        Args:
            indices: source indices of the samples that its workers were at.
            deliveries: how many consumers have taken so far: if more than at the latest death, then whatever ended
                supervisors before, it was not for good.
        """
        self._limit.note(clock.monotonic_ns())
        self._without_progress = self._without_progress + 1 if deliveries == self._deliveries else 1
        self._deliveries = deliveries
        self._indices = tuple(sorted(indices))

    @property
    def are_too_many(self) -> bool:
        """Whether so many supervisors died that another one would likely die, too."""
        return self._limit.is_exceeded or (self._max_restarts is not None and self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        return self._without_progress > _WITHOUT_PROGRESS

    def error(self, name: str, how: str) -> PoolBrokenError:
        """Return what is raised where the latest one is not replaced."""
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers."
        if self._limit.is_exceeded and self._max_restarts is not None:
            most, seconds = self._max_restarts
            advice = (
                f" Crashes within {seconds:g} s: {self._limit.count}, but restarts=({most}, {seconds:g}) allows {most}."
                f"{advice}"
            )
        if self._is_stuck and self._indices:
            at_work = ", ".join(map(item_name, self._indices)).replace(", source index", ",")
            advice = (
                f" It was crash {self._without_progress} in a row without a batch in between. Its workers were at "
                f"{at_work} or shortly after. Check whether your function ends other processes, as os.killpg does."
            )
        return PoolBrokenError(f"{name[0].upper()}{name[1:]} crashed ({how}), and its workers ended.{advice}")


# How long a close waits for the supervisor to end by itself before it is killed.
_CLOSE_TIMEOUT_S = 2.0
# How long the supervisor may take to make room for another message with descriptors; it reads them when it loads.
_SEND_TIMEOUT_S = 5.0
# Without pidfds its process is looked at this often; and so it is, to see whether it is stopped.
_LOOK_MS = 200
# Workers end with their supervisor by themselves, in milliseconds; larger for one in an uninterruptible system call.
_WORKERS_END_S = 5.0


class SupervisorProcess:
    """A supervisor's process, from its start to its end.

    Args:
        arena: what it shares with the trainer.
        workers: how many workers it shall have.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.
        wake: read end of the pipe that wakes the thread that waits here.
        first_ticket: its tickets' numbers begin here.
        program: what is executed in its place.
        around: what it finds around it; None: what there is now.

    Raises:
        PoolBrokenError: no process could be started.
    """

    def __init__(
        self,
        arena: Arena,
        workers: int,
        max_restarts: tuple[int, float] | None,
        wake: int,
        first_ticket: int = 1,
        program: Program = SUPERVISOR,
        around: Surroundings | None = None,
    ) -> None:
        started = self._launched = launch(arena, workers, max_restarts, first_ticket, program, around)
        self._process = started.process
        self._completions = started.completions
        self.control, self.socket = started.control, started.socket
        self.name = f"the supervisor process (pid {self.pid})"
        self._notices = self.socket.fileno()
        self.next_tickets = tickets_after(first_ticket)
        self._wake = wake
        self._stop_watch = StopWatch()
        self._signals: int | None = None  # tells of Ctrl-C
        try:
            fault_points.reach("trainer.launched")
            self._pidfd = machine.open_pidfd(self.pid)
            self._poll = self._make_poll()
        except BaseException:
            started.undo()
            raise

    @property
    def pid(self) -> int:
        """The supervisor's pid; also the number of its process group."""
        return self._process.pid

    def wait(self, room_in: int | None, timeout_ms: int | None = None) -> Ready:
        """Blocks until something has arrived, the supervisor has ended, or the wake pipe is written to: 1 s at most.

        Args:
            room_in: a descriptor that is waited for to be writable, too.
            timeout_ms: how long, at most; 0: find out what there is now.
        """
        poll = self._poll
        signals = ctrl_c.told_descriptor()
        if signals != self._signals:
            self._signals = signals
            poll = self._poll = self._make_poll()
        if room_in is not None:
            poll = self._make_poll()
            poll.register(room_in, select.POLLOUT)
        if timeout_ms is None:
            timeout_ms = _LOOK_MS if self._pidfd is None else self._stop_watch.look_ms
        news = dict(poll.poll(timeout_ms))
        if timeout_ms:
            if news or not machine.is_stopped(self.pid):
                self._stop_watch.runs()
            elif self._stop_watch.is_too_long():  # its death is met as any other
                self._launched.end_group()
        if self._wake in news:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        # Not by name: behind a wait that left no cache warm, that is 7 us, not 14.
        has_ended = self._process.poll() is not None if self._pidfd is None else self._pidfd in news
        return Ready(self._completions in news, self._notices in news, self._signals in news, has_ended)

    def read(self, inbox: collections.deque[Words]) -> bool:
        """Put what has arrived on the completion pipe into a deque; whether there may be more."""
        try:
            data = os.read(self._completions, READ_BYTES)
        except BlockingIOError:
            return False
        inbox.extend(decode_all(data))
        return len(data) == READ_BYTES

    def receive(self) -> tuple[Words, Attachment | Lost] | None:
        """Return the next notice of the socket, None where there is none now."""
        return receive_notice(self.socket)

    def send_files(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send a message with descriptors. Blocks: while the supervisor has very many unread, at most some seconds.

        Raises:
            PoolBrokenError: it does not read them, or the kernel has no room for them.
        """
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        poll.poll(_SEND_TIMEOUT_S * 1000)
        try:
            socket.send_fds(self.socket, [message], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead: another one will be told again
        except OSError as error:
            raise PoolBrokenError(f"Could not send the memory of the arrays to the supervisor: {error}") from error

    def reap(self) -> str:
        """Reap the supervisor, which has ended, and end what is left of its process group; returns how it ended."""
        self._launched.end_group()
        self._process.wait()
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @staticmethod
    def end_workers(workers: Iterable[KnownProcess]) -> None:
        """End the workers of a dead supervisor: none writes any more, into a slot or a pipe."""
        deadline_ns = clock.monotonic_ns() + int(_WORKERS_END_S * 1e9)
        for worker in workers:
            while machine.start_time(worker.pid) == worker.start_time != 0 and clock.monotonic_ns() < deadline_ns:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.001)

    def end(self) -> None:
        """End the supervisor, which was told to close, and its process group. Blocks: at most some seconds."""
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._launched.end_group()
            self._process.wait()

    def close(self) -> None:
        """Close our ends; that of the control pipe belongs to the `ReturnPipe`."""
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._launched.close()

    def _make_poll(self) -> select.poll:
        poll = select.poll()
        for descriptor in (self._completions, self._notices, self._wake, self._pidfd, self._signals):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        return poll


class ProcessStarter:
    """Starts supervisors as processes; see `Starter`.

    Args:
        program: what is executed in the supervisor's place.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.

    Raises:
        MemoryLimitError: no address space for the arena.
        OSError: no descriptors are left.
    """

    hands_over_files = True

    def __init__(self, program: Program, max_restarts: tuple[int, float] | None) -> None:
        self.program, self._max_restarts = program, max_restarts
        self._around = Surroundings.of_now()
        self.arena = Arena.create()
        try:
            self._wake_read, self._wake_write = os.pipe()
        except BaseException:
            self.arena.close_descriptor()
            raise
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    def start(self, workers: int, first_ticket: int) -> SupervisorProcess:
        return SupervisorProcess(
            self.arena, workers, self._max_restarts, self._wake_read, first_ticket, self.program, self._around
        )

    def connect(self, supervisor: SupervisorHandle, pipe: ControlPipe | None) -> ReturnPipe:
        assert isinstance(supervisor, SupervisorProcess)
        if isinstance(pipe, ReturnPipe):
            pipe.renew(supervisor.control)
            return pipe
        return ReturnPipe(supervisor.control)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def close(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)
        self.arena.close_descriptor()
