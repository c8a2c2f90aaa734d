"""Conditions under which the supervisor waits to read several answers at once."""

from __future__ import annotations

import pytest

from tests.support.state import Pool

GATHER_S = 0.001


def busy(workers: int, row_s: float) -> Pool:
    """Return a pool whose workers have the most tickets that they can accept. A ticket has four rows."""
    pool = Pool(workers).with_a_run()
    for _ in range(40):
        for worker in pool.busy():
            pool.answer(worker, row_s=row_s)
            pool.turn()
        for message in pool.told[-workers:]:
            pool.state.release(message.run, message.offset, message.ticket)
        pool.turn()
    return pool


@pytest.mark.parametrize(
    ("workers", "ticket_s", "gathers"),
    [
        (8, 0.006, True),  # one answer every 0.75 ms
        (4, 0.006, False),  # one answer every 1.5 ms
        (8, 0.002, False),  # too short: a worker may finish its second ticket
        (40, 0.03, False),  # too long: workers have no second ticket
    ],
)
def test_answers_gather_only_in_a_busy_pool(workers: int, ticket_s: float, gathers: bool) -> None:
    pool = busy(workers, ticket_s / 4)
    assert not pool.state.roomy
    assert pool.state.expects_several_answers(GATHER_S) is gathers


def test_an_idle_worker_never_waits_for_answers() -> None:
    pool = busy(8, 0.0015)
    pool.answer(pool.busy()[0], row_s=0.0015)
    assert pool.state.roomy
    assert not pool.state.expects_several_answers(GATHER_S)
