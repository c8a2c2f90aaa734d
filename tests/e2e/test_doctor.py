"""`loaderpool doctor` as a user runs it: with a real pool, and a worker that is killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

from tests.support.child import ChildResult, run_command


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., ChildResult]:
    def run(before: str = "", **options: Any) -> ChildResult:
        return run_command("doctor", cwd=tmp_path, before=before, **options)

    return run


def test_a_worker_is_killed_and_the_batches_are_the_same(
    doctor: Callable[..., ChildResult],
) -> None:
    lines = doctor().check().stdout.splitlines()
    assert [line[:18].strip() for line in lines] == [
        "CPUs", "memory", "file descriptors", "large arrays", "crash test",
    ]  # fmt: skip
    assert lines[3].endswith("shared with the workers in place")
    assert (
        "passed: a worker was killed by SIGKILL and replaced; all 24 batches are bit-identical"
        in lines[-1]
    )


def test_what_there_is_little_of_has_a_line_to_run(doctor: Callable[..., ChildResult]) -> None:
    limits = "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 4000))"
    limits += "; os.sched_setaffinity(0, {0})"
    little = "from loaderpool.system import capacity; capacity.available_memory_bytes = lambda: 900 << 20"
    lines = doctor(before=f"{limits}\n{little}").check().stdout.splitlines()
    assert "computing gets no faster" in lines[0]
    assert "900 MiB free; stop other programs" in lines[1]
    assert lines[2].endswith(
        "soft limit 120, hard limit 4,000; 1 worker may need 145: ulimit -n 1024"
    )


def test_a_malloc_without_mappings_is_named(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(env={"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}).check()
    reason = (
        r"malloc \(glibc 2\.\d+, or a library in its place\) does not map large blocks separately"
    )
    assert re.search(
        rf"^large arrays +copied for the workers: {reason}$", result.stdout, re.MULTILINE
    )


def test_a_pool_that_raises_is_a_failed_check(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(before="from loaderpool.tools import doctor\ndoctor._row = 3")
    assert result.returncode == 1
    assert "failed: TypeError: " in result.stdout


def test_a_pool_that_hangs_ends_with_its_stacks(doctor: Callable[..., ChildResult]) -> None:
    hang = "from loaderpool.tools import doctor\nimport time\ndoctor._DEADLINE_S = 0.5\ndoctor.crash_test = "
    result = doctor(before=f"{hang}lambda: time.sleep(60)")
    assert result.returncode == 1 and "Timeout" in result.stderr
