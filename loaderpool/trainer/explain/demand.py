"""What a step demands of workers and CPUs, and so how long it would be with another number of workers.

Three laws bind a step: the consumer's own time with data ready; what workers do for it, which they share; what CPUs do
for it, which all share. It is as long as the longest of them (operational analysis: the bottleneck law).
"""

from __future__ import annotations

import dataclasses
import math

from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.trainer.explain.observed import FEEDS, LEAST_READY_STEPS, MOST_THREADS, Observed


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a step takes, in seconds, and of how many CPUs."""

    ready_s: float  # with data ready
    is_ready_measured: (
        bool  # False: `ready_s` is the consumer's own time, and what a device computes beside may be more
    )
    making_s: float  # of one worker alone, waiting for a CPU left out
    cpu_s: float  # of CPU time, of workers
    own_cpu_s: float  # computing of the consumer's process
    cpus_left: float  # by others, or got from them
    workers: int
    threads: int

    @property
    def cpu_bound_s(self) -> float:
        """The shortest step for which there are CPUs."""
        return (self.cpu_s + self.own_cpu_s) / self.cpus_left

    @property
    def target_s(self) -> float:
        """The shortest step that any number of workers can feed."""
        return max(self.ready_s, self.cpu_bound_s)

    def step_s(self, workers: int, threads: int | None = None) -> float:
        """Return how long a step is with so many workers, of so many threads each; None: of as many as now."""
        return max(self.target_s, self._making_s(threads) / workers)

    def least_workers(self) -> int:
        """Return how many workers feed the shortest step there can be, each with its threads of now."""
        return _between(1, FEEDS * self.making_s / self.target_s, MAX_WORKERS)

    def least_threads(self) -> int:
        """Return how many threads of each worker feed it."""
        return _between(1, FEEDS * self.making_s * self.threads / (self.workers * self.target_s), MOST_THREADS)

    def _making_s(self, threads: int | None) -> float:
        """What a sample waits for, threads wait for at the same time; they compute in turns."""
        if threads is None:
            return self.making_s
        return max(min(self.cpu_s, self.making_s), self.making_s * self.threads / threads)


def demand_of(observed: Observed) -> Demand:
    """Return what a step of the window has taken; there must be one, and time that is not waiting."""
    making_s, cpu_s, own_cpu_s = _by_workers(observed) if observed.workers else _in_process(observed)
    ready_s, is_measured = _ready(observed)
    batches = _batches_made(observed)
    return Demand(
        ready_s=ready_s,
        is_ready_measured=is_measured,
        making_s=making_s / batches,
        cpu_s=cpu_s / batches,
        own_cpu_s=own_cpu_s / observed.steps,
        cpus_left=max(observed.cpus - cpus_of_others(observed), min(observed.cpus, _cpus_to_be_had(observed)), 0.01),
        workers=max(1, observed.workers),
        threads=max(1, observed.threads),
    )


def cpus_used(observed: Observed) -> float:
    """Return how many CPUs workers and consumer use, on average."""
    return (observed.cpu_s + observed.trainer_cpu_s) / observed.whole_s


def cpus_of_others(observed: Observed) -> float:
    """Return how many of the usable CPUs other processes have at least: they use those first that we may not."""
    elsewhere = max(0.0, observed.machine_cpus - observed.cpus)
    return max(0.0, observed.machine_cpu_s / observed.whole_s - cpus_used(observed) - elsewhere)


def _cpus_to_be_had(observed: Observed) -> float:
    """Return how many CPUs workers would get if they wanted one all of the time, with the consumer's.

    Others use what is free, and give way: what they use is no bound for workers that hardly ask for a CPU.
    """
    wanted_s = observed.cpu_s + observed.queued_s
    times = max(1.0, observed.busy_s / wanted_s) if wanted_s else 1.0
    return (times * observed.cpu_s + observed.trainer_cpu_s) / observed.whole_s


def _by_workers(observed: Observed) -> tuple[float, float, float]:
    making_s = max(observed.cpu_s / max(1, observed.threads), observed.busy_s - observed.queued_s)
    return making_s, observed.cpu_s, observed.trainer_cpu_s


def _batches_made(observed: Observed) -> float:
    """Of how many batches the workers' time is: of those taken, but for what the ring took in or gave meanwhile.

    Where it differs by more, other loaders' batches are among those made, and a step needs its share of these, too.
    """
    made = observed.made * observed.steps / max(1, observed.samples)
    return made if made and abs(made - observed.steps) <= observed.slots else observed.steps


def _in_process(observed: Observed) -> tuple[float, float, float]:
    """The consumer's process computes for both; what it computed may all have been for samples, as far as it waited."""
    cpu_s = min(observed.wait_s, observed.trainer_cpu_s) or observed.wait_s
    return observed.wait_s, cpu_s, max(0.0, observed.trainer_cpu_s - cpu_s)


def _ready(observed: Observed) -> tuple[float, bool]:
    """The step with data ready, and whether such steps tell it.

    Those that do not are longer than the average step: data were ready because a few of them were long.
    """
    measured_s = observed.ready_step_s
    if measured_s and observed.ready_steps >= LEAST_READY_STEPS and measured_s <= observed.step_s:
        return measured_s, True
    return max(observed.seconds - observed.wait_s, 1e-9) / observed.steps, False


def _between(least: int, number: float, most: int) -> int:
    return max(least, min(math.ceil(number), most))
