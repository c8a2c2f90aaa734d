"""Runs every row: contestants in fresh processes, rounds that interleave them, failures named and left out.

    row ──▶ loaderpool ▸ limits ▸ peers           round 1
        ──▶ peers ▸ limits ▸ loaderpool           round 2, the other way round
        ──▶ …

A row is run through all its rounds before the next one, so that a drift of the machine meets its contestants alike.
Of the peers all run in the first round, and the best one in the others: the place of the rest is known. In tf.data only
those run that were among the best of the same work in their own view, which is what they bring there.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable

from benchlib.fresh import RunError
from benchlib.machine import Emit
from benchlib.model import Pace, Window
from benchlib.quiet import wait_until_quiet
from benchlib.rounds import forth_and_back, run_contestant

from .rows import Row

__all__ = ["Result", "Results", "run_rows"]

# Importing TensorFlow and torch on a busy machine takes some ten seconds; a hang is named, not waited for.
TIMEOUT_S = 90.0
MEMORY_TIMEOUT_S = 240.0
# Of the peers' own views, so many are measured in tf.data, too.
TRIED_IN_TF = 3
ROUNDS = 2


@dataclasses.dataclass
class Result:
    """What one contestant did in one row, over all rounds."""

    row: Row
    contestant: str
    rounds: list[dict[str, float]] = dataclasses.field(default_factory=list)  # figures by name
    facts: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str | None = None  # of the first run that failed, in one line
    busy_cpus: float = 0.0  # that others kept busy before the most disturbed run

    def values(self, figure: str) -> list[float]:
        return [found[figure] for found in self.rounds if figure in found]

    def median(self, figure: str) -> float:
        return statistics.median(self.values(figure))

    def best(self, figure: str) -> float:
        return max(self.values(figure)) if figure == "rate" else min(self.values(figure))


Results = dict[tuple[str, str], Result]  # by row key and contestant


def run_rows(rows: Iterable[Row], pace: Pace, wanted: Callable[[str], bool], emit: Emit) -> Results:
    """Measure the rows; each raw result goes to `emit` as it comes.

    Args:
        rows: what to measure.
        pace: how thoroughly.
        wanted: whether a peer takes part; loaderpool and limits always do.
        emit: for JSON lines.
    """
    results: Results = {}
    facts: dict[str, float] = {}
    for row in rows:
        beaten = _beaten(row, results)
        names = [name for name in row.contestants if name not in row.peers or (wanted(name) and name not in beaten)]
        found = {name: results.setdefault((row.key, name), Result(row, name)) for name in names}
        for number, name in forth_and_back(names, 1 if row.is_once else pace.rounds or ROUNDS):
            result = found[name]
            if result.failure is None and (number == 0 or not _is_settled(result, found.values(), row)):
                _run(row, result, number, pace, facts, emit)
        _progress(row, found.values())
    return results


def _run(row: Row, result: Result, number: int, pace: Pace, facts: dict[str, float], emit: Emit) -> None:
    busy = wait_until_quiet(pace.patience_s)
    window = Window(row.seconds / pace.shorter, row.warm_s, facts)
    timeout_s = MEMORY_TIMEOUT_S if row.kind == "memory" else TIMEOUT_S
    what = f"{row.key}: {result.contestant}"
    event = {"kind": "round", "row": row.key, "contestant": result.contestant, "round": number, "busy_cpus": busy}
    try:
        measured = run_contestant("bench_peers.contestant", (row.key, result.contestant), window, timeout_s, what)
    except RunError as error:
        result.failure = _one_line(str(error))
        emit({**event, "failure": str(error)})
        return
    result.rounds.append(measured.figures)
    result.facts.update(measured.facts)
    result.busy_cpus = max(result.busy_cpus, busy)
    if result.contestant == "loaderpool":
        facts.update(measured.facts | measured.figures)
    emit({**event, **dataclasses.asdict(measured)})


def _is_settled(result: Result, others: Iterable[Result], row: Row) -> bool:
    """Whether it is a peer, and was not the best one of the first round."""
    ranking = _ranking(row, others)
    return result.contestant in row.peers and result is not ranking[0]


def _beaten(row: Row, results: Results) -> set[str]:
    """Peers whose own view was not among the best, where a row is about the same work in tf.data."""
    if row.kind != "rate" or row.view == "own":
        return set()
    own = [result for (key, _), result in results.items() if key == f"{row.name}/own"]
    return {result.contestant for result in _ranking(row, own)[TRIED_IN_TF:]} - {*row.always}


def _ranking(row: Row, results: Iterable[Result]) -> list[Result]:
    """The peers among them by their first round, the best one first."""
    peers = [result for result in results if result.contestant in row.peers and result.rounds]
    return sorted(peers, key=lambda result: result.rounds[0][row.figure], reverse=row.figure == "rate")


def _one_line(text: str) -> str:
    """How the run ended, and the last line of its stderr that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "Error" in line or "Exception" in line]
    return f"{lines[0]}: {(errors or lines[1:] or [''])[-1]}"[:300].rstrip(": ")


def _progress(row: Row, found: Iterable[Result]) -> None:
    parts = []
    for result in found:
        if result.rounds:
            parts.append(f"{result.contestant} {result.median(row.figure):,.4g}")
        else:
            parts.append(f"{result.contestant} failed")
    print(f"{row.key} ({row.unit}): {', '.join(parts)}", file=sys.stderr, flush=True)
