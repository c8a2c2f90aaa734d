"""`loaderpool trace` and `Loader.trace` with real trainings."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.chrome_traces import Loaded, load
from tests.support.running_trainings import DEADLINE_S, ROOT, RunningTraining, running_trainings

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

COMMAND = [sys.executable, "-m", "loaderpool.tools.cli", "trace"]
SLOW = 21

TRAINING = f"""
import os
import sys
import time

import numpy as np

import loaderpool as lp


def make(i):
    time.sleep(0.15 if i == {SLOW} else 0.0015)
    return np.full(4, i, np.float32)


if __name__ == "__main__":
    workers = 2
    if sys.argv[1] == "spawned":
        workers = lp.Pool(1, start="spawn")
    with lp.Loader(range(64), make, batch_size=4, workers=workers) as loader:
        while not os.path.exists("end"):
            for batch in loader:
                time.sleep(0.002)
"""


def until(training: RunningTraining, is_there: Callable[[Loaded], object]) -> Loaded:
    """Return the first trace that contains an event."""
    path = training.folder / "trace.json"
    found: Loaded = training.look_until(
        lambda: run(training.pid, "-o", path), lambda _: load(path.read_text()), is_there
    )
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], RunningTraining]]:
    with running_trainings(tmp_path, TRAINING) as begin:
        yield begin


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "Traceback" not in result.stderr
    return result


def make(i: int) -> Any:
    time.sleep(0.03 if i == SLOW else 0.0015)
    return np.full(4, i, np.float32)


def check_slow_sample(found: Loaded, least_us: float) -> None:
    """A worker made it during the task of its batch, and training waited for that batch."""
    samples, tasks = (
        [each for each in found.named("item") if each["name"] == f"item {SLOW}"],
        found.named("batch"),
    )
    assert samples and all(sample["dur"] >= least_us for sample in samples)
    for sample in samples[:-1]:  # the trace may have only a part of the last one
        end = sample["ts"] + sample["dur"]
        assert any(each["pid"] == sample["pid"] and each["ts"] <= sample["ts"] and end <= each["ts"] + each["dur"]
                   for each in tasks)  # fmt: skip
    waits = [each for each in found.named("wait for batch") if each["dur"] >= least_us / 3]
    assert waits and samples[0]["pid"] != waits[0]["pid"]


# -- of a training that was started without an option


def test_a_slow_item_is_found_by_its_index_and_is_in_the_batch_that_was_waited_for(
    start: Callable[[str], RunningTraining],
) -> None:
    training = start("waiting")
    found = until(training, lambda found: len(found.named(f"item {SLOW}")) > 1)
    check_slow_sample(found, 150_000)
    assert found.processes[training.pid].endswith("train.py waiting")
    assert sorted(found.processes.values()) == [
        found.processes[training.pid],
        "worker 0",
        "worker 1",
    ]
    assert found.named("epoch 0")
    printed = run(training.pid, "-o", training.folder / "trace.json").stdout
    waited = rf"^Waited .* for batch {SLOW // 4} of epoch \d+; item {SLOW} took 1\d\d ms in it\.$"
    assert re.search(waited, printed, re.MULTILINE)
    assert "Note: " not in printed


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["999999999"], "Error: process 999999999 does not exist."),
        ([str(os.getppid())], "has no loader that has delivered a first batch|cannot be read"),
        (["--last", "-3"], "-3.0 is not in the range 0<x<=86400."),
        (["-o", "trace.txt"], "'trace.txt' must end in .json, .json.gz."),
    ],
)
def test_each_mistake_is_answered_on_one_line(
    arguments: list[str], answer: str, tmp_path: Path
) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode in (1, 2)
    last = result.stderr.splitlines()[-1]
    assert any(each in last for each in answer.split("|")), result.stderr
    assert not list(tmp_path.iterdir())


# -- by `Loader.trace`


@pytest.mark.parametrize("start", [None, "spawn"])
def test_in_passes_and_after_them_from_any_thread(tmp_path: Path, start: Any) -> None:
    found: list[Loaded] = []

    def take(name: str) -> None:
        loader.trace(tmp_path / name)
        found.append(load((tmp_path / name).read_text()))

    with (
        lp.Pool(1 if start else 2, start=start) as pool,
        lp.Loader(range(64), make, batch_size=4, workers=pool) as loader,
    ):
        take("before.json")
        for number, _ in enumerate(loader):
            if number == 8:
                thread = threading.Thread(target=take, args=("during.json",))
                thread.start()
                thread.join()
        take("after.json")
        loader.trace(tmp_path / "after.json.gz", seconds=None)
    before, during, after = found
    assert before.named("step") == []
    assert 5 <= len(during.named("step")) < len(after.named("step")) == 16
    check_slow_sample(after, 30_000)
    compressed = load(gzip.decompress((tmp_path / "after.json.gz").read_bytes()).decode())
    # The first samples may be made before there are tickets, and more are made for the next pass.
    # The record of an item comes only after its ticket, so a later trace may lack it.
    recorded = [
        [each for each in trace.named("item") if "still running" not in each["name"]]
        for trace in (compressed, after)
    ]
    assert len(recorded[0]) >= len(recorded[1]) >= 60
    assert (tmp_path / "after.json.gz").stat().st_size < (
        tmp_path / "after.json"
    ).stat().st_size / 4
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(lp.ClosedError, match="Call trace\\(\\) before"):
        loader.trace(tmp_path / "closed.json")


def test_spawned_workers_can_be_read_from_outside(
    start: Callable[[str], RunningTraining],
) -> None:
    found = until(start("spawned"), lambda found: len(found.named("step")) > 20)
    assert found.named("item")
    assert not found.head["loaderpool"]["notes"]


@pytest.mark.parametrize(
    ("path", "seconds", "error", "words"),
    [
        ("none/trace.json", 1, OSError, "No such file or directory"),
        ("", 1, OSError, "Is a directory"),
        ("trace.json", 0, lp.ArgumentError, "seconds must be from"),
        ("trace.json", "1", lp.ArgumentError, "seconds must be a number"),
    ],
)
def test_wrong_arguments_name_themselves(
    path: str, seconds: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with (
        lp.Loader(range(8), make, batch_size=4, workers=0) as loader,
        pytest.raises(error, match=words),
    ):
        loader.trace(tmp_path / path, seconds)
    assert not list(tmp_path.iterdir())
