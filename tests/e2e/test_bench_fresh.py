"""Runs of benchmarks in processes of their own: nothing outlives them, and what a peer does wrong is an error."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

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
    return importlib.import_module("benchlib.fresh")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid), "what the run has started is still there"


def test_the_result_is_what_the_run_printed_and_what_it_left_is_ended(fresh: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        LEAVES_ONE
        + "print('chatter')\nfrom benchlib.fresh import print_result\nprint_result({'figures': {'rate': 2.5}})"
    )
    result = fresh.run_fresh([sys.executable, "-c", code, str(pid_file)], 60, "a run")
    assert result == {"figures": {"rate": 2.5}}
    wait_until_gone(int(pid_file.read_text()))


def test_a_run_that_hangs_is_named_and_ended_with_all_that_it_started(fresh: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = LEAVES_ONE + "print('it is stuck', file=sys.stderr, flush=True)\ntime.sleep(600)"
    with pytest.raises(fresh.RunError, match=r"a run was still running after 3 s\nit is stuck"):
        fresh.run_fresh([sys.executable, "-c", code, str(pid_file)], 3, "a run")
    wait_until_gone(int(pid_file.read_text()))


def test_a_run_that_fails_shows_why(fresh: Any) -> None:
    with pytest.raises(fresh.RunError, match=r"(?s)a run ended with 1.*ValueError: wrong batches"):
        fresh.run_fresh([sys.executable, "-c", "raise ValueError('wrong batches')"], 60, "a run")
    with pytest.raises(fresh.RunError, match="a run ended with 0"):
        fresh.run_fresh([sys.executable, "-c", "pass"], 60, "a run")


def test_the_loaderpool_that_is_measured_is_the_one_on_pythonpath(
    fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command is given in a checkout, which `python -m` would look into first."""
    (tmp_path / "other/loaderpool").mkdir(parents=True)
    (tmp_path / "other/loaderpool/__init__.py").write_text("")
    code = "import loaderpool\nfrom benchlib.fresh import print_result\nprint_result({'it': loaderpool.__file__})"
    monkeypatch.chdir(REPOSITORY)
    assert fresh.run_fresh([sys.executable, "-c", code], 60, "a run")["it"].startswith(str(REPOSITORY))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert fresh.run_fresh([sys.executable, "-c", code], 60, "a run")["it"].startswith(str(tmp_path))


def test_a_question_is_answered_in_processes_of_its_own(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    finished = subprocess.run(
        [sys.executable, REPOSITORY / "scripts/bench/run", "tiny", "--quick", "--json", events],
        cwd=tmp_path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["contestant"] for event in found if event["kind"] == "round"] == ["loader", "bare"]
    (row,) = [event for event in found if event["kind"] == "result" and event["bar"]]
    assert row["ratio"] > 0 and f"{row['bar']['at_least']:g}" in finished.stdout


def test_the_command_measures_a_row_and_judges_it(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed: scripts/test installs it")
    events = tmp_path / "events.jsonl"
    tables = tmp_path / "tables.md"
    finished = subprocess.run(
        [REPOSITORY / "scripts/bench/peers", "--gross", "--rows", "tiny32/own", "--json", events, "--markdown", tables],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    found = [json.loads(line) for line in events.read_text().splitlines()]
    rates = {event["contestant"]: event["figures"]["rate"] for event in found if event["kind"] == "round"}
    assert set(rates) >= {"loaderpool", "bare", "rows"} and min(rates.values()) > 0, finished.stderr
    verdicts = [event for event in found if event["kind"] == "verdict" and event["ratio"] is not None]
    assert len(verdicts) == 1
    # How fast it is here is not for a test to say, but what is said of it must agree.
    assert finished.returncode == (0 if verdicts[0]["is_met"] else 1), finished.stderr
    assert "16 floats a sample" in tables.read_text()
