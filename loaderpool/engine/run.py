"""`PoolRun`: a run whose batches workers make. Batches are delivered in order, lent or copied.

Called in the main process. "Under the lock" refers to the pool's lock.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from loaderpool.engine.delivery import Delivery, DeliveryCounts, OrderedBuffer, made_of
from loaderpool.errors import LoaderpoolError, MemoryLimitError, SetupError, counted
from loaderpool.memory.arena import map_memory_file
from loaderpool.memory.layout import aligned_empty
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.places import Position, first_number
from loaderpool.system import clock, fault_points
from loaderpool.transport.messages import (
    Begin,
    End,
    Ended,
    Extend,
    Filled,
    Message,
    Release,
    Status,
)

if TYPE_CHECKING:
    from loaderpool.engine.delivery import CheckedArguments
    from loaderpool.engine.known_form import KnownForm
    from loaderpool.engine.orders import StoredOrder
    from loaderpool.engine.pool import WorkerPool
    from loaderpool.engine.session import Session
    from loaderpool.engine.stream.feed import Feed
    from loaderpool.engine.version import Version
    from loaderpool.plan.batches import Plan
    from loaderpool.transport.channel import Received


class Runs:
    """Runs of a loader. Its methods are called under the lock, or by the finalizer of a run.

    A finalizer does not wait for the lock. So the properties iterate over copies, which are made in
    one step.

    Attributes:
        by_number: Runs that the present supervisor knows.
        counts: Counts of deliveries, over all runs.
        lent: Slots with views, per run.
        have_started: At least one run was started.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, PoolRun] = {}
        self.counts = DeliveryCounts()
        self.lent: list[dict[int, None]] = []
        self.have_started = False
        self._started: weakref.WeakSet[PoolRun] = weakref.WeakSet()

    def note_start(self, run: PoolRun) -> None:
        """Note a run that may be restarted under other numbers after its supervisor's death."""
        self._started.add(run)
        self.have_started = True

    @property
    def active(self) -> int:
        """Number of runs whose consumers still take batches."""
        return sum(not run.is_over for run in [*self.by_number.values()])

    @property
    def versions(self) -> set[Version]:
        """Versions of the loader that a run uses, or will use when it is restarted."""
        known = {run.version for run in [*self.by_number.values()]}
        return known | {run.version for run in self._started if not run.is_over}

    @property
    def feeds(self) -> set[int]:
        """Ids of the feeds whose items a worker may still read."""
        return {id(run.feed) for run in [*self.by_number.values()]}

    @property
    def orders(self) -> set[int]:
        """Ids of the stored orders that a worker may still read, or that a restart will need."""
        runs = [*self.by_number.values(), *(run for run in self._started if not run.is_over)]
        return {id(run.order) for run in runs}

    @property
    def slots_lent(self) -> int:
        """Number of slots with views."""
        self.lent = [each for each in self.lent if each]
        return sum(map(len, self.lent))


class RunOwner(Protocol):
    """Interface that a run uses of its loader's engine.

    Runs call it under the lock, except `name_variable`.
    """

    checked: CheckedArguments
    runs: Runs
    known: KnownForm
    is_closed: bool

    @property
    def version(self) -> Version:
        """The present version of the loader."""

    def on_run_ended(self, number: int) -> None:
        """Release the resources of a run, because no worker reads them any more."""

    def check(self, version: Version) -> None:
        """Raise an error if no batch can be made from this version of the loader.

        Raises:
            LoaderpoolError: The loader or its pool is closed, loading the version has failed, or
                its stream has no item.
        """

    def name_variable(self, error: SetupError) -> None:
        """Add the name of the variable that cannot be loaded to the error. Without the lock."""


class RunStart:
    """One start of a run: its number in one session, and its slots and failure under that number.

    Attributes:
        session: Session with the supervisor that knows the number.
        number: Number of the run; 0: the run was not started yet.
        lent: Tickets of the slots with views.
        failure: Pickled error that ends the run; empty: the run cannot get a slot.
    """

    def __init__(self, session: Session, number: int = 0) -> None:
        self.session, self.number = session, number
        self.lent: dict[int, None] = {}
        self.failure: bytes | None = None


class RunNumbers(NamedTuple):
    """Numbers of a run's batches, counted through all epochs (`transport.messages`)."""

    first: int  # number of the first batch
    epoch: int  # epoch of the first batch
    per_epoch: int  # batches of each epoch

    def place(self, number: int) -> tuple[int, int]:
        """Return epoch and batch. As in a ticket, those of the first epoch count from `first`."""
        epoch, batch = divmod(number, self.per_epoch)
        return epoch, number - self.first if epoch == self.epoch else batch


class PoolRun:
    """Batches that workers make, from one position on.

    One thread at a time takes from the run. It is created, and started by `begin`, under the lock.
    Its batches are numbered through all epochs (`transport.messages`).

    Args:
        engine: The loader's engine.
        version: Version of the loader whose function and objects make the batches.
        pool: Pool whose workers make the batches.
        place: Position of the first batch.
        limit: Number after the last batch that may be made.
        plan: Plan of the whole epoch.
        feed: Items of the stream; None: the source is no stream.
        order: Order of the epoch in the arena; None: it is not drawn.
    """

    # After a KeyboardInterrupt `take` can be called again, and returns the next batch.
    outlives_interrupts = True

    def __init__(
        self,
        engine: RunOwner,
        version: Version,
        pool: WorkerPool,
        place: Position,
        limit: int,
        plan: Plan,
        feed: Feed | None = None,
        order: StoredOrder | None = None,
    ) -> None:
        self._engine = engine
        self.version = version
        self._pool = pool
        self._plan = plan.after(place.start)
        self.limit, self.feed, self.order = limit, feed, order
        self.is_over = False
        # An interrupt may have split a delivery or a start, so the run must start again.
        self._is_torn = False
        first, per_epoch = first_number(plan, place), plan.batches_per_epoch
        self._numbers = RunNumbers(first, place.epoch, per_epoch)
        self.buffer = OrderedBuffer(first)
        deterministic = engine.checked.config.deterministic
        if plan.lanes or not deterministic:
            # Imported here, because few loaders need it.
            from loaderpool.engine.buffers import LaneBuffer, UnorderedBuffer

            if plan.lanes:
                self.buffer = LaneBuffer(first, plan.lanes, deterministic, place.lanes)
            else:
                self.buffer = UnorderedBuffer(
                    first, per_epoch, {first + each for each in place.taken}
                )
        # garbage was collected to free slots since the last delivery
        self._has_collected = False
        self._start = RunStart(pool.session)

    def take(self) -> Delivery:
        """Return the next batches. Blocks until they have arrived.

        Called by the consumer's thread, without the lock.

        Raises:
            StopIteration: The run was ended, or the stream or the generators have ended.
            LoaderpoolError: The user's function raised, or the pool is broken or closed.
        """
        try:
            return self._take()
        except SetupError as error:
            self._engine.name_variable(error)
            raise

    def _take(self) -> Delivery:
        engine, pool = self._engine, self._pool
        if os.getpid() != pool.owner_pid:
            pool.check_owner()
        waited_ns = 0
        while True:
            if pool.warnings.due:
                pool.warnings.say()
            with pool.lock:
                if (lender := self._start.session.lender).returned:
                    lender.settle()
                if engine.is_closed or pool.is_closed:
                    engine.check(self.version)
                if self.is_over:
                    raise StopIteration
                if self._is_torn or self._start.session is not pool.session:
                    self._begin_again()
                elif (delivery := self.buffer.front) is not None:
                    if delivery.make_error is not None:
                        raise delivery.make_error()
                    self._is_torn = True  # stays True until the delivery is complete
                    self._deliver(delivery)
                    self._is_torn = self._has_collected = False
                    delivery.waited_ns = waited_ns
                    return delivery
                elif (
                    self._can_end
                    or self._start.failure is not None
                    or self.version.failure is not None
                ):
                    self._check_end()
            # `_check_end` requests this. It runs the user's code, so the lock is released first.
            if self._is_torn:
                gc.collect()
            began_ns = clock.monotonic_ns()
            self._start.session.wait(self._has_news)
            waited_ns += clock.monotonic_ns() - began_ns

    def _check_end(self) -> None:
        """Raise an error if no batch will arrive any more."""
        self._engine.check(self.version)
        # Iterators that were dropped in a reference cycle may hold all slots. A collection frees
        # these slots. The run then starts again.
        if self._start.failure == b"" and not self._has_collected:
            self._has_collected = self._is_torn = True
        elif self._start.failure is not None:
            raise self._error()
        if self.is_at_end:
            end = None if self.feed is None else self.feed.end
            if end is not None and end.make_error is not None:
                raise end.make_error()
            raise StopIteration

    @property
    def _can_end(self) -> bool:
        """True if the end may precede the last number."""
        return self.feed is not None or self._plan.lanes > 0

    @property
    def is_current(self) -> bool:
        """True if the run's batches are made from the present version of the loader."""
        return self.version is self._engine.version

    @property
    def is_ready(self) -> bool:
        """True if `take` returns a delivery without waiting. Reads messages that have arrived."""
        if self.buffer.front is None:
            self._pool.catch_up()
        return self.buffer.front is not None

    @property
    def is_at_end(self) -> bool:
        """True if all batches of the stream or of the generators were taken."""
        feed = self.feed
        if feed is not None:
            return (
                feed.end is not None and self.buffer.taken >= self._numbers.first + feed.end.batches
            )
        return self.buffer.is_over

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        """Number of batches of each lane that has ended."""
        return self.buffer.ended

    def extend(self, limit: int) -> None:
        """Allow batches before the number `limit` to be made. Called without the lock."""
        self._pool.check_owner()
        # The lock keeps a restart on another thread from sending the old limit after the new one.
        with self._pool.lock:
            self.limit = limit
            if self.feed is None:
                self._start.session.send(Extend(self._start.number, self._stop, 0))

    def end(self) -> None:
        """Abandon the remaining batches. Idempotent and non-blocking; also called by finalizers."""
        if self.is_over:
            return
        self.is_over = True
        if self.feed is not None:
            self.feed.stop()
        self._end()

    # ---- session.Listener, called under the lock ----

    def hear(self, received: Received) -> None:
        """Store batches until their turn, or a failure or end that the supervisor reports."""
        message = received.message
        if type(message) is not Filled or self.is_over or message.run != self._start.number:
            self._hear_other(message, received.descriptors)
            return
        if message.error:
            failed = Delivery(message.batch, 1, 0, message.offset)
            failed.make_error = functools.partial(made_of, message.error)
            if not self.buffer.put(failed):
                self._release(failed)
            return
        count = message.batches
        rows = message.rows // count
        form = self._engine.known.form
        if form is not None and form.item_spec is not None:
            rows = self._plan.row_plan.rows(*self._numbers.place(message.batch))
        arrived = Delivery(message.batch, count, rows, message.offset)
        arrived.ticket, arrived.batch_rows = message.ticket, message.batch_rows
        arrived.slot_bytes, arrived.may_lend = message.slot_bytes, message.may_lend
        counts = self._engine.runs.counts
        counts.slots, counts.slot_bytes, counts.slots_wanted = (
            message.slots,
            message.slot_bytes,
            message.slots_wanted,
        )
        if message.failures:
            arrived.row_failures = pickle.loads(message.failures)
        if received.content is not None:
            arrived.oversize = received.content, message.oversize
        elif received.descriptors:
            (file,) = received.descriptors
            try:
                arrived.oversize = (
                    map_memory_file(file, message.oversize, is_private=True),
                    message.oversize,
                )
            finally:
                os.close(file)
        if message.is_last and not message.rows:
            self._start.session.release(Release(self._start.number, message.offset, message.ticket))
        elif not self.buffer.put(arrived):
            self._release(arrived)
        # The next batch of the lane does not exist. A delivery without a slot takes its place.
        if message.is_last:
            self.buffer.put(
                Delivery(arrived.first + self._plan.lanes * bool(message.rows), 1, 0, None)
            )

    def _hear_other(self, message: Message, descriptors: Sequence[int]) -> None:
        if isinstance(message, Ended):
            self._engine.on_run_ended(message.number)
        elif not isinstance(message, Status):
            # A run that has started again has other slots. Its earlier slots are free already.
            for descriptor in descriptors:
                os.close(descriptor)
        elif message.number == self._start.number and not self.is_over:
            self._start.failure = message.error

    def _release(self, arrived: Delivery) -> None:
        """Release the slot of batches that were all taken before the run started again."""
        assert arrived.slot is not None
        self._start.session.release(Release(self._start.number, arrived.slot, arrived.ticket))
        if self.feed is not None:
            self._note_taken(arrived.first, arrived.count)

    # ---- called under the lock ----

    def _has_news(self) -> bool:
        """Return True if `take` need not wait any longer."""
        pool = self._pool
        if (
            self.buffer.front is not None
            or self.is_over
            or self._is_torn
            or self._start.session is not pool.session
        ):
            return True
        has_failed = self._start.failure is not None or self.version.failure is not None
        return has_failed or pool.is_closed or (self._can_end and self.is_at_end)

    def begin(self) -> None:
        """Request all batches that were not taken. `end` pairs with it."""
        self._is_torn = True  # until the request is complete
        pool, buffer = self._pool, self.buffer
        # The new number comes first, so that late messages for the old one are ignored.
        self._start = start = RunStart(pool.session, pool.take_number())
        # The channel has room for one message per slot. So messages about ended runs are read
        # before the supervisor can fill their slots again.
        start.session.catch_up()
        self._engine.runs.lent.append(start.lent)
        start.session.listeners[start.number] = self
        self._engine.runs.by_number[start.number] = self
        first, rest, in_order = (
            buffer.begin_at,
            self._plan.start,
            self._engine.checked.config.deterministic,
        )
        (had, over), stop, feed = map(tuple, buffer.had()), self._stop, 0
        # Batches of a stream that were taken out of order are made again, because their items are
        # released when these batches arrive.
        if self.feed is not None:
            had, over, stop, feed = (), (), self._numbers.first, self.feed.offset
        elif self.order is not None:
            feed = self.order.offset
        start.session.send(
            Begin(start.number, self.version.number, first, stop, rest, had, over, in_order, feed)
        )
        if self.feed is not None:
            self.fed(self.feed)
        self._is_torn = False
        # `end` was called meanwhile, by another thread or a finalizer, and missed the new number.
        if self.is_over:
            self._end()

    def fed(self, feed: Feed) -> None:
        """Allow the batches of a stream to be made whose items are in the arena."""
        start, held = self._start, feed.held
        if held.made:
            end = self._numbers.first + held.made
            start.session.send(Extend(start.number, end, held.latest_rows))

    @property
    def _stop(self) -> int:
        """Number after the last batch that may be made; -1 for generators, which have no limit."""
        return -1 if self._plan.lanes else self.limit

    def _begin_again(self) -> None:
        if self._start.session is self._pool.session:
            self._end()
        else:
            self._engine.runs.by_number.pop(self._start.number, None)
        self.buffer = self.buffer.rest()
        self.begin()

    def _end(self) -> None:
        session, number = self._start.session, self._start.number
        # Otherwise workers may read the arena until `Ended`.
        if self.feed is None and self.order is None:
            session.listeners.pop(number, None)
            self._engine.on_run_ended(number)
        try:
            # A copy, because a view may die while the tuple is built.
            session.send(End(number, tuple(self._start.lent.copy())))
        # A long message needs a file descriptor. Without one, the session is marked as torn: the
        # supervisor that replaces this one does not know the run.
        except OSError:
            session.tear()

    def _error(self) -> LoaderpoolError:
        assert self._start.failure is not None
        if self._start.failure:
            return made_of(self._start.failure)
        active = self._engine.runs.active - 1
        return MemoryLimitError(
            f"{counted(active, 'iterator')} of this loader {'is' if active == 1 else 'are'} "
            "active, and there is no batch buffer for another one. "
            "Close some of them, or set a larger Limits.memory."
        )

    def _note_taken(self, first: int, count: int) -> None:
        """Report taken batches to the feed, which numbers its batches from 0."""
        assert self.feed is not None
        first -= self._numbers.first
        self.feed.take(range(first, first + count), self.buffer.done_before - self._numbers.first)

    def _deliver(self, delivery: Delivery) -> None:
        """Complete the delivery in front of the buffer: lend its slot, or copy its batches."""
        engine, start = self._engine, self._start
        offset, stored = delivery.slot, delivery.stored or delivery.count
        form = engine.known.form
        assert form is not None and offset is not None
        self.buffer.drop_front()
        self._pool.deaths.deliveries += 1
        if self.feed is not None:
            engine.runs.counts.largest_chunk = max(engine.runs.counts.largest_chunk, stored)
            self._note_taken(delivery.first, stored)
        if fault_points.directory is not None:  # checked first, because each batch comes here
            fault_points.reach("trainer.delivering")
        way, counts = DeliveryKind.LENT, engine.runs.counts
        if delivery.oversize is not None:
            delivery.anchor = np.ndarray(
                (delivery.oversize[1],), np.uint8, buffer=delivery.oversize[0]
            )
            start.session.release(Release(start.number, offset, delivery.ticket))
            counts.oversize += stored
            way = DeliveryKind.OVERSIZE
        elif len(start.lent) < delivery.may_lend:
            lend = start.session.lender.lend
            delivery.anchor = lend(
                start.number, delivery.ticket, offset, delivery.slot_bytes, start.lent
            )
            counts.lent += stored
        else:
            # The consumer keeps many batches. A copy costs memory of the main process, but the
            # workers keep their slots.
            begun_ns = clock.monotonic_ns()
            shown = start.session.slots.slot(offset, delivery.slot_bytes)
            rows = sum(delivery.batch_rows) or delivery.rows * stored
            nbytes = form.used_bytes(shown, rows)
            delivery.anchor = aligned_empty(nbytes)
            delivery.anchor[:] = shown[:nbytes]
            del shown
            start.session.release(Release(start.number, offset, delivery.ticket))
            way = DeliveryKind.COPIED
            counts.copied += stored
            counts.copied_ns += clock.monotonic_ns() - begun_ns
        delivery.form = form
        delivery.origin = start.number, *self._numbers.place(delivery.first), stored, way
