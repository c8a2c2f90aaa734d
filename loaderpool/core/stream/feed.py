"""A feed: the items of one pass over a stream, on their way from where they are read to the workers; and all feeds.

    stream ─▶ [reader] ──▶ the feed's thread ──▶ arena ──▶ workers
                                  ▲                │ taken by the consumer
                                  └────────────────┘

A batch may be made once its items lie in the arena, and they stay until the consumer has taken the batch: so whatever
dies in between, the items are still there, though the stream gave them only once. A feed takes in a bounded number of
batches and bytes, and reads only one more: that is the back-pressure.

FEED-2: every batch from the first that may have to be made (again) on, and below `made`, is entered.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.core.channel import GRACE_S
from loaderpool.core.child_process import Surroundings
from loaderpool.core.delivery import FIRST_EPOCH
from loaderpool.core.failures import reading_error
from loaderpool.core.forms import memory_limit
from loaderpool.core.stream.reader import Arriving, ReaderPass, ReaderProcess, StreamEnded
from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.memory.arena import Extent, ExtentPool, room_bytes
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.system import clock, fault_points
from loaderpool.transport.payload.sent import Sent, place
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference
from loaderpool.transport.reports import what_ended
from loaderpool.worker.bundles import ENTRIES, FEED_TABLE_BYTES, Bundle, FeedTable, Frame, frames

if TYPE_CHECKING:
    from loaderpool.config import LoaderConfig
    from loaderpool.core.delivery import DeliveryCounts
    from loaderpool.core.known_form import KnownForm
    from loaderpool.core.pool import WorkerPool

# More than the workers need is read ahead only where it takes no more than this: chunks are for what is small, and
# memory that is used again soon is in the cache. Smaller: chunks of middling items stay small.
_CHEAP_BYTES = 16 << 20
_THREAD_NAME = "loaderpool-feed"
_EMPTY_TABLE = bytes(FEED_TABLE_BYTES)
# What items may take while they wait, of the budget for batches. Less: with large items workers idle while the next are
# read. More: they may take most of it beside the batches.
_SHARE_OF_LIMIT = 4
_LEAST_BYTES = 1 << 20  # at least


class FeedOwner(Protocol):
    """A loader's engine, as the feeds of its stream use it. Under the lock."""

    plan: Plan
    config: LoaderConfig
    known: KnownForm

    @property
    def counts(self) -> DeliveryCounts:
        """Counts of deliveries, over all runs."""

    def on_feed_news(self, feed: Feed) -> None:
        """Tell the runs of a feed that it has another batch, or its end. Called by the feed's thread."""


class Feed:
    """Has a pass read into the arena until the end or `stop`.

    Attributes:
        made: how many batches' items are there, or were; with the pool's lock held.
        latest_rows: of the latest of them.
        end: how many batches there are in all; None: not known yet.
        make_error: makes the error that stands after the last batch, if the stream ended with one.
        offset: of the table in the arena.
        is_over: the rest is not wanted.
        is_gone: its thread has ended, and the reader with it.

    Args:
        feeds: of the loader, which say how much may wait, and where.
        epoch: the pass.
        plan: of its batches.

    Raises:
        MemoryLimitError: no room for the table.
    """

    def __init__(self, feeds: StreamFeeds, epoch: int, plan: Plan) -> None:
        self._feeds, self._pool, self._rooms = feeds, feeds.pool, feeds.rooms
        self.epoch, self._plan = epoch, plan
        self.process: ReaderPass | None = None  # None: this process reads, on the feed's thread
        self.made = 0
        self.end: int | None = None
        self.make_error: Callable[[], LoaderpoolError] | None = None
        self.latest_rows = plan.most_rows
        self.is_over = self.is_started = self.is_gone = self._is_freed = False
        # The consumer has taken something, or wants no more. Only such a queue may be put to in a finalizer.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._pool.lock:
            self._extent = self._rooms.take(FEED_TABLE_BYTES)
        self.offset, self._shared = self._extent.offset, self._pool.arena.map
        self._shared[self.offset : self.offset + FEED_TABLE_BYTES] = _EMPTY_TABLE
        self._table = FeedTable(self._shared, self.offset)
        self._held: dict[int, Extent] = {}  # by batch: all from the first one held on
        self._first_held = 0
        self._taken: set[int] = set()  # of those that are held, or will be
        self._bytes = 0  # of all that are held
        self._size = 0  # of the latest
        self._told = 0  # batches that were told of

    def start(self) -> None:
        """Begin to read; the listener for news knows this feed by now. The pool's lock is held."""
        thread = self._feeds.thread_for(self)
        if thread is None:
            threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True).start()
        else:
            self.process = ReaderPass(thread.reader, self.epoch, self._plan.start)
            thread.run(self._run)
        self.is_started = True

    def take(self, batches: range, before: int) -> None:
        """The consumer has these batches, and all before that one, of which none is ever made again; others may be.

        The pool's lock is held. An exception of a signal's handler may fall into it.
        """
        try:
            self._taken.update(batches)
            while self._first_held < min(before, self.made):
                self._drop(self._first_held)
                self._first_held += 1
        finally:
            if self._news.empty():
                self._news.put(None)

    def stop(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        if self._pool.is_foreign:  # the reader is our parent's
            return
        self.is_over = True
        self._news.put(None)
        if self.process is not None:
            self.process.stop()

    def free(self) -> None:
        """Give back all memory: no worker looks at it any more. The pool's lock is held."""
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

    # ---- Runs in: the feed's thread, which no signal interrupts

    def _run(self) -> None:
        make_error: Callable[[int], LoaderpoolError] | None = None
        try:
            with contextlib.closing(self._frames()) as arriving:
                for frame in arriving:
                    self._put(frame)
                    if self.is_over:
                        break
                    del frame  # its items need not be held while the next ones are read
            fault_points.reach("feed.at_end")
        except StreamEnded as ended:
            make_error = ended.make_error
        except (
            BaseException
        ) as error:  # of the stream, or no memory, say: whatever it is, a consumer waits to be told
            make_error = functools.partial(reading_error, what_ended(error, self.epoch))
        try:
            with self._pool.lock:
                if make_error is not None:
                    self.make_error = functools.partial(
                        make_error, self._plan.start_after(self.epoch, self.made)
                    )
                self.end = self.made
                if not self.is_over:
                    self._feeds.engine.on_feed_news(self)
                    self._pool.session.wake()
        finally:
            if self.process is not None:
                self.process.close()
            self.is_gone = True

    def _frames(self) -> Generator[Frame | Arriving, None, None]:
        if self.process is not None:
            return self.process.frames(self._wanted)
        return frames(self._feeds.batches(self._plan, self.epoch))

    def _put(self, frame: Frame | Arriving) -> None:
        """Put the items of a batch into the arena, when there is room, and enter it."""
        extent = self._room(frame.nbytes)
        if extent is None:
            return
        is_entered = False
        try:
            with (
                memoryview(self._shared) as whole,
                whole[extent.offset : extent.offset + frame.nbytes] as view,
            ):
                frame.write_into(view)
            fault_points.reach("feed.before_entry")
            with self._pool.lock:
                if not self.is_over:
                    self._enter(frame, extent)
                    is_entered = True
        finally:
            if not is_entered:
                with self._pool.lock:
                    self._rooms.give(extent)
        fault_points.reach("feed.entered")

    def _enter(self, frame: Frame | Arriving, extent: Extent) -> None:
        batch = self.made
        self._held[batch] = extent
        self._bytes += extent.nbytes
        self._size = extent.nbytes
        self._table.write(batch, Bundle(extent.offset, frame.nbytes, frame.buffers, frame.first))
        self.latest_rows = frame.rows
        self.made = batch + 1
        if (
            not batch or self.process is None or not self.process.has_more
        ):  # else they are told of together
            self._tell()

    def _tell(self) -> None:
        if self._told < self.made:
            self._told = self.made
            self._feeds.engine.on_feed_news(self)

    def _room(self, nbytes: int) -> Extent | None:
        """Return room for so many bytes, or None: no more is wanted. Blocks: until the consumer has taken enough.

        Raises:
            MemoryLimitError: nothing waits, and still there is no memory.
        """
        while True:
            with self._pool.lock:
                if self.is_over:
                    return None
                if self._fitting(room_bytes(nbytes)) > 0:
                    try:
                        return self._rooms.take(nbytes)
                    except MemoryLimitError:
                        if not self._held:
                            raise
                self._tell()  # or the consumer would wait for what was not told yet
            self._news.get()

    def _wanted(self) -> int:
        """Return how many batches like the latest one may be on their way from a reader."""
        with self._pool.lock:
            return self._fitting(self._size) if self._size else 1

    def _fitting(self, size: int) -> int:
        """Return how many more batches of this size may lie here."""
        (least, most, most_bytes), held = self._feeds.ahead(), len(self._held)
        waiting, left = held - len(self._taken), most_bytes - self._bytes
        needed = min(least - waiting, left // size)
        cheap = min(_CHEAP_BYTES - self._bytes, left) // size
        most = min(
            most - waiting, ENTRIES - held
        )  # all that are held follow one another, and so have entries
        return min(
            most, max(needed, cheap, 2 - held)
        )  # 2: one that the workers make, and one that waits


class ReaderThread:
    """A thread that has a reader process read passes, one after another.

    It lives as long as its process: the kernel ends the process with the thread that started it.

    Attributes:
        latest: the feed whose pass is read, or was read last.
        is_gone: the thread and its process have ended.
    """

    def __init__(self, reader: ReaderProcess, feed: Feed) -> None:
        self.reader, self.latest = reader, feed
        self.is_gone = False
        # Only such a queue may be put to in a finalizer.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=_THREAD_NAME, daemon=True).start()

    @property
    def is_free(self) -> bool:
        """Return whether the next pass can be read: the latest one was read to its end, or abandoned."""
        return self.latest.is_over or self.latest.end is not None

    def run(self, work: Callable[[], None]) -> None:
        """Run this after what was to be run before."""
        self._work.put(work)

    def end(self) -> None:
        """End the thread and its process, after what was to be run. Never blocks; may run in a finalizer, and twice."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work
        self.reader.end()
        self.is_gone = True


class StreamFeeds:
    """Opens, keeps and frees the feeds of one loader. All with the pool's lock held, but `stop`.

    Attributes:
        first: has the item for the probe, and waits for its pass.
        sent: the stream, as its readers are sent it; None: it has none.
        why_on_thread: why the stream is read on a thread of this process; empty: it is not.

    Args:
        engine: of the loader, which is told when a feed has another batch, or its end.
        pool: of the loader.
        stream: what is read.
        shipment: what its reader needs; or why there is none.
        earlier: the stream as it was sent before.

    Raises:
        MemoryLimitError: no shared memory for what the stream holds.
    """

    def __init__(
        self,
        engine: FeedOwner,
        pool: WorkerPool,
        stream: StreamSource,
        shipment: Shipment | str,
        earlier: Sent | None = None,
    ) -> None:
        self.engine, self._stream = engine, stream
        self.pool = pool
        self._config = engine.config
        self._most_bytes = max(_LEAST_BYTES, memory_limit(engine.config) // _SHARE_OF_LIMIT)
        self.rooms = ExtentPool(self.pool.arena)
        self._feeds: list[Feed] = []  # whose memory is not given back
        self.first: Feed | None = None
        self.why_on_thread = shipment if isinstance(shipment, str) else ""
        self.sent: Sent | None = None
        self._threads: list[ReaderThread] = []
        self._ended: list[ReaderThread] = []
        self._make_reader: Callable[[], ReaderProcess] | None = None  # None: this process reads
        if isinstance(shipment, Shipment):
            self.sent = sent = Sent(self.pool.arena, shipment, place(shipment, earlier=earlier))
            files = sent.placement.descriptors
            own = (
                self.pool.arena,
                (sent.offset, sent.nbytes),
                files,
                Surroundings.of_now(self.pool.modules),
            )
            self._make_reader = functools.partial(ReaderProcess, *own)

    def difference(self, shipment: Shipment) -> Difference | None:
        """Return what differs in a shipment from the stream that readers are sent; None: nothing does."""
        return Difference("") if self.sent is None else self.sent.difference(shipment)

    def retire(self) -> None:
        """Read no more passes: the stream has changed. Those that are under way go on."""
        first, self.first = self.first, None
        if first is not None:
            first.stop()
        for thread in self._threads:
            thread.end()

    @property
    def is_done(self) -> bool:
        """Return whether all reading has ended and the memory of all passes was given back."""
        return not self._feeds and all(thread.is_gone for thread in [*self._threads, *self._ended])

    def ahead(self) -> tuple[int, int, int]:
        """How far may be read ahead: batches without which workers would idle, the most batches, the most bytes."""
        least, form = 2 * self.pool.workers_wanted + 1, self.engine.known.form
        if form is None:
            return least, least, _LEAST_BYTES
        # Chunks can only grow where more is there than the workers are at; but items should not lie here long.
        chunk = min(form.max_chunk, 2 * self.engine.counts.largest_chunk)
        return least, least * chunk, self._most_bytes

    def batches(self, plan: Plan, epoch: int) -> Iterator[tuple[int, list[Any]]]:
        """Read the batches of a pass here."""
        window, seed = self._config.shuffle_window, self._config.seed
        return read_batches(self._stream, plan, window=window, seed=seed, epoch=epoch)

    def begin(self) -> None:
        """Begin to read the first pass."""
        self.first = self._open(FIRST_EPOCH, self.engine.plan)
        self.first.start()

    def begin_again(self) -> None:
        """Read the first pass again, which had no item, if it can be read again."""
        if self.first is not None and not self._stream.is_one_shot:
            self.first.free()
            self.begin()

    def of_pass(self, epoch: int, plan: Plan) -> Feed:
        """The feed of a pass: the one that has been read ahead, if it is of this epoch."""
        feed, self.first = self.first, None
        if feed is not None:
            if self._stream.serves(feed.epoch, epoch, plan, self._config.shuffle_window):
                return feed
            feed.stop()
        return self._open(epoch, plan)

    def _open(self, epoch: int, plan: Plan) -> Feed:
        feed = Feed(self, epoch, plan)
        self._feeds.append(feed)
        return feed

    def thread_for(self, feed: Feed) -> ReaderThread | None:
        """Return the thread that has a process read a feed; None: this process reads the stream.

        One process reads the passes that follow one another, so that the stream goes on with its own state. Passes side
        by side have a process each.
        """
        if self._make_reader is None:
            return None
        free = [thread for thread in self._threads if thread.is_free]
        for thread in free[1:]:
            thread.end()
            self._threads.remove(thread)
            self._ended.append(thread)
        if not free:
            self._threads.append(ReaderThread(self._make_reader(), feed))
            return self._threads[-1]
        free[0].latest = feed
        return free[0]

    def free(self, in_use: Collection[int]) -> None:
        """Give back the memory of feeds that are over, but of those with these ids."""
        for feed in list(self._feeds):
            if feed.is_over and id(feed) not in in_use:
                feed.free()
                if feed.is_gone:  # else there is a process yet, whose end `stop` waits for
                    self._feeds.remove(feed)

    def free_all(self) -> None:
        """Give back all memory; it was stopped, and no worker is left."""
        for feed in self._feeds:
            feed.free()
        self._feeds.clear()
        self.rooms.close()
        if self.sent is not None:
            self.sent.give_back()

    def stop(self) -> None:
        """End all reading. Blocks: at most for a moment. In any thread, also in a finalizer; twice is fine."""
        feeds = list(self._feeds)
        for feed in feeds:
            feed.stop()
        # No lock is waited for: a finalizer may have it.
        threads = [*self._threads, *self._ended]
        for thread in threads:
            thread.end()
        clock.wait_until(lambda: all(thread.is_gone for thread in threads), 3 * GRACE_S)
