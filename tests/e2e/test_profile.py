"""`loaderpool profile` as a user runs it: results of py-spy, and messages if py-spy cannot run."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.child import run_command

MODULE = """
import time

import numpy as np

import loaderpool as lp


def compute(item):
    end = time.thread_time() + 0.008
    while time.thread_time() < end:
        sum(range(100_000))


def load(item):
    open("began", "w").close()
    time.sleep(0.02)  # waits
    compute(item)
    return np.float32(item)


def fail(item):
    if item == 60:
        raise ValueError("no sample 60")
    return item


def make():
    return lp.Loader(range(1000), load, batch_size=4, workers=2)


def fails():
    return lp.Loader(range(100), fail, batch_size=4, workers=1)
"""
LINES = dict(enumerate(MODULE.splitlines(), 1))
WAITS = next(number for number, line in LINES.items() if "# waits" in line)

profile = functools.partial(run_command, "profile")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(MODULE)
    return tmp_path


def seen(path: Path) -> dict[str, int]:
    """Return the text of each line of the module, and how often it was the innermost one."""
    counts: dict[str, int] = {}
    for row in path.read_text().splitlines():
        stack, _, count = row.rpartition(" ")
        if lines := re.findall(r"\(train\.py:(\d+)\)", stack):
            line = LINES[int(lines[-1])].strip()
            counts[line] = counts.get(line, 0) + int(count)
    return counts


def test_the_lines_that_compute_are_found_in_every_process(folder: Path) -> None:
    profile("train:make", "--seconds", "2", "-o", "p.txt", cwd=folder).check()
    counts = seen(folder / "p.txt")
    assert counts["sum(range(100_000))"] > counts.get(
        "time.sleep(0.02)  # waits", 0
    )  # this line takes 2.5 times as long
    rows = [row for row in (folder / "p.txt").read_text().splitlines() if "load (train.py" in row]
    makers = {
        re.findall(r"process (\d+):", row)[-1] for row in rows
    }  # the processes that make samples
    assert len(makers) == 2
    assert all(re.match(r"process \d+: worker;load \(train\.py:\d+\)", row) for row in rows)


@pytest.mark.slow
def test_the_flame_graph_begins_with_the_users_function(folder: Path) -> None:
    profile("train:make", "--seconds", "1", "-o", "p.svg", cwd=folder).check()
    frames = re.findall(
        r"<title>([^<]*) \([\d,]+ samples.*? y=\"(\d+)\"", (folder / "p.svg").read_text()
    )
    top = min(int(y) for _, y in frames)
    level_of = {name.partition(":")[0]: (int(y) - top) // 16 for name, y in frames}
    assert level_of["all"] == 0
    assert next(level for name, level in level_of.items() if name.startswith("load (train.py")) == 2


@pytest.mark.slow
def test_waiting_is_recorded_where_it_is_asked_for(folder: Path) -> None:
    profile("train:make", "--seconds", "1", "--idle", "-o", "p.json", cwd=folder).check()
    frames = json.loads((folder / "p.json").read_text())["shared"]["frames"]
    assert ("load", WAITS) in {(frame["name"], frame["line"]) for frame in frames}


def test_an_error_of_the_function_is_an_exit_status(folder: Path) -> None:
    result = profile("train:fails", "-o", "p.svg", cwd=folder)
    assert result.returncode == 1
    assert "no sample 60" in result.stderr and "train:fails failed, as shown above" in result.stderr
    assert "loaderpool/trainer" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train:nope"], "TARGET 'train:nope' was not found"),
        (["train:make", "-o", "p.html"], "'p.html' must end in .svg, .json, .txt"),
    ],
)
def test_a_wrong_argument_is_told(folder: Path, arguments: list[str], said: str) -> None:
    result = profile(*arguments, cwd=folder)
    assert result.returncode == 2 and said in result.stderr


def test_ctrl_c_writes_what_there_is(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "loaderpool.tools.cli",
        "profile",
        "train:make",
        "--seconds",
        "60",
        "-o",
        "p.txt",
    ]
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not (folder / "began").exists():
            time.sleep(0.1)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert seen(folder / "p.txt")
