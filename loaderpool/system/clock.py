"""The one place that reads the time, so that tests can see every reading and clocks are never mixed."""

from __future__ import annotations

import time
from collections.abc import Callable

monotonic_ns = time.monotonic_ns  # comparable between processes of one machine (CLOCK_MONOTONIC)
monotonic_s = time.monotonic
wall_s = (
    time.time
)  # for people and other programs' files: it may jump, so that nothing is measured with it
wall_ns = time.time_ns
process_cpu_ns = time.process_time_ns
thread_cpu_ns = time.thread_time_ns  # of the calling thread: what other processes do does not count


def boot_ns() -> int:
    """Return the time since the machine was started. Only Linux has this clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def wait_until(is_so: Callable[[], bool], at_most_s: float) -> None:
    """Return when it is so, or after so many seconds."""
    ends_s = monotonic_s() + at_most_s
    while monotonic_s() < ends_s and not is_so():
        time.sleep(0.0005)


def cpu_ns_of(pid: int) -> int:
    """Return the CPU time that a process has used so far, of all its threads; OSError or AttributeError: there is none.

    Linux has a clock for each process (clock_getcpuclockid(3)), whose number is made of the pid as the kernel's
    MAKE_PROCESS_CPUCLOCK makes it, for CPUCLOCK_SCHED.
    """
    return time.clock_gettime_ns(~pid << 3 | 2)
