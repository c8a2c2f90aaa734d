"""Trainings in processes of their own, which other processes observe until a file ends them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import POLL_S

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 40.0


class RunningTraining:
    """A script that runs until the file `end` exists, and may wait for the file `release`.

    Args:
        folder: new folder for its files; its current directory.
        script: code that it runs.
        kind: its only argument.
    """

    def __init__(self, folder: Path, script: str, kind: str) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(script)
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "train.py", kind], cwd=folder, env=environment
        )
        self.pid = self.process.pid

    def look_until(
        self,
        look: Callable[[], subprocess.CompletedProcess[str]],
        read: Callable[[str], Any],
        is_wanted: Any,
    ) -> Any:
        """Read the training's page until it satisfies a condition, and return it. There may be no
        batch yet.
        """
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            result = look()
            if result.returncode == 0:
                found = read(result.stdout)
                if is_wanted(found):
                    return found
            else:
                assert "no loader that has delivered a first batch" in result.stderr
            time.sleep(POLL_S)
        raise AssertionError(f"the latest look was {result.stdout or result.stderr}")

    def release(self) -> None:
        (self.folder / "release").touch()

    def end(self) -> None:
        (self.folder / "end").touch()
        self.release()
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def running_trainings(folder: Path, script: str) -> Iterator[Callable[[str], RunningTraining]]:
    """Context with a function that starts a training with an argument. All are ended with the
    context.
    """
    trainings: list[RunningTraining] = []

    def begin(argument: str) -> RunningTraining:
        trainings.append(RunningTraining(folder / f"{len(trainings)}", script, argument))
        return trainings[-1]

    try:
        yield begin
    finally:
        for each in trainings:
            each.end()
