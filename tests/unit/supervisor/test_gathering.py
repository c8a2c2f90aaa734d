"""When the supervisor lets answers gather."""

from __future__ import annotations

import pytest

from tests.support.state import Pool

GATHER_S = 0.001


def busy(workers: int, row_s: float) -> Pool:
    """All workers have as many tickets as they may have, of four rows each."""
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
        (8, 0.006, True),  # an answer each 0.75 ms
        (4, 0.006, False),  # the answers come one by one
        (8, 0.002, False),  # a second ticket may end meanwhile
        (40, 0.03, False),  # a worker has no second ticket
    ],
)
def test_answers_gather_if_many_come_and_all_workers_have_work(
    workers: int, ticket_s: float, gathers: bool
) -> None:
    pool = busy(workers, ticket_s / 4)
    assert not pool.state.roomy
    assert pool.state.expects_several_answers(GATHER_S) is gathers


def test_an_idle_worker_never_waits_for_answers() -> None:
    pool = busy(8, 0.0015)
    pool.answer(pool.busy()[0], row_s=0.0015)
    assert pool.state.roomy
    assert not pool.state.expects_several_answers(GATHER_S)
