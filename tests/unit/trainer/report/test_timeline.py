"""What looks tell of the time between them, and of each worker."""

from __future__ import annotations

import pytest

from loaderpool.trainer.report.timeline import Moment, WorkerShares, moments, worker_shares
from tests.support.looks import S, look, looks


def test_a_moment_has_what_was_between_two_looks() -> None:
    found = moments(looks(3, pids=(100, 101)))
    assert [(each.begin_s, each.end_s) for each in found] == [(-4.0, -2.0), (-2.0, 0.0)]
    assert found[1] == Moment(
        begin_s=-2.0, end_s=0.0, steps=20, computing_s=0.05, waiting_s=0.05, samples_per_s=320.0, epochs=0, workers=2,
        slots=6, slots_lent=2, slots_ready=3,
    )  # fmt: skip


def test_of_time_without_steps_there_is_no_moment() -> None:
    first, last = looks(2)
    same = last._replace(steps=first.steps, samples=first.samples)
    assert moments([first, same]) == []
    assert moments([first]) == []


def test_an_epoch_that_begins_is_noted_and_its_first_wait_is_in_no_step() -> None:
    first, last = looks(2)
    steps = last.steps._replace(epochs=1, epoch_starts_ns=2 * S)
    (found,) = moments([first, last._replace(steps=steps)])
    assert (found.epochs, found.samples_per_s, found.waiting_s) == (1, 160.0, 0.05)


def test_workers_are_told_with_what_they_did_in_all_of_the_time() -> None:
    found = worker_shares(looks(4, pids=(100, 101)))
    assert found[1] == WorkerShares(1, 101, 1, 600, 0.5, 0.25, 100_000.0)


def test_a_worker_that_was_replaced_is_told_since_then() -> None:
    before = [look(number, pids=(100,), end_ns=number * 2 * S) for number in range(3)]
    last = look(3, pids=(200,), end_ns=6 * S)
    assert worker_shares([*before, last]) == [WorkerShares(0, 200, 1, None, None, None, None)]
    later = look(4, pids=(200,), end_ns=8 * S)
    (found,) = worker_shares([*before, last, later])
    assert (found.samples, found.busy_share, found.cpus) == (200, 0.5, pytest.approx(0.25))


def test_of_a_host_nothing_is_told_that_was_not_measured() -> None:
    found = worker_shares(looks(4, pids=(0,)))
    assert found == [WorkerShares(0, None, 1, None, 0.5, None, None)]
