"""python -m bench_peers: loaderpool, its peers and the limits on the same work; tables, a chart, an exit status."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchlib.images import render_images
from benchlib.machine import Emit, disturbance, machine_line, write_events
from benchlib.model import Pace

from .environment import REQUIREMENTS, requirements
from .goals import judge
from .rounds import Results, run_rows
from .rows import PEERS, QUICK_PEERS, ROWS, Row
from .table import full_table, left_out, shortfalls, summary_table

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    rows = _choose_rows(options, parser)
    peers = _choose_peers(options, parser)
    pace = Pace(
        rounds=options.rounds or (1 if options.quick or options.gross else None),
        shorter=2.0 if options.quick or options.gross else 1.0,
        patience_s=options.patience,
    )
    started, shared_before = time.monotonic(), _shared_memory()
    with contextlib.ExitStack() as stack:
        render_images(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loaderpool-bench-"))))
        emit = stack.enter_context(write_events(options.json))
        emit({"kind": "machine", "machine": machine_line(_packages()), "quick": options.quick})
        results = run_rows(rows, pace, peers.__contains__, emit)
        if options.gross:
            results = _once_more(results, pace, emit)
        for verdict in judge(results):
            emit({"kind": "verdict", **dataclasses.asdict(verdict), "is_met": verdict.is_met(options.gross)})
    _print_report(results, options, (time.monotonic() - started) / 60)
    if left := sorted(_shared_memory() - shared_before):
        print(f"left in /dev/shm meanwhile, by somebody: {', '.join(left)}", file=sys.stderr)
    short = shortfalls(judge(results), options.gross)
    for line in short:
        print(f"SHORT {line}", file=sys.stderr)
    return 1 if short and (options.check or options.gross) else 0


def _once_more(results: Results, pace: Pace, emit: Emit) -> Results:
    """Measure the rows that fall short again: a regression does so twice, a noisy moment seldom."""
    short = {verdict.goal.row for verdict in judge(results) if verdict.ratio is not None and not verdict.is_met(True)}
    again = run_rows([row for row in ROWS if row.key in short], pace, set().__contains__, emit)
    for key, result in again.items():
        if result.rounds:
            results[key] = result
    return results


def _print_report(results: Results, options: argparse.Namespace, minutes: float) -> None:
    for line in left_out(results):
        print(line, file=sys.stderr)
    missing = _missing()
    if missing and not options.gross:
        print(f"not installed, so left out: {', '.join(missing)}", file=sys.stderr)
    busy = max((result.busy_cpus for result in results.values()), default=0.0)
    notes = [machine_line(_packages()), f"{minutes:.0f} minutes", disturbance(busy)]
    caption = f"{'; '.join(filter(None, notes))}. Command: `{_command(options)}`."
    print(f"{summary_table(results)}\n\n{caption}")
    if options.markdown:
        options.markdown.write_text(
            f"{summary_table(results)}\n\n{caption}\n\n{full_table(results)}\n", encoding="utf-8"
        )
    if options.chart:
        from .chart import draw

        draw(results, options.chart, caption)


def _command(options: argparse.Namespace) -> str:
    """The command, less where its results are written."""
    words = ["scripts/bench/peers"]
    words += [f"--{form}" for form in ("quick", "gross") if getattr(options, form)]
    if options.rounds:
        words += ["--rounds", str(options.rounds)]
    for name in ("rows", "peers"):
        if getattr(options, name) is not None:
            words += [f"--{name}", *getattr(options, name)]
    return " ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench/peers", description="loaderpool beside its peers and limits.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="three minutes: some rows, few peers, one short round")
    form.add_argument(
        "--gross", action="store_true", help="a minute: loaderpool and limits alone; status 1 below half of a goal"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these, such as cpu, tiny32/tf, gap")
    parser.add_argument("--peers", nargs="*", metavar="PEER", help=f"only these, of {', '.join((*PEERS, 'serial'))}")
    parser.add_argument("--rounds", type=int, metavar="COUNT", help="rounds of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every round and verdict as JSON lines")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write both tables")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a bar chart (PNG)")
    parser.add_argument("--list", action="store_true", help="name all rows and their contestants")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="SECONDS", help="wait this long before each run for others"
    )
    return parser


def _choose_rows(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Row]:
    if options.list:
        for row in ROWS:
            print(f"{row.key}: {row.what}: {', '.join(row.contestants)}")
        sys.exit(0)
    if not options.rows:
        return [row for row in ROWS if (row.is_quick or not options.quick) and (row.is_gross or not options.gross)]
    unknown = [name for name in options.rows if not any(name in (row.name, row.key) for row in ROWS)]
    if unknown:
        parser.error(f"no row named {', '.join(unknown)}; --list names them")
    return [row for row in ROWS if row.name in options.rows or row.key in options.rows]


def _choose_peers(options: argparse.Namespace, parser: argparse.ArgumentParser) -> set[str]:
    known = (*PEERS, "serial")
    chosen = options.peers
    if chosen is None:
        chosen = () if options.gross else (*QUICK_PEERS, "serial") if options.quick else known
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"no peer named {', '.join(unknown)}; there are {', '.join(known)}")
    return set(chosen)


def _packages() -> tuple[str, ...]:
    needed, optional = requirements(REQUIREMENTS.read_text(encoding="utf-8"))
    return tuple(line.partition("==")[0].partition("[")[0] for line in (*needed, *optional))


def _shared_memory() -> set[str]:
    """What has a name in shared memory. What a peer leaves there stays until somebody removes it."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _missing() -> list[str]:
    missing = []
    for package in _packages():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return missing


if __name__ == "__main__":
    sys.exit(main())
