"""Verdicts on the machine's limits: pure, from the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from loaderpool.system.readable import readable_bytes
from loaderpool.tools.doctor.checks import Check, Status
from loaderpool.tools.doctor.limits import Limits

_GROUP = "machine"
# Of a supervisor and a worker with NumPy: below it they hardly fit. And what leaves room for a small loader's batches.
_LEAST_MEMORY, _GOOD_MEMORY = 128 << 20, 1 << 30
# What a pool holds (counted, rounded up): the trainer's end of it, and the supervisor's with its share for each worker.
# Where fewer workers find room, fewer run.
_TRAINER_DESCRIPTORS, _SUPERVISOR_DESCRIPTORS, _WORKER_DESCRIPTORS = 12, 14, 5
_SPARE_DESCRIPTORS = 128  # for files of the user's own
_SPARE_TASKS = 8  # threads that a library of the user's may start besides
_GOOD_PIPE = 1 << 14  # 256 messages; below it a pool works, with more wake-ups


def machine_checks(limits: Limits) -> list[Check]:
    """A check for each limit."""
    return [
        *_cpu_checks(limits),
        *_memory_checks(limits),
        *_descriptor_checks(limits),
        *_process_checks(limits),
        *_kernel_checks(limits),
    ]


def _ok(name: str, found: str) -> Check:
    return Check(_GROUP, name, "ok", found)


def _warn(name: str, found: str, change: str) -> Check:
    return Check(_GROUP, name, "warn", found, change)


def _fail(name: str, found: str, change: str) -> Check:
    return Check(_GROUP, name, "fail", found, change)


def _cpu_checks(limits: Limits) -> Iterator[Check]:
    cpus = limits.cpus
    if cpus.machine > 1:
        yield _ok("CPUs: os.cpu_count()", str(cpus.machine))
    else:
        yield _warn(
            "CPUs: os.cpu_count()",
            "1",
            "workers overlap waiting (files, network) and training, but computing gets no faster",
        )
    if cpus.affinity is None or cpus.affinity >= cpus.machine:
        yield _ok("CPUs: affinity mask", "no such mask here" if cpus.affinity is None else str(cpus.affinity))
    else:
        yield _warn(
            "CPUs: affinity mask",
            f"{cpus.affinity} of {cpus.machine}",
            "if more were meant: taskset, numactl, or the batch system's CPUs per task",
        )
    quota = "none" if cpus.quota is None else f"{cpus.quota:g}"
    if cpus.quota is None or cpus.quota >= cpus.machine:
        yield _ok("CPUs: cgroup quota", quota)
    else:
        yield _warn(
            "CPUs: cgroup quota",
            f"{quota} of {cpus.machine}",
            "if more were meant: the container's CPU limit (docker --cpus, Kubernetes limits.cpu)",
        )
    yield _ok('workers="auto"', f"{cpus.usable}, decided by {cpus.decided_by}")


def _memory_checks(limits: Limits) -> Iterator[Check]:
    free = limits.memory_free
    found = readable_bytes(free)
    if free >= _GOOD_MEMORY:
        yield _ok("memory free", found)
    else:
        status: Status = "warn" if free >= _LEAST_MEMORY else "fail"
        yield Check(
            _GROUP, "memory free", status, found, "end other programs, or set fewer workers and a smaller Limits.memory"
        )
    limit = limits.memory_cgroup
    if limit is None:
        yield _ok("memory: cgroup limit", "none")
    elif limit >= _GOOD_MEMORY:
        yield _ok("memory: cgroup limit", readable_bytes(limit))
    else:
        yield _warn(
            "memory: cgroup limit",
            readable_bytes(limit),
            "give the container more (docker --memory, Kubernetes limits.memory): past it the kernel kills processes",
        )


def _descriptor_checks(limits: Limits) -> Iterator[Check]:
    soft, hard, workers = limits.descriptors_soft, limits.descriptors_hard, limits.cpus.usable
    found = f"{_number(soft)} soft, {_number(hard)} hard, {limits.descriptors_open} open here"
    left = None if soft is None else soft - limits.descriptors_open
    needed = _SUPERVISOR_DESCRIPTORS + _WORKER_DESCRIPTORS * workers
    if left is not None and left < _TRAINER_DESCRIPTORS:
        yield _fail("file descriptors", found, _raise_descriptors(needed, limits))
    elif hard is not None and hard < needed:
        fitting = (hard - _SUPERVISOR_DESCRIPTORS) // _WORKER_DESCRIPTORS
        change = f"{workers} workers need {needed}: {_raise_descriptors(needed, limits)}, or set workers={fitting}"
        yield _warn("file descriptors", found, change) if fitting > 0 else _fail("file descriptors", found, change)
    elif left is not None and left < _SPARE_DESCRIPTORS:
        change = f"files of your own may not find room: {_raise_descriptors(_SPARE_DESCRIPTORS, limits)}"
        yield _warn("file descriptors", found, change)
    else:
        yield _ok("file descriptors", found)


def _process_checks(limits: Limits) -> Iterator[Check]:
    workers = limits.cpus.usable
    needed = workers + 1 + _SPARE_TASKS
    soft = limits.processes_soft
    found = f"{_number(soft)} soft, {_number(limits.processes_hard)} hard, {limits.tasks_of_user} in use by this user"
    if soft is None or soft - limits.tasks_of_user >= needed:
        yield _ok("processes", found)
    elif limits.is_root:
        yield _ok("processes", f"{found} (does not bind root)")
    else:
        yield _fail(
            "processes",
            found,
            (
                f"{workers} workers need {needed} more: ulimit -u {_round(limits.tasks_of_user + needed)}, "
                "or fewer workers"
            ),
        )
    if limits.pids is None:
        yield _ok("processes: cgroup limit", "none")
        return
    most, used = limits.pids
    found = f"{most:,}, {used:,} in use"
    if most - used >= needed:
        yield _ok("processes: cgroup limit", found)
    else:
        yield _fail(
            "processes: cgroup limit",
            found,
            (
                f"{workers} workers need {needed} more: docker --pids-limit, Kubernetes podPidsLimit, systemd "
                "TasksMax; or fewer workers"
            ),
        )


def _kernel_checks(limits: Limits) -> Iterator[Check]:
    if limits.memory_file is not None:
        yield _fail(
            "memfd",
            limits.memory_file,
            "batches need shared memory: allow memfd_create in the sandbox's seccomp profile, and free some memory",
        )
    elif not limits.has_memfd:
        yield _warn("memfd", "none: POSIX shared memory instead", "/dev/shm must then hold all buffered batches")
    else:
        yield _ok("memfd", "works")
    if limits.has_pidfd:
        yield _ok("pidfd", "works")
    else:
        yield _warn(
            "pidfd",
            "none",
            "deaths are seen later, by looks at the process table: Linux 5.3 or later, pidfd_open allowed by seccomp",
        )
    shm = "none" if limits.shm_bytes is None else readable_bytes(limits.shm_bytes)
    if limits.has_memfd:
        yield _ok("/dev/shm", f"{shm} (not needed)")
    elif limits.shm_bytes is None:
        yield _fail("/dev/shm", shm, "without memfd it is needed: mount a tmpfs there")
    else:
        yield _ok("/dev/shm", shm)
    if limits.pipe_bytes >= _GOOD_PIPE:
        yield _ok("pipe capacity", readable_bytes(limits.pipe_bytes))
    else:
        yield _warn(
            "pipe capacity",
            readable_bytes(limits.pipe_bytes),
            (
                "this user's pipe budget is spent: it works, with more wake-ups; end what holds pipes, or raise "
                "fs.pipe-user-pages-soft"
            ),
        )
    pages = limits.pipe_pages_soft
    shown = "not to be read" if pages is None else "no limit" if pages == 0 else f"{pages:,} pages"
    yield _ok("pipe-user-pages-soft", shown)


def _number(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _raise_descriptors(least: int, limits: Limits) -> str:
    wanted, hard = _round(least), limits.descriptors_hard
    if hard is None or hard >= wanted:
        return f"ulimit -n {wanted}"
    return f"raise the hard limit to {wanted} (limits.conf, docker --ulimit nofile)"


def _round(least: int) -> int:
    """A round number, as people set limits."""
    return 1 << max(10, (least - 1).bit_length())
