"""What is made of the results: the table of docs/explanation/performance.md, one of all, what falls short."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from .goals import BEST_PEER, GOALS, Goal, Verdict, best_peer, judge
from .rounds import Result, Results
from .rows import Row

__all__ = ["duration", "full_table", "left_out", "shortfalls", "summary_table", "value_text"]

# What loaderpool is called where a row's name says nothing of the view.
_VIEWS = {"own": "own", "tf": "tf", "function": "tf.function", "pool": "on a running pool", "memory": ""}


def summary_table(results: Results) -> str:
    """One line for each row: loaderpool, its limit, the best peer, and the ratios beside their goals."""
    verdicts = {_goal_key(verdict.goal): verdict for verdict in judge(results)}
    lines = [
        "| work | view | loaderpool | the limit | ratio (goal) | the best peer | ratio (goal) |",
        "|---|---|---:|---|---:|---|---:|",
    ]
    for row in _rows(results):
        if row.kind == "growth":
            continue
        goals = [goal for goal in GOALS if goal.row == row.key and goal.figure is None]
        to_peer = next((goal for goal in goals if goal.against in (BEST_PEER, *row.peers)), None)
        to_limit = next((goal for goal in goals if goal is not to_peer), None)
        limit = results.get((row.key, (to_limit and to_limit.against) or "")) or _first_limit(results, row)
        peer = best_peer(results, row.key, row.figure, bool(to_peer and to_peer.counts_serial))
        if to_peer and to_peer.against != BEST_PEER:
            peer = results.get((row.key, to_peer.against or ""))
        cells = [
            row.what, _VIEWS.get(row.view, row.view), value_text(results[row.key, "loaderpool"]),
            *_compared(results, row, limit, verdicts, to_limit), *_compared(results, row, peer, verdicts, to_peer),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    cpu = [verdict for verdict in verdicts.values() if verdict.goal.figure == "cpu_us"]
    for verdict in cpu:
        lines.append(_cpu_line(results, verdict))
    return "\n".join(lines)


def full_table(results: Results) -> str:
    """One line for each contestant of each row."""
    lines = [
        "| row | contestant | median | min | max | rounds | trainer's CPU a batch |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in _rows(results):
        for result in _of_row(results, row):
            if not result.rounds:
                continue
            values = sorted(_shown(row, value) for value in result.values(row.figure))
            cpu = result.values("cpu_us") if row.kind == "rate" else []
            if row.kind == "growth":  # the figure is trainer and supervisor together
                cpu = [result.facts["trainer_us"]] if "trainer_us" in result.facts else []
            cells = [
                row.key, result.contestant, _unit_text(row, _shown(row, result.median(row.figure))),
                _unit_text(row, values[0]), _unit_text(row, values[-1]), str(len(values)),
                duration(statistics.median(cpu) * 1e-6) if cpu else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shortfalls(verdicts: Iterable[Verdict], is_gross: bool = False) -> list[str]:
    """A line for each goal that is missed; those that were not measured for want of an opponent are not missed."""
    lines = []
    for verdict in verdicts:
        goal = verdict.goal
        what = f"{goal.row}{' ' + goal.figure if goal.figure else ''}"
        against = f" of {verdict.against}" if verdict.against else ""
        if verdict.ratio is None:
            if verdict.against is None or verdict.reason.startswith(goal.row):
                lines.append(f"{what}: no figure, the goal is {goal}{against} ({verdict.reason})")
        elif not verdict.is_met(is_gross):
            half = f", half of it {goal.bound(True):g}" if is_gross else ""
            best = f", best rounds {verdict.ratio_of_best:.3g}"
            lines.append(f"{what}: {verdict.ratio:.3g}{against}{best}; the goal is {goal}{half}")
    return lines


def left_out(results: Results) -> list[str]:
    """A line for each contestant of a row that has failed."""
    return [
        f"{row}: {contestant} gave no result: {result.failure}"
        for (row, contestant), result in results.items()
        if result.failure
    ]


def value_text(result: Result) -> str:
    """Median and range, as time for a batch where the figure is a rate: `24 us [23 .. 26]`."""
    if not result.rounds:
        return "–"
    row = result.row
    values = sorted(_shown(row, value) for value in result.values(row.figure))
    text = _unit_text(row, _shown(row, result.median(row.figure)))
    return text if len(values) == 1 else f"{text} [{_unit_text(row, values[0])} .. {_unit_text(row, values[-1])}]"


def duration(seconds: float) -> str:
    """Three digits and a unit: `24.1 us`, `3.00 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            value = seconds / scale
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError


def _compared(
    results: Results, row: Row, other: Result | None, verdicts: dict[tuple[str, ...], Verdict], goal: Goal | None
) -> list[str]:
    """Two cells: whom loaderpool is compared with, and the ratio."""
    ours = results[row.key, "loaderpool"]
    verdict = verdicts.get(_goal_key(goal)) if goal else None
    if goal and goal.against is None:
        assert verdict
        return [f"{goal}", "–" if verdict.ratio is None else f"{verdict.ratio / goal.bound():.2f}"]
    if other is None or not other.rounds or not ours.rounds:
        return ["–", f"({goal})" if goal else "–"]
    ratio = ours.median(row.figure) / other.median(row.figure)
    name = other.contestant.replace("_", " ")
    return [f"{name}, {value_text(other)}", f"{ratio:.2f} ({goal})" if goal else f"{ratio:.2f}"]


def _cpu_line(results: Results, verdict: Verdict) -> str:
    goal = verdict.goal
    ours, theirs = results[goal.row, "loaderpool"], results.get((goal.against_row or goal.row, verdict.against or ""))
    cells = [f"{ours.row.what}: the trainer's CPU time a batch", _VIEWS[ours.row.view]]
    cells.append(duration(ours.median("cpu_us") * 1e-6) if ours.values("cpu_us") else "–")
    if verdict.ratio is None or theirs is None:
        return f"| {' | '.join([*cells, '–', f'({goal})', '', ''])} |"
    name = f"{theirs.contestant.replace('_', ' ')}, {duration(theirs.median('cpu_us') * 1e-6)}"
    return f"| {' | '.join([*cells, name, f'{verdict.ratio:.2f} ({goal})', '', ''])} |"


def _first_limit(results: Results, row: Row) -> Result | None:
    return next((results[row.key, name] for name in row.limits if (row.key, name) in results), None)


def _goal_key(goal: Goal) -> tuple[str, ...]:
    return goal.row, goal.against or "", goal.figure or ""


def _rows(results: Results) -> list[Row]:
    return list({result.row.key: result.row for result in results.values()}.values())


def _of_row(results: Results, row: Row) -> list[Result]:
    return [result for (key, _), result in results.items() if key == row.key]


def _shown(row: Row, value: float) -> float:
    """Rates are shown as time for a batch."""
    return 1 / value if row.figure == "rate" else value


def _unit_text(row: Row, shown: float) -> str:
    if row.unit == "batches/s":
        return duration(shown)
    if row.unit == "ms":
        return duration(shown * 1e-3)
    if row.unit == "us":
        return duration(shown * 1e-6)
    return f"{shown:,.0f} {row.unit}" if shown >= 10 else f"{shown:.2g} {row.unit}"
