"""Counts of the kernel for a process, if they can be read; and the CPUs that it may use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from loaderpool.system import capacity


def test_cpu_time_of_a_process_is_what_its_own_clock_says() -> None:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    before = time.process_time()
    told = capacity.process_cpu_s(os.getpid())
    assert before <= told <= time.process_time()


@pytest.mark.parametrize(
    ("cpus", "own", "cpuset", "quota", "settings", "told"),
    [
        (64, 1, None, None, {}, ""),  # the user has bound it
        (64, 64, None, None, {"OMP_PROC_BIND": "true"}, ""),
        (64, 2, None, None, {"OMP_PROC_BIND": "true"}, ""),
        (1, 1, None, None, {"OMP_PROC_BIND": "true"}, ""),
        (64, 1, "5\n", None, {"OMP_PROC_BIND": "true"}, ""),  # the container has one CPU
        (64, 1, "0-3,8\n", None, {"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND=true"),
        (64, 1, None, 1.0, {"OMP_PROC_BIND": "true"}, ""),
        (64, 1, None, 1.6, {"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND=true"),
        (64, 1, None, None, {"OMP_PROC_BIND": "close,spread"}, "OMP_PROC_BIND=close,spread"),
        (64, 1, None, None, {"OMP_PROC_BIND": "FALSE"}, ""),
        (64, 1, None, None, {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, ""),
        (64, 1, None, None, {"OMP_PROC_BIND": "", "OMP_PLACES": "cores"}, "OMP_PLACES=cores"),
        (64, 1, None, None, {"GOMP_CPU_AFFINITY": "0-63"}, "GOMP_CPU_AFFINITY=0-63"),
        (
            64,
            1,
            None,
            None,
            {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
            "KMP_AFFINITY=granularity=fine,compact,1,0",
        ),
        (64, 1, None, None, {"KMP_AFFINITY": "verbose,none"}, ""),
        (
            64,
            1,
            None,
            None,
            {"KMP_AFFINITY": "disabled", "OMP_PLACES": "cores"},
            "OMP_PLACES=cores",
        ),
    ],
)
def test_openmp_is_named_if_it_left_one_cpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpus: int,
    own: int,
    cpuset: str | None,
    quota: float | None,
    settings: dict[str, str],
    told: str,
) -> None:
    for name in capacity.OPENMP_BINDING:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    if cpuset is not None:
        (tmp_path / "cpuset.cpus.effective").write_text(cpuset)
    monkeypatch.setattr(capacity, "_cgroup_directories", lambda _: iter([str(tmp_path)]))
    monkeypatch.setattr(capacity, "cgroup_cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)))
    assert capacity.openmp_binding() == told


class Kernel:
    """A clock and a count of kills for lack of memory, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.kills = 100.0, 7
        monkeypatch.setattr(capacity, "oom_kill_count", lambda: self.kills)
        monkeypatch.setattr(capacity.clock, "monotonic_s", lambda: self.now_s)

    def run(self, watch: capacity.OomWatch, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.now_s += 0.25
            watch.look()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_kills_before_the_start_are_not_recent(kernel: Kernel) -> None:
    assert not capacity.OomWatch().has_killed()


@pytest.mark.parametrize("later_s", [0, 1, 4])
def test_a_kill_of_some_seconds_ago_is_recent(kernel: Kernel, later_s: int) -> None:
    watch = capacity.OomWatch()
    for _ in range(3):
        kernel.run(watch, 7)
        kernel.kills += 1
        kernel.run(watch, later_s)
        assert watch.has_killed() and watch.has_killed()  # several workers may have been killed


def test_an_old_kill_is_not_recent(kernel: Kernel) -> None:
    watch = capacity.OomWatch()
    kernel.kills += 1
    kernel.run(watch, 11)
    assert not watch.has_killed()
