"""The command `scripts/bench/run`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import textwrap
from pathlib import Path

from bench.report import markdown_table, record_last_result, text_table
from bench.rounds import measure
from benchlib.fresh import RunError
from benchlib.machine import Emit, disturbance, machine, write_events
from benchlib.model import Pace, Row

__all__ = ["QUESTIONS", "main"]

QUESTIONS = (
    *("cpu_bound", "tiny", "tiny_tf", "local", "wide", "wide_tf", "blocking_io", "latency", "faults"),
    *("eager", "fit", "reader", "import_time", "memory", "hosts", "overhead"),
)


def main() -> int:
    """Run the questions and print their tables.

    Returns:
        The exit status: 1 if a contestant failed, or if `--check` was asked for and a bar is missed.
    """
    options = _parse()
    rows: list[Row] = []
    is_broken = False
    with write_events(options.json) as emit:
        emit({"kind": "machine", "quick": options.quick, **machine()})
        for name in options.questions or QUESTIONS:
            try:
                rows += _answer(name, options, emit)
            except RunError as error:
                is_broken = True
                print(f"{name}: FAILED\n{textwrap.indent(str(error), '    ')}", file=sys.stderr)
    if options.markdown:
        print(markdown_table(rows))
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        print(f"MISSED {row.question}: {row.figure.name} is at {row.ratio:.3g}, the bar is {row.bar}", file=sys.stderr)
    return 1 if is_broken or (options.check and missed) else 0


def _answer(name: str, options: argparse.Namespace, emit: Emit) -> list[Row]:
    module = importlib.import_module(f"bench.{name}")
    pace = Pace(1, 4.0) if options.quick else Pace(patience_s=options.patience)
    found, most_busy = measure(module.QUESTION, pace, emit)
    for row in found:
        emit({"kind": "result", **dataclasses.asdict(row), "median": row.median, "best": row.best})
    print(text_table(found), flush=True)
    if text := disturbance(most_busy):
        print(f"{name}: {text}", file=sys.stderr)
    if options.record:
        record_last_result(Path(module.__file__ or ""), found, most_busy)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description="Run the benchmarks, all or those named.")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="one short round: does it work, not how fast")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every round and result as JSON lines")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/explanation/performance.md")
    parser.add_argument("--record", action="store_true", help="write each result into its module's docstring")
    parser.add_argument(
        "--patience", type=float, default=20.0, metavar="SECONDS", help="wait this long in all for others to finish"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.questions) - set(QUESTIONS))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    if options.record and options.quick:
        parser.error("--record keeps a result for others to read; --quick is too short for that")
    return options
