"""CPUs, memory and processes that this process may use, and their current use.

Limits come from the machine, the CPU affinity and the cgroups. A number that the kernel does not
report counts as 0, or as no limit.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from loaderpool.system import clock, fault_points

_CGROUP = "/sys/fs/cgroup"
_UNTOLD_BYTES = 4 << 30
# Time between two reads of the kernel's count of kills. Smaller: the end of a killed process may be
# noticed after both. Larger: a later kill by a person would be blamed on memory.
_OOM_LOOK_S = 5.0


def usable_cpu_count() -> int:
    """Return the number of CPUs that this process may use, at least 1.

    It is the smallest of `os.cpu_count()`, the affinity mask and the cgroup quota.
    """
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cgroup_cpu_quota()
    if quota is not None:
        counts.append(int(quota + 0.5))
    return max(1, min(counts))


# Settings with which OpenMP binds threads to CPUs. A process that loads OpenMP is then bound to the
# first CPU.
OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def openmp_binding() -> str:
    """Return the OpenMP setting that left this process only one of several CPUs, as "name=value".

    Returns "" if there is none. If such a variable is set and something else has bound the process
    to one CPU, the variable is returned as well.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1:
        return ""
    others = [os.cpu_count() or 1, int((cgroup_cpu_quota() or 2) + 0.5)]
    others += [_count_of(text) for path in _cgroup_directories("cpuset") if (text := _cpuset(path))]
    if min(others) < 2:
        return ""
    values = {name: os.environ.get(name, "").strip() for name in OPENMP_BINDING}
    # "false" overrides the other variables, except KMP_AFFINITY of Intel's and LLVM's OpenMP.
    if values["OMP_PROC_BIND"].lower() == "false":
        values = {"KMP_AFFINITY": values["KMP_AFFINITY"]}
    if {"none", "disabled"} & set(values["KMP_AFFINITY"].lower().split(",")):
        del values["KMP_AFFINITY"]
    return next((f"{name}={value}" for name, value in values.items() if value), "")


def openmp_advice() -> str:
    """Return the advice for users about `openmp_binding`; "" if there is none."""
    binding = openmp_binding()
    name = binding.partition("=")[0]
    text = (
        f"This process may use 1 of {os.cpu_count()} CPUs, and so may its workers. {binding} is "
        "set, with which OpenMP binds a process to one CPU when it imports a library such as "
        f"torch. Unset {name}, unless this is intended."
    )
    return text * bool(binding)


def _cpuset(path: str) -> str:
    return (
        read_file(f"{path}/cpuset.cpus.effective") or read_file(f"{path}/cpuset.effective_cpus")
    ).strip()


def _count_of(cpus: str) -> int:
    """Return the number of CPUs in a CPU list of the kernel: "0-3,8" has 5."""
    ranges = [part.partition("-") for part in cpus.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def cgroup_cpu_quota() -> float | None:
    """Return the CPU quota of this process's cgroups (v2 and v1) in CPUs; None without a quota."""
    quotas = []
    for path in _cgroup_directories("cpu"):
        for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
            # the file has "max", or there is none of these files
            with contextlib.suppress(ValueError):
                quota, period = map(
                    int, " ".join(read_file(f"{path}/{name}") for name in names).split()
                )
                if quota > 0:
                    quotas.append(quota / period)
    return min(quotas, default=None)


def available_memory_bytes() -> int:
    """Return the bytes that can be allocated now without waking the OOM killer.

    It is the smallest of the machine's free memory and the free memory of each cgroup.
    """
    # On systems other than Linux the kernel does not report this. 4 GiB is a careful assumption.
    free = [_counts("/proc/meminfo", "MemAvailable")["MemAvailable"] * 1024 or _UNTOLD_BYTES]
    for path in _cgroup_directories("memory"):
        limit = _first_number(f"{path}/memory.max", f"{path}/memory.limit_in_bytes")
        used = _first_number(f"{path}/memory.current", f"{path}/memory.usage_in_bytes")
        # The file memory.stat is slow to read, and can only raise the result. So it is read only if
        # `limit - used` is the smallest value so far.
        if limit is not None and used is not None and limit - used < min(free):
            counts = _counts(f"{path}/memory.stat", "inactive_file", "total_inactive_file")
            free.append(
                max(0, limit - used + max(counts["inactive_file"], counts["total_inactive_file"]))
            )
    return int(fault_points.setting("available_bytes", min(free)))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 2**62 if it cannot be read."""
    words = read_file("/proc/self/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 1 << 62


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other process."""
    counts = _counts(f"/proc/{pid}/smaps_rollup", "Private_Clean", "Private_Dirty")
    return 1024 * (counts["Private_Clean"] + counts["Private_Dirty"])


def oom_kill_count() -> int:
    """Return the number of processes that the kernel has killed for lack of memory.

    It is the sum of the counts of the cgroups (v2, v1) and of the machine.
    """
    paths = [
        f"{path}/memory.{file}"
        for path in _cgroup_directories("memory")
        for file in ("events", "oom_control")
    ]
    return sum(_counts(path, "oom_kill")["oom_kill"] for path in ("/proc/vmstat", *paths))


class OomWatch:
    """Detects that the kernel has lately killed a process for lack of memory.

    A kill is recent for 5 to 10 seconds, if `look` is called at least every 5 seconds. Memory of a
    killed process may take seconds to be freed, and its parent is notified only then.
    """

    def __init__(self) -> None:
        self._earlier = self._latest = oom_kill_count()
        self._looked_s = clock.monotonic_s()

    def look(self) -> None:
        """Read the kernel's count, if the last one is old."""
        now_s = clock.monotonic_s()
        if now_s - self._looked_s >= _OOM_LOOK_S:
            self._earlier, self._latest, self._looked_s = self._latest, oom_kill_count(), now_s

    def has_killed(self) -> bool:
        """Return True if the kernel has killed a process in the last seconds."""
        return oom_kill_count() > self._earlier


def process_cpu_s(pid: int) -> float:
    """Return the CPU time that the process has used so far, in seconds; 0.0 if it is gone."""
    # the process is gone, or the system has no such clock
    with contextlib.suppress(OSError, AttributeError):
        return clock.cpu_ns_of(pid) / 1e9
    return 0.0


def queued_s(task: int | str) -> float:
    """Return the seconds for which a thread was runnable but had no CPU. They show a busy machine.

    Args:
        task: a pid, for the main thread of that process, or "self/task/TID".
    """
    words = read_file(f"/proc/{task}/schedstat").split()
    return int(words[1]) / 1e9 if words else 0.0


def process_times(pid: int) -> dict[str, Any]:
    """Return the CPU time and the waiting time of a process so far, in seconds by name."""
    return {"cpu_s": process_cpu_s(pid), "queued_s": queued_s(pid)}


def machine_cpu_s() -> float:
    """Return the CPU time that all processes of the machine have used so far, in seconds."""
    # Fields of the first line after "cpu": user, nice, system, idle, iowait, irq, softirq, steal.
    ticks = [int(field) for field in read_file("/proc/stat").split(maxsplit=9)[1:9]]
    return sum(ticks[:3] + ticks[5:]) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


# Advice for the case that a process could not be started.
START_ADVICE = (
    "the machine may be out of memory, processes or file descriptors. Use fewer workers, "
    "or raise the limit (ulimit -u, ulimit -n, or the container's pids limit)"
)


def _cgroup_directories(controller: str) -> Iterator[str]:
    """Yield the directories of this process's cgroup for a controller, innermost first.

    The last one is the root of the mount.
    """
    lines = read_file("/proc/self/cgroup").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = f"{_CGROUP}/{controllers}".rstrip("/")
        if not os.path.exists(root):
            root = f"{_CGROUP}/{controller}"
        inner = os.path.join(root, path.lstrip("/")).rstrip("/")
        while inner.startswith(root):
            if os.path.exists(inner):
                yield inner
            inner = os.path.dirname(inner)
    if not lines:
        yield _CGROUP


def _counts(path: str, *names: str) -> Counter[str]:
    """Return numbers of a file that has a name and a number in each line; 0 for absent names.

    Names that begin with one of `names` are included. Other lines, often hundreds, are not split.
    """
    lines = [line.split() for line in read_file(path).splitlines() if line.startswith(names)]
    return Counter(
        {
            words[0].rstrip(":"): int(words[1])
            for words in lines
            if len(words) > 1 and words[1].isdigit()
        }
    )


def _first_number(*paths: str) -> int | None:
    """Return the number in the first of these files that has one, or None."""
    return next((found for path in paths if (found := _number(path)) is not None), None)


def _number(path: str) -> int | None:
    text = read_file(path).strip()
    return int(text) if text.isdigit() else None  # None: the file is absent, or has "max"


def read_file(path: str) -> str:
    """Return the text of a file of the kernel; "" if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb", 0) as file:
        return file.read().decode(errors="replace")
    return ""
