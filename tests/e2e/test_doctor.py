"""`loaderpool doctor` as a user runs it: a real pool, a worker really killed, real payloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loaderpool.tools.doctor.drill import pool_checks
from tests.support.child import ChildResult, run_command

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

MODULE = """
import threading

import numpy as np

import loaderpool as lp

table = np.ones((400, 1000), np.float32)
lock = threading.Lock()


def make():
    return lp.Loader(range(20), lambda i: table[i], batch_size=4)


def make_locked():
    return lp.Loader(range(20), lambda i: (lock, i)[1])


def fail(i):
    raise ValueError(f"no row {i}")


failing = lp.Loader(range(20), fail)
"""


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., ChildResult]:
    (tmp_path / "jobs.py").write_text(MODULE)

    def run(*arguments: str, before: str = "") -> ChildResult:
        return run_command("doctor", *arguments, cwd=tmp_path, before=before)

    return run


def found(result: ChildResult) -> dict[str, dict[str, str]]:
    data = json.loads(result.stdout)
    assert (data["command"], data["format"]) == ("doctor", 1)
    return {check["name"]: check for check in data["checks"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_is_killed_and_the_stream_is_the_same(workers: int) -> None:
    start, drill = pool_checks(workers)
    assert start.status in ("ok", "warn"), start  # a busy machine may be slow
    assert drill.status == "ok", drill
    assert "SIGKILL" in drill.found and "24 batches" in drill.found


def test_the_table_is_plain_where_it_is_piped(doctor: Callable[..., ChildResult]) -> None:
    result = doctor().check()
    assert "\x1b" not in result.stdout
    for name in ("CPUs: affinity mask", "file descriptors", "memfd", "TensorFlow", "crash drill"):
        assert name in result.stdout
    assert result.stdout.splitlines()[-1].endswith(" 0 failed.")


def test_tensorflow_is_not_imported_to_know_its_version(doctor: Callable[..., ChildResult]) -> None:
    before = "import atexit\natexit.register(lambda: print('imported', 'tensorflow' in sys.modules))"
    assert doctor(before=before).check().stdout.splitlines()[-1] == "imported False"


def test_what_a_target_sends_is_shown(doctor: Callable[..., ChildResult]) -> None:
    checks = found(doctor("jobs:make", "--json", "-").check())
    assert "float32[400, 1000]" in checks["arrays in shared memory"]["found"]
    assert "float32[None, 1000]" in checks["load and first sample"]["found"]


def test_what_cannot_travel_fails_with_its_name(doctor: Callable[..., ChildResult]) -> None:
    result = doctor("jobs:make_locked", "--json", "-")
    assert result.returncode == 1
    check = found(result)["pickle"]
    assert check["status"] == "fail" and "'lock'" in check["found"]


def test_a_first_sample_that_raises_fails_with_its_traceback(doctor: Callable[..., ChildResult]) -> None:
    result = doctor("jobs:failing")
    assert result.returncode == 1
    assert "ValueError: no row 0" in result.stdout and "in fail" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(" 1 failed.")


def test_too_few_descriptors_are_named_and_fail(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(before="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (14, 4096))")
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if "14 soft" in line]
    assert line.startswith("fail") and "file descriptors" in line
