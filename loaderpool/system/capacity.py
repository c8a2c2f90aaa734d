"""How much this process may use, and what is used: CPUs, memory, processes; by the machine, the affinity, cgroups.

What the kernel does not tell counts as 0, or as no limit.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

from loaderpool.system import clock, fault_points

_CGROUP = "/sys/fs/cgroup"
_UNTOLD_BYTES = 4 << 30


def usable_cpu_count() -> int:
    """CPUs this process may really use, at least 1: the smallest of `os.cpu_count()`, affinity mask, cgroup quota."""
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cgroup_cpu_quota()
    if quota is not None:
        counts.append(int(quota + 0.5))
    return max(1, min(counts))


# Settings by which OpenMP binds threads to CPUs: a process that loads it is bound to the first one.
OPENMP_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def openmp_binding() -> str:
    """Return the setting, as "name=value", by which OpenMP has left this process one CPU of several; "": none has.

    A process that something else has bound to a CPU looks alike, if such a variable is set, too.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1:
        return ""
    others = [os.cpu_count() or 1, int((cgroup_cpu_quota() or 2) + 0.5)]
    others += [_count_of(text) for path in _cgroup_directories("cpuset") if (text := _cpuset(path))]
    if min(others) < 2:
        return ""
    values = {name: os.environ.get(name, "").strip() for name in OPENMP_BINDING}
    if (
        values["OMP_PROC_BIND"].lower() == "false"
    ):  # which the others do not undo, but that of Intel's and LLVM's
        values = {"KMP_AFFINITY": values["KMP_AFFINITY"]}
    if {"none", "disabled"} & set(values["KMP_AFFINITY"].lower().split(",")):
        del values["KMP_AFFINITY"]
    return next((f"{name}={value}" for name, value in values.items() if value), "")


def openmp_advice() -> str:
    """Return what users are told of `openmp_binding`; "": nothing."""
    binding = openmp_binding()
    name = binding.partition("=")[0]
    text = (
        f"This process may use 1 of {os.cpu_count()} CPUs, and so may its workers. {binding} is set, with which OpenMP "
        f"binds a process to one CPU when it imports a library such as torch. Unset {name}, unless this is intended."
    )
    return text * bool(binding)


def _cpuset(path: str) -> str:
    return (
        read_file(f"{path}/cpuset.cpus.effective") or read_file(f"{path}/cpuset.effective_cpus")
    ).strip()


def _count_of(cpus: str) -> int:
    """Return the number of CPUs in a list of the kernel: "0-3,8" has 5."""
    ranges = [part.partition("-") for part in cpus.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def cgroup_cpu_quota() -> float | None:
    """CPUs' worth of time that this process's cgroups grant (v2 and v1), or None without a quota."""
    quotas = []
    for path in _cgroup_directories("cpu"):
        for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
            with contextlib.suppress(ValueError):  # "max", or none of these files
                quota, period = map(
                    int, " ".join(read_file(f"{path}/{name}") for name in names).split()
                )
                if quota > 0:
                    quotas.append(quota / period)
    return min(quotas, default=None)


def available_memory_bytes() -> int:
    """Bytes that can be taken now without waking the OOM killer: the machine's and its cgroups', the smallest."""
    # Elsewhere than on Linux the kernel does not tell, and little enough is taken for free.
    free = [_counts("/proc/meminfo")["MemAvailable"] * 1024 or _UNTOLD_BYTES]
    for path in _cgroup_directories("memory"):
        limit = _number(f"{path}/memory.max") or _number(f"{path}/memory.limit_in_bytes")
        used = _number(f"{path}/memory.current") or _number(f"{path}/memory.usage_in_bytes")
        if limit is not None and used is not None:
            counts = _counts(f"{path}/memory.stat")
            free.append(
                max(0, limit - used + max(counts["inactive_file"], counts["total_inactive_file"]))
            )
    return int(fault_points.setting("available_bytes", min(free)))


def resident_bytes() -> int:
    """Return the bytes of memory that this process has now; more than any where it cannot be read."""
    words = read_file("/proc/self/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 1 << 62


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other."""
    counts = _counts(f"/proc/{pid}/smaps_rollup")
    return 1024 * (counts["Private_Clean"] + counts["Private_Dirty"])


def oom_kill_count() -> int:
    """Return how many processes the kernel has killed for memory, as cgroups (v2, v1) and the machine count."""
    paths = [
        f"{path}/memory.{file}"
        for path in _cgroup_directories("memory")
        for file in ("events", "oom_control")
    ]
    return sum(_counts(path)["oom_kill"] for path in ("/proc/vmstat", *paths))


def process_cpu_s(pid: int) -> float:
    """Return the CPU time the process has used so far in seconds; 0.0 where it is gone."""
    with contextlib.suppress(OSError, AttributeError):  # a system may have no such clock
        return clock.cpu_ns_of(pid) / 1e9
    return 0.0


def queued_s(task: int | str) -> float:
    """How long a process' main thread (or "self/task/TID") was runnable without a CPU: a busy machine, not waiting."""
    words = read_file(f"/proc/{task}/schedstat").split()
    return int(words[1]) / 1e9 if words else 0.0


def machine_cpu_s() -> float:
    """Return the CPU time that all processes of the machine have used so far."""
    # In the first line, after "cpu": user, nice, system, idle, iowait, irq, softirq, steal.
    ticks = [int(field) for field in read_file("/proc/stat").split(maxsplit=9)[1:9]]
    return sum(ticks[:3] + ticks[5:]) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


START_ADVICE = (  # where a process could not be started
    "the machine may be out of memory, processes or file descriptors. Use fewer workers, or raise the limit "
    "(ulimit -u, ulimit -n, or the container's pids limit)"
)


def _cgroup_directories(controller: str) -> Iterator[str]:
    """Return the directories of this process's cgroup for a controller, innermost first, up to the mount's root."""
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


def _counts(path: str) -> Counter[str]:
    """The numbers in a file of lines that each have a name and one; 0 of all other names."""
    lines = [line.split() for line in read_file(path).splitlines()]
    return Counter(
        {
            words[0].rstrip(":"): int(words[1])
            for words in lines
            if len(words) > 1 and words[1].isdigit()
        }
    )


def _number(path: str) -> int | None:
    text = read_file(path).strip()
    return int(text) if text.isdigit() else None  # absent, or "max"


def read_file(path: str) -> str:
    """Return a file of the kernel's; "": it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb", 0) as file:
        return file.read().decode(errors="replace")
    return ""
