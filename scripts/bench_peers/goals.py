"""What loaderpool is to reach, in one table, and how a run is held against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .rounds import Result, Results

__all__ = ["BEST_PEER", "GOALS", "Goal", "Verdict", "best_peer", "judge"]

BEST_PEER = "the best peer"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure of loaderpool's, as a ratio to another contestant's of the same run, or by itself."""

    row: str  # its key
    against: str | None = None  # a contestant, or BEST_PEER; None: the figure by itself
    at_least: float | None = None
    at_most: float | None = None
    figure: str | None = None  # None: the row's own
    against_row: str | None = None  # None: the same
    counts_serial: bool = False  # the serial loop is among the peers

    def bound(self, is_gross: bool = False) -> float:
        """What must be reached: the goal, or half of it where only gross regressions count."""
        factor = 2.0 if is_gross else 1.0
        if self.at_least is not None:
            return self.at_least / factor
        assert self.at_most is not None
        return self.at_most * factor

    def is_met(self, ratio: float, is_gross: bool = False) -> bool:
        bound = self.bound(is_gross)
        return ratio >= bound if self.at_least is not None else ratio <= bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least is not None else '≤'} {self.bound():g}"


GOALS = (
    Goal("cpu/own", "bare", at_least=0.99),
    Goal("cpu/tf", "bare", at_least=0.99),
    Goal("jpeg/own", "bare", at_least=1.0),
    Goal("jpeg/tf", "bare", at_least=0.98),
    Goal("tiny32/own", "rows", at_least=0.8),
    Goal("tiny32/own", BEST_PEER, at_least=3.5),
    Goal("tiny1/own", BEST_PEER, at_least=10.0),
    Goal("tiny32/tf", "from_tensors", at_least=0.85),
    Goal("tiny32/function", "from_tensors", at_least=0.85),
    Goal("tiny32/tf", BEST_PEER, at_least=4.0),
    Goal("tiny1/tf", "from_tensors", at_least=0.85),
    Goal("tiny1/function", "from_tensors", at_least=0.85),
    # Every parallel peer is slower than the serial loop here, so that is what counts.
    Goal("tiny1/tf", BEST_PEER, at_least=3.0, counts_serial=True),
    Goal("wide/own", "rows", at_least=0.85),
    # Eight times the best of those who send batches from process to process; threads, which send nothing, as the one
    # call of this function lets the GIL go, are to be led.
    Goal("wide/own", BEST_PEER, at_least=1.0),
    Goal("wide/own", "torch", at_least=8.0),
    Goal("wide/tf", "rows", at_least=0.85),
    Goal("wide/tf", BEST_PEER, at_least=1.0),
    Goal("wide/tf", "torch", at_least=8.0),
    Goal("io16/own", "ideal", at_least=0.99),
    Goal("io32/own", "ideal", at_least=0.99),
    Goal("io256/own", "ideal", at_least=0.90),
    Goal("threads/own", "ideal", at_least=0.95),
    Goal("straggler/own", "bare", at_least=0.97),
    Goal("straggler/tf", "bare", at_least=0.95),
    Goal("first/own", "interpreter", at_most=2.0),
    Goal("first/pool", "interpreter", at_most=0.5),
    Goal("gap/own", "torch", at_most=0.1),
    Goal("gap/tf", BEST_PEER, at_most=1.0),
    Goal("array/memory", at_most=60.0),
    Goal("dicts/memory", at_most=300.0),
    # The trainer's CPU time for a batch. In `wide` batches must be waited for, which costs from_generator as well.
    Goal("tiny32/own", "from_generator", at_most=0.1, figure="cpu_us", against_row="tiny32/tf"),
    Goal("tiny32/tf", "from_generator", at_most=1.1, figure="cpu_us"),
    Goal("wide/own", "waiting", at_most=0.1, figure="cpu_us", against_row="wide/tf"),
    Goal("wide/tf", "waiting", at_most=1.1, figure="cpu_us"),
    Goal("step/own", "ready", at_most=1.03),
    Goal("step/tf", "ready", at_most=1.03),
    Goal("shortstep/own", "ready", at_most=1.03),
    Goal("shortstep/tf", "ready", at_most=1.03),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A goal beside what a run has found."""

    goal: Goal
    ratio: float | None  # of the medians; None: not measured
    ratio_of_best: float | None  # of each side's best round
    against: str | None  # whom it was compared with
    reason: str = ""  # why there is no ratio

    def is_met(self, is_gross: bool = False) -> bool:
        return self.ratio is not None and self.goal.is_met(self.ratio, is_gross)


def judge(results: Results, goals: Iterable[Goal] = GOALS) -> list[Verdict]:
    """Hold a run against the goals of the rows that it has measured."""
    measured = {row for row, _ in results}
    return [_judge(results, goal) for goal in goals if goal.row in measured]


def best_peer(results: Results, row: str, figure: str, counts_serial: bool = False) -> Result | None:
    """The peer with the best median of a row; None where no peer has run."""
    found = [
        result
        for (key, _), result in results.items()
        if key == row
        and result.contestant in result.row.peers
        and (counts_serial or result.contestant != "serial")
        and result.values(figure)
    ]
    if not found:
        return None
    return (max if figure == "rate" else min)(found, key=lambda result: result.median(figure))


def _judge(results: Results, goal: Goal) -> Verdict:
    ours = results.get((goal.row, "loaderpool"))
    if ours is None or not ours.rounds:
        return Verdict(goal, None, None, goal.against, (ours and ours.failure) or "loaderpool was not measured")
    figure = goal.figure or ours.row.figure
    if goal.against is None:
        return Verdict(goal, ours.median(figure), ours.best(figure), None)
    row = goal.against_row or goal.row
    if goal.against == BEST_PEER:
        theirs = best_peer(results, row, figure, goal.counts_serial)
    else:
        theirs = results.get((row, goal.against))
    if theirs is None or not theirs.values(figure):
        reason = (theirs and theirs.failure) or f"{goal.against} was not measured"
        return Verdict(goal, None, None, goal.against, reason)
    ratio = ours.median(figure) / theirs.median(figure)
    return Verdict(goal, ratio, ours.best(figure) / theirs.best(figure), theirs.contestant)
