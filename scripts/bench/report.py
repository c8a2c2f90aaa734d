"""Tables of docs/, and the missed goals. `docs/pictures.py` draws charts of the tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.harness import Result
from bench.rows import PEERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = {
    "loaderpool": "loaderpool",
    "serial": "from_generator",
    "keras": "PyDataset",
    "torch": "DataLoader",
}
NAMES |= {
    "grain": "Grain",
    "spdl": "SPDL",
    "mpire": "mpire",
    "joblib": "joblib",
    "pool_imap": "Pool.imap",
}
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
# Share of a goal that must be reached on a noisy machine.
GROSS = 2.0


def goals_table(results: Iterable[Result]) -> str:
    """Return a table with one line for each measured goal."""
    lines = [
        "| row | measured | loaderpool | against | ratio | of the best rounds | goal |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for result in results:
        for goal in result.row.goals:
            ratio, best, other = (
                result.ratio(goal),
                result.ratio(goal, result.best),
                result.opponent(goal),
            )
            if ratio is None or best is None:
                continue
            against = (
                "" if other is None else f"{other.replace('_', ' ')}, {value_text(result, other)}"
            )
            ratios = ["", ""] if other is None else [f"{ratio:.3g}", f"{best:.3g}"]
            what = result.row.what if goal.of == "loaderpool" else f"{result.row.what} ({goal.of})"
            missed = "" if goal.is_met(ratio) else " missed"
            cells = [
                result.row.key,
                what,
                value_text(result, goal.of),
                against,
                *ratios,
                f"{goal}{missed}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_table(results: Iterable[Result]) -> str:
    """Return the milliseconds for a batch through tf.data and in `fit`, of loaderpool and other
    common ways.
    """
    shown = [
        result
        for result in results
        if result.row.is_rate and result.row.view != "own" and result.peers()
    ]
    return _side_by_side(
        "work", {result.row.what: result for result in shown if not _is_of_backends(result)}
    )


def backends_table(results: Iterable[Result]) -> str:
    """Return the milliseconds of a step of `fit` on each backend of Keras."""
    return _side_by_side(
        "backend", {BACKENDS[each.row.view]: each for each in results if _is_of_backends(each)}
    )


def _is_of_backends(result: Result) -> bool:
    return result.row.measure == "fit:steps" and result.row.is_shown_whole


def _side_by_side(head: str, shown: dict[str, Result]) -> str:
    sides = [side for side in NAMES if any(side in result.figures for result in shown.values())]
    rows = [
        [
            name,
            *(
                f"{1e3 / result.median(side):.3g}" if side in result.figures else "–"
                for side in sides
            ),
        ]
        for name, result in shown.items()
    ]
    return _table([head, *(NAMES[side] for side in sides)], rows)


def limits_table(results: Iterable[Result]) -> str:
    """Return the milliseconds for a batch of loaderpool, and of the same work in processes that
    deliver nothing.
    """
    rows = []
    for result in results:
        limit = next(
            (goal.against for goal in result.row.goals if goal.against in result.row.contestants),
            None,
        )
        if (
            result.row.is_rate
            and result.row.view == "own"
            and {limit, "loaderpool"} <= set(result.figures)
        ):
            ours, best = result.median("loaderpool"), result.median(str(limit))
            rows.append(
                [result.row.what, f"{1e3 / ours:.3g}", f"{1e3 / best:.3g}", f"{ours / best:.0%}"]
            )
    return _table(["work", "loaderpool", "limit", "share of the limit's rate"], rows)


def costs_table(results: Iterable[Result], unit: str) -> str:
    """Return the times or sizes of loaderpool and of the best peer, for rows of one unit."""
    rows = []
    for result in results:
        if result.row.unit == unit and result.row.is_compared and "loaderpool" in result.figures:
            peer = next(iter(result.peers()), "")
            other = f"{value_text(result, peer)} ({NAMES[peer]})" if peer else "–"
            rows.append([result.row.what, value_text(result, "loaderpool"), other])
    return _table(["what", "loaderpool", "the best of the others"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shortfalls(results: Iterable[Result], is_gross: bool = False) -> list[tuple[str, str]]:
    """Return the row and a text for each missed goal. A goal without a measured opponent is not
    missed.
    """
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
                lines.append(
                    (key, f"{key}: {goal.of} is at {ratio:.3g}{against}; the goal is {goal}{half}")
                )
    return lines


def value_text(result: Result, side: str) -> str:
    """Return the median as text; a rate as the time for a batch: `24 us`."""
    row, value = result.row, result.median(side)
    if row.unit == "MB":
        return f"{value:,.0f} MB" if value >= 10 else f"{value:.2g} MB"
    seconds = 1 / value if row.is_rate else value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[row.unit]
    scale, unit = next(
        (each for each in ((1.0, "s"), (1e-3, "ms")) if seconds >= each[0]), (1e-6, "us")
    )
    value = seconds / scale
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def machine_line() -> str:
    """Return the date, the CPUs, and the versions of Python and of installed packages."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    names = ["numpy", "tensorflow-cpu", "tensorflow", "jax", "cloudpickle", *PEERS]
    versions = ", ".join(f"{each} {installed[each]}" for each in names if each in installed)
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpus = f"{len(os.sched_getaffinity(0))} x {cpu[1] if cpu else platform.machine()}"
    return f"{datetime.date.today()}, {cpus}, python {platform.python_version()}, {versions}"


def write_docs(results: Sequence[Result], caption: str, is_whole: bool) -> None:
    """Write the tables into the pages, between their marks. If only some rows were measured, write
    only the table of backends.
    """
    pages = {}
    if any(map(_is_of_backends, results)):
        pages["guide/train/keras-backends.md"] = {"backends": backends_table(results)}
    if is_whole:
        costs = {"times": costs_table(results, "ms"), "memory": costs_table(results, "MB")}
        answers = {"speed": speed_table(results), "limits": limits_table(results), **costs}
        pages |= {
            "internals/goals-and-experiments.md": {"bench": goals_table(results)},
            "benchmarks/results.md": answers,
        }
    for name, parts in pages.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        for mark, table in parts.items():
            begin, end = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{table}\n\n{caption}\n{end}{rest.partition(end)[2]}"
        (DOCS / name).write_text(text, encoding="utf-8")
