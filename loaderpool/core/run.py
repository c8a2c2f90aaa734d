"""A run as the main process has it: batches in their order, lent or copied. In the consumer's process."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from loaderpool.core.delivery import Delivery, DeliveryCounts, OrderedBuffer, aligned_empty, made_of
from loaderpool.core.messages import Begin, End, Ended, Extend, Filled, Release
from loaderpool.errors import LoaderpoolError, MemoryLimitError, SetupError, counted
from loaderpool.memory.arena import map_memory_file
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.places import Position, first_number
from loaderpool.system import clock, fault_points

if TYPE_CHECKING:
    from loaderpool.config import LoaderConfig
    from loaderpool.core.channel import Received
    from loaderpool.core.known_form import KnownForm
    from loaderpool.core.pool import WorkerPool
    from loaderpool.core.stream.feed import Feed
    from loaderpool.core.version import Version
    from loaderpool.plan.batches import Plan


class Runs:
    """Runs of a loader. All methods are called under the pool's lock.

    Attributes:
        by_number: Runs that the present supervisor knows.
        counts: Counts of deliveries, over all runs.
        lent: Slots with views, per run.
        have_started: One run was started.
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
        return sum(not run.is_over for run in self.by_number.values())

    @property
    def versions(self) -> set[Version]:
        """Versions of the loader that a run uses, or will use when it is restarted."""
        known = {run.version for run in self.by_number.values()}
        return known | {run.version for run in self._started if not run.is_over}

    @property
    def feeds(self) -> set[int]:
        """Ids of the feeds whose items a worker may still read."""
        return {id(run.feed) for run in self.by_number.values()}

    @property
    def slots_lent(self) -> int:
        """Number of slots with views."""
        self.lent = [each for each in self.lent if each]
        return sum(map(len, self.lent))


class RunOwner(Protocol):
    """A loader's engine, as its runs use it. Under the lock, but for `name_variable`."""

    plan: Plan
    config: LoaderConfig
    runs: Runs
    known: KnownForm
    is_closed: bool

    @property
    def version(self) -> Version:
        """Present version of the loader."""

    def on_run_ended(self, number: int) -> None:
        """Release what a run holds: no worker reads it any more."""

    def check(self, version: Version) -> None:
        """Raise if no batch can be made of this version of the loader.

        Raises:
            LoaderpoolError: The loader or its pool is closed, or loading the version has failed.
        """

    def name_variable(self, error: SetupError) -> None:
        """Name the variable that could not be loaded in the error's message. Without the lock."""


class PoolRun:
    """Batches that workers make. One thread at a time takes from it.

    Made, and then begun, with the pool's lock held.

    Args:
        engine: of the loader.
        version: whose function and objects make the batches.
        pool: whose workers make them.
        place: where it begins.
        limit: batches before this number are wanted, or may be made ahead.
        feed: where items come from, if the source is a stream.
    """

    outlives_interrupts = (
        True  # KeyboardInterrupt leaves `take` between two batches, and it may be called again
    )

    def __init__(
        self,
        engine: RunOwner,
        version: Version,
        pool: WorkerPool,
        place: Position,
        limit: int,
        feed: Feed | None = None,
    ) -> None:
        self._engine = engine
        self.version = version
        self._pool = pool
        self._plan = engine.plan.after(place.start)
        plan = self._plan
        self._epoch, self.limit = place.epoch, limit
        self.feed = feed
        self.is_over = False
        self._is_torn = False  # an interrupt fell where batches are taken: it begins again
        self.lent: dict[int, None] = {}
        self._first = first = first_number(engine.plan, place)
        self._per_epoch = engine.plan.batches_per_epoch
        self.buffer = OrderedBuffer(first)
        if plan.lanes or not engine.config.deterministic:
            from loaderpool.core.buffers import (
                LaneBuffer,
                UnorderedBuffer,
            )  # which few loaders need

            if plan.lanes:
                self.buffer = LaneBuffer(
                    first, plan.lanes, engine.config.deterministic, place.lanes
                )
            else:
                self.buffer = UnorderedBuffer(
                    first, self._per_epoch, {first + each for each in place.taken}
                )
        self._can_end = feed is not None or plan.lanes > 0  # before its last batch
        self.number = 0
        self._failure: bytes | None = None  # of the whole run; empty: it has no slot
        self._has_collected = False
        self._session = pool.session

    def take(self) -> Delivery:
        """Return the next batches. Blocks until they are there.

        Raises:
            StopIteration: the run was ended, or the generators have.
            LoaderpoolError: what the user's function raised, or what ended the pool.
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
            if pool.due_warnings:
                pool.say_warnings()
            with pool.lock:
                if (lender := self._session.lender).returned:
                    lender.settle()
                if engine.is_closed or pool.is_closed:
                    engine.check(self.version)
                if self.is_over:
                    raise StopIteration
                if self._is_torn or self._session is not pool.session:
                    self._begin_again()
                elif (delivery := self.buffer.front) is not None:
                    if delivery.make_error is not None:
                        raise delivery.make_error()
                    self._is_torn = True  # until it is done
                    self._deliver(delivery)
                    self._is_torn = self._has_collected = False
                    delivery.waited_ns = waited_ns
                    return delivery
                elif self._can_end or self._failure is not None or self.version.failure is not None:
                    self._check_end()
            if self._is_torn:  # to begin again: without the lock, as it runs code of the user's
                gc.collect()
            began_ns = clock.monotonic_ns()
            self._session.wait(self._has_news)
            waited_ns += clock.monotonic_ns() - began_ns

    def _check_end(self) -> None:
        """Raise if no batch will come any more."""
        self._engine.check(self.version)
        if (
            self._failure == b"" and not self._has_collected
        ):  # iterators that were dropped in a cycle have all slots
            self._has_collected = self._is_torn = True
        elif self._failure is not None:
            raise self._error()
        if self.is_at_end:
            if self.feed is not None and self.feed.make_error is not None:
                raise self.feed.make_error()
            raise StopIteration

    @property
    def is_current(self) -> bool:
        """Return whether its batches are made of the present version of the loader."""
        return self.version is self._engine.version

    @property
    def is_ready(self) -> bool:
        """Whether `take` has a delivery, without waiting."""
        if self.buffer.front is None:
            self._pool.catch_up()
        return self.buffer.front is not None

    @property
    def is_at_end(self) -> bool:
        """Whether all batches were taken that the stream has, or the generators have."""
        feed = self.feed
        if feed is not None:
            return feed.end is not None and self.buffer.taken >= self._first + feed.end
        return self.buffer.is_over

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        """Generators that are through: how many batches each lane had that has ended."""
        return self.buffer.ended

    def extend(self, limit: int) -> None:
        """More batches are wanted, or may be made ahead."""
        self._pool.check_owner()
        with (
            self._pool.lock
        ):  # or a run that begins again on another thread might be told of the old limit
            self.limit = limit
            if self.feed is None:
                self._session.send(Extend(self.number, self._stop, 0))

    def end(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        if self.is_over:
            return
        self.is_over = True
        if self.feed is not None:
            self.feed.stop()
        self._end()

    # ---- session.Listener; the pool's lock is held

    def hear(self, received: Received) -> None:
        """Keep what has come until its turn."""
        message: Any = received.message
        if type(message) is not Filled or self.is_over or message.run != self.number:
            self._hear_other(message, received.descriptors)
            return
        count = message.batches
        arrived = Delivery(message.batch, count, message.rows // count, message.offset)
        arrived.ticket = message.ticket
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
            self._session.send(Release(self.number, message.offset, message.ticket))
        elif not self.buffer.put(arrived):
            self._release(arrived)
        if message.is_last:  # where its lane's next batch would be, there is none
            self.buffer.put(
                Delivery(arrived.first + self._plan.lanes * bool(message.rows), 1, 0, None)
            )

    def _hear_other(self, message: Any, descriptors: Sequence[int]) -> None:
        if isinstance(message, Ended):
            self._engine.on_run_ended(message.number)
        elif (
            self.is_over or message.run != self.number
        ):  # it has begun again since: those slots are free
            for descriptor in descriptors:
                os.close(descriptor)
        elif message.offset < 0:
            self._failure = message.error
        else:
            failed = Delivery(message.batch, 1, 0, message.offset)
            failed.make_error = functools.partial(made_of, message.error)
            if not self.buffer.put(failed):
                self._release(failed)

    def _release(self, arrived: Delivery) -> None:
        """All of it was taken before the run began again."""
        assert arrived.slot is not None
        self._session.send(Release(self.number, arrived.slot, arrived.ticket))
        if self.feed is not None:
            self._note_taken(arrived.first, arrived.count)

    # ---- the pool's lock is held

    def _has_news(self) -> bool:
        """Whether `take` has nothing to wait for."""
        pool = self._pool
        if (
            self.buffer.front is not None
            or self.is_over
            or self._is_torn
            or self._session is not pool.session
        ):
            return True
        has_failed = self._failure is not None or self.version.failure is not None
        return has_failed or pool.is_closed or (self._can_end and self.is_at_end)

    def begin(self) -> None:
        """Have the supervisor make what was not taken."""
        self._is_torn, self._failure = True, None  # torn until it is done
        pool, buffer = self._pool, self.buffer
        self._session = pool.session
        self.number = (
            pool.take_number()
        )  # first: what is still said of its last number is not meant
        self._session.catch_up()  # what was said of a run that has ended is taken in before its slots are said again
        self.lent = {}
        self._engine.runs.lent.append(self.lent)
        self._session.listeners[self.number] = self
        self._engine.runs.by_number[self.number] = self
        first, rest, in_order = (
            buffer.begin_at,
            self._plan.start,
            self._engine.config.deterministic,
        )
        (had, over), stop, feed = map(tuple, buffer.had()), self._stop, 0
        if (
            self.feed is not None
        ):  # of a stream all are made again: items are let go of as their batches come
            had, over, stop, feed = (), (), self._first, self.feed.offset
        self._session.send(
            Begin(self.number, self.version.number, first, stop, rest, had, over, in_order, feed)
        )
        if self.feed is not None:
            self.fed(self.feed)
        self._is_torn = False
        if self.is_over:  # it was ended meanwhile, by another thread or a finalizer, which could not end what begins
            self._end()

    def fed(self, feed: Feed) -> None:
        """More of the stream's batches may be made."""
        if feed.made:
            self._session.send(Extend(self.number, self._first + feed.made, feed.latest_rows))

    @property
    def _stop(self) -> int:
        """The number after the last batch that may be made; of generators, -1: there is none."""
        return -1 if self._plan.lanes else self.limit

    def _begin_again(self) -> None:
        if self._session is self._pool.session:
            self._end()
        else:
            self._engine.runs.by_number.pop(self.number, None)
        self.buffer = self.buffer.rest()
        self.begin()

    def _end(self) -> None:
        session, number = self._session, self.number
        if self.feed is None:
            session.listeners.pop(number, None)
            self._engine.on_run_ended(number)
        try:
            session.send(
                End(number, tuple(self.lent.copy()))
            )  # a copy: another one may die while this is built
        except (
            OSError
        ):  # no descriptor for a long message: another supervisor knows nothing of the run
            session.tear()

    def _error(self) -> LoaderpoolError:
        assert self._failure is not None
        if self._failure:
            return made_of(self._failure)
        active = self._engine.runs.active - 1
        return MemoryLimitError(
            f"{counted(active, 'iterator')} of this loader {'is' if active == 1 else 'are'} active, and there is no "
            "batch buffer for another one. "
            "Close some of them, or set a larger Limits.memory."
        )

    def _note_taken(self, first: int, count: int) -> None:
        """Note that the consumer has the items of these batches, which the feed counts from its own first on."""
        assert self.feed is not None
        first -= self._first
        self.feed.take(range(first, first + count), self.buffer.done_before - self._first)

    def _deliver(self, delivery: Delivery) -> None:
        """Have what is in front of the buffer be handed out, in its slot or in a copy."""
        engine, offset, stored = self._engine, delivery.slot, delivery.stored or delivery.count
        form = engine.known.form
        assert form is not None and offset is not None
        self.buffer.drop_front()
        self._pool.deliveries += 1
        if self.feed is not None:
            engine.runs.counts.largest_chunk = max(engine.runs.counts.largest_chunk, stored)
            self._note_taken(delivery.first, stored)
        if fault_points.directory is not None:  # each batch passes here
            fault_points.reach("trainer.delivering")
        way, counts = DeliveryKind.LENT, engine.runs.counts
        if delivery.oversize is not None:
            delivery.anchor = np.ndarray(
                (delivery.oversize[1],), np.uint8, buffer=delivery.oversize[0]
            )
            self._session.send(Release(self.number, offset, delivery.ticket))
            counts.oversize += stored
            way = DeliveryKind.OVERSIZE
        elif len(self.lent) < delivery.may_lend:
            lend = self._session.lender.lend
            delivery.anchor = lend(
                self.number, delivery.ticket, offset, delivery.slot_bytes, self.lent
            )
            counts.lent += stored
        else:
            # The consumer keeps batches: it pays with memory of its own, and workers keep their slots.
            begun_ns = clock.monotonic_ns()
            shown = self._session.slots.slot(offset, delivery.slot_bytes)
            nbytes = form.used_bytes(shown, delivery.rows * stored)
            delivery.anchor = aligned_empty(nbytes)
            delivery.anchor[:] = shown[:nbytes]
            del shown
            self._session.send(Release(self.number, offset, delivery.ticket))
            way = DeliveryKind.COPIED
            counts.copied += stored
            counts.copied_ns += clock.monotonic_ns() - begun_ns
        delivery.form = form
        epoch, batch = divmod(delivery.first, self._per_epoch)
        if epoch == self._epoch:  # as tickets count, from where the epoch was resumed
            batch = delivery.first - self._first
        delivery.origin = self.number, epoch, batch, stored, way
