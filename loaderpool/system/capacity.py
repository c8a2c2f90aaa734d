"""How much this process may use: CPUs, memory and processes, by the machine, the affinity mask and the cgroups."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator

_CGROUP = "/sys/fs/cgroup"


def usable_cpu_count() -> int:
    """CPUs this process may really use, at least 1: the smallest of `os.cpu_count()`, affinity mask, cgroup quota."""
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cgroup_cpu_quota()
    if quota is not None:
        counts.append(int(quota + 0.5))
    return max(1, min(counts))


def cgroup_cpu_quota() -> float | None:
    """CPUs' worth of time that this process's cgroups grant (v2 and v1), or None without a quota."""
    quotas = [quota for quota in _cgroup_quotas() if quota is not None]
    return min(quotas) if quotas else None


def available_memory_bytes() -> int:
    """Bytes that can be taken now without waking the OOM killer: the machine's and its cgroups', the smallest."""
    free = [_machine_available_bytes()]
    for directory, limit in _memory_limits():
        used = _read_int(f"{directory}/memory.current") or _read_int(f"{directory}/memory.usage_in_bytes")
        if used is not None:
            free.append(max(0, limit - used + _reclaimable_bytes(directory)))
    return min(free)


def resident_bytes() -> int:
    """Return the bytes of memory that this process has now; more than any where it cannot be read."""
    try:
        return int(_read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 1 << 62


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other; 0 where it cannot be read."""
    try:
        lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    except (OSError, ValueError, IndexError):
        return 0


def cgroup_memory_limit() -> int | None:
    """Return the bytes that this process's cgroups allow (v2 and v1), the smallest; None without a limit."""
    return min((limit for _, limit in _memory_limits()), default=None)


def cgroup_pids() -> tuple[int, int] | None:
    """The cgroups' limit on processes and threads and how many there are, where fewest are left; None: no limit."""
    found = []
    for directory in _cgroup_directories("pids"):
        limit, used = _read_int(f"{directory}/pids.max"), _read_int(f"{directory}/pids.current")
        if limit is not None and used is not None:
            found.append((limit, used))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def cgroup_throttled_ns() -> int:
    """Return how long the CPU limit of this process's cgroups has held processes back so far; 0: there is none."""
    found = [0]
    for directory in _cgroup_directories("cpu"):
        found.append(1000 * (_count_in(f"{directory}/cpu.stat", "throttled_usec") or 0))
        found.append(_count_in(f"{directory}/cpu.stat", "throttled_time") or 0)  # cgroup v1 has ns
    return max(found)


def oom_kill_count() -> int:
    """Return how many processes the kernel has killed for memory, as far as this one can see; it only ever grows.

    The sum over the cgroups' own counters (v2 `memory.events`, v1 `memory.oom_control`) and the machine's
    (`/proc/vmstat`, Linux 4.13 and later); 0 where none can be read.
    """
    found = [_count_in("/proc/vmstat", "oom_kill")]
    for directory in _cgroup_directories("memory"):
        found += [_count_in(f"{directory}/{name}", "oom_kill") for name in ("memory.events", "memory.oom_control")]
    return sum(filter(None, found))


def start_advice(error: OSError, no_descriptors: str) -> str:
    """Return what to change where a process could not be started.

    Args:
        error: of the attempt.
        no_descriptors: said where that was it.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{no_descriptors}: use fewer workers, or raise the limit (ulimit -n)"
    if error.errno in (errno.ENOENT, errno.EACCES):
        return f"the Python interpreter, {sys.executable}, cannot be run; was its environment removed?"
    return (
        f"the machine is out of memory or of processes ({error.strerror}; ulimit -u, or the container's pids limit): "
        "use fewer workers, or raise the limit"
    )


def _cgroup_quotas() -> Iterable[float | None]:
    for directory in _cgroup_directories("cpu"):
        try:
            if os.path.exists(f"{directory}/cpu.max"):
                quota, period = _read(f"{directory}/cpu.max").split()[:2]
                yield None if quota == "max" else int(quota) / int(period)
            elif os.path.exists(f"{directory}/cpu.cfs_quota_us"):
                quota_us = int(_read(f"{directory}/cpu.cfs_quota_us"))
                period_us = int(_read(f"{directory}/cpu.cfs_period_us"))
                yield quota_us / period_us if quota_us > 0 else None
        except (OSError, ValueError):
            continue


def _memory_limits() -> Iterator[tuple[str, int]]:
    """The cgroup directories that have a limit in bytes, and the limit."""
    for directory in _cgroup_directories("memory"):
        limit = _read_int(f"{directory}/memory.max") or _read_int(f"{directory}/memory.limit_in_bytes")
        if limit is not None and limit < 1 << 60:
            yield directory, limit


def _machine_available_bytes() -> int:
    try:
        for line in _read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Of macOS only all is known, of which half stands for what is free; and of Windows, as far as Python goes, nothing.
    for pages, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // share
    return 4 << 30


def _reclaimable_bytes(directory: str) -> int:
    counts = (_count_in(f"{directory}/memory.stat", name) for name in ("inactive_file", "total_inactive_file"))
    return max(filter(None, counts), default=0)


def _cgroup_directories(controller: str) -> Iterable[str]:
    """Return the directories of this process's cgroup for a controller, innermost first, up to the mount's root."""
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUP
        elif controller in controllers.split(","):
            root = f"{_CGROUP}/{controllers}"
            if not os.path.exists(root):
                root = f"{_CGROUP}/{controller}"
        else:
            continue
        inner = os.path.join(root, path.lstrip("/")).rstrip("/")
        while True:
            if os.path.exists(inner):
                yield inner
            if not inner.startswith(f"{root}/"):
                break
            inner = os.path.dirname(inner)
    if not lines:
        yield _CGROUP


def _count_in(path: str, name: str) -> int | None:
    """Return the number behind a name in a file of such lines; None where there is none."""
    try:
        for line in _read(path).splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def _read_int(path: str) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
