"""CPU time: what processes and the machine have used, and what they waited for; and what they read.

Most are told by a file of the kernel's, which takes some 10 us to read; what cannot be read is 0.0.
"""

from __future__ import annotations

import os

from loaderpool.system import capacity, clock

# Of the first line of /proc/stat, behind "cpu": user, nice, system, idle, iowait, irq, softirq, steal.
_IDLE_FIELDS = (3, 4)
_FIELDS = 8
_MOST_BYTES = 4096  # of a file: all of each but /proc/stat, of which the first line counts


def process_cpu_s(pid: int) -> float:
    """Return the CPU time the process has used so far in seconds; 0.0 where it is gone."""
    try:
        return clock.cpu_ns_of(pid) / 1e9
    except (OSError, AttributeError):
        pass  # a sandbox may have no such clock
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # a system may have neither the file nor such a count
        return 0.0


def queued_s(task: int | str) -> float:
    """Return how many seconds a thread has been runnable without a CPU so far: what tells a busy machine from waiting.

    From the second field of `/proc/PID/schedstat` (Documentation/scheduler/sched-stats.rst of Linux).

    Args:
        task: a process, whose main thread is meant, or "self/task/TID".
    """
    try:
        return int(_read(f"/proc/{task}/schedstat").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def disk_read_bytes(pid: int) -> int:
    """Return how many bytes storage has read for the process so far; what the page cache has is not read (proc(5)).

    0 where it cannot be read: a process that changed its user, or a kernel without accounting of I/O.
    """
    try:
        return int(_read(f"/proc/{pid}/io").partition("\nread_bytes: ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def machine_cpu_s() -> float:
    """Return the CPU time that all processes of the machine have used so far."""
    try:
        ticks = [int(field) for field in _read("/proc/stat").split("\n", 1)[0].split()[1 : _FIELDS + 1]]
        return sum(each for field, each in enumerate(ticks) if field not in _IDLE_FIELDS) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def throttled_s() -> float:
    """Return how long the limit of this process's cgroup has held its processes back so far, summed over CPUs."""
    return capacity.cgroup_throttled_ns() / 1e9


def _read(path: str) -> str:
    """Return a short file of the kernel's; `open` would take twice the time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)
