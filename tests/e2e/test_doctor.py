"""`loaderpool doctor` as a user runs it: a real pool, a worker really killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

from loaderpool.tools.doctor import machine_checks
from tests.support.child import ChildResult, run_command


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., ChildResult]:
    def run(before: str = "") -> ChildResult:
        return run_command("doctor", cwd=tmp_path, before=before)

    return run


def test_a_worker_is_killed_and_the_batches_are_the_same(doctor: Callable[..., ChildResult]) -> None:
    lines = doctor().check().stdout.splitlines()
    assert "\x1b" not in "".join(lines), "the table is plain where it is piped"
    for name in ("CPUs", "memory", "file descriptors", "crash test"):
        assert any(name in line for line in lines)
    assert any("was killed by SIGKILL and replaced; all 24 batches are bit-identical" in line for line in lines)
    assert lines[-1] == "4 checks, 0 failed."


def test_a_pool_that_raises_is_a_failed_check(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(before="from loaderpool.tools import doctor\ndoctor._row = 3")
    assert result.returncode == 1
    assert "TypeError: " in result.stdout and "4 checks, 1 failed." in result.stdout


def test_a_pool_that_hangs_ends_with_its_stacks(doctor: Callable[..., ChildResult]) -> None:
    hang = "from loaderpool.tools import doctor\nimport time\ndoctor._DEADLINE_S = 0.5\ndoctor.crash_test = "
    result = doctor(before=f"{hang}lambda: time.sleep(60)")
    assert result.returncode == 1 and "Timeout" in result.stderr


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
    (check,) = [each for each in machine_checks() if each[1] == name]
    assert check[0] == status and says in check[2]


def test_too_few_descriptors_are_named_and_fail(doctor: Callable[..., ChildResult]) -> None:
    result = doctor(before="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (14, 4096))")
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if "soft limit 14," in line]
    assert line.startswith("fail") and "file descriptors" in line
