"""A ring is as large as workers and limit say, grows and shrinks within the limit, and gives every slot back."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.element.spec import sample_spec
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.memory.batch_form import BatchForm, batch_form
from loaderpool.memory.extents import PAGE_BYTES
from loaderpool.supervisor.scheduler import travelling
from loaderpool.trainer.engine.form_choice import spec_of_whole_batches
from loaderpool.trainer.engine.ring import Ring, plan_ring
from loaderpool.trainer.session.routing import Routing
from loaderpool.transport.messages import Control
from tests.support.return_pipe import Pipe


def form_of(row_bytes: int, batch_size: int) -> BatchForm:
    spec = spec_of_whole_batches(sample_spec(np.zeros((1, row_bytes), np.uint8)))  # of a batch of any rows
    return batch_form(
        spec,
        "sample",
        batch_size=batch_size,
        batch_bytes_seen=row_bytes * batch_size,
        may_leave_rows_out=False,
        may_replace_rows=False,
    )


@given(st.integers(0, 1 << 22), st.integers(1, 64), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 1 << 30)))
def test_a_planned_ring_fits_its_limit_or_names_the_least(
    row_bytes: int, batch_size: int, workers: int, limit: int | None
) -> None:
    form = form_of(row_bytes, batch_size)
    try:
        chunked, plan = plan_ring(form, workers=workers, memory_limit=limit)
    except MemoryLimitError as error:
        least = int(str(error).rpartition("memory=")[2].partition(")")[0])
        assert limit is None or least > limit
        _, plan = plan_ring(form, workers=workers, memory_limit=least)
        assert plan.most_slots * plan.slot_bytes <= least
        return
    assert 2 <= plan.first_slots <= plan.most_slots
    assert plan.slot_bytes >= chunked.slot_bytes
    assert plan.most_slots * plan.slot_bytes <= plan.limit_bytes
    assert limit is None or plan.limit_bytes == limit


class FakeSession:
    """As much of a Session as a ring needs."""

    def __init__(self, ends: Pipe) -> None:
        self.workers_wanted, self.hosts = 2, 0
        self.arena = Arena.create()
        self.pipe = ends.pipe
        self.routing = Routing()
        self.todo: collections.deque[Any] = collections.deque()
        self.sent: list[tuple[Any, ...]] = []
        self.is_closed = False
        self._numbers = 0

    def take_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def send(self, kind: Control, *words: int) -> None:
        self.sent.append((kind, *words))


class Owner:
    """A ring's; nothing is asked of it here."""


class RingBench:
    def __init__(self, ends: Pipe, limit: int, row_bytes: int = 4 * PAGE_BYTES) -> None:
        self.session: Any = FakeSession(ends)
        self.limit = limit
        _, plan = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=limit)
        self.owner: Any = Owner()
        self.ring = Ring(self.session, self.owner, 1, plan)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.ring.extents.values())

    def retiring(self) -> list[int]:
        return [words[1] for words in self.session.sent if words[0] == Control.SLOT_RETIRE]

    def lend(self, slot: int) -> Any:
        extent = self.ring.extents[slot]
        return self.ring.lender.lend(slot, 1, extent.offset, extent.nbytes, {})

    def close(self) -> None:
        self.session.arena.close_descriptor()


@pytest.fixture
def ring_bench(ends: Pipe) -> Iterator[RingBench]:
    bench = RingBench(ends, limit=10 * 64 * 4 * PAGE_BYTES)
    yield bench
    bench.close()


def test_a_ring_grows_only_as_far_as_the_limit_reaches(ring_bench: RingBench) -> None:
    ring = ring_bench.ring
    ring.make_room(1000, runs=100)
    assert ring_bench.nbytes <= ring_bench.limit < ring_bench.nbytes + ring.slot_bytes
    assert not ring.grow_by_one(runs=100) and ring.make_room(1, runs=100) == 0


def test_what_was_made_for_another_run_is_not_made_again_and_again(ends: Pipe) -> None:
    bench = RingBench(ends, limit=100 * 64 * 4 * PAGE_BYTES)
    ring = bench.ring
    first = ring.count
    assert ring.make_room(1000, runs=2) == first  # as many again
    assert ring.make_room(1000, runs=2) == 0 and ring.count == 2 * first
    assert not ring.grow_by_one(runs=1)
    bench.close()


def test_a_ring_has_fewer_slots_where_the_machine_has_no_room_for_more(
    ends: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_out_after(monkeypatch, 5)
    bench = RingBench(ends, limit=10 * 64 * 4 * PAGE_BYTES)
    assert bench.ring.count == bench.ring.prospect == 5 and not bench.ring.grow_by_one(runs=1)
    bench.close()


def test_a_ring_that_the_machine_has_no_room_for_leaves_nothing_behind(
    ends: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = FakeSession(ends)
    give_out_after(monkeypatch, 1)
    _, plan = plan_ring(form_of(4 * PAGE_BYTES, 1), workers=2, memory_limit=1 << 22)
    with pytest.raises(MemoryLimitError, match="the machine is full"):
        Ring(session, Owner(), 1, plan)  # type: ignore[arg-type]
    assert session.arena.extents.taken_bytes == 0 and not session.routing.by_slot and not session.sent
    session.arena.close_descriptor()


def give_out_after(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Arenas have room for so many slots."""
    take, taken = Arena.take, itertools.count()

    def few(self: Arena, nbytes: int, purpose: str) -> Any:
        if next(taken) >= slots:
            raise MemoryLimitError("the machine is full")
        return take(self, nbytes, purpose)

    monkeypatch.setattr(Arena, "take", few)


def test_larger_slots_that_find_no_room_are_tried_again_when_the_old_ones_are_back(
    ring_bench: RingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, old = ring_bench.ring, sorted(ring_bench.ring.extents)
    with monkeypatch.context() as full:
        give_out_after(full, 0)
        assert ring.outgrown(ring.slot_bytes, runs=1)
        for slot in old[:-1]:
            ring.retired(slot)
        assert ring.count == 0 and ring.prospect >= 2
    ring.retired(old[-1])
    assert ring.count >= 2


def test_a_ring_for_which_no_slot_can_be_made_any_more_says_so(
    ring_bench: RingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, old = ring_bench.ring, sorted(ring_bench.ring.extents)
    give_out_after(monkeypatch, 0)
    assert ring.outgrown(ring.slot_bytes, runs=1)
    for slot in old[:-1]:
        ring.retired(slot)
    with pytest.raises(MemoryLimitError, match="the machine is full"):
        ring.retired(old[-1])


def test_a_ring_is_planned_again_for_more_workers(ends: Pipe) -> None:
    bench = RingBench(ends, limit=100 * 64 * 4 * PAGE_BYTES)
    ring, session = bench.ring, bench.session
    before = ring.count
    session.workers_wanted = 20
    assert not ring.fits_workers
    ring.fit_to_workers()
    assert ring.fits_workers and ring.count > before and ring.count >= 40
    assert bench.nbytes <= bench.limit
    more = ring.count
    session.workers_wanted = 1
    ring.fit_to_workers()
    assert ring.count == more  # what is there stays
    bench.close()


def test_a_ring_has_slots_for_what_travels_to_hosts_and_from_them(ends: Pipe) -> None:
    bench = RingBench(ends, limit=1000 * 64 * 4 * PAGE_BYTES)
    ring, session = bench.ring, bench.session
    session.workers_wanted = 4
    ring.fit_to_workers()
    before = ring.count
    session.workers_wanted, session.hosts = 4 * 3, 3
    ring.fit_to_workers()
    assert ring.count >= before + travelling(3, ring.slot_bytes)
    assert bench.nbytes <= bench.limit
    bench.close()


def test_outgrown_slots_are_replaced_as_they_come_back_within_the_limit(ring_bench: RingBench) -> None:
    ring = ring_bench.ring
    old, old_bytes = sorted(ring.extents), ring.slot_bytes
    assert ring.outgrown(old_bytes, runs=1)
    assert ring.slot_bytes == 2 * old_bytes
    assert sorted(ring_bench.retiring()) == old
    for slot in old:
        assert ring_bench.nbytes <= ring_bench.limit
        ring.retired(slot)
    assert ring.count >= 2 and {extent.nbytes for extent in ring.extents.values()} == {2 * old_bytes}
    assert ring_bench.nbytes <= ring_bench.limit


def test_outgrown_slots_that_the_consumer_keeps_do_not_hold_up_new_ones(ring_bench: RingBench) -> None:
    ring = ring_bench.ring
    old = sorted(ring.extents)
    kept = [ring_bench.lend(slot) for slot in old[:-1]]
    assert ring.outgrown(ring.slot_bytes, runs=1)
    ring.retired(old[-1])
    assert ring.count >= 2
    assert ring.lent_count(but=()) == 0
    del kept


def test_a_batch_too_large_for_any_ring_leaves_the_slots_as_they_are(ring_bench: RingBench) -> None:
    ring, before = ring_bench.ring, dict(ring_bench.ring.extents)
    assert not ring.outgrown(ring_bench.limit, runs=1)
    assert ring.extents == before and ring_bench.retiring() == []


def test_what_is_lent_is_not_counted_as_free(ring_bench: RingBench) -> None:
    ring = ring_bench.ring
    slots = sorted(ring.extents)
    kept = {slot: ring_bench.lend(slot) for slot in slots[:3]}
    assert ring.lent_count(but=()) == 3
    assert ring.lent_count(but={slots[0]}) == 2
    kept.clear()
    assert ring.lent_count(but=()) == 0


def test_a_slot_that_a_finalizer_returns_while_lent_ones_are_counted_disturbs_nothing(ring_bench: RingBench) -> None:
    ring = ring_bench.ring
    kept = {slot: ring_bench.lend(slot) for slot in sorted(ring.extents)[:3]}

    class Returning:
        """Counts none, and has the finalizers run in the middle of the count."""

        def __contains__(self, slot: object) -> bool:
            kept.clear()
            return False

    assert ring.lent_count(but=Returning()) == 1  # the first was there when it was looked at
    assert not kept and ring.lent_count(but=()) == 0


def test_an_unloaded_ring_gives_back_each_slot_as_soon_as_nobody_looks_at_it(ring_bench: RingBench) -> None:
    ring, extents = ring_bench.ring, ring_bench.session.arena.extents
    kept = ring_bench.lend(min(ring.extents))
    ring.give_back_all()
    assert extents.taken_bytes == ring.slot_bytes and len(ring.extents) == 1
    del kept
    while ring_bench.session.todo:
        ring_bench.session.todo.popleft()()
    assert extents.taken_bytes == 0 and not ring.extents


@pytest.mark.parametrize("row_bytes", [1000, 3 << 20])
def test_a_ring_has_slots_for_the_tickets_of_workers_with_threads(row_bytes: int) -> None:
    _, plan = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=4 << 30, tickets_per_worker=33)
    assert plan.first_slots >= 66
    assert plan.most_slots >= 66 + 2
    _, tight = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=10 * row_bytes, tickets_per_worker=33)
    assert 2 <= tight.most_slots <= 10
