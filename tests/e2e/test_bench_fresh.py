"""Runs of benchmarks in processes of their own: nothing outlives them, and what a peer does wrong is an error."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_gone

REPOSITORY = Path(__file__).resolve().parents[2]
# A run that leaves a process in a session of its own, which writes down its pid.
LEAVES_ONE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module("bench.harness")


def test_the_result_is_what_the_run_printed_and_what_it_left_is_ended(fresh: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        LEAVES_ONE
        + "print('chatter')\nfrom bench.harness import print_result\nprint_result({'figures': {'rate': 2.5}})"
    )
    result = fresh.run_fresh([sys.executable, "-c", code, str(pid_file)], 60, "a run")
    assert result == {"figures": {"rate": 2.5}}
    assert not wait_gone([int(pid_file.read_text())], 30)


def test_a_run_that_hangs_is_named_and_ended_with_all_that_it_started(fresh: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = LEAVES_ONE + "print('it is stuck', file=sys.stderr, flush=True)\ntime.sleep(600)"
    with pytest.raises(fresh.RunError, match=r"a run was still running after 3 s\nit is stuck"):
        fresh.run_fresh([sys.executable, "-c", code, str(pid_file)], 3, "a run")
    assert not wait_gone([int(pid_file.read_text())], 30)


def test_a_run_that_fails_shows_why(fresh: Any) -> None:
    with pytest.raises(fresh.RunError, match=r"(?s)a run ended with 1.*ValueError: wrong batches"):
        fresh.run_fresh([sys.executable, "-c", "raise ValueError('wrong batches')"], 60, "a run")
    with pytest.raises(fresh.RunError, match="a run ended with 0"):
        fresh.run_fresh([sys.executable, "-c", "pass"], 60, "a run")


def test_the_command_measures_a_row_and_judges_it(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed: scripts/test installs it")
    events = tmp_path / "events.jsonl"
    finished = subprocess.run(
        [REPOSITORY / "scripts/bench/run", "--check", "--rows", "tiny32/own", "--json", events],
        env={**os.environ, "PYTHON": sys.executable}, cwd=tmp_path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    found = [json.loads(line) for line in events.read_text().splitlines()]
    rates = {event["contestant"]: event["figures"][event["contestant"]] for event in found if event["kind"] == "round"}
    assert set(rates) >= {"loaderpool", "bare", "rows"} and min(rates.values()) > 0, finished.stderr
    (result,) = [event for event in found if event["kind"] == "result"]
    # How fast it is here is not for a test to say, but what is said of it must agree.
    assert finished.returncode == (1 if result["short"] else 0), finished.stderr
    assert "16 floats a sample" in finished.stdout and "≥ 0.8" in finished.stdout
