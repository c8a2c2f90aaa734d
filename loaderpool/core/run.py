"""A run as the main process has it: batches in their order, lent or copied. In the consumer's process."""

from __future__ import annotations

import functools
import gc
import os
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from loaderpool.core import failures
from loaderpool.core.buffers import Arrived, LaneBuffer, OrderedBuffer, ReorderBuffer, UnorderedBuffer, WayToPlace
from loaderpool.core.delivery import Delivery, aligned_empty
from loaderpool.core.messages import BatchFailed, Begin, End, Ended, Extend, Filled, GiveBack
from loaderpool.errors import LoaderpoolError, MemoryLimitError, counted
from loaderpool.memory.arena import PAGE_BYTES, map_private
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.base import LanePlaces
from loaderpool.plan.order import Numbering, Plan
from loaderpool.system import clock, fault_points

if TYPE_CHECKING:
    from loaderpool.config import LoaderConfig
    from loaderpool.core.channel import Received
    from loaderpool.core.engine_statistics import DeliveryCounts
    from loaderpool.core.pool import Pool
    from loaderpool.core.session import Session
    from loaderpool.core.stream.feed import Feed
    from loaderpool.memory.layout import BatchForm


class RunOwner(Protocol):
    """A run's loader: `engine.PoolEngine`. All with the pool's lock held."""

    session: Pool
    config: LoaderConfig
    plan: Plan
    number: int
    runs: dict[int, PoolRun]  # by number
    lent: list[dict[int, None]]  # of each run: slots that have views
    slots: int  # of the latest run
    slot_bytes: int
    counts: DeliveryCounts
    known_form: BatchForm | None  # of its batches
    failure: Any  # why no batch can be made; None: nothing has failed
    is_closed: bool

    def check(self) -> None:
        """Raise if no batch can be made."""

    def check_open(self) -> None:
        """Raise if it, or its pool, was closed."""

    def on_run_ended(self, number: int) -> None:
        """No worker looks at what this run needs any more."""


class PoolRun:
    """Batches that workers make. One thread at a time takes from it.

    Made with the pool's lock held, which begins it.

    Args:
        engine: of the loader.
        first_epoch: from whose first batch batches are counted.
        limit: batches before this one are wanted, or may be made ahead.
        plan: of its batches: the loader's, or of the rest of this one epoch.
        taken: ranges of them that are not wanted; only where there is no order.
        lanes: of generators: what is not wanted of each.
        feed: where items come from, if the source is a stream.
    """

    outlives_interrupts = True  # they come out of the wait

    def __init__(
        self,
        engine: RunOwner,
        first_epoch: int,
        limit: int,
        plan: Plan,
        taken: Mapping[int, int],
        lanes: LanePlaces | None = None,
        feed: Feed | None = None,
    ) -> None:
        self._engine, self._pool, self._plan = engine, engine.session, plan
        self.first_epoch, self.limit = first_epoch, limit
        self.feed = feed
        self.is_over = False
        self._is_torn = False  # an interrupt fell where batches are taken: it begins again
        self.lent: dict[int, None] = {}
        self._slots: dict[int, tuple[int, int]] = {}  # of those that are full: bytes, and how many may have views
        rest = plan.start
        self._numbering = Numbering(engine.plan, first_epoch, rest)
        self._base = self._numbering.first
        buffer: ReorderBuffer = OrderedBuffer(0)
        if plan.lanes:
            buffer = LaneBuffer(plan.lanes, engine.config.deterministic, lanes)
        elif not engine.config.deterministic:
            buffer = UnorderedBuffer(0, plan.batches_per_epoch, dict(taken), sum(taken.values()))
        self.buffer = buffer
        self._can_end = feed is not None or plan.lanes > 0  # before its last batch
        self.number = 0
        self._failure: bytes | None = None  # of the whole run; empty: it has no slot
        self._has_collected = False
        self._begin()
        self._way: WayToPlace | None = WayToPlace(
            self._pool,
            plan,
            buffer,
            feed is not None and not feed.reads_here,
        )

    # ---- delivery.Subscription

    def take(self) -> Delivery:
        """Return the next batches. Blocks until they are there.

        Raises:
            StopIteration: the run was ended, or the generators have.
            LoaderpoolError: what the user's function raised, or what ended the pool.
        """
        engine, pool = self._engine, self._pool
        if os.getpid() != pool.owner_pid:
            pool.check_owner()
        waited_ns = 0
        while True:
            if pool.warnings.due:
                pool.warnings.say()
            with pool.lock:
                if (lender := self._session.lender).returned:
                    lender.settle()
                if engine.is_closed or pool.is_closed:
                    engine.check_open()
                if self.is_over:
                    raise StopIteration
                if self._is_torn or self._session is not pool.session:
                    self._begin_again()
                elif (arrived := self.buffer.front()) is not None:
                    if arrived.make_error is not None:
                        raise arrived.make_error()
                    self._is_torn = True  # until it is done
                    delivery = self._deliver(arrived)
                    self._is_torn = False
                    delivery.waited_ns = waited_ns
                    if self._way is not None:
                        self._end_way()
                    return delivery
                elif self._can_end or self._failure is not None or engine.failure is not None:
                    self._check_end()
            if self._is_torn:  # to begin again: without the lock, as it runs code of the user's
                gc.collect()
            began_ns = clock.monotonic_ns()
            pool.wait(self._has_news)
            waited_ns += clock.monotonic_ns() - began_ns

    def _check_end(self) -> None:
        """Raise if no batch will come any more."""
        self._engine.check()
        if self._failure == b"" and not self._has_collected:  # iterators that were dropped in a cycle have all slots
            self._has_collected = self._is_torn = True
        elif self._failure is not None:
            raise self._error()
        if self.is_at_end:
            if self.feed is not None and self.feed.make_error is not None:
                raise self.feed.make_error()
            raise StopIteration

    @property
    def is_ready(self) -> bool:
        """Whether the next batches are there."""
        with self._pool.lock:
            if self.buffer.front() is not None:
                return True
        self._pool.catch_up()
        with self._pool.lock:
            return self.buffer.front() is not None

    @property
    def is_at_end(self) -> bool:
        """Whether all batches were taken that the stream has, or the generators have."""
        feed = self.feed
        if feed is not None:
            return feed.end is not None and self.buffer.taken >= feed.end
        return isinstance(self.buffer, LaneBuffer) and self.buffer.is_over

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        """Generators that are through: how many batches each lane had that has ended."""
        return self.buffer.ended if isinstance(self.buffer, LaneBuffer) else {}

    @property
    def slots_ready(self) -> int:
        """How many slots have batches that wait to be taken. Runs in: any thread, without the lock."""
        return self.buffer.waiting

    def extend(self, limit: int) -> None:
        """More batches are wanted, or may be made ahead."""
        self._pool.check_owner()
        with self._pool.lock:  # or a run that begins again on another thread might be told of the old limit
            self.limit = limit
            if self.feed is None:
                self._session.send(Extend(self.number, self._stop, 0))

    def end(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        if self.is_over:
            return
        self.is_over = True
        self._end_way()
        if self.feed is not None:
            self.feed.stop()
        self._end()

    # ---- session.Listener; the pool's lock is held

    def hear(self, received: Received) -> None:
        """Keep what has come until its turn."""
        message: Any = received.message
        if isinstance(message, Ended):
            self._engine.on_run_ended(message.number)
        elif self.is_over or message.run != self.number:  # it has begun again since: those slots are free
            for descriptor in received.descriptors:
                os.close(descriptor)
        elif isinstance(message, Filled):
            self._hear_filled(message, received)
        elif isinstance(message, GiveBack):
            self._begin_again()
        elif isinstance(message, BatchFailed) and message.offset < 0:
            self.fail(message.error)
        elif isinstance(message, BatchFailed):
            arrived = Arrived(message.batch - self._base, 1, 0, message.offset)
            arrived.make_error = functools.partial(failures.unpack, message.error)
            if not self.buffer.put(arrived):
                self._release(arrived)

    def fail(self, error: bytes) -> None:
        """No more of its batches are made."""
        self._failure = error

    def on_supervisor_lost(self) -> None:
        """Another supervisor is told when batches are taken."""

    def _hear_filled(self, message: Filled, received: Received) -> None:
        count = message.batches
        arrived = Arrived(message.batch - self._base, count, message.rows // count, message.offset)
        arrived.ticket, arrived.arrived_ns = message.ticket, clock.monotonic_ns()
        self._slots[message.offset] = message.slot_bytes, message.may_lend
        self._engine.slots, self._engine.slot_bytes = message.slots, message.slot_bytes
        if message.failures:
            arrived.row_failures = pickle.loads(message.failures)
        if received.content is not None:
            arrived.oversize = received.content, message.oversize
        elif received.descriptors:
            (file,) = received.descriptors
            try:
                arrived.oversize = map_private(file, 0, message.oversize), message.oversize
            finally:
                os.close(file)
        if message.is_last and not message.rows:
            self._session.lender.release(self.number, message.offset, message.ticket)
        elif not self.buffer.put(arrived):
            self._release(arrived)
        if message.is_last:  # where its lane's next batch would be, there is none
            self.buffer.put(Arrived(arrived.first + self._plan.lanes * bool(message.rows), 1, 0, None))

    def _release(self, arrived: Arrived) -> None:
        """All of it was taken before the run began again."""
        assert arrived.slot is not None
        self._session.lender.release(self.number, arrived.slot, arrived.ticket)
        if self.feed is not None:
            self.feed.take(range(arrived.first, arrived.first + arrived.count), self.buffer.done_before)

    # ---- the pool's lock is held

    def _has_news(self) -> bool:
        """Whether `take` has nothing to wait for."""
        pool = self._pool
        if self.buffer.front() is not None or self.is_over or self._is_torn or self._session is not pool.session:
            return True
        has_failed = self._failure is not None or self._engine.failure is not None
        return has_failed or pool.is_closed or (self._can_end and self.is_at_end)

    def _begin(self) -> None:
        """Have the supervisor make what was not taken."""
        self._is_torn, self._failure = True, None  # torn until it is done
        pool, buffer = self._pool, self.buffer
        self._session: Session = pool.session
        self._session.catch_up()  # what was said of a run that has ended is taken in before its slots are said again
        self.number = pool.take_number()
        self.lent, self._slots = {}, {}
        self._engine.lent.append(self.lent)
        self._session.runs[self.number] = self
        self._engine.runs[self.number] = self
        # Of a stream all are made again: items are let go of as their batches come.
        had, over = ((), ()) if self.feed is not None else self._had()
        stop = self._stop
        first = buffer.begin_at + self._base
        rest = self._plan.start
        feed, in_order = 0 if self.feed is None else self.feed.offset, self._engine.config.deterministic
        if self.feed is not None:
            stop = self._base
        self._session.send(Begin(self.number, self._engine.number, first, stop, rest, had, over, in_order, feed))
        if self.feed is not None:
            self.fed(self.feed)
        self._is_torn = False

    def fed(self, feed: Feed) -> None:
        """More of the stream's batches may be made."""
        if feed.made:
            self._session.send(Extend(self.number, self._base + feed.made, feed.latest_rows))

    @property
    def _stop(self) -> int:
        """The number after the last batch that may be made; of generators, -1: there is none."""
        return -1 if self._plan.lanes else self.limit + self._base

    def _had(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the batches after the first one not taken that are not to be made, and the lanes that are over."""
        buffer = self.buffer
        if isinstance(buffer, LaneBuffer):
            lanes, places = self._plan.lanes, buffer.places
            had: list[int] = []
            for lane, taken in enumerate(places.taken):
                first = lane + lanes * (-(-(buffer.begin_at - lane) // lanes))
                had += range(first, taken * lanes + lane, lanes)
            over = sorted((lane + self._base) % lanes for lane in places.over)  # as the supervisor numbers them
            return tuple(number + self._base for number in sorted(had)), tuple(over)
        if isinstance(buffer, UnorderedBuffer):
            ranges = buffer.taken_ranges
            return tuple(
                number + self._base for first, count in ranges.items() for number in range(first, first + count)
            ), ()
        return (), ()

    def _begin_again(self) -> None:
        if self._session is self._pool.session:
            self._end()
        else:
            self._engine.runs.pop(self.number, None)
        self.buffer = self.buffer.rest()
        self._begin()

    def _end(self) -> None:
        session, number = self._session, self.number
        if self.feed is None:
            session.runs.pop(number, None)
            self._engine.on_run_ended(number)
        try:
            session.send(End(number, tuple(self.lent.copy())))  # a copy: another one may die while this is built
        except OSError:  # no descriptor for a long message: another supervisor knows nothing of the run
            session.tear()

    def _end_way(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.end()

    def _error(self) -> LoaderpoolError:
        assert self._failure is not None
        if self._failure:
            return failures.unpack(self._failure)
        active = sum(not run.is_over for run in self._engine.runs.values()) - 1
        return MemoryLimitError(
            f"{counted(active, 'iterator')} of this loader {'is' if active == 1 else 'are'} active, and there is no "
            "batch buffer for another one. "
            "Close some of them, or set a larger Limits.memory."
        )

    def _deliver(self, arrived: Arrived) -> Delivery:
        """Return what is in front of the buffer, which has arrived."""
        engine, form, offset = self._engine, self._engine.known_form, arrived.slot
        assert form is not None and offset is not None
        self.buffer.drop_front()
        self._pool.deliveries += 1
        if self.feed is not None:
            engine.counts.largest_chunk = max(engine.counts.largest_chunk, arrived.count)
            self.feed.take(range(arrived.first, arrived.first + arrived.count), self.buffer.done_before)
        fault_points.reach("trainer.delivering")
        way, copied_us, counts = DeliveryKind.LENT, 0, engine.counts
        nbytes, may_lend = self._slots.pop(offset, (0, 0))
        if arrived.oversize is not None:
            anchor: npt.NDArray[np.uint8] = np.ndarray((arrived.oversize[1],), np.uint8, buffer=arrived.oversize[0])
            self._session.lender.release(self.number, offset, arrived.ticket)
            counts.oversize += arrived.count
            way = DeliveryKind.OVERSIZE
        elif len(self.lent) < may_lend:
            anchor = self._session.lender.lend(self.number, arrived.ticket, offset, nbytes, self.lent)
            counts.lent += arrived.count
        else:
            # The consumer keeps batches: it pays with memory of its own, and workers keep their slots.
            begun_ns = clock.monotonic_ns()
            shown = self._session.slots.slot(offset, nbytes)
            nbytes = form.used_bytes(shown, arrived.rows * arrived.count)
            anchor = aligned_empty(nbytes)
            anchor[:] = shown[:nbytes]
            del shown
            self._session.lender.release(self.number, offset, arrived.ticket)
            took_ns = clock.monotonic_ns() - begun_ns
            way, copied_us = DeliveryKind.COPIED, took_ns // 1000
            counts.copied += arrived.count
            counts.copied_ns += took_ns
        delivery = Delivery(
            form, anchor, arrived.first, arrived.count, arrived.rows, arrived.row_failures, arrived.keep
        )
        epoch, batch = divmod(arrived.first, self._plan.batches_per_epoch)
        delivery.origin = (
            self.number, self.first_epoch + epoch, batch, arrived.count, arrived.ticket, offset // PAGE_BYTES,
            arrived.arrived_ns, copied_us, way,
        )  # fmt: skip
        return delivery
