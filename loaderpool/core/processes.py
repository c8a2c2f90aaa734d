"""The worker processes as the supervisor has them: started, watched for stops, reaped."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.core.channel import Channel
from loaderpool.core.memory import SlotFile
from loaderpool.core.worker import Worker
from loaderpool.memory.arena import Arena
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.supervisor.watch import HungSample, StackFile
from loaderpool.system import fault_points, machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.worker.after_fork import become_worker, serve


class ForkedProcess:
    """A forked process, from its first line to its exit status.

    By `os.fork` itself: a library for it costs its import in every supervisor
    (docs/internals/decisions/0018-workers-are-forked-plainly.md).

    Args:
        run: what it does; then it ends, and never returns to what is on the supervisor's stack.

    Raises:
        OSError: no memory, or no more processes.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        machine.flush_standard_streams()  # or both would write what waits in them
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            serve(run)

    def poll(self) -> int | None:
        """Return its exit status, minus the signal's number where one ended it; None: it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Return its exit status once it has ended. Blocks until then."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another caller was told how it ended, or SIGCHLD is ignored
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class WorkerProcess:
    """A forked worker: its process, the supervisor's end of its channel, and what its threads were at."""

    def __init__(self, number: int, forked: ForkedProcess, cell: int, channel: Channel, stacks: StackFile) -> None:
        self.number, self.process, self.pid, self.cell = number, forked, forked.pid, cell
        self.channel, self.stacks = channel, stacks
        self.sample = HungSample(self.pid, cell, stacks)
        self.stop: StopWatch | None = None  # while it is stopped (SIGSTOP)
        self.was_stopped = False  # it was ended for it
        self.pidfd: int | None = None

    def kill(self) -> None:
        """End it: it is not reaped yet, so the number is still its own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Processes:
    """All workers of a supervisor.

    Args:
        arena: with the board.
        slots: where workers write.
        payloads: by loader; what workers inherit.
        forms: by loader.
        private: descriptors of the supervisor that are not the workers'.
    """

    def __init__(
        self,
        arena: Arena,
        slots: SlotFile,
        payloads: Mapping[int, Mapping[str, Any]],
        forms: Mapping[int, bytes],
        private: Callable[[], list[int]],
    ) -> None:
        self._arena, self._slots, self._payloads, self._forms, self._private = arena, slots, payloads, forms, private
        self.by_number: dict[int, WorkerProcess] = {}
        self._cells = list(range(MAX_WORKERS - 1, -1, -1))  # that are free
        self._pid = os.getpid()

    def start(self, number: int) -> WorkerProcess:
        """Start a worker.

        Raises:
            OSError: no memory, no more processes, or no descriptors.
        """
        if not self._cells:
            raise OSError(errno.EAGAIN, "too many workers have not ended yet")
        fault_points.reach("supervisor.forking")
        ours, theirs = Channel.pair()
        with theirs:
            try:
                stacks = StackFile()
                try:
                    cell = self._cells.pop()
                    self._arena.board.clear(cell)
                    forked = ForkedProcess(lambda: self._become(number, cell, ours.fileno(), theirs.detach(), stacks))
                except BaseException:
                    self._cells.append(cell)
                    stacks.close()
                    raise
            except BaseException:
                ours.close()
                raise
        worker = self.by_number[number] = WorkerProcess(number, forked, cell, Channel(ours), stacks)
        try:
            worker.pidfd = machine.open_pidfd(worker.pid)
        except OSError:  # none left: its end is found by a look, as on machines that have no such thing
            worker.pidfd = None
        return worker

    def bury(self, worker: WorkerProcess) -> int:
        """Reap a worker that has ended, and return its exit code; its cell is the caller's until `free`."""
        del self.by_number[worker.number]
        code = worker.process.wait()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        worker.channel.close()
        return code or 0

    def free(self, worker: WorkerProcess) -> None:
        """Its cell and its stacks are not looked at any more."""
        worker.stacks.close()
        self._cells.append(worker.cell)

    def note_stops(self) -> None:
        """Find out which workers were stopped or go on, after a signal has said that one did."""
        for worker in self.by_number.values():
            while True:
                try:
                    found = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                except ChildProcessError:
                    break
                if found is None:
                    break
                worker.stop = StopWatch() if found.si_code == os.CLD_STOPPED else None

    def end_stopped(self) -> None:
        """End those that were stopped for too long; their death is told as any other."""
        for worker in self.by_number.values():
            if worker.stop is not None and worker.stop.is_too_long():
                worker.stop, worker.was_stopped = None, True
                worker.kill()

    @property
    def stop_look_ms(self) -> int | None:
        """How soon stopped workers are to be looked at again; None: there are none."""
        return next((worker.stop.look_ms for worker in self.by_number.values() if worker.stop is not None), None)

    @property
    def without_pidfd(self) -> list[WorkerProcess]:
        """Those whose end is found only by a look."""
        return [worker for worker in self.by_number.values() if worker.pidfd is None]

    def end_all(self) -> None:
        """Kill and reap them."""
        for worker in self.by_number.values():
            worker.kill()
        for worker in self.by_number.values():
            worker.process.wait()

    def _become(self, number: int, cell: int, ours: int, theirs: int, stacks: StackFile) -> None:
        """Runs in: the new worker, a fork, which keeps nothing of the supervisor's."""
        process.become("worker")
        others = [ours, *self._private()]
        for other in self.by_number.values():
            others += [other.channel.fileno(), other.stacks.descriptor]
            if other.pidfd is not None:
                others.append(other.pidfd)
        become_worker(self._pid, [theirs], others)
        stacks.arm()
        channel = Channel(socket.socket(fileno=theirs))
        Worker(number, cell, channel, self._arena, self._slots, self._payloads, self._forms).run()


class Signals:
    """Tells of SIGCHLD, by which alone a stopped child is told of, through a descriptor."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        for each in (self.descriptor, self._write):
            os.set_blocking(each, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    @property
    def descriptors(self) -> list[int]:
        """Both ends."""
        return [self.descriptor, self._write]

    def take(self) -> None:
        """Take what was told."""
        try:
            os.read(self.descriptor, 4096)
        except BlockingIOError:
            pass


READABLE = select.EPOLLIN if hasattr(select, "EPOLLIN") else 1
