"""A look at what else keeps the machine busy, before a contestant starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["QUIET_CPUS", "busy_cpus", "wait_until_quiet"]

# Shorter and the kernel's 10 ms ticks show; longer and it is the greater part of a quick run.
_LOOK_S = 0.25
# A desktop at rest stays below this; one other process that computes does not.
QUIET_CPUS = 0.25


def busy_cpus() -> float:
    """How many CPUs were busy over the last quarter of a second; 0.0 where the kernel does not tell."""
    before = _busy_ticks()
    time.sleep(_LOOK_S)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / _LOOK_S


def wait_until_quiet(at_most_s: float) -> float:
    """Wait for others to finish, but not longer than told; return how many CPUs were busy at the last look."""
    deadline = time.monotonic() + at_most_s
    while True:
        busy = busy_cpus()
        if busy <= QUIET_CPUS or time.monotonic() >= deadline:
            return busy


def _busy_ticks() -> int:
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    return user + nice + system + irq + softirq + steal
