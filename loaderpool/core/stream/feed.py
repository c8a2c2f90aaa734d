"""A feed: the items of one pass over a stream, on their way from where they are read to the workers.

    stream ─▶ [reader] ──▶ room in the arena ──▶ workers
                 ▲                │ taken by the consumer
                 └──── feed ◀─────┘

A batch may be made once its items lie in the arena, and they stay until the consumer has taken the batch: so whatever
dies in between, the items are still there, though the stream gave them only once. The feed gives its reader rooms
(`reading`), in a bounded number of batches and bytes: that is the back-pressure.

FEED-2: every batch from the first that may have to be made (again) on, and below `made`, is entered.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from loaderpool.core.failures import reading_error
from loaderpool.core.stream.reading import Answer, Kind, Room
from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.memory.arena import Extent, ExtentPool, room_bytes
from loaderpool.memory.feed_table import ENTRIES, FEED_TABLE_BYTES, Bundle, FeedTable
from loaderpool.plan.order import Plan
from loaderpool.system import fault_points
from loaderpool.transport.reports import what_ended

if TYPE_CHECKING:
    from loaderpool.core.pool import Pool
    from loaderpool.core.stream.reader import ReaderProcess
    from loaderpool.core.stream.reading import ReadHere

# More than the workers need is read ahead only where it takes no more than this: chunks are for what is small, and
# memory that is used again soon is in the cache. Smaller: chunks of middling items stay small.
_CHEAP_BYTES = 16 << 20
# A reader has some rooms at a time, so that it need not wait for this process, whose main thread may hold the
# interpreter's lock. A larger batch gets a room of its own size when it is there: a wait is little beside its copy.
_ROOMS, _LARGE_BYTES = 16, 1 << 19
_EMPTY_TABLE = bytes(FEED_TABLE_BYTES)


class Ahead(NamedTuple):
    """How far a stream may be read ahead."""

    least: int  # batches without which workers would idle
    most: int  # batches
    most_bytes: int  # of them


class Feed:
    """Has a pass read into the arena, from `start` until the end or `stop`.

    Attributes:
        made: how many batches' items are there, or were; with the session's lock held.
        end: how many batches there are in all; None: not known yet.
        make_error: makes the error that stands after the last batch, if the stream ended with one.
        tail: how many batches are full and the rows of the one after them, where that is smaller.
        offset: of the table in the arena.
        shared: the arena's mapping.
        reads_here: in this process.
        is_over: the rest is not wanted.
        is_gone: its thread has ended.

    Args:
        session: whose arena.
        reader: reads the pass.
        epoch: the pass.
        plan: of its batches.
        ahead: how much may wait; asked again and again.
        rooms: of all feeds of the loader.
        on_news: called, with the session's lock held, when there is another batch or the end.

    Raises:
        MemoryLimitError: no room for the table.
    """

    def __init__(
        self,
        session: Pool,
        reader: ReadHere | ReaderProcess,
        epoch: int,
        plan: Plan,
        ahead: Callable[[], Ahead],
        rooms: ExtentPool,
        on_news: Callable[[Feed], None],
    ) -> None:
        self._session, self.reader, self.epoch, self.plan = session, reader, epoch, plan
        self._batch_rows, self._ahead, self._on_news = plan.most_rows, ahead, on_news
        self._rooms, self.reads_here = rooms, reader.reads_here
        self.made = 0
        self.end: int | None = None
        self.make_error: Callable[[], LoaderpoolError] | None = None
        self.tail: tuple[int, int] | None = None
        self.is_over = self.is_started = self.is_gone = self._is_freed = False
        with session.lock:
            self._extent = rooms.take(FEED_TABLE_BYTES)
        self.offset, self.shared = self._extent.offset, session.arena.map
        self.shared[self.offset : self.offset + FEED_TABLE_BYTES] = _EMPTY_TABLE
        self._table = FeedTable(self.shared, self.offset)
        self._granted: dict[int, Extent] = {}  # by offset: rooms of the reader
        self._held: dict[int, Extent] = {}  # by batch: all from the first one held on
        self._first_held = 0
        self._taken: set[int] = set()  # of those that are held, or will be
        self._bytes = 0  # of all these
        self._size = 0  # of the next room
        self._is_starved = False  # the reader could have more rooms

    def start(self) -> None:
        """Begin to read; the listener for news knows this feed by now."""
        threading.Thread(target=self._run, name="loaderpool-feed", daemon=True).start()
        self.is_started = True

    def rows_of(self, batch: int) -> int:
        """Rows of a batch that is made."""
        return self._batch_rows if self.tail is None or batch < self.tail[0] else self.tail[1]

    def take(self, batches: range, before: int) -> None:
        """The consumer has these batches, and all before that one, of which none is ever made again; others may be.

        The session's lock is held. An exception of a signal's handler may fall into it.
        """
        try:
            self._taken.update(batches)
            while self._first_held < min(before, self.made):
                self._drop(self._first_held)
                self._first_held += 1
        finally:
            if self._is_starved:
                self.reader.wake()

    def stop(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        if self._session.is_foreign:  # the reader is our parent's
            return
        self.is_over = True
        self.reader.wake()

    def free(self) -> None:
        """Give back all memory that no reader has: no worker looks at it any more. The session's lock is held."""
        self.stop()
        if self._is_freed:
            return
        self._is_freed = True
        self._table.release()
        for extent in [self._extent, *self._held.values()]:
            self._rooms.give(extent)
        self._held.clear()

    def _drop(self, batch: int) -> None:
        self._taken.discard(batch)
        extent = self._held.pop(batch, None)
        if extent is None:  # it was all given back
            return
        self._table.clear(batch)
        self._bytes -= extent.nbytes
        self._rooms.give(extent)

    # ---- the reader's side. Runs in: the feed's thread, which no signal interrupts

    def grant(self) -> list[Room]:
        """Return rooms that the reader may have beside those that it has.

        Raises:
            MemoryLimitError: nothing waits, and still there is no memory.
        """
        granted: list[Room] = []
        with self._session.lock:
            most = _ROOMS if 0 < self._size < _LARGE_BYTES else 1
            self._is_starved = False
            if len(self._granted) > most // 2:  # enough for now: many at a time are one message
                return []
            while len(self._granted) < most and self._has_room(room_bytes(self._size)):
                try:
                    extent = self._rooms.take(self._size)
                except MemoryLimitError:
                    if self._held or self._granted:
                        break
                    raise
                self._granted[extent.offset] = extent
                self._bytes += extent.nbytes
                granted.append(Room(extent.offset, extent.nbytes))
            self._is_starved = len(self._granted) < most
        return granted

    def hear(self, answer: Answer) -> None:
        """Take in what has become of a room: a batch, or one that was too small."""
        if answer.kind == Kind.BATCH:
            fault_points.reach("feed.before_entry")
        with self._session.lock:
            extent = self._granted.pop(answer.offset)
            if answer.kind == Kind.BATCH and not self.is_over and not self._is_freed:
                self._enter(answer, extent)
                return
            self._size = answer.nbytes
            self._bytes -= extent.nbytes
            self._rooms.give(extent)

    def _enter(self, answer: Answer, extent: Extent) -> None:
        batch = self.made
        self._held[batch] = extent
        self._table.write(batch, Bundle(answer.offset, answer.nbytes, answer.buffers, answer.first, answer.rows))
        if answer.rows != self._batch_rows:
            self.tail = batch, answer.rows
        self.made = batch + 1
        # Those that come are rarely much larger; and one that was is soon forgotten.
        self._size = min(max(answer.nbytes, self._size - self._size // 16), _LARGE_BYTES)
        fault_points.reach("feed.entered")
        self._on_news(self)

    def _has_room(self, size: int) -> bool:
        if self.is_over or self._is_freed or self._session.is_closed:
            return False
        ahead, held = self._ahead(), len(self._held) + len(self._granted)
        waiting = held - len(self._taken)
        if held >= ENTRIES or waiting >= ahead.most:  # all that are held follow one another, and so have entries
            return False
        nbytes = self._bytes + size
        if waiting >= ahead.least:
            return nbytes <= min(_CHEAP_BYTES, ahead.most_bytes)
        return held < 2 or nbytes <= ahead.most_bytes  # one that the workers make, and one that waits

    def _run(self) -> None:
        make_error: Callable[[], LoaderpoolError] | None = None
        try:
            make_error = self.reader.run(self)
            fault_points.reach("feed.at_end")
        except BaseException as error:  # of the stream, or no memory, say: whatever it is, a consumer waits to be told
            make_error = functools.partial(reading_error, what_ended(error, self.epoch), self.position)
        try:
            with self._session.lock:
                self.make_error, self.end = make_error, self.made
                if not self.is_over:
                    self._on_news(self)
                    self._session.wake()
        finally:
            self.reader.close()
            with self._session.lock:
                while self._granted:
                    self._rooms.give(self._granted.popitem()[1])
                self.is_gone = True

    @property
    def position(self) -> int:
        """Where the batch begins that is read now."""
        position: int = self.plan.start_after(self.epoch, self.made)
        return position
