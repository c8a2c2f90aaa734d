"""The trainer's ends of the processes that read one loader's stream: started, lent to one pass at a time, ended.

A reader is kept for the passes that follow, for its start takes as long as an interpreter's. Where two passes run side
by side there are two. One that does not answer soon to a cancelled pass is killed; the next pass has another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Sequence

from loaderpool.errors import PoolBrokenError, closed_error
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, clock, fault_points, machine
from loaderpool.trainer.session.launch import Surroundings
from loaderpool.trainer.stream.reader.reader import GRACE_S, Reader
from loaderpool.transport import child_process

# Of two passes that wait for the same reader one may miss the news.
_TURN_S = 0.05


class Readers:
    """Takes no lock, so that a finalizer may close it in the middle of anything: who pops a reader alone has it.

    Args:
        arena: what function and source are in, in which the stream's own arrays lie.
        place: offset and length of the stream's shipment in it.
        files: descriptors of the shipment's data files; the caller's, until after `close`.
    """

    def __init__(self, arena: Arena, place: tuple[int, int], files: Sequence[int]) -> None:
        self._arena, self._place, self._files = arena, place, files
        self._around = Surroundings.of_now()
        self._idle: list[Reader] = []
        self._all: dict[int, Reader] = {}  # by pid
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # tells who waits for one to look again
        self.is_closed = False

    def begin(self) -> None:
        """Start one for the first pass. What goes wrong goes wrong again, and is told, when it is taken."""
        with contextlib.suppress(PoolBrokenError):
            self._idle.append(self._start())

    def take(self) -> Reader:
        """Return a reader that is the caller's alone until it is given back.

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
        reader.note_left()
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
            reader.tell_end()  # the thread that has it closes it
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
            raise closed_error()
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            try:
                my_end, their_end = (
                    socket.socket(fileno=machine.above_standard(each.detach())) for each in socket.socketpair()
                )
                mine.callback(my_end.close)
                theirs.callback(their_end.close)
                crossing = [their_end.fileno(), self._arena.descriptor, *self._files]
                start = {
                    "path": self._around.path,
                    "argv": self._around.argv,
                    "trainer_pid": os.getpid(),
                    "dies_with_thread": threading.current_thread() is threading.main_thread(),
                    "socket": crossing[0],
                    "arena": crossing[1],
                    "arena_bytes": self._arena.nbytes,
                    "files": crossing[2:],
                    "place": self._place,
                }
                process = child_process.start(
                    "loaderpool.trainer.stream.reader.process",
                    start,
                    crossing,
                    "loaderpool-reader",
                    directory=self._around.directory,
                    environment=self._around.environment,
                )
                mine.callback(_undo, process)
            except ValueError:  # the arena's descriptor is closed
                raise closed_error() from None
            except OSError as error:
                advice = capacity.start_advice(error, "this process has no file descriptors left")
                raise PoolBrokenError(f"Could not start the stream process: {error}; {advice}") from error
            fault_points.reach("trainer.reader_launched")
            reader = Reader(process, my_end)
            mine.pop_all()
        self._all[reader.pid] = reader
        if self.is_closed:  # meanwhile: who closed it did not see this one
            self.end(reader, 0.0)
            raise closed_error()
        return reader


def _undo(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
