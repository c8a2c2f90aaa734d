"""A feed: the items of one pass over a stream, on their way from where they are read to the workers.

    stream ──frame──▶ [thread of the feed] ──bundle──▶ arena ──▶ workers
                            ▲ room                        │ taken by the consumer
                            └─────────────────────────────┘

A batch may be made once its bundle lies in the arena, and the bundle stays until the consumer has taken the batch: so
whatever dies in between, the items are still there, though the stream gave them only once. How far the stream is read
ahead is bounded, in batches and bytes: that is the back-pressure to the reader.

Without an order a ticket may cover batches that were taken, in an earlier stretch or by an earlier process, beside
others that were not. So a bundle stays until all tickets were answered that could ask for it.

FEED-2: every bundle that is entered has a number below `made`, and every one below that which a ticket may still ask
for is entered.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from loaderpool.bundling import Frame
from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.failures import source_error
from loaderpool.memory.extents import Extent
from loaderpool.memory.feed_table import ENTRIES, FEED_TABLE_BYTES, Bundle, FeedTable
from loaderpool.session import Session
from loaderpool.worker.failures import describe_failure

__all__ = ["Feed"]

# Extents grow by powers of two from here, so that those of earlier bundles fit later ones.
_LEAST_EXTENT_BYTES = 4096


class Feed:
    """Reads frames and puts them into the arena, from `start` until the end or `stop`.

    Attributes:
        made: how many batches' bundles are there, or were; with the session's lock held.
        end: how many batches there are in all; None: not known yet.
        make_error: makes the error that stands behind the last batch, if the stream ended with one.
        tail: how many batches are full and the rows of the one behind them, where that is smaller.
        offset: of the table in the arena.

    Args:
        session: whose arena.
        frames: what is read; closed at the end.
        epoch: that it is read for.
        batch_rows: rows of a full batch.
        ahead: how many batches, and bytes of them, may wait; asked again and again.
        on_news: called, with the session's lock held, when there is another batch or the end.

    Raises:
        MemoryLimitError: no room for the table.
    """

    def __init__(
        self,
        session: Session,
        frames: Iterator[Frame],
        epoch: int,
        batch_rows: int,
        ahead: Callable[[], tuple[int, int]],
        on_news: Callable[[Feed], None],
    ) -> None:
        self._session, self._frames, self.epoch = session, frames, epoch
        self._batch_rows, self._ahead, self._on_news = batch_rows, ahead, on_news
        self.made = 0
        self.end: int | None = None
        self.make_error: Callable[[], LoaderpoolError] | None = None
        self.tail: tuple[int, int] | None = None
        self.is_over = self.is_started = False
        self._is_freed = False
        with session.lock:
            self._extent = session.arena.take(FEED_TABLE_BYTES, "the table of a stream's batches")
        self.offset = self._extent.offset
        self._table = FeedTable(session.arena.map, self.offset)
        self._held: dict[int, Extent] = {}  # by batch
        self._held_bytes = 0
        self._taken: set[int] = set()  # of these, those that the consumer has
        self._spare: dict[int, list[Extent]] = {}  # by size
        # Of its kind only this queue may be put to in a finalizer, which may run in the middle of anything.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to read; whoever is told of news knows this feed by now."""
        self.is_started = True
        threading.Thread(target=self._run, name="loaderpool-feed", daemon=True).start()

    def rows_of(self, batch: int) -> int:
        """Rows of a batch that is made."""
        return self._batch_rows if self.tail is None or batch < self.tail[0] else self.tail[1]

    def take(self, batches: range, settled: int) -> None:
        """The consumer has these batches, and no ticket asks for one before `settled`. The session's lock is held."""
        self._taken.update(batch for batch in batches if batch in self._held)
        for batch in [batch for batch in self._held if batch < settled]:
            self._drop(batch)
        self._room.put(None)

    def stop(self) -> None:
        """Nobody wants the rest. Never blocks; may run in a finalizer, and twice."""
        self.is_over = True
        self._room.put(None)

    def free(self) -> None:
        """Give all memory back: no worker looks at it any more. The session's lock is held."""
        self.stop()
        if self._is_freed:
            return
        self._is_freed = True
        arena = self._session.arena
        self._table.release()
        for extent in [self._extent, *self._held.values(), *(one for many in self._spare.values() for one in many)]:
            arena.give_back(extent)
        self._held.clear()
        self._spare.clear()

    def _drop(self, batch: int) -> None:
        extent = self._held.pop(batch, None)
        self._taken.discard(batch)
        if extent is not None:
            self._held_bytes -= extent.nbytes
            if not self._is_freed:
                self._table.clear(batch)
            self._spare.setdefault(extent.nbytes, []).append(extent)

    # ---- reading. Runs in: the feed's thread ----

    def _run(self) -> None:
        try:
            for frame in self._frames:
                if not self._put(frame):
                    return
        except BaseException as error:
            if isinstance(error, LoaderpoolError):  # ours: it says what it has to
                make_error: Any = functools.partial(type(error), *error.args)
            else:
                failure = describe_failure(error, epoch=self.epoch, worker=None)
                make_error = functools.partial(source_error, failure, self.made * self._batch_rows)
            self._finish(make_error)
        else:
            self._finish(None)
        finally:
            close = getattr(self._frames, "close", None)
            if close is not None:
                close()
            del self._frames

    def _put(self, frame: Frame) -> bool:
        """Bring a frame into the arena as soon as there is room; False: nobody wants it."""
        session = self._session
        extent = self._take_extent(len(frame.pickled))
        if extent is None:
            return False
        session.arena.map[extent.offset : extent.offset + len(frame.pickled)] = frame.pickled
        with session.lock:
            if self.is_over or self._is_freed:
                self._keep_or_give_back(extent)
                return False
            batch = self.made
            bundle = Bundle(extent.offset, len(frame.pickled), frame.pickling, frame.first, frame.rows)
            self._held[batch] = extent
            self._held_bytes += extent.nbytes
            self._table.write(batch, bundle)
            if frame.rows != self._batch_rows:
                self.tail = batch, frame.rows
            self.made = batch + 1
            self._on_news(self)
        return True

    def _take_extent(self, nbytes: int) -> Extent | None:
        """Room for so many bytes. Blocks until the consumer has made some; None: nobody wants it.

        Raises:
            MemoryLimitError: nothing waits, and still there is none.
        """
        size = max(_LEAST_EXTENT_BYTES, 1 << (nbytes - 1).bit_length())
        session = self._session
        while True:
            with session.lock:
                if self.is_over or self._is_freed or session.is_closed:
                    return None
                most, most_bytes = self._ahead()
                held = len(self._held) - len(self._taken)
                # Two at least: one that the workers make, and one that waits.
                has_room = held < most and len(self._held) < ENTRIES
                if has_room and (held < 2 or self._held_bytes + size <= most_bytes):
                    spare = self._spare.get(size)
                    if spare:
                        return spare.pop()
                    self._give_back_spare()
                    try:
                        return session.arena.take(size, "the items of a batch")
                    except MemoryLimitError:
                        if not held:
                            raise
            self._room.get()

    def _give_back_spare(self) -> None:
        """Extents of another size than what comes now are of no use."""
        for extents in self._spare.values():
            for extent in extents:
                self._session.arena.give_back(extent)
        self._spare.clear()

    def _keep_or_give_back(self, extent: Extent) -> None:
        if self._is_freed:
            self._session.arena.give_back(extent)
        else:
            self._spare.setdefault(extent.nbytes, []).append(extent)

    def _finish(self, make_error: Callable[[], LoaderpoolError] | None) -> None:
        with self._session.lock:
            self.make_error = make_error
            self.end = self.made
            if not self.is_over:
                self._on_news(self)
                self._session.wake()
