"""The machine's limits on this process, read and not judged."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil

from loaderpool.system import capacity, machine
from loaderpool.tools.tuning.cpus import CpuBudget, cpu_budget


@dataclasses.dataclass(frozen=True)
class Limits:
    """Numbers of the kernel; None: unlimited, or not to be read here."""

    cpus: CpuBudget
    memory_free: int  # bytes that can be taken without waking the OOM killer
    memory_cgroup: int | None  # the cgroups' smallest limit in bytes
    descriptors_open: int
    descriptors_soft: int | None
    descriptors_hard: int | None
    tasks_of_user: int  # processes and threads, which RLIMIT_NPROC counts alike
    processes_soft: int | None
    processes_hard: int | None
    is_root: bool  # whom RLIMIT_NPROC does not bind
    pids: tuple[int, int] | None  # the cgroups' tightest limit, and how many there are
    memory_file: str | None  # why an anonymous memory file cannot be made; None: it can
    has_memfd: bool  # whether that file needs no /dev/shm
    has_pidfd: bool
    shm_bytes: int | None  # size of /dev/shm; None: there is none
    pipe_bytes: int
    pipe_pages_soft: int | None  # pages that a user's pipes may hold before new ones shrink to one; 0: no limit


def read_limits() -> Limits:
    """The limits as they are now."""
    descriptors = machine.descriptor_limits()
    processes = resource.getrlimit(resource.RLIMIT_NPROC)
    trouble, has_memfd = _try_memory_file()
    return Limits(
        cpus=cpu_budget(),
        memory_free=capacity.available_memory_bytes(),
        memory_cgroup=capacity.cgroup_memory_limit(),
        descriptors_open=_count("/proc/self/fd"),
        descriptors_soft=_limit(descriptors[0]),
        descriptors_hard=_limit(descriptors[1]),
        tasks_of_user=_tasks_of_user(os.getuid()),
        processes_soft=_limit(processes[0]),
        processes_hard=_limit(processes[1]),
        is_root=os.geteuid() == 0,
        pids=capacity.cgroup_pids(),
        memory_file=trouble,
        has_memfd=has_memfd,
        has_pidfd=_try_pidfd(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        pipe_bytes=_pipe_bytes(),
        pipe_pages_soft=_read_number("/proc/sys/fs/pipe-user-pages-soft"),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _count(directory: str) -> int:
    try:
        return len(os.listdir(directory))
    except OSError:
        return 0


def _tasks_of_user(uid: int) -> int:
    tasks = 0
    for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                    fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
                if int(fields["Uid"].split()[0]) == uid:
                    tasks += int(fields["Threads"])
            except (OSError, KeyError, ValueError):  # it has ended
                continue
    return tasks


def _try_memory_file() -> tuple[str | None, bool]:
    try:
        descriptor = machine.create_memory_file("doctor")
    except OSError as error:
        return str(error), False
    try:
        machine.reserve(descriptor, 0, 1 << 20)
        return None, "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    except Exception as error:
        return str(error), False
    finally:
        os.close(descriptor)


def _try_pidfd() -> bool:
    descriptor = machine.open_pidfd(os.getpid())
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _pipe_bytes() -> int:
    ends = os.pipe()
    try:
        return machine.pipe_capacity_bytes(ends[0])
    finally:
        for end in ends:
            os.close(end)


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
