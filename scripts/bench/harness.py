"""Contestants in new processes, and rounds that interleave them.

    loaderpool ▸ limits ▸ peers        round 1, each in its own process:  start ──▶ measure ──▶ verify ──▶ figures
    peers ▸ limits ▸ loaderpool        round 2, in the opposite order
    …

So no contestant affects another one, and a change of the machine's speed affects all of them. All
rounds of a row run before the next row. A contestant verifies its results before it reports a
number. All peers run in the first round, and only the best one in the others.
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
# Environment variable of all processes of a run. Processes that outlive the run are found by it,
# not by their names.
_ENVIRONMENT_MARK = "LOADERPOOL_BENCH_RUN"
# time for the processes of a run to end after it; some peers end their servers slowly
_GRACE_S = 2.0
_BUSY_LOOK_S = 0.25


class RunError(RuntimeError):
    """A run gave no result. The text has the reason and the end of its standard error."""


def print_result(result: Mapping[str, float]) -> None:
    """Print the result for `run_fresh`, which has started this process."""
    print("\n" + _RESULT_MARK + json.dumps(result), flush=True)


def be_contestant(row_key: str, contestant: str, window: str) -> None:
    """Measure one contestant of a row in this process, and print the result."""
    row = next(row for row in ROWS if row.key == row_key)
    module, function = row.measure.split(":")
    measure = getattr(importlib.import_module(f"bench.{module}"), function)
    print_result(measure(row, contestant, Window(**json.loads(window))))
    sys.stdout.flush()
    # An interpreter with an open iterator of tf.data or DataLoader hangs at its end. Keras leaves
    # such iterators open.
    os._exit(0)


def run_fresh(command: Sequence[str], timeout_s: float, name: str) -> dict[str, Any]:
    """Run a command, and return the result that it prints. After `timeout_s`, kill it and all its
    processes.
    """
    mark = uuid.uuid4().hex
    # Files, not pipes: a server that a peer leaves behind would keep a pipe open, and this process
    # would wait for it.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            command, cwd=_SCRIPTS,  # `python -m` searches the current directory first
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            env={**_child_environment(), _ENVIRONMENT_MARK: mark},
        ) as process:  # fmt: skip
            try:
                process.wait(timeout_s)
            except BaseException as error:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # the process is not reaped yet, so no other group has its number
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
    """Return the environment of every run: the paths of this package and loaderpool, compiled
    modules, and no log of TensorFlow.

    The loaderpool is that of PYTHONPATH, otherwise the installed one, otherwise this checkout.
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
    # otherwise each run would compile its modules again
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _end_marked(mark: str, grace_s: float) -> None:
    """Wait for the processes of a run to end, then kill the others."""
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
    """Results of a row: the figures of each contestant, one for each round, and the failures."""

    row: Row
    figures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # one line for each contestant that failed
    busy_cpus: float = 0.0  # CPUs that other processes used before the most disturbed run

    def median(self, side: str) -> float:
        return statistics.median(self.figures[side])

    def best(self, side: str) -> float:
        """Return the result of the best round. Disturbances can only slow a round down."""
        return (max if self.row.is_rate else min)(self.figures[side])

    def peers(self) -> list[str]:
        """Return the peers that have a result, the best one first."""
        found = [side for side in self.row.peers if side in self.figures]
        return sorted(found, key=self.median, reverse=self.row.is_rate)

    def opponent(self, goal: Goal) -> str | None:
        """Return the contestant that a goal compares with. None: the goal is a number, or that
        contestant has no result.
        """
        name = next(iter(self.peers()), None) if goal.against == BEST_PEER else goal.against
        return name if name in self.figures else None

    def ratio(self, goal: Goal, of: Callable[[str], float] | None = None) -> float | None:
        """Return the ratio of two medians, or the figure itself if the goal is a number. None: not
        measured.

        Args:
            goal: The goal.
            of: Another summary of the rounds, in place of the median.
        """
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
    """Measure a row with these peers. `rounds` replaces the row's own number. `emit` gets each
    result.
    """
    result = Result(row)
    names = [*row.contestants, *(peer for peer in row.peers if peer in peers)]
    for number in range(rounds or row.rounds):
        # loaderpool is first in the first round, because limits use its results.
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
    # Not by `-m`, because spawned workers would import the module again.
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
