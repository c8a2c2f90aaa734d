"""How a pass over a stream is read, on a thread or in a process, and what is said between that and its feed.

    feed ──Room──▶ reader ──Answer──▶ feed

A room is a place in the arena that only the reader writes to, until it has answered. It answers each room once: a batch
lies there now, or the next batch needs more room, and nothing was written. An error lies in a room as a batch does. So
whatever is long goes through the arena, and a message is one small packet. A reader is ahead by the rooms that it has.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import faulthandler
import io
import os
import pickle
import queue
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.system import fault_points, process
from loaderpool.transport.payload.loaded import Payloads, describe_load_error
from loaderpool.transport.pickling import Frame, frames
from loaderpool.transport.reports import describe_failure, what_ended
from loaderpool.worker.after_fork import become_worker, end_stray, serve, settle_libraries

ROOM, ANSWER = struct.Struct("<2Q"), struct.Struct("<6Q")
_MOST_ROOMS = 256  # in one packet; a feed gives fewer
Batches = Iterator[tuple[int, list[Any]]]  # of `read_batches`


class Kind(enum.IntEnum):
    """What an answer says."""

    BATCH = 1  # it lies in the room
    TOO_SMALL = 2  # `nbytes` are needed
    FAILED = 3  # in the room lies, pickled, a `Failure` or error, and advice or None; nothing follows
    END = 4  # of the stream; nothing follows, and no room is meant


class Room(NamedTuple):
    """A place in the arena."""

    offset: int
    nbytes: int


class Answer(NamedTuple):
    """What became of a room."""

    kind: int
    offset: int = 0  # of the room
    nbytes: int = 0
    buffers: int = 0  # as in `Bundle`, and so the others
    first: int = 0
    rows: int = 0


class GivesRooms(Protocol):
    """A feed, as its reader sees it."""

    is_over: bool  # the rest is not wanted
    shared: Any  # the arena's mapping

    @property
    def position(self) -> int:
        """Where the batch begins that is read now."""

    def grant(self) -> list[Room]:
        """Return rooms that the reader may have beside those that it has."""

    def hear(self, answer: Answer) -> None:
        """Take in what has become of a room."""


class Unwanted(BaseException):
    """The rest of the pass is not wanted."""


class Writer:
    """Puts frames into rooms, in the order of both.

    Args:
        shared: the arena's mapping.
        next_room: returns a room that was not answered yet. Blocks until there is one. May raise `Unwanted`.
        tell: gives the feed an answer.
    """

    def __init__(self, shared: Any, next_room: Callable[[], Room], tell: Callable[[Answer], object]) -> None:
        self._shared, self._next_room, self._tell = shared, next_room, tell

    def put(self, kind: Kind, frame: Frame) -> None:
        """Put one into the next room that is large enough."""
        nbytes = frame.nbytes
        while (room := self._next_room()).nbytes < nbytes:
            self._tell(Answer(Kind.TOO_SMALL, room.offset, nbytes))
        with memoryview(self._shared) as whole, whole[room.offset : room.offset + nbytes] as view:
            frame.write_into(view)
        self._tell(Answer(kind, room.offset, nbytes, frame.buffers, frame.first, frame.rows))

    def put_batches(self, batches: Batches) -> None:
        """Put all. Raises what reading them raises."""
        with contextlib.closing(frames(batches)) as read:
            for frame in read:
                self.put(Kind.BATCH, frame)
                del frame  # its items need not be held while the next ones are read


class ReadHere:
    """Reads a pass on the thread of its feed; it cannot be ended while it waits in the user's code.

    Its methods are those of `reader.ReaderProcess`.
    """

    reads_here = is_gone = True

    def __init__(self, open_batches: Callable[[], Batches]) -> None:
        self._open_batches = open_batches
        # Of its kind only this queue may be put to in a finalizer, which may run in the middle of anything.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, feed: GivesRooms) -> None:
        rooms: collections.deque[Room] = collections.deque()

        def next_room() -> Room:
            while not rooms:
                if feed.is_over:
                    raise Unwanted
                rooms.extend(feed.grant())
                if not rooms:
                    self._news.get()
            return rooms.popleft()

        def tell(answer: Answer) -> None:
            feed.hear(answer)
            if feed.is_over:
                raise Unwanted

        with contextlib.suppress(Unwanted):
            Writer(feed.shared, next_room, tell).put_batches(self._open_batches())

    def wake(self) -> None:
        if self._news.empty():
            self._news.put(None)

    def close(self) -> None:
        pass


# ---- in a process of its own


class _WatchedStream(StreamSource):
    """Looks before each item whether the pass goes on."""

    def __init__(self, items: Any, channel: socket.socket) -> None:
        super().__init__(items)
        self._is_over = False
        self._poll = select.poll()
        self._poll.register(channel, select.POLLRDHUP)
        threading.Thread(target=self._watch, name="loaderpool-reader-watch", daemon=True).start()

    def _watch(self) -> None:
        self._poll.poll()
        self._is_over = True  # who ended it kills us if the user's code delays our end

    def open(self) -> Iterator[Any]:
        for item in super().open():
            if self._is_over:
                raise Unwanted
            yield item


class _Reader:
    """Reads a pass in this process. It may have a second thread, for it never forks.

    Args:
        start: as `main` is told it.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = start
        self._channel = socket.socket(fileno=start["socket"])
        self._rooms: collections.deque[Room] = collections.deque()
        self._arena = Arena(start["arena"], start["arena_bytes"])
        self._writer = Writer(self._arena.map, self._next_room, self._tell)

    def run(self) -> None:
        """Read to the end. May raise `Unwanted`, and what a socket raises whose other end is closed."""
        payloads = Payloads(self._arena, {0: list(self._start["files"])})
        try:
            fault_points.reach("reader.loading")
            payloads.load(0, *self._start["place"])
        except BaseException as error:
            end_stray(error)
            self._put_error(describe_failure(error, epoch=0, worker=None), describe_load_error(error, "the reader"))
            return
        settle_libraries()
        fault_points.reach("reader.pass_taken")
        try:
            self._read(payloads.loaded[0])
            end_stray()
        except Unwanted:
            raise
        except BaseException as error:  # of the socket, too: then the next line meets it again
            end_stray(error)
            self._put_error(what_ended(error, self._start["epoch"]), None)
        else:
            fault_points.reach("reader.before_end")
            self._tell(Answer(Kind.END))
        fault_points.reach("reader.after_end")

    def _read(self, payload: Mapping[str, Any]) -> None:
        stream, config = _WatchedStream(payload["source"], self._channel), payload["config"]
        plan, epoch = payload["plan"].after(self._start["start"]), self._start["epoch"]
        self._writer.put_batches(
            read_batches(stream, plan, window=config.shuffle_window, seed=config.seed, epoch=epoch)
        )

    def _put_error(self, ended: Any, advice: str | None) -> None:
        self._writer.put(Kind.FAILED, Frame(0, 0, 0, [pickle.dumps((ended, advice))]))

    def _next_room(self) -> Room:
        end_stray()
        fault_points.reach("reader.before_sending")
        if not self._rooms:
            packet = self._channel.recv(_MOST_ROOMS * ROOM.size)
            if not packet:
                raise Unwanted
            self._rooms.extend(map(Room._make, ROOM.iter_unpack(packet)))
        return self._rooms.popleft()

    def _tell(self, answer: Answer) -> None:
        self._channel.send(ANSWER.pack(*answer))
        if answer.kind == Kind.BATCH:
            fault_points.reach("reader.after_sending")


def _run(start: Mapping[str, Any]) -> None:
    with contextlib.suppress(Unwanted):
        _Reader(start).run()


def main(start: Mapping[str, Any]) -> None:
    """The reader process, from the first import to its end: a clean interpreter with the user's iterable in it."""
    process.become("reader")
    become_worker(start["trainer_pid"], (), ())  # the thread that started us lives until we are gone
    for descriptor in (start["socket"], start["arena"], *start["files"]):
        os.set_inheritable(descriptor, False)  # the exec needed it; what the user's code starts does not
    sys.argv = list(start["argv"])
    if isinstance(sys.stderr, io.TextIOWrapper):
        faulthandler.enable()
    serve(lambda: _run(start))
