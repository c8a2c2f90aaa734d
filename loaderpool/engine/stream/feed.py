"""`Feed`: items of one pass over a stream, on their way to the workers. `StreamFeeds`: all feeds.

    stream ─▶ [reader] ──▶ the feed's thread ──▶ arena ──▶ workers
                                  ▲                │ taken by the consumer
                                  └────────────────┘

A batch can be made once its items are in the arena. They stay there until the consumer has taken
the batch. So if a process dies meanwhile, the items are still there, although the stream yields
them only once. A feed holds a bounded number of batches and bytes, and reads only one batch more.
This limits how far the reader is ahead of the consumer.

FEED-2: The feed's table has every batch below `HeldBatches.made` that may have to be made, or made
again.

Called in the main process. "The lock" is the pool's lock.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loaderpool.engine.delivery import FIRST_EPOCH
from loaderpool.engine.failures import reading_error
from loaderpool.engine.stream.reader import Arriving, ReaderPass, ReaderProcess, StreamEnded
from loaderpool.engine.stream.stored import HeldBatches, StoredItems
from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.memory.arena import Extent, ExtentPool, room_bytes
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.supervisor.forms import memory_limit
from loaderpool.system import clock, fault_points
from loaderpool.transport.channel import GRACE_S
from loaderpool.transport.child_process import Surroundings
from loaderpool.transport.payload.sent import Sent, place
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference
from loaderpool.transport.reports import what_ended
from loaderpool.worker.bundles import ENTRIES, Bundle, Frame, frames

if TYPE_CHECKING:
    from loaderpool.engine.delivery import CheckedArguments, DeliveryCounts
    from loaderpool.engine.known_form import KnownForm
    from loaderpool.engine.pool import WorkerPool

# Items beyond the workers' needs are read ahead only up to this size. Large chunks only help with
# small items, and memory that is soon reused stays in the CPU's cache. Smaller: chunks of
# middle-sized items stay small.
_CHEAP_BYTES = 16 << 20
_THREAD_NAME = "loaderpool-feed"
# Waiting items may use this part (1/4) of the memory limit for batches. A smaller part: with large
# items, workers idle while the next ones are read. A larger part: waiting items use most of the
# limit, in addition to the batches.
_SHARE_OF_LIMIT = 4
_LEAST_BYTES = 1 << 20  # minimum of the memory for waiting items


class FeedOwner(Protocol):
    """A loader's engine, as the feeds of its stream use it. Called under the lock."""

    plan: Plan
    checked: CheckedArguments
    known: KnownForm

    @property
    def counts(self) -> DeliveryCounts:
        """Counts of deliveries, over all runs."""

    def on_feed_news(self, feed: Feed) -> None:
        """Report a new batch, or the end, to a feed's runs. Called by the feed's thread."""


class PassEnd(NamedTuple):
    """End of a pass, once it is known."""

    batches: int  # number of batches of the whole pass
    # makes the error that follows the last batch; None: the stream has no error
    make_error: Callable[[], LoaderpoolError] | None


class Feed:
    """Reads a pass into the arena, until its end or `stop`. Batches are numbered from 0.

    Attributes:
        held: Batches whose items are, or were, in the arena. Read under the lock.
        end: End of the pass; None: not known yet.
        process: Pass of a reader process; None: this process reads, on the feed's thread.
        is_started: True after `start`.
        is_over: True if the consumer has abandoned the rest.
        is_gone: True once nothing reads the pass any more.

    Args:
        feeds: Feeds of the loader, which set the limits, and provide memory.
        epoch: Epoch of the pass.
        plan: Plan of the pass.

    Raises:
        MemoryLimitError: There is too little shared memory for the table.
    """

    def __init__(self, feeds: StreamFeeds, epoch: int, plan: Plan) -> None:
        self._feeds, self._pool = feeds, feeds.pool
        self.epoch, self._plan = epoch, plan
        self.process: ReaderPass | None = None
        self.end: PassEnd | None = None
        self.is_over = self.is_started = self.is_gone = False
        # Wakes the feed's thread when the consumer has taken something, or has abandoned the rest.
        # A `SimpleQueue`, because a finalizer can put to it without a deadlock.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._pool.lock:
            items = StoredItems(self._pool.arena, feeds.rooms)
        self.held = HeldBatches(items, plan.most_rows)
        self._told = 0  # number of batches that were reported to the engine

    @property
    def offset(self) -> int:
        """Offset of the feed's table in the arena."""
        return self.held.items.offset

    def start(self) -> None:
        """Start to read. Called under the lock, once the engine can notify users of this feed."""
        thread = self._feeds.threads.thread_for(self)
        if thread is None:
            threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True).start()
        else:
            assert isinstance(self._plan.start, int)
            self.process = ReaderPass(thread.reader, self.epoch, self._plan.start)
            thread.run(self._run)
        self.is_started = True

    def take(self, batches: range, before: int) -> None:
        """Note taken batches, and release items that are not needed any more.

        Called under the lock. A signal handler's exception may interrupt it.

        Args:
            batches: Batches that the consumer has taken. They may be made again.
            before: All batches before this one are taken, and none is made again.
        """
        try:
            self.held.take(batches, before)
        finally:
            if self._news.empty():
                self._news.put(None)

    def stop(self) -> None:
        """Stop reading, because the consumer has abandoned the rest. Idempotent and non-blocking.

        Called by any thread, and by finalizers.
        """
        if self._pool.is_foreign:  # this is a fork: the reader belongs to the parent
            return
        self.is_over = True
        self._news.put(None)
        if self.process is not None:
            self.process.stop()

    def free(self) -> None:
        """Release all memory, because no worker reads it any more. Idempotent. Under the lock."""
        self.stop()
        self.held.items.free()

    # ---- called by the feed's thread, which no signal interrupts ----

    def _run(self) -> None:
        make_error: Callable[[int], LoaderpoolError] | None = None
        try:
            with contextlib.closing(self._frames()) as arriving:
                for frame in arriving:
                    self._put(frame)
                    if self.is_over:
                        break
                    del frame  # frees its items before the next ones are read
            fault_points.reach("feed.at_end")
        except StreamEnded as ended:
            make_error = ended.make_error
        # An error of the stream, of memory or any other one: the consumer waits for a report.
        except BaseException as error:
            make_error = functools.partial(reading_error, what_ended(error, self.epoch))
        try:
            with self._pool.lock:
                made, follows = self.held.made, None
                if make_error is not None:
                    position = self._plan.start_after(self.epoch, made)
                    assert isinstance(position, int)
                    follows = functools.partial(make_error, position)
                self.end = PassEnd(made, follows)
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
        """Store the items of a batch in the arena, once there is room, and publish the batch."""
        extent = self._room(frame.nbytes)
        if extent is None:
            return
        is_entered = False
        try:
            with (
                memoryview(self._pool.arena.map) as whole,
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
                    self._feeds.rooms.give(extent)
        fault_points.reach("feed.entered")

    def _enter(self, frame: Frame | Arriving, extent: Extent) -> None:
        bundle = Bundle(extent.offset, frame.nbytes, frame.buffers, frame.first)
        self.held.enter(extent, bundle, frame.rows)
        # If more batches are at hand, they are reported together.
        if self.held.made == 1 or self.process is None or not self.process.has_more:
            self._tell()

    def _tell(self) -> None:
        if self._told < self.held.made:
            self._told = self.held.made
            self._feeds.engine.on_feed_news(self)

    def _room(self, nbytes: int) -> Extent | None:
        """Return an extent for a batch, or None if the consumer has abandoned the rest.

        Blocks until the consumer has taken enough.

        Raises:
            MemoryLimitError: There is too little memory although no items wait.
        """
        while True:
            with self._pool.lock:
                if self.is_over:
                    return None
                if self._fitting(room_bytes(nbytes)) > 0:
                    try:
                        return self._feeds.rooms.take(nbytes)
                    except MemoryLimitError:
                        if not len(self.held.items):
                            raise
                self._tell()  # The consumer may wait for a batch that was not reported yet.
            self._news.get()

    def _wanted(self) -> int:
        """Return the number of batches like the latest one that the reader may send now."""
        with self._pool.lock:
            size = self.held.latest_bytes
            return self._fitting(size) if size else 1

    def _fitting(self, size: int) -> int:
        """Return the number of further batches of this size that the feed may hold."""
        least, most, most_bytes = self._feeds.ahead()
        held, nbytes, waiting = len(self.held.items), self.held.items.nbytes, self.held.waiting
        left = most_bytes - nbytes
        needed = min(least - waiting, left // size)
        cheap = min(_CHEAP_BYTES - nbytes, left) // size
        # Held batches are consecutive, so each has its own entry of the table.
        most = min(most - waiting, ENTRIES - held)
        # At least two: one that the workers make, and one that waits.
        return min(most, max(needed, cheap, 2 - held))


class ReaderThread:
    """Thread whose reader process reads passes, one after another.

    It lives as long as the process. The kernel would kill the process when its starting thread
    ends.

    Attributes:
        reader: The reader process.
        latest: Feed of the pass that is read now, or was read last.
        is_gone: True once the thread has finished and its process has exited.
    """

    def __init__(self, reader: ReaderProcess, feed: Feed) -> None:
        self.reader, self.latest = reader, feed
        self.is_gone = False
        # A `SimpleQueue`, because a finalizer can put to it without a deadlock.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=_THREAD_NAME, daemon=True).start()

    @property
    def is_free(self) -> bool:
        """True if another pass can be read, because the latest one has ended or was abandoned."""
        return self.latest.is_over or self.latest.end is not None

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread, after earlier work."""
        self._work.put(work)

    def end(self) -> None:
        """End the thread and its process, after earlier work. Idempotent and non-blocking.

        Called by any thread, and by finalizers.
        """
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work
        self.reader.end()
        self.is_gone = True


class ReaderThreads:
    """Threads whose processes read a stream's passes. Each pass in progress has its own thread.

    Consecutive passes are read by one process, so that the stream keeps its state. Called under the
    lock, except `all`.

    Args:
        make_reader: Starts a reader process; None: this process reads the stream, without them.
    """

    def __init__(self, make_reader: Callable[[], ReaderProcess] | None) -> None:
        self._make_reader = make_reader
        self._present: list[ReaderThread] = []
        self._ended: list[ReaderThread] = []  # threads that get no more passes

    @property
    def all(self) -> list[ReaderThread]:
        """All threads, in a new list."""
        return [*self._present, *self._ended]

    def thread_for(self, feed: Feed) -> ReaderThread | None:
        """Return the thread whose process reads a feed, or None if this process reads it."""
        if self._make_reader is None:
            return None
        free = [thread for thread in self._present if thread.is_free]
        for thread in free[1:]:
            thread.end()
            self._present.remove(thread)
            self._ended.append(thread)
        if not free:
            self._present.append(ReaderThread(self._make_reader(), feed))
            return self._present[-1]
        free[0].latest = feed
        return free[0]


class StreamFeeds:
    """Opens, stores and frees the feeds of one loader. Called under the lock, except `stop`.

    Attributes:
        first: Feed with the item for the probe, until the first pass takes the feed; None: none.
        sent: The stream as its readers get it; None: there is no reader.
        why_on_thread: Reason why a thread of this process reads the stream; empty: a reader reads.
        threads: Threads of the readers.

    Args:
        engine: Engine of the loader. It gets a report of each new batch, and of the end.
        pool: Pool of the loader.
        stream: The source.
        shipment: Shipment for the readers, or the reason why there are none.
        earlier: The stream as it was sent before.

    Raises:
        MemoryLimitError: There is too little shared memory for the stream's data.
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
        self._config = engine.checked.config
        self._most_bytes = max(_LEAST_BYTES, memory_limit(self._config) // _SHARE_OF_LIMIT)
        self.rooms = ExtentPool(self.pool.arena)
        self._feeds: list[Feed] = []  # feeds whose memory is not released
        self.first: Feed | None = None
        self.why_on_thread = shipment if isinstance(shipment, str) else ""
        self.sent: Sent | None = None
        make_reader: Callable[[], ReaderProcess] | None = None
        if isinstance(shipment, Shipment):
            self.sent = sent = Sent(self.pool.arena, shipment, place(shipment, earlier=earlier))
            files = sent.placement.descriptors
            own = (
                self.pool.arena,
                (sent.offset, sent.nbytes),
                files,
                Surroundings.of_now(self.pool.modules),
            )
            make_reader = functools.partial(ReaderProcess, *own)
        self.threads = ReaderThreads(make_reader)

    def difference(self, shipment: Shipment) -> Difference | None:
        """Return the difference of a shipment from the stream that readers get, or None."""
        return Difference("") if self.sent is None else self.sent.difference(shipment)

    def retire(self) -> None:
        """Read no more passes, because the stream has changed. Passes in progress continue."""
        first, self.first = self.first, None
        if first is not None:
            first.stop()
        for thread in self.threads.all:
            thread.end()

    @property
    def is_done(self) -> bool:
        """True if all reading has ended and all memory of the passes was released."""
        return not self._feeds and all(thread.is_gone for thread in self.threads.all)

    def ahead(self) -> tuple[int, int, int]:
        """Return the limits for reading ahead.

        Returns:
            Batches that are needed to keep all workers busy, maximum number of batches, and maximum
            number of bytes.
        """
        least, form = 2 * self.pool.workers.wanted + 1, self.engine.known.form
        if form is None:
            return least, least, _LEAST_BYTES
        # Chunks can only grow if more batches wait than the workers need. But items should not wait
        # for long, so chunks at most double each time.
        chunk = min(form.max_chunk, 2 * self.engine.counts.largest_chunk)
        return least, least * chunk, self._most_bytes

    def batches(self, plan: Plan, epoch: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield the batches of a pass, which this process reads."""
        window, seed = self._config.shuffle_window, self._config.seed
        return read_batches(self._stream, plan, window=window, seed=seed, epoch=epoch)

    def begin(self) -> None:
        """Start to read the first pass."""
        self.first = self._open(FIRST_EPOCH, self.engine.plan)
        self.first.start()

    def begin_again(self) -> None:
        """Read the first pass again, which had no item. Does nothing if that is impossible."""
        if self.first is not None and not self._stream.is_one_shot:
            self.first.free()
            self.begin()

    def of_pass(self, epoch: int, plan: Plan) -> Feed:
        """Return the feed of a pass: the first one if it can serve the pass, or a new one."""
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

    def free(self, in_use: Collection[int]) -> None:
        """Release the memory of feeds that are over, except those with these ids."""
        for feed in list(self._feeds):
            if feed.is_over and id(feed) not in in_use:
                feed.free()
                # A feed with a running thread stays, because `stop` must wait for the thread.
                if feed.is_gone or not feed.is_started:
                    self._feeds.remove(feed)

    def free_all(self) -> None:
        """Release all memory. Called after `stop`, when no worker is left."""
        for feed in self._feeds:
            feed.free()
        self._feeds.clear()
        self.rooms.close()
        if self.sent is not None:
            self.sent.give_back()

    def stop(self) -> None:
        """Stop all reading, and wait up to 3 * GRACE_S seconds for that. Idempotent.

        Called by any thread, and by finalizers, without the lock.
        """
        feeds = list(self._feeds)
        for feed in feeds:
            feed.stop()
        # Threads may need the lock to end. A finalizer may hold it, so the wait has a limit.
        threads = self.threads.all
        for thread in threads:
            thread.end()
        clock.wait_until(lambda: all(thread.is_gone for thread in threads), 3 * GRACE_S)
