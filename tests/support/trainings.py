"""Windows of trainings, computed from a few rates with a model of a loader."""

from __future__ import annotations

import dataclasses
from typing import Any

from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowItem
from loaderpool.trainer.explain.window import Window

STEPS = 500


@dataclasses.dataclass(frozen=True)
class Training:
    """A loader with workers that share batches evenly, a ring that is large enough, and a consumer.

    A step takes as long as the slowest part: the consumer, all workers together, or the computation
    on all CPUs.
    """

    step_s: float = 75e-3  # time of the consumer if data is ready
    batch: int = 32
    sample_cpu_s: float = 0.0
    sample_blocked_s: float = 0.0
    cpus: float = 16.0
    step_cpu_s: float = 5e-3  # part of `step_s` in which the consumer's process computes
    others: float = 0.0  # CPUs that other programs use
    sample_bytes: int = 150_528

    def length(self, workers: int, threads: int = 1) -> float:
        """Return the duration of a step."""
        return max(self.step_s, self._making_s(threads) / workers, self._cpu_bound_s())

    def window(self, workers: int, threads: int = 1, steps: int = STEPS, **changes: Any) -> Window:
        """Return the measurements of the training. Some batches are ready at first, because the
        ring was full.
        """
        length = self.length(workers, threads)
        is_fed = length < 1.001 * self.step_s
        ready = steps if is_fed else 10
        seconds = ready * self.step_s + (steps - ready) * length
        cpu_s = steps * self.batch * self.sample_cpu_s
        busy_s = min(workers * seconds, steps * self._making_s(threads))
        queued_s = (
            workers * seconds - busy_s
            if length <= 1.001 * self._cpu_bound_s() and not is_fed
            else 0.0
        )
        median = int(1e9 * (self.sample_cpu_s + self.sample_blocked_s)).bit_length()
        buckets = tuple(
            steps * self.batch // 4 if bucket == median else 0 for bucket in range(BUCKETS)
        )
        calls = CallTimes(calls=sum(buckets), buckets=buckets, slowest=(SlowItem(8812, 3, 1.9),))
        observed = Window(
            seconds=seconds,
            steps=steps,
            samples=steps * self.batch,
            bytes=steps * self.batch * self.sample_bytes,
            wait_s=0.0 if is_fed else (steps - ready) * (length - self.step_s),
            ready_steps=ready,
            ready_steps_s=ready * self.step_s,
            workers=workers,
            threads=threads,
            made=max(1, round(busy_s / self._making_s(threads))) * self.batch,
            busy_s=busy_s + queued_s,
            idle_s=workers * seconds - busy_s - queued_s,
            cpu_s=cpu_s,
            queued_s=queued_s,
            calls=calls,
            cpus=self.cpus,
            machine_cpu_s=cpu_s + steps * self.step_cpu_s + self.others * seconds,
            trainer_cpu_s=steps * self.step_cpu_s,
            slots=32,
            slots_lent=2,
            slots_wanted=32,
            slot_bytes=self.batch * self.sample_bytes,
        )
        return dataclasses.replace(observed, **changes)

    def in_process(self, steps: int = STEPS, **changes: Any) -> Window:
        """Return the measurements of a training with workers=0."""
        making_s = self.batch * (self.sample_cpu_s + self.sample_blocked_s)
        seconds = steps * (self.step_s + making_s)
        own_s = steps * (self.step_cpu_s + self.batch * self.sample_cpu_s)
        observed = Window(
            seconds=seconds,
            steps=steps,
            samples=steps * self.batch,
            bytes=steps * self.batch * self.sample_bytes,
            wait_s=steps * making_s,
            cpus=self.cpus,
            machine_cpu_s=own_s + self.others * seconds,
            trainer_cpu_s=own_s,
        )
        return dataclasses.replace(observed, **changes)

    def _making_s(self, threads: int) -> float:
        """Return the time in which one worker makes a batch. Its threads wait at the same time, and
        compute in turns.
        """
        return self.batch * max(
            self.sample_cpu_s, (self.sample_cpu_s + self.sample_blocked_s) / threads
        )

    def _cpu_bound_s(self) -> float:
        return (self.batch * self.sample_cpu_s + self.step_cpu_s) / (self.cpus - self.others)


COMPUTING = Training(sample_cpu_s=24e-3, sample_blocked_s=1e-3)
BLOCKING = Training(sample_cpu_s=1e-3, sample_blocked_s=49e-3)
MIXED = Training(sample_cpu_s=10e-3, sample_blocked_s=15e-3)


def idle(**changes: Any) -> Window:
    """Return a training whose workers would be fast enough, but have tickets for half of the time,
    so that a step waits for half of its time.
    """
    window = Training(sample_cpu_s=9e-3).window(4)
    halves = {
        "seconds": 2 * window.seconds,
        "machine_cpu_s": window.machine_cpu_s,
        "wait_s": window.seconds,
        "idle_s": 8 * window.seconds - window.busy_s,
        "ready_steps": 100,
        "ready_steps_s": 100 * window.step_s,
    }
    return dataclasses.replace(window, **{**halves, **changes})


def slowed(window: Window, seconds: float) -> Window:
    """Return the same training, with slow calls that take this much longer than the median one."""
    return dataclasses.replace(window, calls=window.calls._replace(slow_ns=int(seconds * 1e9)))


def times(window: Window, factor: int) -> Window:
    """Return the same training measured for longer: sums grow, and other values stay."""
    stay = {
        "workers",
        "threads",
        "cpus",
        "machine_cpus",
        "slots",
        "slots_lent",
        "slots_wanted",
        "slot_bytes",
    }
    sums = {
        field.name: factor * value
        for field in dataclasses.fields(window)
        if type(value := getattr(window, field.name)) in (int, float) and field.name not in stay
    }
    return slowed(dataclasses.replace(window, **sums), factor * window.slow_s)
