"""What more workers could bring at best, from how much of its time the function computes."""

from __future__ import annotations

from loaderpool.tools.tuning.window import Measurement

# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
COMPUTES_ABOVE = 0.75


def cpu_share(base: Measurement, threads: int = 1) -> float:
    """The share of its time that the function computes, 0.0 to 1.0; the rest it waits, for anything but a CPU.

    Args:
        base: the measurement of the fewest workers, which disturb each other least.
        threads: calls that a worker makes at the same time; 0 workers make one.
    """
    window = base.best
    cpu_s = window.workers_cpu_s if base.workers else window.own_cpu_s
    # Waiting for a CPU is not the function's own: on a busy machine all work would seem to block.
    had_s = window.elapsed_s * max(1, base.workers) - window.queued_s
    share = min(1.0, cpu_s / had_s) if had_s > cpu_s else 1.0
    # Of a worker that computes all the time nobody can tell how long its calls would wait if they were alone.
    return share / threads if base.workers and share < COMPUTES_ABOVE else share


def ideal_speedup(workers: int, cpus: int, share: float, threads: int = 1) -> float:
    """The speed-up over one call at a time that `workers` could reach: until their computing fills the CPUs.

    For a function that only computes this is `min(workers, cpus)`, for one that only waits it is `workers` times their
    threads. The threads of one worker compute in turns.

    Args:
        workers: 0 counts as one process, this one.
        cpus: CPUs there are.
        share: the function's `cpu_share`.
        threads: calls that a worker makes at the same time; 0 workers make one.
    """
    processes = max(1, workers)
    if share >= COMPUTES_ABOVE:
        return float(min(processes, cpus))
    at_once = float(workers * threads or 1)
    return min(at_once, cpus / share, processes / share) if share > 0 else at_once
