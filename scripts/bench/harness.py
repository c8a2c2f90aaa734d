"""Contestants in fresh processes, and rounds that interleave them.

    loaderpool ▸ limits ▸ peers        round 1, each in a process of its own:  start ──▶ measure ──▶ verify ──▶ figures
    peers ▸ limits ▸ loaderpool        round 2, the other way round
    …

so that nothing leaks from one to another, and a drift of the machine's speed meets all of them alike. A row is run
through all its rounds before the next one. A contestant verifies its results before it hands them over, so no number is
printed for wrong batches. Of the peers all run in the first round, and the best one in the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from bench.rows import BEST_PEER, ROWS, Goal, Row
from bench.windows import Window

_SCRIPTS = Path(__file__).resolve().parents[1]
_RESULT_MARK = "RESULT "
# All that descends from a run carries it: those that outlive the run are found by it, never by name.
_ENVIRONMENT_MARK = "LOADERPOOL_BENCH_RUN"
_GRACE_S = 2.0  # from a run's end to that of what it has started; some peers take a moment to end their servers
_BUSY_LOOK_S = 0.25


class RunError(RuntimeError):
    """A run gave no result; the text says why, with the end of its stderr."""


def print_result(result: Mapping[str, float]) -> None:
    """Hand the result to `run_fresh`, which has started this process."""
    print("\n" + _RESULT_MARK + json.dumps(result), flush=True)


def be_contestant(row_key: str, contestant: str, window: str) -> None:
    """Measure one contestant of a row in this process, and print the result."""
    row = next(row for row in ROWS if row.key == row_key)
    module, function = row.measure.split(":")
    measure = getattr(importlib.import_module(f"bench.{module}"), function)
    print_result(measure(row, contestant, Window(**json.loads(window))))
    sys.stdout.flush()
    os._exit(
        0
    )  # Keras leaves iterators of tf.data and DataLoader open, and an interpreter hangs that ends with one


def run_fresh(command: Sequence[str], timeout_s: float, name: str) -> dict[str, Any]:
    """The result that the command has printed; past `timeout_s` it is ended, with all that it has started."""
    mark = uuid.uuid4().hex
    # Files, not pipes: a server that a peer leaves behind would hold a pipe open, and so hold us.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            command, cwd=_SCRIPTS,  # `python -m` finds modules in the current directory before all others
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            env={**_child_environment(), _ENVIRONMENT_MARK: mark},
        ) as process:  # fmt: skip
            try:
                process.wait(timeout_s)
            except BaseException as error:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # it is not reaped yet, so the group is its own
                _end_marked(mark, 0.0)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RunError(
                    f"{name} was still running after {timeout_s:g} s\n{_tail(err)}"
                ) from None
        _end_marked(mark, _GRACE_S)
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith(_RESULT_MARK)]
        if process.returncode or len(lines) != 1:
            raise RunError(f"{name} ended with {process.returncode}\n{_tail(err)}")
    result: dict[str, Any] = json.loads(lines[0][len(_RESULT_MARK) :])
    return result


def _tail(file: IO[str]) -> str:
    file.seek(0)
    return file.read()[-4000:]


def _child_environment() -> dict[str, str]:
    """The environment of every run: this package and loaderpool, compiled as by an installer, a quiet TensorFlow.

    The loaderpool is the one on PYTHONPATH, else the one that is installed, else that of this checkout.
    """
    elsewhere = [
        folder for folder in sys.path if folder and Path(folder).resolve() != _SCRIPTS.parent
    ]
    checkout = (
        ""
        if importlib.machinery.PathFinder.find_spec("loaderpool", elsewhere)
        else str(_SCRIPTS.parent)
    )
    given = [
        os.path.abspath(folder)
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder
    ]
    path = os.pathsep.join(filter(None, [*given, str(_SCRIPTS), checkout]))
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run would compile its modules again
    return environment


def _end_marked(mark: str, grace_s: float) -> None:
    """Wait for the processes of a run to end by themselves, then end those that have not."""
    deadline = time.monotonic() + grace_s
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_ENVIRONMENT_MARK) == mark:
                yield process


@dataclasses.dataclass
class Result:
    """What came of a row: the figures of each side, one a round, and who has failed."""

    row: Row
    figures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # of contestants, in one line
    busy_cpus: float = 0.0  # that others kept busy before the most disturbed run

    def median(self, side: str) -> float:
        return statistics.median(self.figures[side])

    def best(self, side: str) -> float:
        """Its best round: what disturbs a run from outside only slows it down."""
        return (max if self.row.is_rate else min)(self.figures[side])

    def peers(self) -> list[str]:
        """Those that have a result, the best one first."""
        found = [side for side in self.row.peers if side in self.figures]
        return sorted(found, key=self.median, reverse=self.row.is_rate)

    def opponent(self, goal: Goal) -> str | None:
        """Whom a goal compares with; None: with a number, or with a contestant that has no result."""
        name = next(iter(self.peers()), None) if goal.against == BEST_PEER else goal.against
        return name if name in self.figures else None

    def ratio(self, goal: Goal, of: Callable[[str], float] | None = None) -> float | None:
        """Of the medians (`of`: else), or the figure itself, where the goal is a number; None: not measured."""
        of = of or self.median
        if goal.of not in self.figures:
            return None
        if goal.against is None:
            return of(goal.of)
        other = self.opponent(goal)
        return None if other is None else of(goal.of) / of(other)


def run_row(
    row: Row,
    peers: Iterable[str],
    rounds: int | None,
    shorter: float,
    emit: Callable[[dict[str, Any]], None],
) -> Result:
    """Measure a row with these peers, in so many rounds or the row's own; `emit` is given each raw result."""
    result = Result(row)
    names = [*row.contestants, *(peer for peer in row.peers if peer in peers)]
    for number in range(rounds or row.rounds):
        # Limits use what loaderpool tells of itself, so it comes first where there is one round.
        for name in names if number % 2 == 0 else list(reversed(names)):
            is_worse = number > 0 and name in row.peers and name != next(iter(result.peers()), name)
            if name not in result.failures and (row.is_shown_whole or not is_worse):
                _run(result, name, number, shorter, emit)
    return result


def _run(
    result: Result, name: str, number: int, shorter: float, emit: Callable[[dict[str, Any]], None]
) -> None:
    row = result.row
    busy = psutil.cpu_percent(_BUSY_LOOK_S) / 100 * (psutil.cpu_count() or 1)
    before = {side: statistics.median(values) for side, values in result.figures.items()}
    given = json.dumps({"seconds": row.seconds / shorter, "warm_s": row.warm_s, "before": before})
    # Not by `-m`: workers that are spawned would import the module again.
    program = "import sys; from bench.harness import be_contestant; be_contestant(*sys.argv[1:])"
    command = [sys.executable, "-c", program, row.key, name, given]
    event = {
        "kind": "round",
        "row": row.key,
        "contestant": name,
        "round": number,
        "busy_cpus": round(busy, 2),
    }
    try:
        figures = run_fresh(command, row.timeout_s, f"{row.key}: {name}")
    except RunError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = [line for line in lines[1:] if "Error" in line] or lines[1:] or [""]
        result.failures[name] = f"{lines[0]}: {why[-1]}"[:300].rstrip(": ")
        emit({**event, "failure": str(error)})
        return
    for side, value in figures.items():
        result.figures.setdefault(side, []).append(value)
    result.busy_cpus = max(result.busy_cpus, busy)
    emit({**event, "figures": figures})
