"""Number of a run's slots that get a batch, and the worker that gets each slot."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loaderpool.memory.layout import FixedLayout
from loaderpool.supervisor import slots
from loaderpool.supervisor.records import Layout, ToWorker
from loaderpool.transport.messages import Filled, Found
from tests.support.state import LOADER, RUN, Endless, Pool, begin, look, release

LARGE = 2 * slots._LARGE_BYTES
TWO_WORKERS = slots.slots_of(LARGE, 1, 2, 2)
SLOW_S = 0.00025  # time for a row: batches take so long that each has its own slot


class Consumer:
    """Takes batches in their order, and keeps the latest `kept`."""

    def __init__(self, pool: Pool, kept: int) -> None:
        self.pool, self.kept = pool, kept
        self.held: list[int] = []
        self.seen = 0

    def take(self) -> None:
        """Take all batches that have arrived."""
        arrived = sorted(self.pool.of(Filled), key=lambda filled: filled.batch)[self.seen :]
        for message in arrived:
            if message.batch != self.seen:
                return
            self.seen += 1
            self.held.append(message.offset)
            if len(self.held) > self.kept:
                release(self.pool.state, RUN, self.held.pop(0))
        self.pool.turn()


def large(workers: int = 2, room: int = 2) -> Pool:
    return Pool(workers).with_a_run(slot_bytes=LARGE, room=room)


def used(pool: Pool) -> int:
    """Number of slots that have had a batch."""
    run = pool.state.runs[RUN]
    return run.slots - len(run.fresh)


def each_answers(pool: Pool, has_waited: bool = True) -> None:
    """Let each worker finish its oldest ticket. The answers arrive one by one."""
    for worker in pool.busy():
        pool.answer(worker, row_s=SLOW_S)
        pool.turn(has_waited)


def test_run_begins_with_one_large_slot_per_worker() -> None:
    pool = large(workers=3)
    assert used(pool) == 3
    assert [len(tickets) for tickets in pool.channels.values()] == [1, 1, 1]


def test_all_workers_get_a_first_ticket_if_one_had_the_first_sample() -> None:
    pool = Pool(3)
    pool.state.load(LOADER, Endless())
    look(pool.state, LOADER)
    pool.turn()
    (probe_owner,) = pool.busy()
    pool.state.found(probe_owner, Found(pool.channels[probe_owner].pop().number, LOADER, b"", 0.0))
    pool.state.lay_out(LOADER, Layout(LARGE, 1, 0), 0.001)
    pool.die(probe_owner + 1)  # its replacement gets tickets after this worker
    pool.turn()
    begin(pool.state, RUN, LOADER, 0)
    pool.state.deal()
    given = [each.worker for each in pool.state.instructions if isinstance(each, ToWorker)]
    assert sorted(given) == sorted(pool.state.workers)


def test_fast_consumer_needs_few_large_slots() -> None:
    pool = large()
    consumer = Consumer(pool, kept=1)
    for _ in range(50):
        for worker in pool.busy():
            pool.answer(worker, row_s=SLOW_S)
            consumer.take()
    assert consumer.seen >= 90
    assert used(pool) <= 4 < TWO_WORKERS


def test_an_idle_worker_waits_for_its_third_slot() -> None:
    pool = large()
    for _ in range(2):
        each_answers(pool, has_waited=False)
    assert used(pool) == 4 and not pool.busy()
    assert pool.state.has_withheld_slot
    pool.turn(has_waited=True)
    assert used(pool) == 6 and len(pool.busy()) == 2
    assert not pool.state.has_withheld_slot


def test_no_worker_waits_if_no_batch_remains() -> None:
    pool = large()
    pool.state.extend(RUN, 4, 0)
    for _ in range(2):
        each_answers(pool, has_waited=False)
    assert used(pool) == 4 and not pool.busy()
    assert not pool.state.has_withheld_slot


def test_a_waiting_worker_gets_a_released_slot() -> None:
    pool = large()
    for _ in range(2):
        each_answers(pool, has_waited=False)
    first = pool.of(Filled)[0].offset
    release(pool.state, RUN, first)
    pool.turn(has_waited=False)
    ((ticket,),) = [pool.channels[worker] for worker in pool.busy()]
    assert ticket.offset == first
    assert used(pool) == 4


@pytest.mark.parametrize("kept", [2, 5, 8])
def test_consumer_that_keeps_batches_gets_more_slots(kept: int) -> None:
    pool = large()
    consumer = Consumer(pool, kept)
    for _ in range(50):
        each_answers(pool)
        consumer.take()
        assert len(pool.busy()) == 2, "a worker is idle, and a slot is unused"
    assert kept + 2 <= used(pool) <= kept + 5


def test_idle_worker_gets_every_slot() -> None:
    pool = large()
    for _ in range(TWO_WORKERS):
        each_answers(pool)
    assert used(pool) == TWO_WORKERS and not pool.busy()
    assert len(pool.of(Filled)) == TWO_WORKERS


def beside_another_run() -> Pool:
    """Return a run of small slots, with tickets at all workers, and a later one of large slots."""
    pool = Pool(2).with_a_run()
    pool.state.load(2, Endless())
    pool.state.lay_out(2, Layout(LARGE, 1, 0), 0.001)
    begin(pool.state, RUN + 1, 2, 0)
    return pool


def pass_time(pool: Pool, steps: int) -> list[Filled]:
    """Let workers answer, and release all small slots, but no large one. Return the large ones."""
    for _ in range(steps):
        for worker in pool.busy():
            pool.answer(worker, row_s=SLOW_S)
            for message in pool.of(Filled):
                if message.run == RUN:
                    release(pool.state, RUN, message.offset)
            pool.turn(has_waited=False)
    return [message for message in pool.of(Filled) if message.run != RUN]


def test_run_gets_large_slots_while_another_one_keeps_all_workers_busy() -> None:
    pool = beside_another_run()
    assert len(pass_time(pool, 20)) == 4


def test_wait_for_a_slot_goes_on_while_no_worker_has_room() -> None:
    pool = beside_another_run()
    pass_time(pool, 20)
    assert pool.state.has_withheld_slot and not pool.state.roomy
    pool.turn(has_waited=False)
    assert pool.state.has_withheld_slot
    pool.answer(pool.busy()[0], row_s=SLOW_S)
    pool.turn(has_waited=True)
    assert len(pass_time(pool, 5)) == 5


def test_small_slots_are_used_at_once() -> None:
    pool = Pool(2).with_a_run()
    assert [len(tickets) for tickets in pool.channels.values()] == [2, 2]


def test_workers_with_threads_use_slots_at_once() -> None:
    pool = large(room=5)
    assert [len(tickets) for tickets in pool.channels.values()] == [5, 5]


def test_only_the_first_ticket_of_a_slot_is_fresh() -> None:
    pool = large()
    consumer = Consumer(pool, kept=1)
    fresh: dict[int, list[bool]] = {}
    for _ in range(20):
        for worker in pool.busy():
            ticket = pool.answer(worker, row_s=SLOW_S)
            fresh.setdefault(ticket.offset, []).append(ticket.is_fresh)
            consumer.take()
    assert all(each[0] and not any(each[1:]) for each in fresh.values())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_worker_writes_its_own_slots_again(is_reversed: bool) -> None:
    pool = large()
    first, second = pool.busy()
    mine = pool.answer(first, row_s=SLOW_S).offset
    others = pool.answer(second, row_s=SLOW_S).offset
    # Otherwise the slot that was released last is used first.
    for offset in (others, mine) if is_reversed else (mine, others):
        release(pool.state, RUN, offset)
    pool.turn()
    assert pool.channels[first][0].offset == mine
    assert pool.channels[second][0].offset == others


def test_ended_run_gives_back_slots_without_a_batch() -> None:
    pool = large()
    free = pool.state.slots._memory.largest + TWO_WORKERS * LARGE
    for worker in pool.busy():
        pool.answer(worker, row_s=SLOW_S)
    pool.state.end(RUN, ())
    pool.turn()
    assert RUN not in pool.state.runs
    assert pool.state.slots._memory.largest == free
    assert pool.state.slots.kept_bytes == 2 * LARGE


# ---- batches whose rows vary


@dataclasses.dataclass
class Varying(Endless):
    """Plan of batches of 1 to 9 rows, 5 on average, except batch 11, which has 90."""

    batch_size: int = 90
    usual_rows: int = 5

    def batch_rows(self, number: int, count: int) -> tuple[int, ...]:
        return tuple(90 if each == 11 else 1 + each % 9 for each in range(number, number + count))

    def total_rows(self, number: int, count: int) -> int:
        return sum(self.batch_rows(number, count))


def with_varying_rows(row_bytes: int, limit_bytes: int = 1 << 30) -> Pool:
    pool = Pool(2)
    pool.state.load(LOADER, Varying())
    rows = FixedLayout(((row_bytes,),), (np.dtype(np.uint8),), None)
    layout = Layout(4096, 1, 1, limit_bytes, rows=rows)
    pool.state.lay_out(LOADER, layout, 1e-7)
    begin(pool.state, RUN, LOADER, 0, 200)
    pool.turn()
    return pool


@pytest.mark.parametrize("row_bytes", [8, 1 << 12, 1 << 16, 1 << 20])
def test_tickets_have_no_more_rows_than_a_slot(row_bytes: int) -> None:
    pool = with_varying_rows(row_bytes)
    room = pool.state.runs[RUN].layout.slot_bytes
    assert 20 * row_bytes <= room <= max(21 * row_bytes, 1 << 21)
    plan, seen, most = Varying(), 0, 0
    while busy := pool.busy():
        for worker in busy:
            pool.answer(worker, row_s=1e-7)
        for filled in pool.of(Filled)[seen:]:
            rows = plan.batch_rows(filled.batch, filled.batches)
            assert (filled.rows, filled.batch_rows) == (sum(rows), rows * (len({*rows}) > 1))
            assert len(rows) == 1 or filled.rows * row_bytes <= room
            most = max(most, filled.batches)
            seen += 1
            release(pool.state, RUN, filled.offset)
        pool.turn()
    assert sum(filled.batches for filled in pool.of(Filled)) == 200
    assert (most > 1) == (row_bytes < 1 << 20)


def test_slots_of_large_batches_stay_within_the_limit() -> None:
    pool = with_varying_rows(1 << 20, limit_bytes=16 << 20)
    run = pool.state.runs[RUN]
    assert run.slots == 2
    assert 5 << 20 <= run.layout.slot_bytes <= 8 << 20
