"""The number of workers that is chosen for trainings of a model."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.trainer.autotune import Autotuner
from loaderpool.trainer.explain.window import Window
from tests.support.trainings import BLOCKING, COMPUTING, Training

MOST = 64
WINDOW_S = 6.0
_STEPS = 500
WindowOf = Callable[[int, int], Window]  # makes a window from the numbers of workers and steps


@dataclasses.dataclass
class Course:
    """Result of a training."""

    seconds: float = 0.0
    changes: list[tuple[float, int]] = dataclasses.field(
        default_factory=list
    )  # times of changes, and the new numbers of workers

    def after(self, seconds: float) -> list[int]:
        """Return the numbers that were chosen after this time."""
        return [workers for at, workers in self.changes if at >= seconds]


def run(
    tuner: Autotuner,
    workers: int,
    window_of: WindowOf,
    seconds: float,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[int, Course]:
    """Train for this time. `noise` changes each window's times. Return the last number, and the
    course.
    """
    course, chance = Course(), random.Random(seed)
    while course.seconds < seconds:
        whole = slowed(window_of(workers, _STEPS), math.exp(noise * chance.gauss(0, 1)))
        steps = max(20, math.ceil(WINDOW_S / whole.step_s) + 1)
        for part in (max(20, steps // 3), steps):
            before_s, seen = course.seconds, part_of(whole, part)
            proposal = tuner.judge(seen, course.seconds + seen.seconds)
            if proposal is not None:
                break
        course.seconds = before_s + seen.seconds
        if proposal is not None:
            workers = proposal.workers
            course.changes.append((course.seconds, workers))
    return workers, course


_SUMS = (
    "seconds", "wait_s", "ready_steps_s", "busy_s", "idle_s", "cpu_s", "queued_s", "machine_cpu_s", "trainer_cpu_s",
)  # fmt: skip


def slowed(seen: Window, factor: float) -> Window:
    """Return the same window on a machine that is slower by this factor."""
    return dataclasses.replace(seen, **{name: factor * getattr(seen, name) for name in _SUMS})


def part_of(seen: Window, steps: int) -> Window:
    """Return this number of steps of a window, each with the mean values."""
    counts = {
        name: round(getattr(seen, name) * steps / seen.steps)
        for name in ("ready_steps", "made", "samples")
    }
    return dataclasses.replace(slowed(seen, steps / seen.steps), steps=steps, **counts)


def least_that_feeds(training: Training) -> int:
    best = training.length(MOST)
    return next(
        workers for workers in range(1, MOST + 1) if training.length(workers) <= 1.02 * best
    )


def window_of(training: Training):
    return lambda workers, steps: training.window(workers, steps=steps)


trainings = st.builds(
    Training,
    step_s=st.floats(2e-3, 0.2),
    batch=st.integers(1, 64),
    sample_cpu_s=st.floats(50e-6, 10e-3),
    sample_blocked_s=st.floats(0.0, 10e-3),
    cpus=st.sampled_from([4.0, 16.0, 64.0]),
    step_cpu_s=st.floats(0.1e-3, 2e-3),
)


@given(
    trainings, st.integers(1, MOST - 2)
)  # beyond MOST - 1, another worker shortens steps by less than the noise
@settings(max_examples=300)
def test_whatever_it_begins_with_it_comes_to_rest_where_the_training_is_fed(
    training: Training, first: int
) -> None:
    workers, course = run(Autotuner(1, MOST), first, window_of(training), seconds=900)
    assert training.length(workers) <= 1.05 * training.length(MOST)
    assert workers <= max(least_that_feeds(training) + 1, 1)
    assert not course.after(300)


@pytest.mark.slow
@given(trainings, st.integers(1, MOST), st.integers(0, 1000))
@settings(max_examples=300)
def test_noise_has_it_change_rarely(training: Training, first: int, seed: int) -> None:
    """Steps of windows that differ by 3 %."""
    workers, course = run(
        Autotuner(1, MOST), first, window_of(training), seconds=1800, noise=0.03, seed=seed
    )
    assert training.length(workers) <= 1.15 * training.length(MOST)
    assert len(course.after(300)) <= 10


def test_a_function_that_becomes_dearer_has_more() -> None:
    tuner = Autotuner(1, MOST)
    workers, _ = run(tuner, 4, window_of(COMPUTING), seconds=60)
    dearer = dataclasses.replace(BLOCKING, sample_blocked_s=5 * 49e-3)
    workers, course = run(tuner, workers, window_of(dearer), seconds=60)
    assert dearer.length(workers) <= 1.05 * dearer.length(MOST)
    assert course.after(0)[-1] == workers
    assert not course.after(40)


def test_what_no_worker_more_makes_faster_ends_the_search() -> None:
    """The source serves at most four workers. With more, each waits longer."""
    limited = dataclasses.replace(BLOCKING, step_s=20e-3)

    def window(workers: int, steps: int) -> Window:
        slower = dataclasses.replace(limited, sample_blocked_s=49e-3 * max(1, workers / 4))
        return slower.window(workers, steps=steps)

    workers, course = run(Autotuner(1, MOST), 1, window, seconds=500)
    assert 4 <= workers <= 8
    assert len(course.changes) <= 6
    assert not course.after(120)


def test_workers_that_slow_the_training_down_are_taken_back() -> None:
    """Each worker after the fourth takes 4 % of the consumer's CPU."""

    def window(workers: int, steps: int) -> Window:
        slowed = dataclasses.replace(COMPUTING, step_s=0.190 * (1 + 0.04 * max(0, workers - 4)))
        return slowed.window(workers, steps=steps)

    workers, course = run(Autotuner(1, MOST), 12, window, seconds=300)
    assert 4 <= workers <= 6
    assert not course.after(120)


def test_bounds_hold() -> None:
    workers, _ = run(Autotuner(3, 6), 3, window_of(BLOCKING), seconds=120)
    assert workers == 6
    workers, _ = run(
        Autotuner(3, 6), 6, window_of(dataclasses.replace(BLOCKING, step_s=5.0)), seconds=400
    )
    assert workers == 3


@pytest.mark.parametrize("others", [1.0, 1.5])
def test_when_other_programs_give_cpus_back_there_are_more_workers_again(others: float) -> None:
    """With half of the CPUs, one worker is as fast as two, but not with all of them."""
    quiet = Training(step_s=20e-3, batch=16, sample_cpu_s=3.4e-3, cpus=2, step_cpu_s=1e-3)
    tuner = Autotuner(1, MOST)
    workers, _ = run(tuner, 2, window_of(dataclasses.replace(quiet, others=others)), seconds=20)
    assert workers == 1
    workers, course = run(tuner, workers, window_of(quiet), seconds=60)
    assert quiet.length(workers) <= 1.05 * quiet.length(MOST)
    assert not course.after(30)


def test_a_ceiling_is_tried_again_within_a_minute_where_workers_compute_all_the_time() -> None:
    """For some seconds, one worker was as fast as two, and no count shows the reason."""
    computing = Training(step_s=20e-3, batch=16, sample_cpu_s=3.4e-3, cpus=4, step_cpu_s=1e-3)

    def window(workers: int, steps: int) -> Window:
        slower = 1 if workers == 1 else 2
        return dataclasses.replace(computing, sample_cpu_s=slower * 3.4e-3).window(
            workers, steps=steps
        )

    tuner = Autotuner(1, 2)
    workers, course = run(tuner, 1, window, seconds=20)
    assert workers == 1
    assert course.changes  # two were tried
    workers, course = run(tuner, workers, window_of(computing), seconds=60)
    assert workers == 2
