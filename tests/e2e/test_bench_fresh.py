"""The command that runs benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_command_measures_a_row_and_judges_it(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed: scripts/test installs it")
    events = tmp_path / "events.jsonl"
    finished = subprocess.run(
        [REPOSITORY / "scripts/bench/run", "--check", "--rows", "tiny32/own", "--json", events],
        env={**os.environ, "PYTHON": sys.executable}, cwd=tmp_path, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    found = [json.loads(line) for line in events.read_text().splitlines()]
    rates = {
        event["contestant"]: event["figures"][event["contestant"]]
        for event in found
        if event["kind"] == "round"
    }
    assert set(rates) >= {"loaderpool", "bare", "rows"} and min(rates.values()) > 0, finished.stderr
    (result,) = [event for event in found if event["kind"] == "result"]
    # The speed on this machine does not matter, but the output must be consistent.
    assert finished.returncode == (1 if result["short"] else 0), finished.stderr
    assert "16 floats a sample" in finished.stdout and "≥ 0.8" in finished.stdout
