"""A feed: the items of one pass over a stream, on their way from where they are read to the workers.

    stream ─▶ [reader] ──frame──▶ [thread of the feed] ──bundle──▶ arena ──▶ workers
                                        ▲ room                        │ taken by the consumer
                                        └─────────────────────────────┘

The reader is this thread itself, where the stream lives in this process, or a process (`reader/`).

A batch may be made once its bundle lies in the arena, and the bundle stays until the consumer has taken the batch: so
whatever dies in between, the items are still there, though the stream gave them only once. How far the stream is read
ahead is bounded, in batches and bytes: that is the back-pressure to the reader.

FEED-2: every batch from the first that may have to be made (again) on, and below `made`, is entered.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.memory.arena import ExtentPool, room_bytes
from loaderpool.memory.extents import Extent
from loaderpool.memory.feed_table import ENTRIES, FEED_TABLE_BYTES, Bundle, FeedTable
from loaderpool.plan.order import Plan
from loaderpool.system import fault_points
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.remote_errors import reading_error
from loaderpool.trainer.stream.frames import FrameSource, NextFrame, StreamFailed
from loaderpool.transport.reports import what_ended

# More than the workers need is read ahead only where it takes no more than this: chunks are for what is small, and
# memory that is used again soon is in the cache. Smaller: chunks of middling items stay small.
_CHEAP_BYTES = 16 << 20
_EMPTY_TABLE = bytes(FEED_TABLE_BYTES)


class Ahead(NamedTuple):
    """How far a stream may be read ahead."""

    least: int  # batches without which workers would idle
    most: int  # batches
    most_bytes: int  # of them


class Feed:
    """Reads frames and puts them into the arena, from `start` until the end or `stop`.

    Attributes:
        made: how many batches' bundles are there, or were; with the session's lock held.
        end: how many batches there are in all; None: not known yet.
        make_error: makes the error that stands behind the last batch, if the stream ended with one.
        tail: how many batches are full and the rows of the one behind them, where that is smaller.
        offset: of the table in the arena.
        reads_here: in this process.

    Args:
        session: whose arena.
        frames: what is read; closed at the end.
        epoch: that it is read for.
        plan: of its batches.
        ahead: how much may wait; asked again and again.
        rooms: where the room for it comes from, of this and other feeds of the loader.
        on_news: called, with the session's lock held, when there is another batch or the end.

    Raises:
        MemoryLimitError: no room for the table.
    """

    def __init__(
        self,
        session: EngineSession,
        frames: FrameSource,
        epoch: int,
        plan: Plan,
        ahead: Callable[[], Ahead],
        rooms: ExtentPool,
        on_news: Callable[[Feed], None],
    ) -> None:
        self._session, self._frames, self.epoch, self.plan = session, frames, epoch, plan
        self._batch_rows, self._ahead, self._on_news = plan.most_rows, ahead, on_news
        self._rooms = rooms
        self.reads_here = frames.reads_here
        self.made = 0
        self.end: int | None = None
        self.make_error: Callable[[], LoaderpoolError] | None = None
        self.tail: tuple[int, int] | None = None
        self.is_over = self.is_started = False
        self._is_freed = False
        with session.lock:
            self._extent = rooms.take(FEED_TABLE_BYTES)
        self.offset = self._extent.offset
        session.arena.map[self.offset : self.offset + FEED_TABLE_BYTES] = _EMPTY_TABLE
        self._table = FeedTable(session.arena.map, self.offset)
        self._held: dict[int, Extent] = {}  # by batch: all from the first one held on
        self._first_held = 0
        self._taken: set[int] = set()  # of those that are held, or will be
        self._held_bytes = 0
        # Of its kind only this queue may be put to in a finalizer, which may run in the middle of anything.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to read; the listener for news knows this feed by now."""
        self.is_started = True
        threading.Thread(target=self._run, name="loaderpool-feed", daemon=True).start()

    def rows_of(self, batch: int) -> int:
        """Rows of a batch that is made."""
        return self._batch_rows if self.tail is None or batch < self.tail[0] else self.tail[1]

    def take(self, batches: range, before: int) -> None:
        """The consumer has these batches, and all before that one, of which none is ever made again; others may be.

        The session's lock is held.
        """
        self._taken.update(batches)
        while self._first_held < min(before, self.made):
            self._drop(self._first_held)
            self._first_held += 1
        self._tell_of_room()

    def stop(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        if self._session.is_foreign:  # the reader is our parent's
            return
        self.is_over = True
        self._tell_of_room()
        self._frames.cancel()

    def _tell_of_room(self) -> None:
        if self._room.empty():  # else the thread will look again anyhow, after what has been changed by now
            self._room.put(None)

    def free(self) -> None:
        """Give all memory back: no worker looks at it any more. The session's lock is held."""
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
        self._held_bytes -= extent.nbytes
        self._table.clear(batch)
        self._rooms.give(extent)

    # ---- reading. Runs in: the feed's thread ----

    def _run(self) -> None:
        make_error: Callable[[], LoaderpoolError] | None = None
        try:
            while not self.is_over:
                frame = self._frames.next(self.made)
                if frame is None or not self._put(frame):
                    break
                del frame  # its items need not be held while the next ones are read
            fault_points.reach("feed.at_end")
        except StreamFailed as error:
            make_error = error.make_error
        except BaseException as error:  # of the stream, or no memory, say: whatever it is, a consumer waits to be told
            make_error = functools.partial(
                reading_error, what_ended(error, self.epoch), self.plan.start_after(self.epoch, self.made)
            )
        try:
            self._finish(make_error)
        finally:
            self._frames.close()

    def _put(self, frame: NextFrame) -> bool:
        """Bring a frame into the arena as soon as there is room; False: it is not wanted any more."""
        session = self._session
        nbytes = frame.nbytes
        extent = self._take_extent(nbytes)
        if extent is None:
            return False
        try:
            with memoryview(session.arena.map) as whole, whole[extent.offset : extent.offset + nbytes] as room:
                frame.write_into(room, extent.offset)
            fault_points.reach("feed.before_entry")
        except BaseException:
            with session.lock:
                self._rooms.give(extent)
            raise
        with session.lock:
            if self.is_over or self._is_freed:
                self._rooms.give(extent)
                return False
            batch = self.made
            self._held[batch] = extent
            self._held_bytes += extent.nbytes
            self._table.write(batch, Bundle(extent.offset, nbytes, frame.buffers, frame.first, frame.rows))
            if frame.rows != self._batch_rows:
                self.tail = batch, frame.rows
            self.made = batch + 1
            fault_points.reach("feed.entered")
            self._on_news(self)
        return True

    def _take_extent(self, nbytes: int) -> Extent | None:
        """Room for so many bytes. Blocks until the consumer has made some; None: it is not wanted any more.

        Raises:
            MemoryLimitError: nothing waits, and still there is none.
        """
        size = room_bytes(nbytes)
        session = self._session
        while True:
            with session.lock:
                if self.is_over or self._is_freed or session.is_closed:
                    return None
                if self._has_room(size):
                    try:
                        return self._rooms.take(nbytes)
                    except MemoryLimitError:
                        if not self._held:
                            raise
            self._room.get()

    def _has_room(self, size: int) -> bool:
        ahead, held = self._ahead(), len(self._held)
        waiting = held - len(self._taken)
        if held >= ENTRIES or waiting >= ahead.most:  # all that are held follow one another, and so have entries
            return False
        nbytes = self._held_bytes + size
        if waiting >= ahead.least:
            return nbytes <= min(_CHEAP_BYTES, ahead.most_bytes)
        return held < 2 or nbytes <= ahead.most_bytes  # one that the workers make, and one that waits

    def _finish(self, make_error: Callable[[], LoaderpoolError] | None) -> None:
        with self._session.lock:
            self.make_error = make_error
            self.end = self.made
            if not self.is_over:
                self._on_news(self)
                self._session.wake()
