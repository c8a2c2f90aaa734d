"""The slots of one loader: how many, how large, who may hold how many, and when one is lent rather than copied.

All numbers obey a budget of bytes, `Limits.memory`. A ring begins small and grows when a batch would have to be copied
for lack of a free slot; slots that batches outgrow are replaced by larger ones as they come back.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.memory.batch_form import CHUNK_BATCHES, BatchForm
from loaderpool.memory.extents import Extent
from loaderpool.memory.layout import FixedLayout
from loaderpool.supervisor.scheduler import TICKETS_PER_WORKER, travelling
from loaderpool.system import capacity
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.lease import Lender
from loaderpool.trainer.session.routing import Listener
from loaderpool.transport.messages import Control, decode_all

_DEFAULT_LIMIT_BYTES = 2 << 30
_SHARE_OF_FREE = 4
# A run that must share needs one slot to fill while the consumer looks at another.
_LEAST_SLOTS = 2
# Slots up to this size are all made at once; larger ones are made when they are needed.
_SMALL_SLOT_BYTES = 4 << 20
# Beyond the workers' tickets: what tf.data holds under prefetch(2) (five or six), and some look-ahead.
_CONSUMER_SLOTS = 8
# Small slots cost little: enough of them to keep all workers busy behind a straggler.
_LOOK_AHEAD_SLOTS = 32
# But no more than this of such as hold very many batches each: making them takes a millisecond for 3 MiB.
_LOOK_AHEAD_BYTES = 8 << 20


class RingPlan(NamedTuple):
    """How a ring of one loader is cut from its budget."""

    max_chunk: int  # most batches in a slot
    slot_bytes: int
    first_slots: int  # made at the start
    most_slots: int  # made when needed
    tickets_per_worker: int  # that it has room for
    limit_bytes: int  # of all slots, but not those whose batches the consumer keeps beyond their turn


def plan_ring(
    form: BatchForm,
    *,
    workers: int,
    memory_limit: int | None,
    tickets_per_worker: int = TICKETS_PER_WORKER,
    hosts: int = 0,
) -> tuple[BatchForm, RingPlan]:
    """Choose chunk size and number of slots within the budget; returns the form with chunks of that size, too.

    Args:
        form: of the batches; how large a chunk would be without a budget.
        workers: how many there are.
        memory_limit: the budget in bytes; None: a share of what is free.
        tickets_per_worker: how many tickets a worker may have at the same time.
        hosts: that have the workers, on other machines; 0: they are processes of this one.

    Raises:
        MemoryLimitError: two slots of one batch do not fit; the message names what works.
    """
    free = capacity.available_memory_bytes()
    limit = memory_limit if memory_limit is not None else min(_DEFAULT_LIMIT_BYTES, free // _SHARE_OF_FREE)
    wanted = tickets_per_worker * workers + travelling(hosts, form.slot_bytes) + _CONSUMER_SLOTS
    form = with_chunk(form, max(1, min(form.max_chunk, form.max_chunk * limit // max(1, form.slot_bytes * wanted))))
    slot_bytes = _page_rounded(form.slot_bytes)
    least = slot_bytes * _LEAST_SLOTS
    room = max(0, free - HEADROOM_BYTES)
    if least > room and form.max_chunk == 1:
        rows = 0 if form.unit == "element" else form.batch_rows
        dtype = _largest_dtype(form)
        raise MemoryLimitError(capacity.batch_advice(least, rows, form.unit == "sample", dtype, limit, room))
    if limit < least:
        setting = f"Limits(memory={memory_limit:,})" if memory_limit is not None else f"the default of {limit:,} bytes"
        raise MemoryLimitError(
            f"{setting} is too small: one batch takes {slot_bytes:,} bytes, and at least {_LEAST_SLOTS} batch "
            f"buffers are needed. Set Limits(memory={least}) ({least / 2**20:.1f} MiB) or more, or lower batch_size."
        )
    tickets = workers * tickets_per_worker + travelling(hosts, slot_bytes)
    counts = _slot_counts(slot_bytes, form.max_chunk, workers, tickets, limit)
    return form, RingPlan(form.max_chunk, slot_bytes, *counts, tickets_per_worker, limit)


def _largest_dtype(form: BatchForm) -> np.dtype[Any]:
    """Return the dtype of the component that has the most bytes; of varying ones, of the largest items."""
    sizes = form.fixed.row_bytes if form.fixed is not None else [item.dtype.itemsize for item in form.spec.components]
    return form.spec.components[max(range(len(sizes)), key=sizes.__getitem__)].dtype


def _slot_counts(slot_bytes: int, max_chunk: int, workers: int, tickets: int, limit_bytes: int) -> tuple[int, int]:
    """How many slots are made at once, and how many at most, where workers may have so many tickets in all."""
    wanted = tickets + _CONSUMER_SLOTS
    if slot_bytes <= _SMALL_SLOT_BYTES:
        ahead = max(_LOOK_AHEAD_SLOTS, 4 * workers)
        if max_chunk > CHUNK_BATCHES:
            ahead = min(ahead, _LOOK_AHEAD_BYTES // slot_bytes)
        most = min(limit_bytes // slot_bytes, max(wanted, ahead))
        return most, most
    most = min(limit_bytes // slot_bytes, wanted)
    return min(most, _first_slots(tickets)), most


def _first_slots(tickets: int) -> int:
    return tickets + 3


class Ring:
    """A loader's slots in the session's arena. The caller holds the session's lock.

    Args:
        session: whose arena and pipe.
        owner: who is told of retired slots.
        loader: the loader's number.
        plan: sizes and counts; where the machine has less, fewer slots are made, but no fewer than two.
        is_for_lanes: they are for batches of generators.

    Raises:
        MemoryLimitError: the machine has no room for two.
    """

    def __init__(
        self,
        session: EngineSession,
        owner: Listener,
        loader: int,
        plan: RingPlan,
        is_for_lanes: bool = False,
    ) -> None:
        self._session, self._is_for_lanes = session, is_for_lanes
        self._owner = weakref.ref(owner)  # which has us
        self._loader = loader
        self._workers = session.workers_wanted  # that it was planned for
        self.plan = plan
        self.lender = Lender(session.arena, session.pipe)
        self.extents: dict[int, Extent] = {}
        self._retiring: set[int] = set()
        self._wanted = plan.first_slots  # slots that there shall be as soon as retiring ones leave room for them
        self._ceiling: int | None = None  # the machine had no room for more than so many
        self._make_first_slots()

    @property
    def count(self) -> int:
        """Slots that stay."""
        return len(self.extents) - len(self._retiring)

    @property
    def prospect(self) -> int:
        """How many slots the ring has, or will have once slots that became too small are replaced."""
        return max(self.count, self._wanted)

    @property
    def fits_workers(self) -> bool:
        """Whether it was planned for as many workers as there shall be now."""
        return self._workers == self._session.workers_wanted

    def lent_count(self, but: Container[int]) -> int:
        """Slots that stay and are lent, but for these."""
        lent = self.lender.lent
        return sum(1 for slot in self.extents if slot in lent and slot not in self._retiring and slot not in but)

    @property
    def slots_wanted(self) -> int:
        """How many slots there would be, were memory no limit."""
        return self.tickets + _CONSUMER_SLOTS

    @property
    def tickets(self) -> int:
        """How many tickets the workers may have, and how many travel to them and from them."""
        session, plan = self._session, self.plan
        return session.workers_wanted * plan.tickets_per_worker + travelling(session.hosts, plan.slot_bytes)

    def reserve(self, quota: int) -> int:
        """Slots that a run with this quota never lends, so that workers always have somewhere to write.

        Of generators that many batches may be made ahead, so they hang on nothing but the quota, and grow no faster
        than it does (RING-4).
        """
        if self._is_for_lanes:
            return max(1, quota // 2)
        half, busy = self.count // 2, self._session.workers_wanted * self.plan.tickets_per_worker // 2
        # The least of both, at least one; `min` and `max` cost 6 us behind a wait that left no cache warm.
        kept = busy + 1 if busy < half else half
        return kept if kept > 1 else 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a new slot."""
        return self.plan.slot_bytes

    def slots_of_another_run(self) -> int:
        """How many slots a run beside others should have: as many as the first where they are small."""
        if self.plan.slot_bytes <= _SMALL_SLOT_BYTES:
            return self.plan.first_slots
        return self._session.workers_wanted + 2

    def grow_by_one(self, runs: int) -> bool:
        """Add a slot if the budget of so many runs has room for it."""
        if self.count >= self._most(runs) or not self._has_room():
            return False
        try:
            self._add(self._take_extent())
        except MemoryLimitError:
            self._ceiling = self.count
            return False
        return True

    def make_room(self, slots: int, runs: int) -> int:
        """Add up to `slots` slots for a run that will be one of so many; returns how many."""
        added = 0
        while added < slots and self.grow_by_one(runs):
            added += 1
        return added

    def outgrown(self, nbytes: int, runs: int, least: int = 0) -> bool:
        """A batch of `nbytes` did not fit: make new slots that large, and retire the old ones as they come back.

        Args:
            nbytes: of the batch.
            runs: that share the slots.
            least: how many there must be at once, beside the old ones; 0: fewer will do, when those are back.

        Returns:
            Whether slots are retired; not where the budget has too few larger ones for so many runs.

        Raises:
            MemoryLimitError: the machine has no room for a single one.
        """
        new_bytes = _page_rounded(2 * nbytes)
        if new_bytes <= self.plan.slot_bytes:
            return False
        limit_bytes = self.plan.limit_bytes
        affordable = limit_bytes // new_bytes
        if affordable < max(_LEAST_SLOTS, runs) or (least and self._taken_bytes() + least * new_bytes > limit_bytes):
            return False  # such batches go on arriving in memory of their own
        self.plan = self.plan._replace(slot_bytes=new_bytes, most_slots=min(self.plan.most_slots, affordable))
        for slot in list(self.extents):
            if slot not in self._retiring:
                self._retiring.add(slot)
                self._session.send(Control.SLOT_RETIRE, slot)
        self._ceiling = None
        self._wanted = max(least, min(self._most(runs), max(runs, _first_slots(self.tickets))))
        self._grow_as_wanted()
        return True

    def retired(self, slot: int) -> None:
        """The supervisor has taken a retiring slot out of its hands.

        Raises:
            MemoryLimitError: the machine has no room for a single one in place of the old ones.
        """
        self._retiring.discard(slot)
        extent = self.extents.pop(slot, None)
        if extent is not None:
            self._session.arena.give_back(extent)
        self._grow_as_wanted()

    def fit_to_workers(self) -> None:
        """There are, or shall be, another number of workers: plan for them, and make the slots that more of them need.

        Fewer need fewer, but slots that are there stay.
        """
        plan, self._workers = self.plan, self._session.workers_wanted
        first, most = _slot_counts(plan.slot_bytes, plan.max_chunk, self._workers, self.tickets, plan.limit_bytes)
        self.plan = plan._replace(first_slots=first, most_slots=most)
        self._ceiling = None
        self._wanted = max(self._wanted, first)
        self._grow_as_wanted()

    def tell_new_supervisor(self) -> None:
        """Another supervisor takes the slots over: all are free but those that the consumer looks at."""
        told: dict[int, bytes] = {}
        for slot, extent in list(self.extents.items()):
            message = self.lender.lent_message(slot)
            if message is None and slot in self._retiring:
                self._session.routing.by_slot.pop(slot, None)
                self.retired(slot)
                continue
            ticket = 0 if message is None else next(decode_all(message))[2]
            self._session.send(Control.SLOT_ADD, self._loader, slot, extent.offset, extent.nbytes, ticket)
            if slot in self._retiring:
                self._session.send(Control.SLOT_RETIRE, slot)
            if message is not None:
                told[slot] = message
        for slot, message in told.items():
            if self.lender.lent_message(slot) != message:  # it came back meanwhile, before it was known there
                self._session.pipe.release(message)

    def give_back_all(self) -> None:
        """The loader is unloaded: all slots are free memory again, each as soon as its last view has died."""
        if self.extents:
            self.lender.on_return.append(self._reclaim_later)  # first: a slot may return at any moment
        for slot in list(self.extents):
            self._reclaim(slot)

    def _reclaim_later(self, slot: int) -> None:
        """Runs in: finalizers, on any thread."""
        self._session.todo.append(functools.partial(self._reclaim, slot))
        if self._session.is_closed:  # no other thread comes by that would
            self._session.run_todo()

    def _reclaim(self, slot: int) -> None:
        if slot not in self.lender.lent and slot in self.extents:
            self._session.routing.by_slot.pop(slot, None)
            self._retiring.discard(slot)
            self._session.arena.give_back(self.extents.pop(slot))
            if not self.extents:  # have no reference left: what is closed goes without the collector of garbage
                self.lender.on_return.clear()

    def _most(self, runs: int) -> int:
        """Slots that there may be at most for so many runs."""
        most = self.plan.most_slots + (max(1, runs) - 1) * self.slots_of_another_run()
        affordable = self.plan.limit_bytes // self.plan.slot_bytes
        return min(most, affordable, affordable if self._ceiling is None else self._ceiling)

    def _has_room(self) -> bool:
        """Whether the budget has room for one more slot."""
        return self._taken_bytes() + self.plan.slot_bytes <= self.plan.limit_bytes

    def _taken_bytes(self) -> int:
        kept = self._retiring & self.lender.lent.keys()  # only the consumer needs them any more
        return sum(extent.nbytes for slot, extent in self.extents.items() if slot not in kept)

    def _grow_as_wanted(self) -> None:
        """Make the slots that outgrown ones were in the way of."""
        while self.count < self._wanted and self._has_room():
            try:
                self._add(self._take_extent())
            except MemoryLimitError:
                lent = self.lender.lent
                if any(slot not in lent for slot in self._retiring):
                    return  # their pages are still to come
                self._wanted = self._ceiling = self.count
                if not self.count:
                    raise
                return

    def _make_first_slots(self) -> None:
        extents: list[Extent] = []
        try:
            while len(extents) < self.plan.first_slots:
                extents.append(self._take_extent())
        except BaseException as error:
            if not isinstance(error, MemoryLimitError) or len(extents) < _LEAST_SLOTS:
                for extent in extents:
                    self._session.arena.give_back(extent)
                raise
            self._wanted = self._ceiling = len(extents)
        for extent in extents:
            self._add(extent)

    def _take_extent(self) -> Extent:
        return self._session.arena.take(self.plan.slot_bytes, "a batch buffer")

    def _add(self, extent: Extent) -> None:
        number = self._session.take_number()
        self.extents[number] = extent
        owner = self._owner()
        assert owner is not None  # it calls us
        self._session.routing.by_slot[number] = owner
        self._session.send(Control.SLOT_ADD, self._loader, number, extent.offset, extent.nbytes)


def with_chunk(form: BatchForm, max_chunk: int) -> BatchForm:
    """The form with slots for at most `max_chunk` batches."""
    if max_chunk == form.max_chunk:
        return form
    if form.fixed is None:
        return dataclasses.replace(form, max_chunk=max_chunk, slot_bytes=form.slot_bytes // form.max_chunk * max_chunk)
    fixed = FixedLayout(form.fixed.row_shapes, form.fixed.dtypes, form.batch_rows * max_chunk)
    return dataclasses.replace(form, max_chunk=max_chunk, fixed=fixed, slot_bytes=fixed.slot_bytes)


def _page_rounded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
