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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["everything"], "there is no everything"), (["verdicts", "--only", "dozing"], "there is no case dozing")],
)
def test_what_there_is_not_is_told(arguments: list[str], told: str) -> None:
    result = verdicts(*arguments)
    assert result.returncode == 2
    assert told in result.stderr
