"""A subscription to a pool's batches: in order (or as they come), each lent or copied as it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.memory.layout import is_empty
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import LanePlaces
from loaderpool.system import clock, fault_points
from loaderpool.trainer.engine.delivery import Delivery, aligned_empty
from loaderpool.trainer.engine.lane_buffer import LaneBuffer, WayToPlace
from loaderpool.trainer.engine.reorder_buffer import Arrived, OrderedBuffer, ReorderBuffer, UnorderedBuffer
from loaderpool.trainer.engine.ring import Ring
from loaderpool.trainer.engine.run import Run
from loaderpool.trainer.engine.run_context import RunContext
from loaderpool.transport.messages import Control

if TYPE_CHECKING:
    from loaderpool.trainer.stream.feed import Feed

_NO_LIMIT = 1 << 62


class PoolSubscription:
    """Batches of consecutive epochs as the workers finish them, handed out in order (or not, if not deterministic).

    Made with the session's lock held, which begins it.

    Args:
        context: of the loader whose batches they are.
        first_epoch: from whose first batch batches are counted.
        limit: batches before this one are wanted, or may be made ahead.
        plan: of its batches: the loader's, or of the rest of this one epoch.
        taken: ranges of them that are not wanted; only where there is no order.
        quota: slots that it may hold.
        feed: where the items of its batches come from, where the source is a stream.
        lanes: of generators: what is not wanted of each.
    """

    outlives_interrupts = True  # they come out of the wait

    def __init__(
        self,
        context: RunContext,
        first_epoch: int,
        limit: int,
        plan: BasePlan,
        taken: Mapping[int, int],
        quota: int,
        feed: Feed | None = None,
        lanes: LanePlaces | None = None,
    ) -> None:
        self._context, self._session, self._layout = context, context.session, context.layout
        self._plan, self._per_epoch, self.feed = plan, plan.batches_per_epoch, feed
        self.first_epoch, self.limit, self.quota = first_epoch, limit, quota
        self.is_over = False
        self._tells_its_end = feed is not None or plan.lanes > 0
        buffer: ReorderBuffer = OrderedBuffer(0)
        if plan.lanes:
            buffer = LaneBuffer(plan.lanes, context.is_deterministic, lanes)
        elif not context.is_deterministic:
            buffer = UnorderedBuffer(0, plan.batches_per_epoch, dict(taken), sum(taken.values()))
        self._run = self._begin(buffer)
        self._way: WayToPlace | None = WayToPlace(self._session, plan, buffer, feed is not None and not feed.reads_here)

    def take(self) -> Delivery:
        """The next batches. Blocks until they are there.

        Raises:
            StopIteration: the run was ended, or the stream has.
            LoaderpoolError: what the user's function raised, or what ended the pool.
        """
        session, failure, owner = self._session, self._context.failure, self._context.owner
        session.check_owner()
        if session.todo:
            session.run_todo()
        waited_ns = 0
        while True:
            if not self._run.buffer.is_ready():
                started = clock.monotonic_ns()
                session.wait_for(self._has_news)
                waited_ns += clock.monotonic_ns() - started
            if session.warnings.are_due:
                session.warnings.say()  # of a form that `element_spec` states the first workers may begin later
            with session.lock:
                if self._layout.ring.lender.returned:  # a Ctrl-C broke a finalizer off, or a fork held it back
                    self._layout.ring.lender.settle()
                if owner.is_closed or session.is_closed:  # first: no batch that is ready outlives the close by chance
                    owner.check_open()
                if self._plan.lanes:
                    self._pass_over_ends()
                arrived = self._run.buffer.front()
                if arrived is not None:
                    if arrived.make_error is not None:
                        raise arrived.make_error()
                    delivery = self._deliver(arrived)
                    delivery.waited_ns = waited_ns
                    if self._way is not None:
                        self._end_way()
                    return delivery
                failure.check()
                session.check_usable()
                if self.is_at_end:
                    if self.feed is not None and self.feed.make_error is not None:
                        raise self.feed.make_error()
                    raise StopIteration
                if self.is_over:
                    raise StopIteration
            # What was ready was given back by `restart`, on another thread, before we had the lock: wait again.

    def _end_way(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.end()

    @property
    def is_ready(self) -> bool:
        """Whether the next batches are there."""
        if not self._run.buffer.is_ready():
            self._session.catch_up()
        return self._run.buffer.is_ready()

    @property
    def is_at_end(self) -> bool:
        """Whether all batches were taken that the stream has, or the generators have."""
        feed, buffer = self.feed, self._run.buffer
        if isinstance(buffer, LaneBuffer):
            return buffer.is_over
        return feed is not None and feed.end is not None and buffer.taken >= feed.end

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        buffer = self._run.buffer
        return buffer.ended if isinstance(buffer, LaneBuffer) else {}

    def fed(self, feed: Feed) -> None:
        """More of the stream's batches may be made. The session's lock is held."""
        if feed.tail is not None and feed.made == feed.tail[0] + 1:
            self._session.send(Control.RUN_AFTER, self._run.number, 0, *feed.tail)
        self.extend(feed.made)

    def extend(self, limit: int) -> None:
        """More batches are wanted, or may be made ahead."""
        with self._session.lock:  # or a restart on another thread might tell the new run of the old limit
            self.limit = limit
            self._session.send(Control.RUN_EXTEND, self._run.number, limit, self.quota)

    @property
    def lent(self) -> Iterable[int]:
        """Slots of this run that the consumer looks at, as they are now."""
        return list(self._run.lent)  # in one step of the interpreter: finalizers change it at any moment

    def set_quota(self, quota: int) -> None:
        """Hold at most so many slots from now on, not fewer than before: only `restart` gives slots back."""
        self.quota = quota
        self.extend(self.limit)

    def restart(self, quota: int) -> None:
        """Give back every slot that is not taken, and have those batches made again in other slots.

        What was taken is not made again; what the consumer still looks at is no longer this run's. A consumer that
        waits goes on waiting: the batches will be the same (in any order, if not deterministic). The session's lock is
        held.
        """
        if self.is_over:
            return
        old = self._run
        old.end_now()
        self.quota = quota
        self._run = self._begin(old.buffer.rest())
        if self.is_over:  # ended meanwhile, without the lock, by who may have seen the old run only
            self._run.end()

    def end(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        self.is_over = True
        self._end_way()
        if self.feed is not None:
            self.feed.stop()
        self._run.end()

    def _begin(self, buffer: ReorderBuffer) -> Run:
        session = self._session
        plan, feed = self._plan, self.feed
        run = Run(self._context, session.take_number(), self.first_epoch, plan, buffer, feed)
        number, start = run.number, plan.begins_at if feed is None else 0
        start_number, start_bytes = run.place_start(start) if start else (0, 0)
        session.send(
            Control.RUN_BEGIN,
            number,
            self._context.number,
            self.first_epoch,
            plan.batches_per_epoch,
            buffer.begin_at,
            0 if start or feed is not None or plan.lanes else self.limit,
            self.quota,
        )
        if start:
            session.send(Control.RUN_AFTER, number, start_number, plan.full_batches, plan.last_rows, start_bytes)
            session.send(Control.RUN_EXTEND, number, self.limit, self.quota)
        if isinstance(buffer, LaneBuffer):
            session.send(Control.RUN_LANES, number, plan.lanes)
            for lane, batches in enumerate(buffer.places.taken):
                if lane in buffer.ended:
                    session.send(Control.LANE_OVER, number, lane)
                elif batches * plan.lanes + lane >= buffer.begin_at + plan.lanes:  # further than its turn
                    session.send(Control.LANE_AT, number, lane, batches * plan.lanes + lane)
            self.limit = self._furthest(buffer)
            session.send(Control.RUN_EXTEND, number, self.limit, self.quota)
        if feed is not None:
            session.send(Control.RUN_FEED, number, feed.offset)
            if feed.tail is not None:
                session.send(Control.RUN_AFTER, number, 0, *feed.tail)
            self.limit = feed.made
            session.send(Control.RUN_EXTEND, number, self.limit, self.quota)
        self._context.runs[number] = run
        session.routing.by_run[number] = run
        return run

    def _has_news(self) -> bool:
        """Whether `take` has nothing to wait for. The session's lock is held."""
        if self._run.buffer.is_ready() or self._context.failure.is_there or self.is_over:
            return True
        return self._tells_its_end and self.is_at_end

    # ---- generators that take turns; the session's lock is held ----

    def _furthest(self, buffer: LaneBuffer) -> int:
        """The batch before which may be made: no further from the next one than there are slots that are never lent.

        So the next batch always has a slot, however far its generator is behind the others (RING-4). A run that is
        alone has all slots as its quota, also those that the consumer keeps of passes that are over, and may keep for
        ever: these do not count. Without an order whatever has a slot is handed out, and nothing waits for a slow
        generator.
        """
        layout = self._layout
        if not self._context.is_deterministic:
            return _NO_LIMIT
        not_lent = layout.ring.prospect - layout.ring.lent_count(but=())
        return buffer.begin_at + max(1, min(layout.ring.reserve(self.quota), not_lent))

    def _pass_over_ends(self) -> None:
        """Take note of generators that have ended, if that is what stands in front."""
        buffer, ring = self._run.buffer, self._layout.ring
        if not isinstance(buffer, LaneBuffer):
            return
        while (arrived := buffer.front()) is not None:
            if arrived.make_error is not None or arrived.oversize is not None:
                return
            extent = ring.extents[arrived.slot]  # type: ignore[index]  # it has a slot
            if not is_empty(self._session.arena.anchor(extent.offset, extent.nbytes)):
                return
            for behind in buffer.end_lane():
                self._run.give_back(behind)
            self._session.send(Control.LANE_OVER, self._run.number, arrived.first % self._plan.lanes)
            self._move_window(buffer)

    def _move_window(self, buffer: LaneBuffer) -> None:
        limit = self._furthest(buffer)
        if limit > self.limit:
            self.extend(limit)

    # ---- delivering; the session's lock is held ----

    def _deliver(self, arrived: Arrived) -> Delivery:
        """What is in front of the buffer, which has arrived. An interrupt on the way loses no slot."""
        context, run, ring = self._context, self._run, self._layout.ring
        if not ring.fits_workers:
            self._layout.quotas.fit_to_workers()
        form, slot = self._layout.form, arrived.slot
        assert slot is not None
        way, copied_us = DeliveryKind.LENT, 0
        is_ours = False  # still in the buffer: the end of the run gives it back
        try:
            run.buffer.drop_front()
            is_ours = True
            if isinstance(run.buffer, LaneBuffer):
                self._move_window(run.buffer)
            if self.feed is not None:
                context.counts.largest_chunk = max(context.counts.largest_chunk, arrived.count)
                self.feed.take(range(arrived.first, arrived.first + arrived.count), run.buffer.done_before)
            self._session.deliveries += 1
            fault_points.reach("trainer.delivering")
            if arrived.oversize is not None:
                anchor: npt.NDArray[Any] = np.ndarray((arrived.oversize[1],), np.uint8, buffer=arrived.oversize[0])
                context.counts.oversize += arrived.count
                way = DeliveryKind.OVERSIZE
            elif self._may_lend(ring):
                is_ours = False
                anchor = self._lend(ring, slot, arrived.ticket, run.lent)
                context.counts.lent += arrived.count
            else:
                begun_ns = clock.monotonic_ns()
                anchor = self._copied(ring, arrived, slot)
                copied_ns = clock.monotonic_ns() - begun_ns
                way, copied_us = DeliveryKind.COPIED, copied_ns // 1000
                context.counts.copied += arrived.count
                context.counts.copied_ns += copied_ns
        finally:
            if is_ours:
                is_ours = False
                ring.lender.give_back(slot, arrived.ticket)
        if arrived.oversize is not None:
            context.owner.outgrown(arrived.oversize[1] // arrived.count * form.max_chunk)
        delivery = Delivery(
            form, anchor, arrived.first, arrived.count, arrived.rows, arrived.row_failures, arrived.keep
        )
        epoch, batch = divmod(arrived.first, self._per_epoch)
        delivery.origin = (
            run.number, self.first_epoch + epoch, batch, arrived.count, arrived.ticket, slot, arrived.arrived_ns,
            copied_us, way,
        )  # fmt: skip
        return delivery

    @staticmethod
    def _lend(ring: Ring, slot: int, ticket: int, lent: dict[int, None]) -> npt.NDArray[np.uint8]:
        extent = ring.extents[slot]
        lent[slot] = None  # first, so that below it is known whether a lease took the slot
        try:
            return ring.lender.lend(slot, ticket, extent.offset, extent.nbytes, lent)
        except BaseException:
            # A lease that began returns the slot when its anchor dies, and may have done so.
            if slot not in ring.lender.lent and lent.pop(slot, 0) is None:
                ring.lender.give_back(slot, ticket)
            raise

    def _copied(self, ring: Ring, arrived: Arrived, slot: int) -> npt.NDArray[np.uint8]:
        extent = ring.extents[slot]
        shown = self._session.arena.anchor(extent.offset, extent.nbytes)
        nbytes = self._layout.form.used_bytes(shown, arrived.rows * arrived.count)
        copy = aligned_empty(nbytes)
        copy[:] = shown[:nbytes]
        return copy

    def _may_lend(self, ring: Ring) -> bool:
        """Lend-or-copy: enough slots must stay for the workers, for this run and for all of them."""
        reserve = ring.reserve(self.quota)
        lent = self._run.lent
        if len(lent) < self.quota - reserve and len(ring.lender.lent) < ring.count - reserve:
            return True
        if len(lent) < ring.count and self._layout.quotas.grow_by_one():
            self.set_quota(self.quota + 1)
            if self._plan.lanes:  # RING-4: with the quota what is kept back has grown, too
                reserve = ring.reserve(self.quota)
                return len(lent) < self.quota - reserve and len(ring.lender.lent) < ring.count - reserve
            return len(ring.lender.lent) < ring.count - reserve
        return False
