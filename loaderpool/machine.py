"""What this machine is and allows; the only module with Linux-only calls.

Each has the fallback the design names: POSIX shared memory unlinked at birth for `memfd_create`, a look at the
process table for `pidfd_open`, `getppid` for `PR_SET_PDEATHSIG`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator

from loaderpool import fault_points
from loaderpool.errors import MemoryLimitError

__all__ = [
    "available_memory_bytes",
    "cgroup_cpu_quota",
    "cgroup_memory_limit",
    "cgroup_pids",
    "create_memory_file",
    "descriptor_limits",
    "die_with_parent",
    "flush_standard_streams",
    "is_stopped",
    "map_pages",
    "oom_kill_count",
    "open_pidfd",
    "pipe_capacity_bytes",
    "process_cpu_s",
    "raise_descriptor_limit",
    "raise_oom_score",
    "reserve",
    "restore_malloc_thresholds",
    "return_pages",
    "start_time",
    "thread_ids",
    "usable_cpu_count",
]

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_F_GETPIPE_SZ = 1032
_MADV_POPULATE_WRITE = 23
_FALLOC_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GLIBC_DEFAULT_TRIM = 128 * 1024
_CGROUP = "/sys/fs/cgroup"


def create_memory_file(name: str) -> int:
    """Make an anonymous shared memory file that vanishes with its last holder; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return above_standard(os.memfd_create(f"loaderpool-{name}", os.MFD_CLOEXEC))
    from multiprocessing import shared_memory  # the fallback: named for an instant, unlinked at birth

    block = shared_memory.SharedMemory(create=True, size=1)
    descriptor = os.dup(block._fd)  # type: ignore[attr-defined]
    block.close()
    block.unlink()
    return above_standard(descriptor)


def above_standard(descriptor: int) -> int:
    """The descriptor, or in its place a copy that is none of the standard streams'.

    In a daemon these may be closed, so that a new descriptor gets their number; whoever then opens or replaces them, or
    writes to them, as C libraries do, would hit what is ours.
    """
    if descriptor > 2:
        return descriptor
    import fcntl

    try:
        copy: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        return copy
    finally:
        os.close(descriptor)


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Give a range of a memory file its pages now, so that no later write can fail for lack of them.

    Raises:
        MemoryLimitError: the machine refused; set a smaller `memory_limit`.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        fault_points.reach("machine.reserve")
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise MemoryLimitError(
            f"the machine refused {nbytes:,} bytes of shared memory ({error.strerror}); set a smaller memory_limit"
        ) from error


def map_pages(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Enter a range's pages into this process's page table at once, instead of by a fault for each. Best effort."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
    except (OSError, AttributeError, ValueError):  # Linux before 5.14, or no Linux
        pass


def return_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Give the pages of a range back to the machine; the range reads as zeros afterwards. Best effort."""
    if not LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(
        ctypes.c_int(descriptor),
        ctypes.c_int(_FALLOC_KEEP_SIZE_PUNCH_HOLE),
        ctypes.c_int64(offset),
        ctypes.c_int64(nbytes),
    )


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, or None where the machine has no such thing."""
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            return None
    return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's forking *thread* ends; for single-threaded parents only."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call took effect
        os._exit(1)


def oom_kill_count() -> int:
    """How many processes the kernel has killed for memory, as far as this one can see; it only ever grows.

    The sum over the cgroup's own counter (v2 `memory.events`, v1 `memory.oom_control`) and the machine's
    (`/proc/vmstat`, Linux 4.13 and later); 0 where none can be read.
    """
    found = [_count_in(f"{_CGROUP}{path}/memory.events", "oom_kill") for path in {"", _cgroup_path("")}]
    found.append(_count_in(f"{_CGROUP}/memory{_cgroup_path('memory')}/memory.oom_control", "oom_kill"))
    found.append(_count_in(f"{_CGROUP}/memory/memory.oom_control", "oom_kill"))
    found.append(_count_in("/proc/vmstat", "oom_kill"))
    return sum(found)


def _cgroup_path(controller: str) -> str:
    """This process's cgroup below the controller's root; "" names the unified (v2) hierarchy."""
    try:
        with open("/proc/self/cgroup") as lines:
            for line in lines:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if controller in controllers.split(","):
                    return path if path != "/" else ""
    except (OSError, ValueError):
        pass
    return ""


def _count_in(path: str, name: str) -> int:
    try:
        with open(path) as lines:
            for line in lines:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        pass
    return 0


def start_time(pid: int) -> int:
    """When a process began, in a unit of the machine's, which tells it from a later one of the same pid; 0: it is gone.

    A zombie is gone; 0 also where the machine does not say.
    """
    state, began = _stat_of(pid)
    return 0 if state in ("", "Z", "X") else began


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (SIGSTOP), as far as the machine says."""
    return _stat_of(pid)[0] == "T"


def _stat_of(pid: int) -> tuple[str, int]:
    """State and start time of a process (proc(5), fields 3 and 22); ("", 0) where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def flush_standard_streams() -> None:
    """Write out what was printed, as far as anybody takes it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or its reader is gone
            pass


def descriptor_limits() -> tuple[int, int]:
    """How many descriptors this process may have, and how many it may allow itself."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as it may allow itself. Best effort."""
    try:
        _, hard = descriptor_limits()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


def raise_oom_score() -> None:
    """Ask the kernel's OOM killer to take this process before the trainer. Best effort."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass


def pipe_capacity_bytes(descriptor: int) -> int:
    """How many bytes the pipe holds (one page where the user's pipe budget is spent)."""
    if not LINUX:
        return 65536
    import fcntl

    return fcntl.fcntl(descriptor, _F_GETPIPE_SZ)


def process_cpu_s(pid: int) -> float:
    """CPU time the process has used so far in seconds; 0.0 where it is gone or cannot be read."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def restore_malloc_thresholds() -> bool:
    """Put glibc's mmap and trim thresholds back to where large NumPy arrays are cheap.

    The first `from_generator` of a process sets both to 128 KiB for good (TensorFlow's answer to its issue 65675);
    large arrays then cost a page fault per page each time. Returns False where there is no glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return False
    largest_dynamic = 32 * 1024 * 1024  # glibc's own upper bound for the sliding threshold
    return bool(
        libc.mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(largest_dynamic))
        and libc.mallopt(ctypes.c_int(_M_TRIM_THRESHOLD), ctypes.c_int(2 * largest_dynamic))
    )


def thread_ids() -> frozenset[int]:
    """Ids of this process's threads beside the main one, those of C libraries too where the kernel lists them."""
    try:
        found = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        found = set()
    if os.getpid() in found:
        return frozenset(found - {os.getpid()})
    import threading  # no /proc, or another PID namespace's: Python's own threads at least

    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return frozenset(thread.native_id or 0 for thread in others)


def cgroup_cpu_quota() -> float | None:
    """CPUs' worth of time that this process's cgroups grant (v2 and v1), or None without a quota."""
    quotas = [quota for quota in _cgroup_quotas() if quota is not None]
    return min(quotas) if quotas else None


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


def _cgroup_directories(controller: str) -> Iterable[str]:
    """The directories of this process's cgroup for a controller, innermost first, up to the mount's root."""
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


def usable_cpu_count() -> int:
    """CPUs this process may really use, at least 1: the smallest of `os.cpu_count()`, affinity mask, cgroup quota."""
    counts = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    quota = cgroup_cpu_quota()
    if quota is not None:
        counts.append(int(quota + 0.5))
    return max(1, min(counts))


def available_memory_bytes() -> int:
    """Bytes that can be taken now without waking the OOM killer: the machine's and its cgroups', the smallest."""
    free = [_machine_available_bytes()]
    for directory, limit in _memory_limits():
        used = _read_int(f"{directory}/memory.current") or _read_int(f"{directory}/memory.usage_in_bytes")
        if used is not None:
            free.append(max(0, limit - used + _reclaimable_bytes(directory)))
    return min(free)


def cgroup_memory_limit() -> int | None:
    """Bytes that this process's cgroups allow (v2 and v1), the smallest; None without a limit."""
    return min((limit for _, limit in _memory_limits()), default=None)


def cgroup_pids() -> tuple[int, int] | None:
    """The cgroups' limit on processes and threads and how many there are, where fewest are left; None: no limit."""
    found = []
    for directory in _cgroup_directories("pids"):
        limit, used = _read_int(f"{directory}/pids.max"), _read_int(f"{directory}/pids.current")
        if limit is not None and used is not None:
            found.append((limit, used))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


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
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def _reclaimable_bytes(directory: str) -> int:
    try:
        for line in _read(f"{directory}/memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _read_int(path: str) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):  # absent, or "max"
        return None
