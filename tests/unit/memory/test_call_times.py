"""Durations of calls, as workers count them and other processes read them."""

from __future__ import annotations

import pytest

from loaderpool.memory.board import BOARD_BYTES
from loaderpool.memory.call_times import (
    BUCKETS,
    CALL_TIMES_BYTES,
    SLOWEST,
    CallClock,
    CallTimes,
    SlowItem,
    read_call_times,
)
from loaderpool.memory.recorder import WorkerRecorder, worker_rings
from loaderpool.transport.messages import Ticket
from loaderpool.worker import tickets


@pytest.fixture
def numbers() -> memoryview:
    return memoryview(bytearray(CALL_TIMES_BYTES)).cast("Q")


def clock_of(numbers: memoryview, worker_cell: int, loader: int) -> CallClock:
    return CallClock(
        numbers, worker_cell, loader, WorkerRecorder(bytearray(worker_rings(0, 1 << 30).step), 0, 0)
    )


def call(clock: CallClock, lengths: dict[int, int], epoch: int = 0, ends: bool = True) -> None:
    """Note a ticket whose samples take these times in ns, by index, as `Progress` does."""
    board = memoryview(bytearray(BOARD_BYTES)).cast("Q")
    now_ns = [1_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets.clock, "monotonic_ns", lambda: now_ns[0])
        noted = tickets.Progress(board, 0, 0, Exception, clock)
        noted.begin_ticket(1_000, Ticket(run=1, epoch=epoch), are_told=False)
        for index, ns in lengths.items():
            noted.note(index)
            now_ns[0] += ns
        if ends:
            noted.end_ticket(now_ns[0])


def test_each_call_ends_where_the_next_one_begins(numbers: memoryview) -> None:
    call(clock_of(numbers, 3, 7), {5: 100, 6: 1_000, 9: 10})
    found = read_call_times(numbers, [3], 7)
    assert (found.calls, found.sum_ns) == (3, 1_110)
    assert found.slowest == (SlowItem(6, 0, 1e-6), SlowItem(5, 0, 1e-7), SlowItem(9, 0, 1e-8))
    assert [bucket for bucket in range(BUCKETS) if found.buckets[bucket]] == [4, 7, 10]
    assert read_call_times(numbers, [2, 4], 7) == read_call_times(numbers, [3], 8) == CallTimes()


def test_the_slowest_are_exact_over_workers_that_come_and_go_and_epochs(
    numbers: memoryview,
) -> None:
    lengths = {index: 1_000 + (index * 7_919) % 10_007 for index in range(1_000)}
    for epoch in range(3):
        for worker in range(2):
            clock = clock_of(numbers, worker, 1)  # another process uses the cell now
            for first in range(worker, 1_000, 20):
                call(
                    clock,
                    {
                        index: lengths[index] + epoch
                        for index in range(first, min(first + 20, 1_000), 2)
                    },
                    epoch,
                )
    found = read_call_times(numbers, range(2), 1).slowest
    slowest = sorted(lengths, key=lengths.__getitem__, reverse=True)[:SLOWEST]
    assert [each.index for each in found] == slowest
    assert [each.seconds for each in found] == [(lengths[index] + 2) / 1e9 for index in slowest]
    assert {each.epoch for each in found} == {2}


def test_what_was_abandoned_is_not_counted(numbers: memoryview) -> None:
    clock = clock_of(numbers, 0, 1)
    call(clock, {4: 9_999}, ends=False)
    clock.begin_ticket(0, 0)  # its calls are not counted any more
    for _ in range(2):
        call(clock, {5: 8}, ends=False)
    call(clock, {8: 50})
    assert read_call_times(numbers, [0], 1).slowest == (SlowItem(8, 0, 5e-8),)


def test_of_many_tickets_a_share_is_counted_and_each_slow_call_kept(numbers: memoryview) -> None:
    clock = clock_of(numbers, 0, 1)
    for ticket in range(40):
        call(clock, {ticket: 1_000 + ticket})
    found = read_call_times(numbers, [0], 1)
    assert found.calls == 5
    assert [each.index for each in found.slowest] == list(range(39, 39 - SLOWEST, -1))


@pytest.mark.parametrize(("share", "least", "most"), [(0.5, 600, 1_100), (0.99, 60_000, 140_000)])
def test_quantiles(numbers: memoryview, share: float, least: int, most: int) -> None:
    call(
        clock_of(numbers, 0, 1),
        {index: 100_000 if index % 20 == 3 else 900 for index in range(200)},
    )
    assert least <= read_call_times(numbers, [0], 1).quantile_ns(share) <= most
    assert CallTimes().quantile_ns(share) == 0


def test_what_slow_calls_take_beyond_the_median_one_is_exact(numbers: memoryview) -> None:
    clock, slow_ns = clock_of(numbers, 0, 1), 0
    clock.begin_ticket(0, 0)  # calls for several samples are not counted
    for ticket in range(400):
        is_slow = (
            ticket > 80 and ticket % 13 == 0
        )  # most of them in tickets whose calls are not counted
        call(
            clock,
            {ticket * 10 + row: 50_000 if is_slow and row == 3 else 1_000 for row in range(10)},
        )
        slow_ns += 49_000 * is_slow
    assert read_call_times(numbers, [0], 1).slow_ns == pytest.approx(slow_ns, rel=0.05)
