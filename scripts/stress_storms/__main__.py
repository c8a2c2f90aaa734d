"""Command scripts/stress: runs all parts, and prints tables. The exit status shows a failure."""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import itertools
import os
import platform
import resource
import secrets
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import loaderpool as lp

from .caches import SETTINGS, run_caches
from .leaks import run_abandoned
from .orders import KINDS, Outcome, run_orders
from .shapes import SHAPES
from .sharing import run_sharing
from .storm import Result, plan_rounds, run_round
from .trainers import LATE_S, Death, run_trainer_deaths

_M_ARENA_MAX = -8  # value in malloc.h
_say = functools.partial(print, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    os.environ["PYTHONFAULTHANDLER"] = "1"  # so that a supervisor that hangs can print its stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    warnings.simplefilter(
        "error", lp.LoaderpoolWarning
    )  # otherwise a damaged entry would be made again unnoticed
    # Otherwise each thread that reads a stream would have a heap of its own, and keep its freed
    # memory. Memory would seem to grow.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    _say(f"seed {options.seed}")
    results = _storm(options)
    mismatches = [
        f"round {each.round.number}: {line}" for each in results for line in each.mismatches
    ]
    if results:
        counts = _sum(results)
        told = ", ".join(f"{counts[key]:,} {text}" for key, text in _TOLD.items())
        print(f"{counts['passes']:,} passes, {told}, {len(mismatches):,} mismatches.\n")
    leaks = []
    if options.passes and options.only is None:
        found = run_abandoned(options.passes, options.shape, options.seed, options.deadline, _say)
        leaks = [each for each in found if each.is_leak]
        for each in found:
            print(
                f"held by all processes: {each.what} {each.before:,} before, {each.after:,} after ({each.at_most:,})"
            )
        print(f"{options.passes:,} passes abandoned; {len(leaks)} kinds of leak.\n")
    if options.shares and options.only is None:
        with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
            sharing = run_sharing(options.shares, options.seed, options.deadline, Path(folder))
        mismatches += [f"shared by name: {line}" for line in sharing.mismatches]
        print(
            f"{sharing.kills:,} processes killed that share by name: {sharing.makes:,} calls of make, "
            f"{sharing.values:,} values checked, {len(sharing.mismatches)} mismatches.\n"
        )
    for settings in SETTINGS if options.caches and options.only is None else ():
        with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
            killed = run_caches(
                options.caches, options.seed, options.deadline, Path(folder), settings
            )
        mismatches += [f"shared {settings}: {line}" for line in killed.mismatches]
        print(f"shared {settings}: {killed}\n")
    deaths: list[Death] = []
    if options.trainers and options.only is None:
        deaths = run_trainer_deaths(options.trainers, options.seed, options.deadline, _say)
        left, slowest_ms = (
            sum(len(each.left) for each in deaths),
            1e3 * max(each.seconds for each in deaths),
        )
        print(
            f"{len(deaths):,} trainers died; {left} processes left. The slowest ended {slowest_ms:.0f} ms later.\n"
        )
    orders: list[Outcome] = []
    if options.orders and options.only is None:
        orders = run_orders(options.orders, options.seed, options.kind, _say)
        for outcome in orders:
            print(
                f"{outcome.kind}: {outcome.stops} trainings killed, {outcome.epochs} epochs, {outcome.rows:,} rows, "
                f"{len(outcome.mismatches)} mismatches, {outcome.seconds:.0f} s"
            )
    print(
        f"{time.strftime('%F')}, {os.cpu_count()} CPUs, python {platform.python_version()}, seed {options.seed}"
    )
    for line in mismatches:
        print(f"MISMATCH {line}", file=sys.stderr)
    for each in leaks:
        print(f"LEAK {each.what}: {each.before:,} before, {each.after:,} after", file=sys.stderr)
    if mismatches and results:  # rounds stop at the first one with a mismatch
        again = ["--seed", str(options.seed), "--only", str(results[-1].round.number), *given]
        print(f"Again: scripts/stress {shlex.join(again)}", file=sys.stderr)
    wrong = [f"{each.kind}: {line}" for each in orders for line in each.mismatches]
    for line in wrong:
        print(f"ORDER {line}", file=sys.stderr)
    late = [each for each in deaths if each.left or each.seconds > LATE_S]
    for death in late:
        lines = "".join(f"\n  {line}" for line in death.left)
        what = f"{death.way} ({death.shape}, workers {death.workers_are})"
        print(
            f"LATE {death.seconds:.1f} s after a trainer's death by {what}{lines}", file=sys.stderr
        )
    return 1 if mismatches or leaks or late or wrong else 0


def _storm(options: argparse.Namespace) -> list[Result]:
    rounds = plan_rounds(options)
    if options.only is not None:
        rounds = itertools.islice(rounds, options.only, options.only + 1)
    stop_at = float("inf") if options.seconds is None else time.monotonic() + options.seconds
    results: list[Result] = []
    for each in rounds:
        if time.monotonic() >= stop_at:
            break
        result = run_round(each, options.deadline, stop_at)
        results.append(result)
        counts = _sum(results)
        kills = counts["kills"] + counts["faults"]
        _say(
            f"{each}: {result.counts['passes']} passes, {result.counts['batches']} batches, "
            f"{len(result.mismatches)} mismatches, {result.seconds:.1f} s; {kills} kills in all"
        )
        is_enough = (
            kills >= options.kills and counts["supervisor_kills"] >= options.supervisor_kills
        )
        has_all = options.seconds is None and is_enough and len(results) >= 2 * len(options.shape)
        if result.mismatches or has_all:
            break
    return results


def _sum(results: Iterable[Result]) -> collections.Counter[str]:
    return sum((each.counts for each in results), collections.Counter())


_TOLD = {
    "kills": "workers killed", "faults": "segmentation faults of functions", "supervisor_kills": "supervisors killed",
    "reader_kills": "readers killed", "losses": "passes that were told of it", "stops": "workers stopped for good",
    "brief_stops": "processes stopped for a moment", "resizes": "times another number of workers",
    "saves": "times another loader at a saved place", "batches": "batches compared",
}  # fmt: skip


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/stress", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, help="storm for so long, instead of for a number of kills")
    add("--kills", type=int, default=1600, metavar="N", help="at least, of workers (1,600)")
    add("--supervisor-kills", type=int, default=50, metavar="N", help="at least (50)")
    add("--reader-kills", type=int, default=2, metavar="N", help="in a round that has a reader (2)")
    add("--passes", type=int, default=500, metavar="N", help="to abandon (500); 0: none")
    add(
        "--shares", type=int, default=500, metavar="N", help="to kill that share data by name (500)"
    )
    add(
        "--caches",
        type=int,
        default=50,
        metavar="N",
        help="kills of ranks, of supervisors and of workers that share a cache or samples (50)",
    )
    add("--trainers", type=int, default=50, metavar="N", help="to die (50); 0: none")
    add(
        "--orders",
        type=int,
        default=50,
        metavar="N",
        help="kills of a training, for each kind of order (50)",
    )
    add(
        "--kind",
        action="append",
        choices=list(KINDS),
        help="only this kind of order; may be given again",
    )
    add("--seed", type=int, default=secrets.randbelow(2**31), help="repeats what is drawn (random)")
    add("--shape", action="append", choices=list(SHAPES), help="only this one; may be given again")
    add("--only", type=int, metavar="ROUND", help="only the round of this number, and no passes")
    add(
        "--stops-every",
        type=int,
        default=4,
        metavar="N",
        help="rounds, one has a SIGSTOP (4); 0: none",
    )
    add("--kills-a-round", type=int, default=30, metavar="N", help="with --seconds (30)")
    add("--deadline", type=float, default=120.0, metavar="S", help="seconds of a pass (120)")
    options = parser.parse_args(arguments)
    options.shape = options.shape or list(SHAPES)
    options.kind = options.kind or list(KINDS)
    return options


if __name__ == "__main__":
    sys.exit(main())
