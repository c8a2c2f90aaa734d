"""What more workers and threads could bring at best, from how much of its time the function computes."""

from __future__ import annotations

from collections.abc import Sequence

from loaderpool.tools.tuning.setting import Setting
from loaderpool.tools.tuning.window import Measurement
from loaderpool.trainer.explain.thresholds import COMPUTES_ABOVE

# Threads that compute in turns use one CPU; the margin is for the process's own other threads.
THREADS_ABOVE_CPUS = 1.3


def cpu_share(base: Measurement) -> float:
    """The share of its time that the function computes, 0.0 to 1.0; the rest it waits, for anything but a CPU.

    Args:
        base: the measurement of the smallest setting, in which calls disturb each other least.
    """
    window = base.best
    cpu_s = window.workers_cpu_s if base.workers else window.own_cpu_s
    # Waiting for a CPU is not the function's own: on a busy machine all work would seem to block.
    had_s = window.elapsed_s * base.setting.processes - window.queued_s
    share = min(1.0, cpu_s / had_s) if had_s > cpu_s else 1.0
    # Of a worker that computes all the time it cannot be told how long its calls would wait if they were alone.
    return share / base.setting.threads if share < COMPUTES_ABOVE else share


def compute_in_turns(measurements: Sequence[Measurement]) -> bool:
    """Whether the threads of a worker compute one at a time, by the interpreter's lock; code in C may let go of it."""
    return not any(
        each.best.workers_cpu_s > THREADS_ABOVE_CPUS * each.workers * each.best.elapsed_s
        for each in measurements
        if each.setting.threads > 1
    )


def ideal_speedup(setting: Setting, cpus: int, share: float, in_turns: bool = True) -> float:
    """The speed-up over one call at a time that `setting` could reach: until its computing fills the CPUs.

    For a function that only computes this is `min(workers, cpus)`, for one that only waits it is `workers` times their
    threads.

    Args:
        setting: 0 workers count as one process, this one.
        cpus: CPUs there are.
        share: the function's `cpu_share`.
        in_turns: whether the threads of one worker compute in turns.
    """
    at_once = setting.processes if in_turns else setting.calls
    if share >= COMPUTES_ABOVE:
        return float(min(at_once, cpus))
    return min(float(setting.calls), cpus / share, at_once / share) if share > 0 else float(setting.calls)
