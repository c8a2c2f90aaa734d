"""Command scripts/bench/run: measures rows, and prints tables. The exit status shows missed
goals.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Result, run_row
from bench.report import goals_table, machine_line, shortfalls, speed_table, write_docs
from bench.rows import ALL_PEERS, ROWS, Row
from bench.works import render_images

QUIET_CPUS = 0.25  # an idle desktop stays below this; another process that computes does not


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if loaderpool gave no result, or is below half of a goal with
    `--check`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    rows = _choose_rows(options, parser)
    peers = set(options.peers or (ALL_PEERS if options.peers is not None else ()))
    if unknown := sorted(peers - set(ALL_PEERS)):
        parser.error(f"no peer named {', '.join(unknown)}; there are {', '.join(ALL_PEERS)}")
    rounds, shorter = (1, 2.0) if options.check else (None, 1.0)
    started = time.monotonic()
    emit = functools.partial(_emit, options.json)
    with tempfile.TemporaryDirectory(prefix="loaderpool-bench-") as folder:
        render_images(Path(folder))
        emit({"kind": "machine", "machine": machine_line(), "is_check": options.check})
        results: dict[str, Result] = {}
        for row in rows:
            results[row.key] = run_row(row, peers, rounds, shorter, emit)
            _progress(results[row.key])
        if options.check:  # a regression misses the goal twice, noise seldom does
            for key in {key for key, _ in shortfalls(results.values(), is_gross=True)}:
                again = run_row(results[key].row, (), rounds, shorter, emit)
                results[key] = again if again.figures else results[key]
        short = shortfalls(results.values(), options.check)
        for key, result in results.items():
            lines = [line for short_key, line in short if short_key == key]
            emit({"kind": "result", "row": key, "figures": result.figures, "short": lines})
    busy = max(result.busy_cpus for result in results.values())
    command = shlex.join(["scripts/bench/run", *(sys.argv[1:] if arguments is None else arguments)])
    caption = (
        f"{machine_line()}; {(time.monotonic() - started) / 60:.0f} minutes. Command: `{command}`."
    )
    print(f"{goals_table(results.values())}\n\n{speed_table(results.values())}\n\n{caption}")
    if options.write_docs:
        write_docs(list(results.values()), caption, is_whole=not options.rows)
    if busy > QUIET_CPUS:
        print(
            f"others kept up to {busy:.1f} CPUs busy meanwhile, run again on a quiet machine",
            file=sys.stderr,
        )
    for _, line in short:
        print(f"SHORT {line}", file=sys.stderr)
    is_broken = any("loaderpool" in result.failures for result in results.values())
    return 1 if is_broken or (options.check and short) else 0


def _emit(file: Path | None, event: dict[str, Any]) -> None:
    if file is not None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with file.open("a", encoding="utf-8") as sink:
            print(json.dumps({**event, "at": now}), file=sink)


def _progress(result: Result) -> None:
    figures = ", ".join(f"{side} {result.median(side):,.4g}" for side in result.figures)
    print(f"{result.row.key} ({result.row.unit}): {figures}", file=sys.stderr, flush=True)
    for failure in result.failures.values():
        print(f"    {failure}", file=sys.stderr, flush=True)


def _choose_rows(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Row]:
    if options.list:
        for row in ROWS:
            print(f"{row.key}: {row.what}: {', '.join((*row.contestants, *row.peers))}")
        sys.exit(0)
    if not options.rows:
        return [row for row in ROWS if row.is_checked or not options.check]
    # A name is the key of a row (`tiny32`) or of a group (`fit`).
    chosen = {
        name: [row for row in ROWS if f"{row.key}/".startswith(f"{name}/")] for name in options.rows
    }
    if unknown := [name for name, found in chosen.items() if not found]:
        parser.error(f"no row named {', '.join(unknown)}; --list names them")
    return [row for row in ROWS if any(row in found for found in chosen.values())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description=__doc__)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="only these: cpu, tiny32/tf, fit (--list names all)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="PEER",
        help=f"other loaders, all or of {', '.join(ALL_PEERS)}",
    )
    parser.add_argument(
        "--check", action="store_true", help="a minute: status 1 below half of a goal"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append every round and result as JSON lines"
    )
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/")
    parser.add_argument("--list", action="store_true", help="name all rows and their contestants")
    return parser


if __name__ == "__main__":
    sys.exit(main())
