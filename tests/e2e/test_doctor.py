"""`loaderpool doctor` as a user runs it: a real pool, a worker really killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

from loaderpool.tools.doctor import machine_checks, pool_checks
from tests.support.child import ChildResult, run_command

NAMES = ["CPUs", "memory", "file descriptors", "pool start", "crash test"]


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., ChildResult]:
    def run(*arguments: str, before: str = "") -> ChildResult:
        return run_command("doctor", *arguments, cwd=tmp_path, before=before)

    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_is_killed_and_the_stream_is_the_same(workers: int) -> None:
    start, drill = pool_checks(workers)
    assert start.status in ("ok", "warn"), start  # a busy machine may be slow
    assert drill.status == "ok", drill
    assert "SIGKILL" in drill.found and "24 batches" in drill.found


def test_a_look_that_raises_or_hangs_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderpool.tools.doctor._start", lambda workers: workers / 0)
    (check,) = pool_checks(1)
    assert (check.status, check.found) == ("fail", "ZeroDivisionError: division by zero")
    ended = threading.Event()
    monkeypatch.setattr("loaderpool.tools.doctor._start", lambda workers: ended.wait())
    (check,) = pool_checks(1, deadline_s=0.1)
    assert (check.status, check.found) == ("fail", "not finished after 0.1 s")
    ended.set()


def test_the_table_is_plain_where_it_is_piped(doctor: Callable[..., ChildResult]) -> None:
    result = doctor().check()
    assert "\x1b" not in result.stdout
    assert all(name in result.stdout for name in NAMES)
    assert result.stdout.splitlines()[-1] == "5 checks, 0 failed."


def test_its_json_has_every_check(doctor: Callable[..., ChildResult]) -> None:
    data = json.loads(doctor("--json", "-").check().stdout)
    assert (data["command"], data["format"], data["ok"]) == ("doctor", 1, True)
    assert [check["name"] for check in data["checks"]] == NAMES


@pytest.mark.parametrize(
    ("patched", "value", "name", "status", "says"),
    [
        ("capacity.usable_cpu_count", 1, "CPUs", "warn", "computing gets no faster"),
        ("capacity.available_memory_bytes", 1 << 28, "memory", "warn", "smaller Limits.memory"),
        ("capacity.available_memory_bytes", 1 << 20, "memory", "fail", "smaller Limits.memory"),
        ("machine.descriptor_limits", (20, 4096), "file descriptors", "fail", "ulimit -n 1024"),
        ("machine.descriptor_limits", (100, 4096), "file descriptors", "warn", "ulimit -n 1024"),
    ],
)
def test_what_is_short_is_said_with_what_to_change(
    patched: str, value: object, name: str, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"loaderpool.tools.doctor.{patched}", lambda: value)
    (check,) = [each for each in machine_checks() if each.name == name]
    assert check.status == status and says in check.change


def test_too_few_descriptors_are_named_and_fail(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(before="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (14, 4096))")
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if "soft limit 14," in line]
    assert line.startswith("fail") and "file descriptors" in line
