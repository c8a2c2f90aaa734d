"""The process that reads one pass over a stream, as the main process has it: started, listened to, ended.

started ──▶ answers rooms ──END or FAILED──▶ reaped
│
├ the feed is over: the socket is closed, and the process may let go of the stream; not in time: killed
└ it died: SourceError, after all whole batches
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loaderpool.core.channel import Channel
from loaderpool.core.failures import reader_lost_error, reading_error, setup_error
from loaderpool.core.launch import Surroundings
from loaderpool.core.stream.reading import ANSWER, ROOM, Answer, GivesRooms, Kind
from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, fault_points, machine
from loaderpool.transport import child_process
from loaderpool.transport.reports import LostReport, Verdict

# How long a reader may take to let go of a stream that is not wanted any more, and to end. Smaller: the user's code
# that happens to wait is killed instead of closed. Larger: the loader's end waits as long.
GRACE_S = 0.5
_NOT_LOADED = "the stream process could not load the source"


class Shipped(NamedTuple):
    """What each reader of a loader's stream is started with."""

    arena: Arena
    place: tuple[int, int]  # offset and length of the stream's shipment in it
    files: Sequence[int]  # descriptors of the shipment's data files: the caller's, while readers are started
    around: Surroundings


class ReaderProcess:
    """Reads a pass in a process of its own.

    Runs in: the feed's thread, which starts and reaps the process; other threads may only `wake`.

    Args:
        shipped: the stream.
        epoch: the pass.
        start: its first position.

    Attributes:
        reads_here: in this process, where reading tells itself how far it is.
        is_gone: no process is left.
    """

    reads_here = False

    def __init__(self, shipped: Shipped, epoch: int, start: int) -> None:
        self._shipped, self._epoch, self._start = shipped, epoch, start
        self._wake: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = capacity.oom_kill_count()
        self._was_stopped = self.is_gone = False

    def wake(self) -> None:
        """Have `run` look again at the feed. Never blocks; any thread, also in a finalizer."""
        if self._wake is not None:  # else it has not looked yet
            with contextlib.suppress(OSError):  # it will look anyhow, or has ended
                self._wake.send(b"\0", socket.MSG_DONTWAIT)

    def run(self, feed: GivesRooms) -> Callable[[], LoaderpoolError] | None:
        """Read until the end, or until the feed is over; returns what makes the stream's error, if it has one.

        Whatever it raises ended the stream, too.
        """
        with contextlib.ExitStack() as ends:
            try:
                woken, self._wake = map(ends.enter_context, Channel.pair())
                ours, theirs = map(ends.enter_context, Channel.pair())
                self._process = process = self._launch(theirs)
                theirs.close()
            except ValueError:  # the arena's descriptor is closed
                raise closed_error() from None
            except OSError as error:
                advice = capacity.start_advice(error, "this process has no file descriptors left")
                raise PoolBrokenError(f"Could not start the stream process: {error}; {advice}") from error
            ends.callback(_hang_up, ours)
            fault_points.reach("trainer.reader_launched")
            answer = self._serve(feed, ours, woken, process.pid)
        if answer is None:
            self.close()
            return None if feed.is_over else functools.partial(reader_lost_error, self._death(process), feed.position)
        if answer.kind == Kind.END:
            return None
        ended, advice = pickle.loads(feed.shared[answer.offset : answer.offset + answer.nbytes])
        if advice is None:
            return functools.partial(reading_error, ended, feed.position)
        return functools.partial(setup_error, ended, _NOT_LOADED, advice, "the stream process")

    def close(self) -> None:
        """Wait until the process is gone, for which it has a moment. Then nothing writes to rooms any more."""
        process = self._process
        if process is not None and process.returncode is None:
            child_process.end(process, GRACE_S)
        self.is_gone = True

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        arena, place, files, around = self._shipped
        start = {
            "path": around.path,
            "argv": around.argv,
            "trainer_pid": os.getpid(),
            "socket": theirs.fileno(),
            "arena": arena.descriptor,
            "arena_bytes": arena.nbytes,
            "files": list(files),
            "place": place,
            "epoch": self._epoch,
            "start": self._start,
        }
        return child_process.start(
            "loaderpool.core.stream.reading",
            start,
            [theirs.fileno(), arena.descriptor, *files],
            "loaderpool-reader",
            directory=around.directory,
            environment=around.environment,
        )

    def _serve(self, feed: GivesRooms, ours: socket.socket, woken: socket.socket, pid: int) -> Answer | None:
        """Give rooms and hear answers; returns the last one, or None: it sends no more, or the feed is over."""
        poll, watch = select.poll(), machine.StopWatch()
        poll.register(ours, select.POLLIN)
        poll.register(woken, select.POLLIN)
        has_ended = False
        while not feed.is_over:
            if rooms := feed.grant():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    ours.send(b"".join(ROOM.pack(*room) for room in rooms), socket.MSG_DONTWAIT)
            try:
                answer = _receive(ours)
            except BlockingIOError:
                if has_ended:  # and what it sent was read
                    return None
                found = poll.poll(watch.look_ms)
                has_ended = child_process.has_ended(pid)  # children of the user's may hold its end of the socket
                if found or not machine.is_stopped(pid):
                    watch.runs()
                elif watch.is_too_long():
                    self._was_stopped = True
                    child_process.kill_group(pid)
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096, socket.MSG_DONTWAIT)
                continue
            if answer is None or answer.kind in (Kind.FAILED, Kind.END):
                return answer
            feed.hear(answer)
        return None

    def _death(self, process: subprocess.Popen[bytes]) -> LostReport:
        code, pid, epoch = process.returncode, process.pid, self._epoch
        is_out_of_memory = code == -signal.SIGKILL and capacity.oom_kill_count() > self._oom_kills
        return LostReport(Verdict.BEFORE, None, epoch, code, pid, 1, "", is_out_of_memory, self._was_stopped)


def _hang_up(ours: socket.socket) -> None:
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)  # closing is not enough: a fork of this process may have it, too


def _receive(ours: socket.socket) -> Answer | None:
    """Return what has come, or None: nothing will. Raises BlockingIOError: nothing has."""
    while True:
        try:
            packet = ours.recv(ANSWER.size, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            continue  # it ended before it read all rooms; what it sent is still to be read
        return Answer(*ANSWER.unpack(packet)) if packet else None
