"""`scripts/verdicts` runs its cases, and misses a bar where one is missed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "verdicts"


def verdicts(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
def test_a_case_is_run_and_told() -> None:
    result = verdicts("verdicts", "--runs", "1", "--only", "too short")
    assert (result.returncode, result.stderr) == (0, "")
    assert "| too short | WARM_UP | 1 x WARM_UP | - |" in result.stdout
    assert "1 of 1 right, 0 wrong changes" in result.stdout


def test_a_part_that_there_is_not_is_told() -> None:
    result = verdicts("everything")
    assert result.returncode == 2
    assert "there is no everything" in result.stderr
