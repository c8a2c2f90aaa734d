"""What all benchmarks share: contestants in fresh processes, rounds that interleave them, ratios held against bars.

Each file of this folder answers one question. It defines contestants, functions of a `Window` that return `Measured`,
and ends with `main(QUESTION)`. Run as a script it runs itself again, once for each contestant and round:

    file.py ──▶ file.py --contestant bare ──▶ verify ──▶ figures      round 1
            ──▶ file.py --contestant loader ─▶ verify ──▶ figures
            ──▶ file.py --contestant loader …                          round 2, in the other order

so that nothing leaks from one to another and a drift of the machine's speed meets all of them alike. A contestant
verifies its results before it returns, so no number is ever printed for wrong batches.

Ratios are formed from the medians of the rounds; the ratio of each side's best round is printed beside them, for what
disturbs a run from outside only ever slows it down, and `from_generator` has two speeds, of which a process gets one by
chance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import quiet
from fresh import print_result, run_fresh

__all__ = [
    "Bar",
    "Delivery",
    "Figure",
    "Measured",
    "Pace",
    "Question",
    "Row",
    "Window",
    "add_options",
    "delivered",
    "deliveries",
    "main",
    "measure",
    "require",
]

# Above the slowest contestant by far (TensorFlow's import and some seconds of work); a hang is named, not waited for.
_CONTESTANT_TIMEOUT_S = 120.0
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Window:
    """How long a contestant measures."""

    seconds: float  # of measurement, after the warm-up
    warm_s: float  # before it, not counted
    facts: dict[str, float]  # what contestants that ran before have found, such as the number of slots


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a contestant found, after it has verified its results."""

    figures: dict[str, float]  # by the names of the question's figures
    facts: dict[str, float] = dataclasses.field(default_factory=dict)  # for other contestants and for the record


Contestant = Callable[[Window], Measured]


@dataclasses.dataclass(frozen=True)
class Pace:
    """How thoroughly a question is measured."""

    is_quick: bool = False  # one short round
    patience_s: float = 20.0  # how long the contestants of a question wait, all together, for a quiet machine


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that a question measures."""

    name: str
    unit: str  # a rate ("batches/s"), where more is better, or a time ("ms"), where less is
    what: str  # a few words for the table

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure's ratio to another figure of the same run, and what it should be."""

    figure: str
    baseline: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, ratio: float) -> bool:
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclasses.dataclass(frozen=True)
class Question:
    """One benchmark."""

    name: str
    figures: tuple[Figure, ...]
    contestants: dict[str, Contestant]
    bars: tuple[Bar, ...]
    rounds: int = 3
    seconds: float = 2.0
    warm_s: float = 0.5

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure over all rounds, against its bar if it has one."""

    question: str
    figure: Figure
    values: tuple[float, ...]  # one a round
    bar: Bar | None = None
    ratio: float | None = None  # median to the baseline's median
    ratio_of_best: float | None = None  # best round to the baseline's best round

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return _best(self.figure, self.values)

    @property
    def is_met(self) -> bool:
        return self.bar is None or (self.ratio is not None and self.bar.is_met(self.ratio))


def require(condition: object, message: str) -> None:
    """Fail the contestant unless the condition holds (`assert` would vanish under -O)."""
    if not condition:
        raise AssertionError(message)


@dataclasses.dataclass(frozen=True)
class Delivery(Generic[_T]):
    """What a consumer saw of the batches that it took."""

    rate: float  # batches per second after the warm-up
    seen: list[_T]  # of every batch from the first one on
    cpu_s: float  # CPU time of this process for each counted batch, all its threads together


def deliveries(
    batches: Iterable[Any], window: Window, look: Callable[[Any], _T], turn: int = 1
) -> tuple[float, list[_T]]:
    """Batches per second after the warm-up, and what `look` saw; see `delivered`."""
    delivery = delivered(batches, window, look, turn)
    return delivery.rate, delivery.seen


def delivered(batches: Iterable[Any], window: Window, look: Callable[[Any], _T], turn: int = 1) -> Delivery[_T]:
    """Take batches through the warm-up and the window.

    Args:
        batches: must not end before the window does.
        window: its warm-up begins at the first delivery; the clock starts at the first one after it, and stops at one.
        look: cheap against the making of a batch; its results are for the caller to verify.
        turn: the counted batches are a multiple of this. Where n workers each make a whole batch at a time, batches
            come n at a time, and a window that cuts a bunch would measure its own edge.
    """
    seen: list[_T] = []
    iterator: Iterator[Any] = iter(batches)
    clock = time.perf_counter
    warm_until = 0.0
    for batch in iterator:
        # From the first delivery on: what starts slowly is warm no sooner than others.
        warm_until = warm_until or clock() + window.warm_s
        seen.append(look(batch))
        if clock() >= warm_until:
            break
    cpu_s = time.process_time()
    started = clock()
    deadline, count, is_whole = started + window.seconds, 0, False
    for batch in iterator:
        seen.append(look(batch))
        count += 1
        if clock() >= deadline and count % turn == 0:
            is_whole = True
            break
    elapsed_s = clock() - started
    cpu_s = time.process_time() - cpu_s
    require(is_whole, "the pass ended before the window did: give the loader more items")
    return Delivery(count / elapsed_s, seen, cpu_s / count)


def measure(
    question: Question, file: Path, pace: Pace, emit: Callable[[dict[str, Any]], None]
) -> tuple[list[Row], float]:
    """Run all contestants round by round; each raw result goes to `emit`.

    Returns:
        The rows, and how many CPUs others kept busy before the most disturbed contestant.

    Raises:
        RuntimeError: a contestant failed or verified its results as wrong; its stderr is in the text.
    """
    rounds = 1 if pace.is_quick else question.rounds
    seconds = question.seconds / (4 if pace.is_quick else 1)
    most_busy, patience_s = 0.0, pace.patience_s
    values: dict[str, list[float]] = {figure.name: [] for figure in question.figures}
    facts: dict[str, float] = {}
    for number in range(rounds):
        names = list(question.contestants)
        for name in names if number % 2 == 0 else reversed(names):
            started = time.monotonic()
            busy = 0.0 if pace.is_quick else quiet.wait_until_quiet(patience_s)
            patience_s = max(0.0, patience_s - (time.monotonic() - started))
            most_busy = max(most_busy, busy)
            measured = _run_contestant(file, name, Window(seconds, question.warm_s, facts))
            facts.update(measured.facts)
            for figure, value in measured.figures.items():
                values[figure].append(value)
            event = {"kind": "round", "question": question.name, "round": number, "contestant": name}
            emit({**event, "busy_cpus_before": busy, **dataclasses.asdict(measured)})
    return _rows(question, values), most_busy


def main(question: Question) -> None:
    """The command line of a benchmark file. Ends the process; status 1 if `--check` finds a bar missed."""
    file = Path(sys.argv[0]).resolve()
    parser = argparse.ArgumentParser(description=f"The benchmark {question.name!r}; its question is in {file.name}.")
    parser.add_argument("--contestant", choices=list(question.contestants), help="measure this one here, once")
    parser.add_argument("--window", help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.contestant:
        window = Window(question.seconds, question.warm_s, {})
        if arguments.window:
            window = Window(**json.loads(arguments.window))
        measured = question.contestants[arguments.contestant](window)
        print_result(dataclasses.asdict(measured))
        return
    import report

    sys.exit(report.run_and_report([(question, file)], arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `run` and every file have."""
    parser.add_argument("--quick", action="store_true", help="one short round: does it work, not how fast")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every round and result as JSON lines")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/explanation/performance.md")
    parser.add_argument("--record", action="store_true", help="write the result into the file's docstring")
    parser.add_argument(
        "--patience", type=float, default=20.0, metavar="SECONDS", help="wait this long in all for others to finish"
    )


def _run_contestant(file: Path, name: str, window: Window) -> Measured:
    command = [sys.executable, str(file), "--contestant", name, "--window", json.dumps(dataclasses.asdict(window))]
    return Measured(**run_fresh(command, _CONTESTANT_TIMEOUT_S, f"{file.name}: contestant {name!r}"))


def _best(figure: Figure, values: Iterable[float]) -> float:
    return max(values) if figure.is_rate else min(values)


def _rows(question: Question, values: dict[str, list[float]]) -> list[Row]:
    rows = []
    for figure in question.figures:
        row = Row(question.name, figure, tuple(values[figure.name]))
        bars = [bar for bar in question.bars if bar.figure == figure.name]
        for bar in bars:
            baseline = Row(question.name, question.figure(bar.baseline), tuple(values[bar.baseline]))
            rows.append(
                dataclasses.replace(
                    row, bar=bar, ratio=row.median / baseline.median, ratio_of_best=row.best / baseline.best
                )
            )
        if not bars:
            rows.append(row)
    return rows
