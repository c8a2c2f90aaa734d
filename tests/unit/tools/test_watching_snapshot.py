"""What is told of a loader from the bytes that it shares: no process is needed for that."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from loaderpool.tools.watching.snapshot import LoaderSnapshot, PoolMemory, WorkerState, take_snapshot
from loaderpool.trainer.explain.looks import Look, WorkerCounts
from tests.support.looks import ABOUT, LOADER, HandMadeBoard, S, looks

NOW_NS = 102 * S  # two seconds after the last look


def snapshot(
    found: list[Look], board: HandMadeBoard | None = None, cpu_s: dict[int, float] | None = None, **page: Any
) -> LoaderSnapshot:
    where = {"loader": LOADER, "arena": [1, 2]} if board is not None else {}
    content: Any = types.SimpleNamespace(
        about=ABOUT, more={"pid": 1, **where}, looks=found, asked_ns=0, handed_over_ns=NOW_NS - S // 2
    )
    vars(content).update(page)
    pool = PoolMemory(board.board, board.call_times, cpu_s or {}) if board is not None else None
    return take_snapshot(content, pool, NOW_NS)


def test_rates_and_waits_are_those_of_the_looks() -> None:
    found = snapshot(looks(20, wait=0.5))
    assert found.steps_per_s == pytest.approx(10)
    assert found.samples_per_s == pytest.approx(320)
    assert found.bytes_per_s == pytest.approx(320_000)
    assert found.wait_shares == pytest.approx((0.5,) * 19)
    assert found.explanation.wait_share == pytest.approx(0.5)
    assert found.look_age_s == pytest.approx(2)
    assert (found.slots, found.slots_lent) == (6, 2)
    assert (found.number, found.pool, found.workers) == (None, None, ())


def test_a_first_look_alone_has_no_rates() -> None:
    found = snapshot(looks(1))
    assert found.steps_per_s is found.samples_per_s is found.bytes_per_s is None
    assert found.wait_shares == ()
    assert found.call_s == {}


def test_time_in_which_no_step_was_taken_has_no_share_of_waiting() -> None:
    first, second = looks(2)
    again = second._replace(number=2, now_ns=second.now_ns + S)
    assert len(snapshot([first, second, again]).wait_shares) == 1


def test_a_wait_lasts_until_now() -> None:
    waiting = snapshot(looks(3), asked_ns=NOW_NS - 5 * S)
    assert (waiting.asked_s, waiting.handed_over_s) == (5.0, None)
    training = snapshot(looks(3))
    assert (training.asked_s, training.handed_over_s) == (None, 0.5)


def test_a_time_that_is_after_now_is_none() -> None:
    assert snapshot(looks(3), asked_ns=NOW_NS + S).asked_s == 0.0


# -- workers


@pytest.mark.parametrize(
    ("fields", "state", "index", "item_s"),
    [
        ({}, WorkerState.STARTING, None, None),
        ({"in_setup": 1}, WorkerState.SETUP, None, None),
        ({"ticket": 9, "index": 1235, "started_ns": NOW_NS - 7 * S}, WorkerState.ITEM, 1234, 7.0),
        ({"ticket": 9, "index": 1, "started_ns": NOW_NS}, WorkerState.ITEM, 0, 0.0),
        (
            {"ticket": 9, "index": 8, "started_ns": NOW_NS - S, "in_generator": 1},
            WorkerState.GENERATOR,
            7,
            1.0,
        ),
        ({"ticket": 9, "finished": 9 << 16, "started_ns": NOW_NS - S}, WorkerState.IDLE, None, None),
    ],
)
def test_what_a_worker_is_at(
    fields: dict[str, int], state: WorkerState, index: int | None, item_s: float | None
) -> None:
    board = HandMadeBoard()
    board.set(5, pid=77, **fields)
    (worker,) = snapshot(looks(3, pids=(77,)), board, {77: 1.0}).workers
    assert (worker.pid, worker.state, worker.index, worker.item_s) == (77, state, index, item_s)


def test_of_a_block_the_first_item_is_known() -> None:
    board = HandMadeBoard()
    board.set(0, pid=70, ticket=9, index=33, started_ns=NOW_NS - S, block=128)
    board.set(1, pid=71, ticket=9, block=128)
    first, second = snapshot(looks(3, pids=(70, 71)), board, {70: 0.0, 71: 0.0}).workers
    assert (first.index, first.items, first.item_s) == (32, 128, 1.0)
    assert (second.index, second.items) == (None, 1)


def test_busy_is_the_share_of_the_time_since_the_latest_look() -> None:
    """The looks have half of the time as busy; of the two seconds since then the workers tell."""
    found = looks(4, pids=(70, 71, 72, 73))
    board = HandMadeBoard()
    then = found[-1].work.workers[0].busy_ns
    at_item = {"ticket": 9, "index": 4, "started_ns": NOW_NS - S}
    board.set(0, pid=70, busy_ns=then + S // 2, wait_ns=then + 3 * S // 2, ticket=9)
    board.set(1, pid=71, busy_ns=then, wait_ns=then, **at_item)  # it is at one ticket for all of them
    board.set(2, pid=72, busy_ns=then, wait_ns=then, ticket=9)  # and this one waits for one
    board.set(3, pid=73, busy_ns=then + 9 * S, wait_ns=then, **at_item)  # which began long before
    workers = snapshot(found, board, {70: 2.0, 71: 3.5, 72: 0.0, 73: 1.5}).workers
    assert [each.busy_share for each in workers] == [0.25, 1.0, 0.0, 1.0]
    assert [each.cpus for each in workers] == [0.25, 1.0, 0.0, 0.0]
    assert [each.number for each in workers] == [0, 1, 2, 3]


def test_a_look_of_this_moment_is_no_base_for_shares() -> None:
    """A worker's counters stand still while it is at a ticket, and the kernel counts CPU time in ticks."""
    found = looks(4, pids=(70,), last_ns=NOW_NS)
    board = HandMadeBoard()
    before = found[-2].work.workers[0]
    board.set(0, pid=70, busy_ns=before.busy_ns + S // 2, wait_ns=before.idle_ns + 3 * S // 2, ticket=9)
    (worker,) = snapshot(found, board, {70: before.cpu_s + 1.0}).workers
    assert (worker.busy_share, worker.cpus) == (0.25, 0.5)


def test_workers_that_came_since_the_look_are_shown_and_those_that_are_gone_are_not() -> None:
    board = HandMadeBoard()
    board.set(0, pid=70, ticket=1)
    board.set(1, pid=71, ticket=1)
    board.set(9, pid=79, in_setup=1)
    workers = snapshot(looks(3, pids=(70, 71)), board, {71: 0.0, 79: 0.0}).workers
    assert [(each.pid, each.state, each.busy_share is None) for each in workers] == [
        (71, WorkerState.IDLE, False),
        (79, WorkerState.SETUP, True),
    ]


def test_hosts_are_those_of_the_looks() -> None:
    """Their cells have other numbers where workers have their pids."""
    found = looks(3)
    for number, each in enumerate(found):
        each.work.workers.clear()
        found[number] = each._replace(
            work=each.work._replace(workers={7: WorkerCounts(0, 4, number * 3 * S, number * S, 0.0, 0.0)})
        )
    board = HandMadeBoard()
    board.set(0, pid=123_456)
    (host,) = snapshot(found, board, {123_456: 0.0}).workers
    assert (host.number, host.pid, host.state, host.busy_share, host.cpus) == (7, 0, WorkerState.HOST, 0.75, None)


def test_calls_and_the_slowest_of_them_are_those_that_workers_have_counted_by_now() -> None:
    board = HandMadeBoard()
    board.set(0, pid=70, ticket=1)
    board.set(2, pid=72, ticket=1)
    for cell, index, seconds in ((0, 11, 3), (2, 22, 5), (1, 99, 7)):  # cell 1 has no worker
        calls = board.clock(cell)
        calls.begin_ticket(0, epoch=4)
        calls.note(0, seconds * S, index)
    found = snapshot(looks(3, pids=(70, 72)), board, {70: 0.0, 72: 0.0})
    assert [(each.index, each.epoch, each.seconds) for each in found.slowest] == [(22, 4, 5.0), (11, 4, 3.0)]
    assert list(found.call_s) == ["p50", "p90", "p99"]
    assert 2 < found.call_s["p50"] < 9


def test_it_goes_into_json() -> None:
    board = HandMadeBoard()
    board.set(0, pid=70, ticket=1, index=3, started_ns=NOW_NS - S)
    data = json.loads(json.dumps(snapshot(looks(20, pids=(70,)), board, {70: 9.0}).to_dict(), allow_nan=False))
    assert data["workers"][0]["state"] == "item"
    assert (data["workers"][0]["index"], data["workers"][0]["item_s"]) == (2, 1.0)
    assert data["explanation"]["verdict"]
    assert "slowest" in data
    assert "slowest" not in data["explanation"]
