"""Verdicts of the doctor, on machines that are only described."""

from __future__ import annotations

import dataclasses
import time

import pytest

from loaderpool.system.readable import readable_bytes
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.doctor.drill import in_time
from loaderpool.tools.doctor.limits import Limits, read_limits
from loaderpool.tools.doctor.machine_checks import machine_checks
from loaderpool.tools.doctor.versions import version_checks
from loaderpool.tools.tuning.cpus import CpuBudget

GOOD = Limits(
    cpus=CpuBudget(8, 8, 8, None),
    memory_free=16 << 30,
    memory_cgroup=None,
    descriptors_open=6,
    descriptors_soft=1024,
    descriptors_hard=1 << 20,
    tasks_of_user=100,
    processes_soft=60_000,
    processes_hard=60_000,
    is_root=False,
    pids=None,
    memory_file=None,
    has_memfd=True,
    has_pidfd=True,
    shm_bytes=64 << 20,
    pipe_bytes=65536,
    pipe_pages_soft=16384,
)
NEW = {"numpy": "2.4.6", "cloudpickle": "3.1.2", "tensorflow": "2.21.0"}


def test_nothing_is_to_be_changed_on_a_good_machine() -> None:
    checks = machine_checks(GOOD)
    assert {check.status for check in checks} == {"ok"}
    assert not any(check.change for check in checks)
    assert len({check.name for check in checks}) == len(checks)


@pytest.mark.parametrize(
    ("changes", "name", "status", "says"),
    [
        ({"cpus": CpuBudget(1, 1, 1, None)}, "CPUs: os.cpu_count()", "warn", "computing gets no faster"),
        ({"cpus": CpuBudget(2, 8, 2, None)}, "CPUs: affinity mask", "warn", "taskset"),
        ({"cpus": CpuBudget(2, 8, 8, 1.5)}, "CPUs: cgroup quota", "warn", "--cpus"),
        ({"memory_free": 512 << 20}, "memory free", "warn", "Limits.memory"),
        ({"memory_free": 64 << 20}, "memory free", "fail", "fewer workers"),
        ({"memory_cgroup": 512 << 20}, "memory: cgroup limit", "warn", "--memory"),
        ({"descriptors_soft": 16}, "file descriptors", "fail", "ulimit -n 1024"),
        ({"descriptors_soft": 100}, "file descriptors", "warn", "ulimit -n 1024"),
        ({"descriptors_soft": 30, "descriptors_hard": 30}, "file descriptors", "warn", "workers=3"),
        ({"descriptors_soft": 18, "descriptors_hard": 18}, "file descriptors", "fail", "hard limit"),
        ({"descriptors_soft": 120, "descriptors_hard": 120}, "file descriptors", "warn", "hard limit"),
        ({"processes_soft": 105}, "processes", "fail", "ulimit -u"),
        ({"processes_soft": 105, "is_root": True}, "processes", "ok", ""),
        ({"pids": (20, 15)}, "processes: cgroup limit", "fail", "--pids-limit"),
        ({"memory_file": "[Errno 1] Operation not permitted", "has_memfd": False}, "memfd", "fail", "seccomp"),
        ({"has_memfd": False}, "memfd", "warn", "/dev/shm"),
        ({"has_memfd": False, "shm_bytes": None}, "/dev/shm", "fail", "tmpfs"),
        ({"shm_bytes": None}, "/dev/shm", "ok", ""),
        ({"has_pidfd": False}, "pidfd", "warn", "5.3"),
        ({"pipe_bytes": 4096}, "pipe capacity", "warn", "fs.pipe-user-pages-soft"),
    ],
)
def test_what_is_short_is_said_with_what_to_change(
    changes: dict[str, object], name: str, status: str, says: str
) -> None:
    (check,) = [check for check in machine_checks(dataclasses.replace(GOOD, **changes)) if check.name == name]
    assert check.status == status
    assert says in check.change
    assert bool(check.change) == (status != "ok")


def test_the_limits_of_this_machine_can_be_read() -> None:
    limits = read_limits()
    assert limits.memory_free > 0
    assert limits.descriptors_open > 2
    assert limits.tasks_of_user > 0
    assert limits.pipe_bytes >= 4096
    assert machine_checks(limits)


@pytest.mark.parametrize(
    ("changes", "python", "name", "status", "says"),
    [
        ({}, (3, 11, 7), "TensorFlow", "ok", ""),
        ({"tensorflow": "2.18.1"}, (3, 11, 7), "TensorFlow", "warn", "copies every array"),
        ({"tensorflow": "2.18.1", "numpy": "1.26.4"}, (3, 11, 7), "TensorFlow", "ok", ""),
        ({"tensorflow": None, "tensorflow-cpu": "2.18.0rc1"}, (3, 11, 7), "TensorFlow", "warn", "2.19"),
        ({"tensorflow": "2.9.0"}, (3, 11, 7), "TensorFlow", "warn", "2.17"),
        ({"tensorflow": None}, (3, 11, 7), "TensorFlow", "ok", ""),
        ({"numpy": "1.24.1"}, (3, 11, 7), "NumPy", "fail", "numpy>=1.26"),
        ({"cloudpickle": None}, (3, 11, 7), "cloudpickle", "fail", "cloudpickle>=3.0"),
        ({}, (3, 9, 1), "Python", "fail", "3.10"),
        ({}, (3, 14, 0), "Python", "warn", "3.13"),
    ],
)
def test_versions_are_judged(
    changes: dict[str, str | None], python: tuple[int, ...], name: str, status: str, says: str
) -> None:
    versions: dict[str, str | None] = {**NEW, **changes}
    (check,) = [check for check in version_checks(versions.get, python) if check.name == name]
    assert check.status == status
    assert says in check.change


def test_a_look_that_raises_or_hangs_is_a_failed_check() -> None:
    def raises() -> Check:
        raise OSError("no room")

    def hangs() -> Check:
        time.sleep(1.0)
        raise AssertionError

    assert in_time("pool", "x", raises, 60) == Check("pool", "x", "fail", "OSError: no room")
    late = in_time("pool", "x", hangs, 0.05)
    assert late.status == "fail" and "0.05 s" in late.found and late.change


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(17, "17 bytes"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (300 << 20, "300 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_in_words(nbytes: int, words: str) -> None:
    assert readable_bytes(nbytes) == words
