"""What is made of the results: the tables of docs/explanation/performance.md, a picture, what falls short."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Result
from bench.rows import BEST_PEER, PEERS, Row

DOCS = Path(__file__).resolve().parents[2] / "docs"
OURS, PEER, LIMIT = "#1b6ca8", "#b8b8b8", "#e0a63a"
OUT_OF_SIGHT = 8  # times as fast as loaderpool: a limit that would leave no room for the others
# Of a goal, for a machine that is noisy: half of it.
GROSS = 2.0


def goals_table(results: Iterable[Result]) -> str:
    """One line for each goal that was measured."""
    lines = [
        "| row | measured | loaderpool | against | ratio | of the best rounds | goal |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for result in results:
        for goal in result.row.goals:
            ratio, best, other = result.ratio(goal), result.ratio(goal, result.best), result.opponent(goal)
            if ratio is None or best is None:
                continue
            against = "" if other is None else f"{other.replace('_', ' ')}, {value_text(result, other)}"
            ratios = ["", ""] if other is None else [f"{ratio:.3g}", f"{best:.3g}"]
            what = result.row.what if goal.of == "loaderpool" else f"{result.row.what} ({goal.of})"
            missed = "" if goal.is_met(ratio) else " missed"
            cells = [result.row.key, what, value_text(result, goal.of), against, *ratios, f"{goal}{missed}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def peers_table(results: Iterable[Result]) -> str:
    """One line for each row that others can run: loaderpool, its limit and the best peer."""
    lines = [
        "| work | view | loaderpool | the limit | ratio (goal) | the best peer | ratio (goal) |",
        "|---|---|---:|---|---:|---|---:|",
    ]
    for result in results:
        row = result.row
        if not row.is_compared or "loaderpool" not in result.figures:
            continue
        goals = [goal for goal in row.goals if goal.of == "loaderpool"]
        to_peer = next((goal for goal in goals if goal.against in (BEST_PEER, *row.peers)), None)
        to_limit = next((goal for goal in goals if goal.against not in (BEST_PEER, *row.peers)), None)
        cells = [row.what, row.view, value_text(result, "loaderpool", spread=True)]
        limit = (to_limit and to_limit.against) or next(iter(row.contestants[1:]), None)
        for other, goal in ((limit, to_limit), (next(iter(result.peers()), None), to_peer)):
            if other not in result.figures:
                cells += ["–", f"({goal})" if goal else "–"]
                continue
            ratio = result.median("loaderpool") / result.median(other)
            name = f"{other.replace('_', ' ')}, {value_text(result, other, spread=True)}"
            cells += [name, f"{ratio:.2f} ({goal})" if goal and goal.against else f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shortfalls(results: Iterable[Result], is_gross: bool = False) -> list[tuple[str, str]]:
    """Row and text for each goal that is missed. One that was not measured for want of an opponent is not."""
    lines = []
    for result in results:
        key = result.row.key
        if "loaderpool" in result.failures:
            lines.append((key, result.failures["loaderpool"]))
        for goal in result.row.goals:
            ratio = result.ratio(goal)
            if ratio is not None and not goal.is_met(ratio, GROSS if is_gross else 1.0):
                against = "" if goal.against is None else f" of {result.opponent(goal)}"
                half = " (status 1 below half of it)" if is_gross else ""
                lines.append((key, f"{key}: {goal.of} is at {ratio:.3g}{against}; the goal is {goal}{half}"))
    return lines


def value_text(result: Result, side: str, *, spread: bool = False) -> str:
    """Median, and range if asked for, as time for a batch where it is a rate: `24 us [23 us .. 26 us]`."""
    text = _unit_text(result.row, result.median(side))
    values = sorted(result.figures[side], reverse=result.row.is_rate)
    if not spread or len(values) == 1:
        return text
    return f"{text} [{_unit_text(result.row, values[0])} .. {_unit_text(result.row, values[-1])}]"


def _unit_text(row: Row, value: float) -> str:
    if row.unit == "MB":
        return f"{value:,.0f} MB" if value >= 10 else f"{value:.2g} MB"
    seconds = 1 / value if row.is_rate else value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[row.unit]
    scale, unit = next((each for each in ((1.0, "s"), (1e-3, "ms")) if seconds >= each[0]), (1e-6, "us"))
    value = seconds / scale
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def machine_line() -> str:
    """Date, CPUs, the versions of Python and of what is installed."""
    names = ["numpy", "tensorflow-cpu", "tensorflow", "jax", "cloudpickle", *PEERS]
    versions = [f"python {platform.python_version()}"]
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = cpu[1] if cpu else platform.machine()
    return f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} x {name}, {', '.join(versions)}"


def write_docs(results: Sequence[Result], caption: str) -> None:
    """Put the tables into docs/explanation/performance.md, between their marks, and draw the README's picture."""
    page = DOCS / "explanation" / "performance.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (("bench", goals_table(results)), ("peers", peers_table(results))):
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n\n{caption}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")
    draw(results, DOCS / "images" / "peers.png")


def draw(results: Sequence[Result], file: Path) -> None:
    """A bar chart for each row that others can run: throughput beside the row's limit, or time."""
    from matplotlib.figure import Figure

    shown = [result for result in results if result.row.is_compared and "loaderpool" in result.figures]
    lines = -(-len(shown) // 3)
    figure = Figure(figsize=(15.6, 2.6 * lines), dpi=80, layout="constrained")
    for number, result in enumerate(shown, 1):
        _draw_row(figure.add_subplot(lines, 3, number), result)
    figure.savefig(file)


def _draw_row(axis: Any, result: Result) -> None:
    row = result.row
    reach = OUT_OF_SIGHT * result.median("loaderpool") if row.is_rate else float("inf")
    sides = [side for side in (*row.contestants, *row.peers) if side in result.figures and result.median(side) < reach]
    sides.sort(key=result.median, reverse=not row.is_rate)
    colors = [OURS if side == "loaderpool" else LIMIT if side in row.contestants else PEER for side in sides]
    values = [result.median(side) for side in sides]
    bars = axis.barh([side.replace("_", " ") for side in sides], values, color=colors)
    axis.bar_label(bars, [value_text(result, side) for side in sides], padding=4, fontsize=6.5)
    if not row.is_rate and max(values) > 30 * min(values):  # times reach from microseconds to seconds
        axis.set_xscale("log")
    axis.margins(x=0.2)
    axis.tick_params(labelsize=7)
    axis.set_title(f"{row.what}\n{row.unit}, {'more' if row.is_rate else 'less'} is better", fontsize=8, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
