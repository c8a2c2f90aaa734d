"""The only module that reads the time. Tests can see every reading, and clocks are never mixed."""

from __future__ import annotations

import time
from collections.abc import Callable

# Comparable between processes of one machine (CLOCK_MONOTONIC).
monotonic_ns = time.monotonic_ns
monotonic_s = time.monotonic
# For people and for files of other programs. This clock may jump, so it measures no durations.
wall_s = time.time
wall_ns = time.time_ns
process_cpu_ns = time.process_time_ns
thread_cpu_ns = time.thread_time_ns  # CPU time of the calling thread; other processes do not count


def boot_ns() -> int:
    """Return the time since the machine started. Only Linux has this clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wait_until(is_so: Callable[[], bool], at_most_s: float, look_s: float = 0.0005) -> None:
    """Wait until `is_so()` is true, or for `at_most_s` seconds. Check it every `look_s` seconds."""
    ends_s = monotonic_s() + at_most_s
    while monotonic_s() < ends_s and not is_so():
        time.sleep(look_s)


def cpu_ns_of(pid: int) -> int:
    """Return the CPU time that all threads of a process have used so far.

    Linux has a clock for each process (clock_getcpuclockid(3)). Its number is made of the pid, as
    the kernel's MAKE_PROCESS_CPUCLOCK does for CPUCLOCK_SCHED.

    Raises:
        OSError: there is no such process.
        AttributeError: the system has no such clock.
    """
    return time.clock_gettime_ns(~pid << 3 | 2)
