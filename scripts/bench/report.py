"""What is made of the rows: tables for people and for Markdown, JSON lines, a file's last result."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import Pace, Question, Row, measure
from quiet import QUIET_CPUS

__all__ = ["disturbance", "machine_line", "record_last_result", "run_and_report"]

_PACKAGES = ("numpy", "tensorflow-cpu", "tensorflow")
_LAST_RESULT = "Last result"


def run_and_report(questions: list[tuple[Question, Path]], options: argparse.Namespace) -> int:
    """Run the questions, print the tables, return the exit status.

    Args:
        questions: each with its file.
        options: as `common.add_options` defines them.

    Returns:
        1 if a contestant failed, or if `--check` was asked for and a bar is missed; else 0.
    """
    if options.record and options.quick:
        raise SystemExit("--record keeps a result for others to read; --quick is too short for that")
    pace = Pace(options.quick, options.patience)
    rows: list[Row] = []
    broken: list[str] = []
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(options.json.open("a", encoding="utf-8")) if options.json else None

        def emit(event: dict[str, Any]) -> None:
            if sink is not None:
                print(json.dumps({**event, "at": _now().isoformat(timespec="seconds")}), file=sink, flush=True)

        emit({"kind": "machine", "quick": pace.is_quick, **_machine()})
        for question, file in questions:
            try:
                found, most_busy = measure(question, file, pace, emit)
            except RuntimeError as error:
                broken.append(question.name)
                print(f"{question.name}: FAILED\n{textwrap.indent(str(error), '    ')}", file=sys.stderr)
                continue
            for row in found:
                emit({"kind": "result", **dataclasses.asdict(row), "median": row.median, "best": row.best})
            print(text_table(found), flush=True)
            if most_busy > QUIET_CPUS:
                print(f"{question.name}: {disturbance(most_busy)}", file=sys.stderr)
            if options.record:
                record_last_result(file, found, most_busy)
            rows += found
    if options.markdown:
        print(markdown_table(rows))
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        print(f"MISSED {row.question}: {row.figure.name} is at {row.ratio:.3g}, the bar is {row.bar}", file=sys.stderr)
    return 1 if broken or (options.check and missed) else 0


def text_table(rows: Iterable[Row]) -> str:
    """Lines of at most 110 characters: median [range] of each figure, then the ratio of the medians."""
    lines = []
    for row in rows:
        spread = f"[{_number(min(row.values))} .. {_number(max(row.values))}]" if len(row.values) > 1 else ""
        line = f"{row.question:11} {row.figure.name:14} {_number(row.median):>7} {row.figure.unit:9} {spread:17}"
        if row.bar is not None and row.ratio is not None and row.ratio_of_best is not None:
            line += f" {_ratio(row.ratio):>5} x {row.bar.baseline} (best {_ratio(row.ratio_of_best)}; bar {row.bar})"
            line += "" if row.is_met else " MISSED"
        lines.append(line.rstrip())
    return "\n".join(lines)


def markdown_table(rows: Iterable[Row]) -> str:
    """The table of docs/explanation/performance.md: one line for each bar."""
    lines = [
        "| question | measured | median | against | ratio | of the best rounds | bar |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    by_name = {(row.question, row.figure.name): row for row in rows}
    for row in rows:
        if row.bar is None or row.ratio is None:
            continue
        baseline = by_name[row.question, row.bar.baseline]
        lines.append(
            f"| {row.question} | {row.figure.what} | {_number(row.median)} {row.figure.unit} | {baseline.figure.what}, "
            f"{_number(baseline.median)} {baseline.figure.unit} | {_ratio(row.ratio)} | {_ratio(row.ratio_of_best)} | "
            f"{row.bar} |"
        )
    return "\n".join([*lines, "", f"{machine_line()}. Command: `scripts/bench/run --markdown`."])


def record_last_result(file: Path, rows: list[Row], most_busy: float) -> None:
    """Write the rows into the file's own docstring, in the place of its last result.

    Args:
        file: the question's.
        rows: of that question.
        most_busy: CPUs that others kept busy; a disturbed result says so for as long as it stands there.
    """
    text = file.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    if docstring is None or _LAST_RESULT not in docstring:
        raise ValueError(f'{file.name} has no docstring with a part that begins with "{_LAST_RESULT}"')
    table = textwrap.indent(text_table(rows), "    ")
    note = f"; {disturbance(most_busy)}" if most_busy > QUIET_CPUS else ""
    # A line of its own for the machine: with all versions it is as long as a line may be.
    fresh = f"{docstring[: docstring.index(_LAST_RESULT)]}{_LAST_RESULT}{note}\n({machine_line()}):\n\n{table}\n"
    file.write_text(text.replace(docstring, fresh, 1), encoding="utf-8")


def disturbance(most_busy: float) -> str:
    """What to say of a run during which others kept so many CPUs busy."""
    return f"others kept up to {most_busy:.1f} CPUs busy meanwhile, run again on a quiet machine"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _machine(packages: Iterable[str] = _PACKAGES) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"cpu": _cpu_name(), "cpus": len(_usable_cpus()), "load_1min": os.getloadavg()[0], "versions": versions}


def machine_line(packages: Iterable[str] = _PACKAGES) -> str:
    """Date, CPUs and versions, in one line."""
    machine = _machine(packages)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{_now():%Y-%m-%d}, {machine['cpus']} x {machine['cpu']}, {versions}"


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
