"""The one place that reads the time, so that tests can see every reading and clocks are never mixed."""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns  # comparable between processes of one machine (CLOCK_MONOTONIC)
monotonic_s = time.monotonic
wall_s = time.time  # for people and other programs' files: it may jump, so that nothing is measured with it
wall_ns = time.time_ns
process_cpu_ns = time.process_time_ns
thread_cpu_ns = time.thread_time_ns  # of the thread that asks


def cpu_ns_of(pid: int) -> int:
    """Return the CPU time that a process has used so far, of all its threads.

    Linux has a clock for each process (clock_getcpuclockid(3)), which takes a microsecond to read. Its number is made
    of the pid as the kernel's MAKE_PROCESS_CPUCLOCK makes it, for CPUCLOCK_SCHED.

    Raises:
        OSError, AttributeError: there is no such process, or no such clock.
    """
    return time.clock_gettime_ns(~pid << 3 | 2)


def cpu_clock_of(thread: int) -> int | None:
    """Return the clock of a thread's CPU time, for `cpu_clock_ns`; None: the system has none, or the thread is gone.

    Args:
        thread: the ident of a thread of this process that lives: `sys._current_frames` has just named it.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    try:
        return time.pthread_getcpuclockid(thread)
    except OSError:
        return None


def cpu_clock_ns(clock_id: int) -> int | None:
    """Return a thread's CPU time by its clock; None: the thread has ended."""
    try:
        return time.clock_gettime_ns(clock_id)
    except OSError:
        return None
