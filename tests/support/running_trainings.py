"""Trainings in processes of their own, which are looked at from outside until they are told to end."""

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
    """A script that goes on until there is a file `end` beside it, and may hold something up until there is `release`.

    Args:
        folder: made for it; its current directory.
        script: what it runs.
        kind: its one argument.
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
        """What is read of the first look at it that is wanted; it may not have delivered a batch yet."""
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
    """Gives what starts one with an argument; they end with the block."""
    trainings: list[RunningTraining] = []

    def begin(argument: str) -> RunningTraining:
        trainings.append(RunningTraining(folder / f"{len(trainings)}", script, argument))
        return trainings[-1]

    try:
        yield begin
    finally:
        for each in trainings:
            each.end()
