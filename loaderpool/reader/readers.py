"""The trainer's ends of the processes that read one loader's stream: started, lent to one pass at a time, ended.

A reader is kept for the passes that follow, for its start takes as long as an interpreter's. Where two passes run side
by side there are two. One that does not answer soon to a cancelled pass is killed; the next pass has another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from loaderpool import boot, capacity, clock, fault_points, machine
from loaderpool.errors import ClosedError, PoolBrokenError
from loaderpool.launch import environment, inherited, search_path
from loaderpool.memory.arena import Arena
from loaderpool.reader.words import ORDER, Order
from loaderpool.worker.failures import LostReport, Verdict

__all__ = ["Reader", "ReaderGoneError", "Readers"]

# How long a reader may take to let go of a pass that nobody wants, or to end. Smaller: the user's code that happens to
# wait is killed instead of closed. Larger: the next pass, or the loader's end, waits as long.
GRACE_S = 0.5
# A stopped reader is ended after so long, as a worker is; it is looked for five times as often.
_STOPPED_S = 5.0
# Without pidfds a reader's process is looked at this often.
_LOOK_MS = 200
# Of two passes that wait for the same reader one may miss the news.
_TURN_S = 0.05
_CLOSED = "this Loader, or its pool, is closed; make a new one"


class ReaderGoneError(Exception):
    """The reader is dead, or was told to end; it never leaves this package."""


class Reader:
    """A process and our end of the socket to it.

    Ownership: whoever has taken it from `Readers` alone reads from the socket and closes it.

    Args:
        process: just started.
        channel: our end.

    Attributes:
        is_used: whether it has served a pass.
        is_leaving: it was told that nobody wants the rest of its pass.
        passes: how many it was told of.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self.is_used = self.is_leaving = self.was_stopped = False
        self.passes = 0
        self._oom_kills = capacity.oom_kill_count()
        self._has_ended = False
        self._stopped_ns = 0
        longest_s = fault_points.setting("stopped_s", _STOPPED_S)
        self._longest_stop_ns = int(longest_s * 1e9)
        self._pidfd = machine.open_pidfd(process.pid)
        self._look_ms = _LOOK_MS if self._pidfd is None else max(1, int(longest_s * 200))
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def read(self, epoch: int, start: int) -> int:
        """Have a pass read from its position `start` on; returns the pass's number.

        Raises:
            ReaderGoneError: nobody hears it.
        """
        self.passes += 1
        try:
            self._channel.send(ORDER.pack(Order.READ, self.passes, epoch, start))
        except OSError:
            raise ReaderGoneError from None
        return self.passes

    def grant(self, number: int, offset: int) -> None:
        """There is room in the arena for the bundle that was told of.

        Raises:
            ReaderGoneError: nobody hears it.
        """
        try:
            self._channel.send(ORDER.pack(Order.ROOM, number, offset, 0))
        except OSError:
            raise ReaderGoneError from None

    def cancel(self, number: int) -> None:
        """Nobody wants the rest of a pass. Never blocks; in any thread, also in a finalizer."""
        self.is_leaving = True
        with contextlib.suppress(OSError):
            self._channel.send(ORDER.pack(Order.CANCEL, number, 0, 0), socket.MSG_DONTWAIT)

    def receive_into(self, view: memoryview, deadline_ns: int | None = None) -> None:
        """Fill `uint8[n]`. Blocks: until the reader has sent so much, or `deadline_ns`, if there is one.

        Raises:
            ReaderGoneError: it sends no more, or not in time.
        """
        while view.nbytes:
            try:
                count = self._channel.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(deadline_ns)
                continue
            except OSError:
                count = 0
            if not count:
                raise ReaderGoneError
            view = view[count:]

    def _wait(self, deadline_ns: int | None) -> None:
        """Blocks until there may be something; at most for a moment."""
        if self._has_ended:  # and what it had sent was read
            raise ReaderGoneError
        pause_ms = self._look_ms
        if deadline_ns is not None:
            left_ms = (deadline_ns - clock.monotonic_ns()) // 1_000_000
            if left_ms <= 0:
                raise ReaderGoneError
            pause_ms = min(pause_ms, left_ms + 1)
        before = clock.monotonic_ns()
        ready = {descriptor for descriptor, _ in self._poll.poll(pause_ms)}
        if ready:
            self._stopped_ns = 0
            # Its end tells only that: children of the user's may hold the other end of the socket.
            self._has_ended = self._pidfd in ready
        elif self._pidfd is None and self._process.poll() is not None:
            self._has_ended = True
        elif machine.is_stopped(self.pid):
            # A gap in our own time (Ctrl-Z stops us, too) counts as one look.
            self._stopped_ns += min(clock.monotonic_ns() - before, 2_000_000 * pause_ms)
            if self._stopped_ns > self._longest_stop_ns:
                self.was_stopped = True
                self.kill()
        else:
            self._stopped_ns = 0

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process now, and what the user's code has started in it and left running."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # safe while it is not reaped: until then its number is not reused

    def tell_end(self) -> None:
        """Tell it to end, and whoever waits for it here that it will. Never blocks."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def reap(self, grace_s: float = 0.0) -> None:
        """Blocks until the process is gone: for so long it may end by itself. Twice is fine, in any thread."""
        if self._process.returncode is not None:
            return
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(grace_s * 1000)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        if self._process.returncode is None:
            self.kill()
            self._process.wait()

    def death(self, epoch: int) -> LostReport:
        """How it died; it is reaped."""
        code = self._process.returncode
        is_out_of_memory = code == -signal.SIGKILL and capacity.oom_kill_count() > self._oom_kills
        return LostReport(
            Verdict.BEFORE, None, epoch, code, self.pid, 1, "", is_out_of_memory, was_stopped=self.was_stopped
        )

    def close(self) -> None:
        """Close our descriptors; the process is reaped."""
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Readers:
    """Takes no lock, so that a finalizer may close it in the middle of anything: who pops a reader alone has it.

    Args:
        arena: what function and source are in, in which the stream's own arrays lie.
        place: offset and length of the stream's shipment in it.
        files: descriptors of the shipment's data files; the caller's, until after `close`.
    """

    def __init__(self, arena: Arena, place: tuple[int, int], files: Sequence[int]) -> None:
        self._arena, self._place, self._files = arena, place, files
        self._idle: list[Reader] = []
        self._all: dict[int, Reader] = {}  # by pid
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # tells who waits for one to look again
        self.is_closed = False

    def begin(self) -> None:
        """Start one for the first pass. What goes wrong goes wrong again, and is told, when it is taken."""
        with contextlib.suppress(PoolBrokenError):
            self._idle.append(self._start())

    def take(self) -> Reader:
        """A reader that is nobody else's until it is given back.

        Raises:
            PoolBrokenError: none could be started.
            ClosedError: the loader is closed.
        """
        until_ns = clock.monotonic_ns() + int(GRACE_S * 1e9)
        while True:
            while self._idle:
                with contextlib.suppress(IndexError):
                    reader = self._idle.pop()
                    if reader.is_alive():
                        return reader
                    self.end(reader)
            # One that is letting go of an abandoned pass will be free sooner than another one could be here.
            left_s = (until_ns - clock.monotonic_ns()) / 1e9
            if left_s <= 0 or not any(reader.is_leaving for reader in list(self._all.values())):
                return self._start()
            with contextlib.suppress(queue.Empty):
                self._changed.get(timeout=min(left_s, _TURN_S))

    def give_back(self, reader: Reader) -> None:
        """It is between passes."""
        if self._idle:  # one is enough; two passes side by side are rare
            self.end(reader)
            return
        reader.is_used, reader.is_leaving = True, False
        self._idle.append(reader)
        self._tell_change()
        if self.is_closed:
            self._end_idle()

    def end(self, reader: Reader, grace_s: float = GRACE_S) -> None:
        """End a reader that was taken. Blocks: while it ends, at most for `grace_s`."""
        reader.tell_end()
        reader.reap(grace_s)
        reader.close()
        self._all.pop(reader.pid, None)
        self._tell_change()

    def _tell_change(self) -> None:
        if self._changed.empty():
            self._changed.put(None)

    def close(self) -> None:
        """End them all. Blocks: at most for a moment. In any thread, also in a finalizer; twice is fine."""
        self.is_closed = True
        readers = list(self._all.values())
        for reader in readers:
            reader.tell_end()  # whoever has it closes it
        self._end_idle()
        until_ns = clock.monotonic_ns() + int(GRACE_S * 1e9)
        for reader in readers:
            reader.reap(max(0.0, (until_ns - clock.monotonic_ns()) / 1e9))

    def _end_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(IndexError):
                self.end(self._idle.pop())

    def _start(self) -> Reader:
        if self.is_closed:
            raise ClosedError(_CLOSED)
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            try:
                my_end, their_end = (
                    socket.socket(fileno=machine.above_standard(each.detach())) for each in socket.socketpair()
                )
                mine.callback(my_end.close)
                theirs.callback(their_end.close)
                crossing = [their_end.fileno(), self._arena.descriptor, *self._files]
                start = {
                    "path": search_path(),
                    "argv": [str(argument) for argument in getattr(sys, "argv", ())],
                    "trainer_pid": os.getpid(),
                    "dies_with_thread": threading.current_thread() is threading.main_thread(),
                    "socket": crossing[0],
                    "arena": crossing[1],
                    "arena_bytes": self._arena.nbytes,
                    "files": crossing[2:],
                    "place": self._place,
                }
                file, nbytes = boot.write_settings(start)
                theirs.callback(os.close, file)
                process = subprocess.Popen(
                    boot.command("loaderpool.reader.process", file, nbytes, "loaderpool-reader"),
                    pass_fds=[file, *crossing],
                    stdin=subprocess.DEVNULL,
                    stdout=inherited(sys.__stdout__, 1),
                    stderr=inherited(sys.__stderr__, 2),
                    start_new_session=True,  # Ctrl-C and Ctrl-Z of the terminal are the trainer's alone
                    env=environment(),
                )
                mine.callback(_undo, process)
            except ValueError:  # the arena's descriptor is closed
                raise ClosedError(_CLOSED) from None
            except OSError as error:
                advice = capacity.start_advice(error, "this process has no file descriptors left")
                raise PoolBrokenError(f"no process to read the stream could be started: {error}; {advice}") from error
            fault_points.reach("trainer.reader_launched")
            reader = Reader(process, my_end)
            mine.pop_all()
        self._all[reader.pid] = reader
        if self.is_closed:  # meanwhile: who closed it did not see this one
            self.end(reader, 0.0)
            raise ClosedError(_CLOSED)
        return reader


def _undo(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
