"""How many workers are recommended, and how long steps are said to be, beside an analytic model of a loader."""

from __future__ import annotations

import dataclasses
import re

import pytest

from loaderpool.trainer.explain.observed import MOST_THREADS, WAITS_ABOVE, Pace
from loaderpool.trainer.explain.verdicts import Finding, Verdict, find_verdict
from tests.support.trainings import BLOCKING, COMPUTING, MIXED, Training

ADVISED = {Verdict.TOO_FEW_WORKERS, Verdict.SOURCE_WAITS}


def told(found: Finding) -> int:
    """The number that a change has."""
    return int(re.search(r"(?:workers|threads)=(\d+)", found.change)[1])  # type: ignore[index]


def least_workers(training: Training) -> int:
    """The least number with which a step is hardly longer than with any."""
    best = training.length(1_000)
    return next(workers for workers in range(1, 1_000) if training.length(workers) <= 1.02 * best)


@pytest.mark.parametrize("training", [COMPUTING, BLOCKING, MIXED], ids=["computing", "blocking", "mixed"])
@pytest.mark.parametrize("workers", [0, 1, 2, 4, 8])
def test_the_least_workers_that_feed_the_step_are_recommended(training: Training, workers: int) -> None:
    window = training.window(workers, can_have_threads=False) if workers else training.in_process()
    found = find_verdict(window)
    assert found.verdict in ADVISED
    assert abs(told(found) - least_workers(training)) <= 1
    assert found.step_s == pytest.approx(training.length(told(found)), rel=0.03)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_are_recommended_where_they_wait(workers: int, threads: int) -> None:
    slow = dataclasses.replace(BLOCKING, sample_blocked_s=149e-3)
    found = find_verdict(slow.window(workers, threads))
    if "threads" not in found.change:
        assert slow.length(workers, 256) > 1.1 * slow.step_s  # as a worker's computing takes all of its time
        return
    assert found.step_s == pytest.approx(slow.length(workers, told(found)), rel=0.05)
    assert found.step_s <= 1.05 * slow.length(workers, 256)


def test_computing_is_bounded_by_the_cpus_that_others_leave() -> None:
    crowded = dataclasses.replace(COMPUTING, others=8.0)
    window = crowded.window(4)
    assert window.cpus_of_others == pytest.approx(8.0, rel=0.01)
    found = find_verdict(window)
    assert told(found) in (8, 9)  # a sample computes 24 of its 25 ms
    assert found.expect.startswith("at best")
    assert found.step_s == pytest.approx(crowded.length(1_000), rel=0.03)


def test_others_give_way_to_workers_that_hardly_compute() -> None:
    """Other programs use all that is free, and workers that read have to wait for a CPU only now and then."""
    window = BLOCKING.window(4)
    crowded = dataclasses.replace(
        window, machine_cpu_s=16 * window.seconds, queued_s=0.1 * window.busy_s, busy_s=1.1 * window.busy_s
    )
    found = find_verdict(crowded)
    assert (found.verdict, found.change) == (Verdict.SOURCE_WAITS, find_verdict(window).change)
    computing = COMPUTING.window(4)
    assert (
        find_verdict(dataclasses.replace(computing, machine_cpu_s=16 * computing.seconds)).verdict is Verdict.CPUS_FULL
    )


def test_steps_that_found_data_ready_tell_the_step_that_there_would_be() -> None:
    """A device computes beside the consumer, whose own time is short while it waits for data."""
    window = COMPUTING.window(4)
    beside = dataclasses.replace(window, wait_s=0.9 * window.seconds)
    assert beside.ready_s == pytest.approx(75e-3)
    few = dataclasses.replace(beside, ready_steps=4, ready_steps_s=4 * 75e-3)
    assert few.ready_s == pytest.approx(0.1 * window.step_s)
    assert find_verdict(beside).expect.startswith("about")
    assert find_verdict(few).expect.startswith("at best")


def test_ready_steps_that_are_longer_than_others_tell_nothing() -> None:
    """A consumer that paused found data ready for that very reason."""
    window = COMPUTING.window(4, ready_steps=10, ready_steps_s=60.0)
    assert window.ready_s == pytest.approx((window.seconds - window.wait_s) / window.steps)


def test_waiting_for_a_cpu_is_no_making() -> None:
    quiet = COMPUTING.window(4)
    queued = dataclasses.replace(quiet, busy_s=quiet.busy_s * 1.1, queued_s=quiet.busy_s * 0.1)
    assert queued.making_s == pytest.approx(quiet.making_s)


def test_no_more_threads_are_recommended_than_were_ever_measured() -> None:
    slow = Training(sample_cpu_s=10e-6, sample_blocked_s=2.0)
    assert told(find_verdict(slow.window(1))) == MOST_THREADS


def test_no_number_of_workers_is_beyond_the_most() -> None:
    slow = Training(sample_cpu_s=10e-6, sample_blocked_s=20.0)
    assert told(find_verdict(slow.window(8, can_have_threads=False))) == 1024
    assert find_verdict(slow.window(1024, can_have_threads=False)).change == ""


@pytest.mark.parametrize("workers", range(2, 16))
def test_paces_of_workers_that_helped_are_no_limit(workers: int) -> None:
    """As many as are needed, but one, wait for a twentieth and more; who had fewer was slower."""
    rates = tuple(Pace(each, COMPUTING.batch / COMPUTING.length(each)) for each in range(1, workers + 1))
    window = COMPUTING.window(workers, paces=rates)
    wanted = Verdict.TOO_FEW_WORKERS if window.wait_share >= WAITS_ABOVE else Verdict.COMPUTE_BOUND
    assert find_verdict(window).verdict is wanted
