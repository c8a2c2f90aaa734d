"""A training whose workers an `Autotuner` chooses, window by window: an analytic model without processes and clocks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from loaderpool.trainer.autotune import Autotuner
from loaderpool.trainer.explain.window import Window

WINDOW_S = 6.0
_STEPS = 500
WindowOf = Callable[[int, int], Window]  # from workers and steps


@dataclasses.dataclass
class Course:
    """What became of it."""

    seconds: float = 0.0
    changes: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # when, and to how many workers

    def after(self, seconds: float) -> list[int]:
        """The numbers that were chosen from then on."""
        return [workers for at, workers in self.changes if at >= seconds]


def run(
    tuner: Autotuner, workers: int, window_of: WindowOf, seconds: float, noise: float = 0.0, seed: int = 0
) -> tuple[int, Course]:
    """Have it train for so long; `noise` is of each window's times. Returns the last number, and the course."""
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
    """The same window on a machine that was so much slower."""
    return dataclasses.replace(seen, **{name: factor * getattr(seen, name) for name in _SUMS})


def part_of(seen: Window, steps: int) -> Window:
    """So many steps of it, each as all of them."""
    counts = {name: round(getattr(seen, name) * steps / seen.steps) for name in ("ready_steps", "made", "samples")}
    return dataclasses.replace(slowed(seen, steps / seen.steps), steps=steps, **counts)
