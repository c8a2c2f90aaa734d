"""Time that a process wanted to compute and had to wait for a CPU: what tells a busy machine from blocking work."""

from __future__ import annotations

from pathlib import Path


def queued_s(pid: int) -> float:
    """Seconds that the process's main thread has been runnable without a CPU so far.

    From the second field of `/proc/PID/schedstat` (Documentation/scheduler/sched-stats.rst of Linux); 0.0 where there
    is none, so that all time without CPU time then counts as blocked.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
