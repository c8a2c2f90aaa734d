"""What more workers could bring at best, from how much of its time the function computes."""

from __future__ import annotations

from loaderpool.tuning.window import Measurement

__all__ = ["COMPUTES_ABOVE", "cpu_share", "ideal_speedup"]

# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
COMPUTES_ABOVE = 0.75


def cpu_share(base: Measurement) -> float:
    """The share of its time that the function computes, 0.0 to 1.0; the rest it waits, for anything but a CPU.

    Args:
        base: the measurement of the fewest workers, which disturb each other least.
    """
    window = base.best
    cpu_s = window.workers_cpu_s if base.workers else window.own_cpu_s
    # Waiting for a CPU is not the function's own: on a busy machine all work would seem to block.
    had_s = window.elapsed_s * max(1, base.workers) - window.queued_s
    return min(1.0, cpu_s / had_s) if had_s > cpu_s else 1.0


def ideal_speedup(workers: int, cpus: int, share: float) -> float:
    """The speed-up over one process that `workers` could reach: until their computing fills the CPUs.

    For a function that only computes this is `min(workers, cpus)`, for one that only waits it is `workers`.

    Args:
        workers: 0 counts as one process, this one.
        cpus: CPUs there are.
        share: the function's `cpu_share`.
    """
    processes = max(1, workers)
    if share >= COMPUTES_ABOVE:
        return float(min(processes, cpus))
    return min(float(processes), cpus / share) if share > 0 else float(processes)
