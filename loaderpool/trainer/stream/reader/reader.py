"""A process that reads a stream, as the trainer has it: told what to read, listened to, ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess

from loaderpool.system import capacity, clock, machine
from loaderpool.system.machine import StopWatch
from loaderpool.trainer.stream.reader.messages import COMMAND, ReaderCommand
from loaderpool.transport.reports import LostReport, Verdict

# How long a reader may take to let go of a pass that is not wanted any more, or to end. Smaller: the user's code that
# happens to wait is killed instead of closed. Larger: the next pass, or the loader's end, waits as long.
GRACE_S = 0.5
# Without pidfds a reader's process is looked at this often.
_LOOK_MS = 200


class ReaderGoneError(Exception):
    """The reader is dead, or was told to end; it never leaves this package."""


class Reader:
    """A process and our end of the socket to it.

    Ownership: the caller that has taken it from `Readers` alone reads from the socket and closes it.

    Args:
        process: just started.
        channel: our end.

    Attributes:
        is_used: whether it has served a pass.
        passes: how many it was told of.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self.is_used = self.was_stopped = False
        self._cancelled = (0, 0)  # pass, and by when it must have let go of it; a later pass is not meant
        self.passes = 0
        self._oom_kills = capacity.oom_kill_count()
        self._has_ended = False
        self._stop_watch = StopWatch()
        self._pidfd = machine.open_pidfd(process.pid)
        self._look_ms = _LOOK_MS if self._pidfd is None else self._stop_watch.look_ms
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
            ReaderGoneError: the reader is dead or ending.
        """
        self.passes += 1
        try:
            self._channel.send(COMMAND.pack(ReaderCommand.READ, self.passes, epoch, start))
        except OSError:
            raise ReaderGoneError from None
        return self.passes

    def grant(self, number: int, offset: int) -> None:
        """There is room in the arena for the bundle that was told of.

        Raises:
            ReaderGoneError: the reader is dead or ending.
        """
        try:
            self._channel.send(COMMAND.pack(ReaderCommand.ROOM, number, offset, 0))
        except OSError:
            raise ReaderGoneError from None

    def cancel(self, number: int) -> None:
        """The consumer abandoned the rest of a pass. Never blocks; in any thread, also in a finalizer."""
        if self._cancelled[0] != number:
            self._cancelled = number, clock.monotonic_ns() + int(GRACE_S * 1e9)
        with contextlib.suppress(OSError):
            self._channel.send(COMMAND.pack(ReaderCommand.CANCEL, number, 0, 0), socket.MSG_DONTWAIT)

    @property
    def is_leaving(self) -> bool:
        """Whether it was told that the rest of its pass is not wanted."""
        return self._cancelled[0] == self.passes

    def note_left(self) -> None:
        """It is between passes."""
        self.is_used, self._cancelled = True, (0, 0)

    def receive_into(self, view: memoryview) -> None:
        """Fill `uint8[n]`. Blocks: until the reader has sent so much; once it was cancelled, not for long.

        Raises:
            ReaderGoneError: it sends no more, or not in time.
        """
        while view.nbytes:
            try:
                count = self._channel.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait()
                continue
            except OSError:
                count = 0
            if not count:
                raise ReaderGoneError
            view = view[count:]

    def _wait(self) -> None:
        """Blocks until there may be something; at most for a moment."""
        if self._has_ended:  # and what it had sent was read
            raise ReaderGoneError
        pause_ms = self._look_ms
        number, leaves_by_ns = self._cancelled
        if number == self.passes:
            left_ms = (leaves_by_ns - clock.monotonic_ns()) // 1_000_000
            if left_ms < 0:
                raise ReaderGoneError
            pause_ms = min(pause_ms, left_ms + 1)
        ready = {descriptor for descriptor, _ in self._poll.poll(pause_ms)}
        if ready:
            self._stop_watch.runs()
            # Its end tells only that: children of the user's may hold the other end of the socket.
            self._has_ended = self._pidfd in ready
        elif self._pidfd is None and self._process.poll() is not None:
            self._has_ended = True
        elif not machine.is_stopped(self.pid):
            self._stop_watch.runs()
        elif self._stop_watch.is_too_long():
            self.was_stopped = True
            self.kill()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        if self._pidfd is None:
            return self._process.poll() is None
        return not _has_ended(self._pidfd, 0.0)  # it is not reaped: what it has started may have to be ended yet

    def kill(self) -> None:
        """End the process now, and what the user's code has started in it and left running."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # safe while it is not reaped: until then its number is not reused

    def tell_end(self) -> None:
        """Tell it to end, and a thread that waits for it here that it will. Never blocks."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def reap(self, grace_s: float = 0.0) -> None:
        """Blocks until the process is gone: for so long it may end by itself. Twice is fine, in any thread."""
        if self._process.returncode is not None:
            return
        if self._pidfd is not None:
            _has_ended(self._pidfd, grace_s)
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


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    """Whether the process has. Blocks: until then, at most for so long."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
