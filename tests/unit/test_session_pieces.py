"""What the trainer's side is made of, piece by piece and without processes: pipe, leases, board, ring, passes."""

from __future__ import annotations

import collections
import fcntl
import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.config import MAX_WORKERS
from loaderpool.element.spec import sample_spec
from loaderpool.errors import ClosedError, LoaderpoolError, MemoryLimitError, SampleError
from loaderpool.memory.arena import Arena, map_whole_file
from loaderpool.memory.batch_form import BatchForm, batch_form
from loaderpool.memory.board import BOARD_BYTES, RUN_MARKS, Board, Field
from loaderpool.memory.extents import PAGE_BYTES
from loaderpool.plan.order import Plan
from loaderpool.system import capacity, machine
from loaderpool.trainer.engine.ring import Ring, plan_ring
from loaderpool.trainer.engine.spec_choice import spec_of_whole_batches
from loaderpool.trainer.epochs.epoch_pass import Pass
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import IterationLog
from loaderpool.trainer.session.lease import Lender, ReturnPipe
from loaderpool.trainer.session.routing import Routing
from loaderpool.transport.messages import MESSAGE_BYTES, Control, pack, unpack_all


class Pipe:
    """A ReturnPipe and its other end."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.room = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PAGE_BYTES) // MESSAGE_BYTES
        self.pipe = ReturnPipe(write_end)

    def read(self) -> list[tuple[int, ...]]:
        """The messages that are in it."""
        try:
            return [tuple(words) for words in unpack_all(os.read(self._read_end, 1 << 20))]
        except BlockingIOError:
            return []

    def numbers(self) -> list[int]:
        return [words[1] for words in self.read()]

    def close(self) -> None:
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1


@pytest.fixture
def ends() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


# ---- the return pipe ----


def test_messages_arrive_in_their_order(ends: Pipe) -> None:
    for number in range(10):
        ends.pipe.order(pack(Control.RELEASE, number))
    assert ends.numbers() == list(range(10))
    assert not ends.pipe.has_unsent


def test_a_full_pipe_blocks_nobody_and_keeps_the_order_of_orders(ends: Pipe) -> None:
    count = 3 * ends.room
    for number in range(count):
        ends.pipe.order(pack(Control.RESIZE, number))
    assert ends.pipe.has_unsent and not ends.pipe.flush()
    seen = ends.numbers()
    ends.pipe.order(pack(Control.RESIZE, count))  # behind what waits, though there is room now
    while ends.pipe.has_unsent:
        ends.pipe.flush()
        seen += ends.numbers()
    assert seen + ends.numbers() == list(range(count + 1))


def test_releases_into_a_full_pipe_are_not_lost(ends: Pipe) -> None:
    count = 2 * ends.room + 5
    for number in range(count):
        ends.pipe.release(pack(Control.RELEASE, number))
    seen = ends.numbers()
    while not ends.pipe.flush():
        seen += ends.numbers()
    assert sorted(seen + ends.numbers()) == list(range(count))


def test_a_pipe_that_nobody_reads_any_more_takes_everything_in_silence(ends: Pipe) -> None:
    ends.close()
    for _ in range(3):
        ends.pipe.release(pack(Control.RELEASE, 1))
        ends.pipe.order(pack(Control.RELEASE, 2))
    assert not ends.pipe.has_unsent


def test_a_dropped_pipe_closes_its_descriptor_and_nobody_elses() -> None:
    read_end, write_end = os.pipe()
    pipe = ReturnPipe(write_end)
    release = pipe.release  # as a lease holds it
    del pipe
    release(pack(Control.RELEASE, 1))
    assert len(os.read(read_end, 100)) == MESSAGE_BYTES
    del release
    gc.collect()
    assert os.read(read_end, 100) == b""  # end of file: it was the last
    os.close(read_end)


# ---- leases ----


class ReorderBuffer:
    """An arena with a lender."""

    def __init__(self, ends: Pipe) -> None:
        self.arena = Arena.create()
        self.lender = Lender(self.arena, ends.pipe)
        self.ends = ends
        self.by_run: dict[int, None] = {}

    def lend(self, slot: int, nbytes: int = 1000) -> Any:
        extent = self.arena.take(nbytes, "a test")
        return self.lender.lend(slot, 1, extent.offset, extent.nbytes, self.by_run)


@pytest.fixture
def shelf(ends: Pipe) -> Iterator[ReorderBuffer]:
    shelf = ReorderBuffer(ends)
    yield shelf
    shelf.arena.close_descriptor()


def test_a_slot_returns_with_the_last_view_of_its_anchor(shelf: ReorderBuffer) -> None:
    anchor = shelf.lend(7)
    array = np.ndarray((10, 5), np.float32, anchor, 128)
    part = array[2:5, ::2].T
    del anchor, array
    assert shelf.ends.read() == [] and set(shelf.lender.lent) == {7} == set(shelf.by_run)
    part[...] = 3  # still there to be written
    del part
    assert shelf.ends.numbers() == [7]
    assert not shelf.lender.lent and not shelf.by_run


def test_a_cast_view_and_a_memoryview_keep_the_slot(shelf: ReorderBuffer) -> None:
    anchor = shelf.lend(3)
    kept: Any = memoryview(anchor.view(np.int16)[4:9])
    del anchor
    assert shelf.ends.read() == []
    del kept
    assert shelf.ends.numbers() == [3]


def test_a_return_that_ctrl_c_breaks_off_is_made_good(shelf: ReorderBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run under nohup
    anchor = shelf.lend(7)

    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(shelf.ends.pipe, "release", interrupt)
        del anchor
    assert shelf.ends.read() == []
    with pytest.raises(KeyboardInterrupt):  # it was not lost either, but is sent again in a moment
        time.sleep(10)
    signal.signal(signal.SIGINT, before)
    shelf.lender.settle()
    assert shelf.ends.numbers() == [7]
    assert not shelf.lender.lent and not shelf.lender.returned


def test_a_pipe_that_is_renewed_keeps_its_number(ends: Pipe) -> None:
    number = ends.pipe.fileno()
    read_end, write_end = os.pipe()
    ends.pipe.renew(write_end)
    assert ends.pipe.fileno() == number
    ends.pipe.release(pack(Control.RELEASE, 5))
    assert ends.read() == []
    assert len(os.read(read_end, 100)) == MESSAGE_BYTES
    os.close(read_end)


def test_leases_in_a_cycle_return_when_it_is_collected(shelf: ReorderBuffer) -> None:
    cycle: list[Any] = [shelf.lend(1), shelf.lend(2)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert sorted(shelf.ends.numbers()) == [1, 2]


def test_who_wants_to_know_is_told_of_each_return(shelf: ReorderBuffer) -> None:
    told: list[int] = []
    shelf.lender.on_return.append(told.append)
    anchors = [shelf.lend(slot) for slot in (4, 5)]
    del anchors[0]
    assert told == [4]
    anchors.clear()
    assert told == [4, 5]


def test_arrays_live_on_without_their_arenas_descriptor(shelf: ReorderBuffer) -> None:
    anchor = shelf.lend(1)
    anchor[...] = 9
    shelf.arena.close_descriptor()
    shelf.arena.close_descriptor()
    assert (anchor == 9).all()


def test_a_returned_extent_reads_as_zeros_when_it_is_taken_again(shelf: ReorderBuffer) -> None:
    extent = shelf.arena.take(3 * PAGE_BYTES, "a test")
    shelf.arena.anchor(extent.offset, extent.nbytes)[...] = 255
    shelf.arena.give_back(extent)
    again = shelf.arena.take(3 * PAGE_BYTES, "a test")
    assert again == extent and not shelf.arena.anchor(again.offset, again.nbytes).any()


def test_more_than_the_machine_has_is_refused_before_it_is_taken(shelf: ReorderBuffer) -> None:
    before = shelf.arena.extents.taken_bytes
    with pytest.raises(MemoryLimitError, match=r"a whale needs .* has only"):
        shelf.arena.take(capacity.available_memory_bytes() + (1 << 30), "a whale")
    assert shelf.arena.extents.taken_bytes == before


def test_a_mapped_memory_file_outlives_its_descriptor() -> None:
    descriptor = machine.create_memory_file("test")
    os.write(descriptor, bytes(range(100)))
    mapped = map_whole_file(descriptor, 100)
    os.close(descriptor)
    view = np.ndarray((50,), np.uint8, mapped, 50)
    del mapped
    gc.collect()
    assert view.tolist() == list(range(50, 100))


# ---- the board ----


def test_cells_and_marks_lie_apart(shelf: ReorderBuffer) -> None:
    board = shelf.arena.board
    assert len(board.words) * 8 == BOARD_BYTES
    cells = {Board.base(cell) + field for cell in range(MAX_WORKERS) for field in Field}
    marks = {Board.mark(run) for run in range(RUN_MARKS)}
    assert len(cells) == MAX_WORKERS * len(Field) and len(marks) == RUN_MARKS
    assert not cells & marks and max(cells | marks) < len(board.words)


def test_a_mark_means_one_run_only_though_others_share_it(shelf: ReorderBuffer) -> None:
    board = shelf.arena.board
    board.abandon(5)
    assert board.is_abandoned(5) and not board.is_abandoned(5 + RUN_MARKS)
    board.abandon(5 + RUN_MARKS)
    assert board.is_abandoned(5 + RUN_MARKS) and not board.is_abandoned(5)


def test_clearing_a_cell_leaves_its_neighbours(shelf: ReorderBuffer) -> None:
    board = shelf.arena.board
    for cell in (0, 1, 2):
        for field in Field:
            board.write(cell, field, cell + 1)
    board.clear(1)
    assert [{board.read(cell, field) for field in Field} for cell in (0, 1, 2)] == [{1}, {0}, {3}]


# ---- the ring ----


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
        plan = plan_ring(form, workers=workers, memory_limit=limit)
    except MemoryLimitError as error:
        least = int(str(error).rpartition("memory_limit=")[2].split()[0])
        assert limit is None or least > limit
        plan = plan_ring(form, workers=workers, memory_limit=least)
        assert plan.most_slots * plan.slot_bytes <= least
        return
    assert 2 <= plan.first_slots <= plan.most_slots
    assert plan.slot_bytes >= plan.form.slot_bytes
    assert plan.most_slots * plan.slot_bytes <= plan.limit_bytes
    assert limit is None or plan.limit_bytes == limit


class FakeSession:
    """As much of a Session as a ring needs."""

    def __init__(self, ends: Pipe) -> None:
        self.workers_wanted = 2
        self.arena = Arena.create()
        self.pipe = ends.pipe
        self.routing = Routing()
        self.todo: collections.deque[Any] = collections.deque()
        self.orders: list[tuple[Any, ...]] = []
        self.is_closed = False
        self._numbers = 0

    def take_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def order(self, kind: Control, *words: int) -> None:
        self.orders.append((kind, *words))


class Owner:
    """A ring's; nothing is asked of it here."""


class RingBench:
    def __init__(self, ends: Pipe, limit: int, row_bytes: int = 4 * PAGE_BYTES) -> None:
        self.session: Any = FakeSession(ends)
        self.limit = limit
        plan = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=limit)
        self.owner: Any = Owner()
        self.ring = Ring(self.session, self.owner, 1, plan)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.ring.extents.values())

    def retiring(self) -> list[int]:
        return [words[1] for words in self.session.orders if words[0] == Control.SLOT_RETIRE]

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
    plan = plan_ring(form_of(4 * PAGE_BYTES, 1), workers=2, memory_limit=1 << 22)
    with pytest.raises(MemoryLimitError, match="the machine is full"):
        Ring(session, Owner(), 1, plan)  # type: ignore[arg-type]
    assert session.arena.extents.taken_bytes == 0 and not session.routing.by_slot and not session.orders
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


def test_an_unloaded_ring_gives_back_each_slot_as_soon_as_nobody_looks_at_it(ring_bench: RingBench) -> None:
    ring, extents = ring_bench.ring, ring_bench.session.arena.extents
    kept = ring_bench.lend(min(ring.extents))
    ring.give_back_all()
    assert extents.taken_bytes == ring.slot_bytes and len(ring.extents) == 1
    del kept
    while ring_bench.session.todo:
        ring_bench.session.todo.popleft()()
    assert extents.taken_bytes == 0 and not ring.extents


# ---- passes ----


class FakeDelivery:
    count, rows, nbytes = 1, 2, 16
    row_failures = ()


class FakeRun:
    def __init__(self, engine: FakeEngine, first_epoch: int, limit: int) -> None:
        self.engine, self.first_epoch, self.limit = engine, first_epoch, limit
        self.taken = self.wait_ns = 0
        self.is_over = self.is_at_end = False

    def take(self) -> Any:
        if self.engine.error is not None:
            raise self.engine.error
        assert self.taken < self.limit and not self.is_over
        self.taken += 1
        return FakeDelivery()

    def extend(self, limit: int) -> None:
        self.limit = limit

    def end(self) -> None:
        self.is_over = True


class FakeForm:
    max_chunk = 1


class FakeEngine:
    """Delivers 3 batches an epoch at once."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []
        self.error: BaseException | None = None

    def form(self) -> Any:
        return FakeForm()

    def read_ahead(self, is_sure: bool) -> int:
        return 0

    def begin(self, first_epoch: int, limit: int, plan: Plan, taken: Any, lanes: Any) -> Any:
        self.runs.append(FakeRun(self, first_epoch, limit))
        return self.runs[-1]

    def close(self) -> None: ...


@pytest.fixture
def passes() -> tuple[FakeEngine, EpochTracker]:
    engine = FakeEngine()
    config = lp.Loader(range(6), batch_size=2, workers=0).config
    return engine, EpochTracker(lambda: engine, config, Plan(6, 2), None)


def finish(one_pass: Pass) -> int:
    """How many deliveries were left in it."""
    count = 0
    while True:
        try:
            one_pass.next_delivery()
        except StopIteration:
            return count
        count += 1


def test_passes_one_after_the_other_go_on_with_one_run(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    for epoch in range(4):
        one_pass = Pass(book, IterationLog())
        assert finish(one_pass) == 3 and one_pass.epoch == epoch
        assert finish(one_pass) == 0
    assert len(engine.runs) == 1 and engine.runs[0].taken == 12 and book.counters.passes == 4


def test_a_pass_that_was_left_early_counts_and_its_run_ends(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    left = Pass(book, IterationLog())
    left.next_delivery()
    left.close()
    left.close()
    assert engine.runs[0].is_over and book.epoch == 1
    again = Pass(book, IterationLog())
    assert finish(again) == 3 and again.epoch == 1 and len(engine.runs) == 2


def test_passes_side_by_side_have_numbers_and_runs_of_their_own(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    both = Pass(book, IterationLog()), Pass(book, IterationLog())
    for one_pass in (*both, *both):
        one_pass.next_delivery()
    assert [one_pass.epoch for one_pass in both] == [0, 1] and len(engine.runs) == 2
    assert [finish(one_pass) for one_pass in both] == [1, 1]
    # Of the two only the one that stands before the next epoch is kept for it.
    assert [run.is_over for run in engine.runs] == [True, False]
    after = Pass(book, IterationLog())
    assert finish(after) == 3 and after.epoch == 2 and len(engine.runs) == 2


def test_a_pass_that_delivered_nothing_does_not_count(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    unread = Pass(book, IterationLog())
    unread.close()
    assert (unread.epoch, book.epoch) == (-1, 0)
    engine.error = SampleError("first batch")
    failed = Pass(book, IterationLog())
    with pytest.raises(SampleError):
        failed.next_delivery()
    with pytest.raises(StopIteration):
        failed.next_delivery()
    assert book.epoch == 0 and book.counters.passes == 0
    assert isinstance(book.last_error, SampleError) and engine.runs[0].is_over
    engine.error = None
    after = Pass(book, IterationLog())
    assert finish(after) == 3 and after.epoch == 0


def test_a_pass_that_could_not_begin_does_not_count(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes

    def refuse(*_: int) -> None:
        raise MemoryLimitError("no slot")

    with monkeypatch.context() as refusing:
        refusing.setattr(engine, "begin", refuse)
        with pytest.raises(MemoryLimitError):
            Pass(book, IterationLog()).next_delivery()
    assert book.epoch == 0
    book.looks_ahead = False  # so that the run is asked for more when a pass takes it
    finish(Pass(book, IterationLog()))
    with monkeypatch.context() as refusing:
        refusing.setattr(engine.runs[0], "extend", refuse)
        with pytest.raises(MemoryLimitError):
            Pass(book, IterationLog()).next_delivery()
    assert book.epoch == 1 and engine.runs[0].is_over
    after = Pass(book, IterationLog())
    assert finish(after) == 3 and after.epoch == 1


def test_what_may_be_made_ahead_is_said_with_the_second_and_the_last_delivery(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes
    monkeypatch.setattr(engine, "read_ahead", lambda is_sure: 2)
    one_pass = Pass(book, IterationLog(), is_followed=True)
    one_pass.next_delivery()
    one_pass.next_delivery()
    assert engine.runs[0].limit == 3 + 2
    one_pass.next_delivery()
    assert engine.runs[0].limit == 6
    one_pass.close()  # nothing of its epoch is left to lose
    assert not engine.runs[0].is_over
    after = Pass(book, IterationLog())  # it has followed on another one, so one may follow on it
    after.next_delivery()
    assert engine.runs[0].limit == 6  # no word to the engine in the gap between the epochs
    after.next_delivery()
    assert engine.runs[0].limit == 6 + 2
    assert finish(after) == 1 and after.epoch == 1 and len(engine.runs) == 1
    assert engine.runs[0].limit == 9
    book.looks_ahead = False
    assert finish(Pass(book, IterationLog())) == 3
    assert engine.runs[0].limit == 9
    assert finish(Pass(book, IterationLog())) == 3
    assert engine.runs[0].limit == 12


def test_of_a_pass_that_may_be_the_only_one_a_part_is_made_ahead(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes
    asked: list[bool] = []

    def read_ahead(is_sure: bool) -> int:
        asked.append(is_sure)
        return 2

    monkeypatch.setattr(engine, "read_ahead", read_ahead)
    left = Pass(book, IterationLog())
    left.next_delivery()
    left.close()
    only = Pass(book, IterationLog())  # behind one that was left, which says nothing
    assert finish(only) == 3 and engine.runs[1].limit == 3 + 1
    assert asked == [False] * 3
    second = Pass(book, IterationLog())
    second.next_delivery()
    assert engine.runs[1].limit == 3 + 1  # no word in this gap either, for its first batch is made already
    second.next_delivery()
    assert engine.runs[1].limit == 6 + 2
    assert finish(second) == 1 and engine.runs[1].limit == 9
    last = Pass(book, IterationLog(), is_followed=False)
    assert finish(last) == 3 and engine.runs[1].limit == 9
    assert asked[3:] == [True]
    assert finish(Pass(book, IterationLog())) == 3 and engine.runs[1].limit == 15
    assert len(engine.runs) == 2


def test_a_loader_closed_before_its_run_is_parked_keeps_the_last_delivery(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes
    one_pass = Pass(book, IterationLog(), is_followed=True)
    one_pass.next_delivery()

    def closed(*_: int) -> None:
        raise ClosedError("this Loader is closed")

    one_pass.next_delivery()
    monkeypatch.setattr(engine.runs[0], "extend", closed)
    assert finish(one_pass) == 1 and engine.runs[0].is_over


def test_a_run_that_stops_before_its_epoch_is_over_is_an_error_and_no_short_epoch(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, book = passes
    one_pass = Pass(book, IterationLog())
    one_pass.next_delivery()

    def stop(self: FakeRun) -> None:
        raise StopIteration

    monkeypatch.setattr(FakeRun, "take", stop)
    with pytest.raises(LoaderpoolError, match="epoch 0 ended after 1 of 3 batches"):
        one_pass.next_delivery()


def test_a_pass_closed_while_it_waits_just_ends(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, book = passes
    one_pass = Pass(book, IterationLog())

    def closed_meanwhile(self: FakeRun) -> None:
        one_pass.close()
        raise StopIteration

    monkeypatch.setattr(FakeRun, "take", closed_meanwhile)
    with pytest.raises(StopIteration):
        one_pass.next_delivery()
    assert book.last_error is None


def test_an_epoch_that_is_set_does_not_go_on_with_another_ones_run(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    finish(Pass(book, IterationLog()))
    book.set_epoch(5)
    one_pass = Pass(book, IterationLog())
    assert finish(one_pass) == 3 and one_pass.epoch == 5 and book.epoch == 6
    assert [run.is_over for run in engine.runs] == [True, False]
    assert engine.runs[1].first_epoch == 5


def test_the_parked_run_ends_with_the_loader(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    finish(Pass(book, IterationLog()))
    assert not engine.runs[0].is_over
    book.drop_parked()
    book.drop_parked()
    assert engine.runs[0].is_over


@pytest.mark.parametrize("row_bytes", [1000, 3 << 20])
def test_a_ring_has_slots_for_the_tickets_of_workers_with_threads(row_bytes: int) -> None:
    plan = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=4 << 30, tickets_per_worker=33)
    assert plan.first_slots >= 66
    assert plan.most_slots >= 66 + 2
    tight = plan_ring(form_of(row_bytes, 1), workers=2, memory_limit=10 * row_bytes, tickets_per_worker=33)
    assert 2 <= tight.most_slots <= 10
