"""Figures from two snapshots of a loader, and estimates for other numbers of workers, compared with
a model of a loader.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowItem
from loaderpool.trainer.explain.verdicts import Finding, Verdict, find_verdict
from loaderpool.trainer.explain.window import (
    MOST_THREADS,
    WAITS_ABOVE,
    Autotuned,
    Decision,
    Pace,
    Snapshot,
    Window,
    WorkerCounts,
    sums_of_workers,
    window_of,
)
from tests.support.looks import S, look
from tests.support.trainings import BLOCKING, COMPUTING, Training

START_S = 3.0


def seen(number: int, workers: int = 2, pid: int = 100) -> Snapshot:
    """Return a snapshot at second `2 * number`, with calls, of a loader whose first batch was
    waited for.
    """
    calls = CallTimes(
        10 * number, number * S, number * 1000, (number,) * BUCKETS, (SlowItem(8, 9, 7e-9),)
    )
    pids = tuple(range(pid, pid + workers))
    return look(number, pids=pids, calls=calls, end_ns=number * 2 * S, start_s=START_S)


@pytest.fixture
def window() -> Window:
    """Return the last four seconds of a training of ten."""
    return window_of([seen(number) for number in range(6)], 5.0)


def test_a_window_has_its_deliveries(window: Window) -> None:
    assert (window.seconds, window.steps) == (4.0, 40)
    assert (window.samples, window.bytes, window.copied) == (1280, 1_280_000, 2)


def test_a_window_has_the_wait_times_of_training(window: Window) -> None:
    assert (window.wait_s, window.wait_share, window.ready_steps) == (2.0, 0.5, 16)
    assert window.ready_steps_s == pytest.approx(0.8)
    assert window.start_s == 0.0


def test_a_window_sums_its_workers(window: Window) -> None:
    assert (window.workers, window.threads) == (2, 1)
    assert (window.busy_s, window.idle_s, window.cpu_s) == (4.0, 4.0, 2.0)
    assert window.queued_s == pytest.approx(0.4)


def test_a_window_has_the_calls_of_the_function(window: Window) -> None:
    assert (window.calls.calls, window.slow_s) == (20, 2e-6)
    assert window.calls.slowest == (SlowItem(8, 9, 7e-9),)


def test_a_window_has_cpu_times(window: Window) -> None:
    assert window.cpus == 4.0
    times = (window.machine_cpu_s, window.trainer_cpu_s, window.trainer_queued_s)
    assert times == pytest.approx((4.0, 0.4, 0.1))


def test_a_window_has_the_slots_of_the_latest_snapshot(window: Window) -> None:
    assert (window.slots, window.slots_lent, window.slots_wanted) == (6, 2, 6)


def test_a_window_from_the_start_has_the_wait_for_the_first_batch() -> None:
    found = window_of([seen(0), seen(1)], 60.0)
    assert (found.start_s, found.seconds, found.wait_s) == (3.0, 5.0, 4.0)
    assert found.elapsed_s == 5.0
    assert window_of([seen(0), seen(5)], 60.0).start_s == 0.0  # most of the waiting came later


def test_of_lent_slots_the_most_are_told() -> None:
    """A training that has ended has released its arrays, so the latest number would be too
    small.
    """
    looks = [seen(number) for number in range(6)]
    full = dataclasses.replace(looks[3], slots_lent=5)
    assert window_of([*looks[:3], full, *looks[4:]], 60.0).slots_lent == 5
    assert window_of([*looks[:3], full, *looks[4:]], 3.0).slots_lent == 2


def test_sums_are_of_all_workers_that_there_were() -> None:
    """The sums include a worker that has ended, up to its last snapshot, and all of its
    replacement.
    """
    before = look(3, pids=(100, 101))
    now = {0: look(4, pids=(100,)).by_worker[0], 2: WorkerCounts(500, 1, 0.5, 0.25, 0.125, 0.0, 7)}
    sums = sums_of_workers(now, before)
    assert (sums["busy_s"], sums["idle_s"], sums["cpu_s"]) == (
        before.busy_s + 1.5,
        before.idle_s + 1.25,
        3.0 + 0.625,
    )
    assert sums["made"] == before.made + 207
    replaced = sums_of_workers(
        {0: WorkerCounts(500, 1, 0.5)}, before
    )  # another process starts at 0
    assert replaced["busy_s"] == before.busy_s + 0.5


def test_how_fast_other_numbers_of_workers_were() -> None:
    looks = [seen(1, 1), seen(2, 1), seen(3, 3), seen(4, 3)]
    assert window_of(looks, 60.0).paces == (Pace(1, 320.0, 1 / 1280), Pace(3, 320.0, 3 / 1280))


def compiled(own_s: tuple[float, ...]) -> list[Snapshot]:
    """Return a snapshot after each of the first steps, with these durations, and two after 100 and
    200 more steps of 20 ms.
    """
    found, passed_s, steps = [], 0.0, 0
    for step_s, count in [(0.0, 0), *((each, 1) for each in own_s), (2.0, 100), (2.0, 100)]:
        passed_s, steps, number = passed_s + step_s, steps + count, len(found)
        counts = {
            "steps": steps,
            "seconds": passed_s,
            "ready_steps": steps,
            "ready_steps_s": passed_s,
        }
        found.append(
            look(number, wait=0.0, pids=(100, 101), end_ns=10 * S + int(passed_s * S), **counts)
        )
    return found


@pytest.mark.parametrize("own_s", [(5.0, 0.02, 0.02), (5.0, 3.0, 0.02), (0.02, 0.02, 4.0)])
def test_the_first_steps_which_compile_are_in_no_mean(own_s: tuple[float, ...]) -> None:
    found = window_of(compiled(own_s), 60.0)
    assert found.steps >= 200
    assert (found.step_s, found.ready_s) == pytest.approx((0.02, 0.02))


def test_a_start_is_told_until_training_went_on_for_twice_as_long() -> None:
    looks = [dataclasses.replace(seen(number), wait_s=0.0) for number in range(6)]
    assert [window_of(looks[: count + 2], 60.0).start_s for count in (1, 2, 3, 4)] == [
        3.0,
        3.0,
        3.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("numbers", "in_vain"),
    [((4, 8, 4), 8), ((2, 4, 8, 4), 8), ((4, 8), 0), ((4, 8, 5), 0), ((4, 2, 4), 0), ((4,), 0)],
)
def test_workers_that_auto_tried_in_vain_are_those_that_it_took_back(
    numbers: tuple[int, ...], in_vain: int
) -> None:
    decisions = tuple(Decision(1.0, *pair, "") for pair in itertools.pairwise(numbers))
    last = dataclasses.replace(seen(5), autotuned=Autotuned(32, decisions))
    assert window_of([seen(4), last], 60.0).autotuned.in_vain == in_vain


def test_what_was_measured_with_other_numbers_of_workers_is_left_out_once_there_is_enough_of_these() -> (
    None
):
    looks = [seen(1, 1), seen(2, 1), seen(3, 3), seen(4, 3), seen(5, 3)]
    assert window_of(looks, 60.0).steps == 40
    # a single snapshot with three workers shows nothing
    assert window_of(looks[:3], 60.0).steps == 40
    assert window_of(looks[:4], 60.0).steps == 20


# -- estimates for other numbers of workers


def told(found: Finding) -> int:
    """Return the number in a change."""
    return int(re.search(r"(?:workers|threads)=(\d+)", found.change)[1])  # type: ignore[index]


def test_computing_is_bounded_by_the_cpus_that_others_leave() -> None:
    crowded = dataclasses.replace(COMPUTING, others=8.0)
    window = crowded.window(4)
    assert window.cpus_of_others == pytest.approx(8.0, rel=0.01)
    found = find_verdict(window)
    assert told(found) in (8, 9)  # a sample computes for 24 of its 25 ms
    assert found.expect.startswith("at best")
    assert found.expected_step_s == pytest.approx(crowded.length(1_000), rel=0.03)


def test_others_give_way_to_workers_that_hardly_compute() -> None:
    """Other programs use all free CPUs, and workers that read seldom have to wait for a CPU."""
    window = BLOCKING.window(4)
    crowded = dataclasses.replace(
        window,
        machine_cpu_s=16 * window.seconds,
        queued_s=0.1 * window.busy_s,
        busy_s=1.1 * window.busy_s,
    )
    found = find_verdict(crowded)
    assert (found.verdict, found.change) == (Verdict.SOURCE_WAITS, find_verdict(window).change)
    computing = COMPUTING.window(4)
    assert (
        find_verdict(dataclasses.replace(computing, machine_cpu_s=16 * computing.seconds)).verdict
        is Verdict.CPUS_FULL
    )


@pytest.mark.parametrize(
    ("ready_steps", "ready_steps_s", "ready_share", "about"),
    [
        (10, 0.75, 0.075 / 0.198, "about"),
        (4, 0.30, 0.1, "at best"),  # too few steps show nothing,
        (
            10,
            60.0,
            0.1,
            "at best",
        ),  # nor do long ones: data may be ready because the consumer paused
    ],
)
def test_steps_that_found_data_ready_tell_the_step_that_there_would_be(
    ready_steps: int, ready_steps_s: float, ready_share: float, about: str
) -> None:
    """A device computes while the consumer continues, so the consumer's own time is short if it
    waits for data.
    """
    window = COMPUTING.window(4, ready_steps=ready_steps, ready_steps_s=ready_steps_s)
    beside = dataclasses.replace(window, wait_s=0.9 * window.seconds)
    assert beside.ready_s == pytest.approx(ready_share * window.step_s, rel=0.01)
    assert find_verdict(beside).expect.startswith(about)


def test_no_more_threads_are_recommended_than_were_ever_measured() -> None:
    slow = Training(sample_cpu_s=10e-6, sample_blocked_s=2.0)
    assert told(find_verdict(slow.window(1))) == MOST_THREADS


def test_no_number_of_workers_is_beyond_the_most() -> None:
    slow = Training(
        sample_cpu_s=8.0, sample_blocked_s=12.0, cpus=5000
    )  # threads do not help functions that compute so much
    assert told(find_verdict(slow.window(8))) == 1024
    assert find_verdict(slow.window(1024)).change == ""


@pytest.mark.parametrize("workers", range(2, 16))
def test_paces_of_workers_that_helped_are_no_limit(workers: int) -> None:
    """With one worker less than needed, steps wait for a twentieth or more. With still fewer, they
    were slower.
    """
    rates = tuple(
        Pace(each, COMPUTING.batch / COMPUTING.length(each)) for each in range(1, workers + 1)
    )
    window = COMPUTING.window(workers, paces=rates)
    wanted = Verdict.TOO_FEW_WORKERS if window.wait_share >= WAITS_ABOVE else Verdict.COMPUTE_BOUND
    assert find_verdict(window).verdict is wanted
