"""Trainings in processes of their own, which are looked at from outside until they are told to end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 40.0

_Kind = TypeVar("_Kind", bound="RunningTraining")


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
        self.process = subprocess.Popen([sys.executable, "train.py", kind], cwd=folder, env=environment)
        self.pid = self.process.pid

    def release(self) -> None:
        (self.folder / "release").touch()

    def end(self) -> None:
        (self.folder / "end").touch()
        self.release()
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def running_trainings(
    folder: Path,
    script: str,
    kind: type[_Kind] = RunningTraining,  # type: ignore[assignment]
) -> Iterator[Callable[[str], _Kind]]:
    """Gives what starts one with an argument; they end with the block."""
    trainings: list[_Kind] = []

    def begin(argument: str) -> _Kind:
        trainings.append(kind(folder / f"{len(trainings)}", script, argument))
        return trainings[-1]

    try:
        yield begin
    finally:
        for each in trainings:
            each.end()
