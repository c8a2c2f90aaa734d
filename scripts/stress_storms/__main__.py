"""python -m stress_storms: the storm, abandoned passes, trainers that die; in tables, and in the exit status."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import resource
import secrets
import sys
import time
import warnings
from collections.abc import Sequence

try:
    from rich.console import Console
except ModuleNotFoundError:
    sys.exit("scripts/stress prints its tables with rich: pip install 'loaderpool[cli]', or run scripts/test once")

import loaderpool as lp
from benchlib.machine import machine_line

from .abandon import run_abandoned
from .cluster import LEFT_AT_MOST_S, running_cluster
from .cluster_gaps import measure_gaps
from .cluster_storm import NODES, run_cluster_storm
from .cluster_trainers import run_cluster_trainer_deaths
from .readings import can_be_dataset
from .report import (
    cluster_summary,
    print_cluster_results,
    print_gaps,
    print_growth,
    print_results,
    print_trainer_deaths,
    summary,
)
from .rounds import Plan, Result, plan_rounds
from .shapes import ON_HOSTS, SHAPES
from .storm import run_round
from .trainers import LATE_S, Death, run_trainer_deaths

__all__ = ["main"]

_M_ARENA_MAX = -8  # of malloc.h


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parse(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # it has a word to say for each batch in a checkpoint
    os.environ["PYTHONFAULTHANDLER"] = "1"  # so that a supervisor that hangs can be made to show its stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    warnings.simplefilter("error", lp.CacheWarning)  # a damaged entry is made anew, so nothing else would show it
    # Or each thread that reads a stream has a heap of its own, in which what it freed stays: memory would seem to grow.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    _say(f"seed {options.seed}")
    if options.ray:
        return _storm_cluster(options, console)
    results = _storm(options)
    mismatches = [f"round {each.round.number}: {line}" for each in results for line in each.mismatches]
    if results:
        print_results(console, results, options.markdown)
        print(f"{summary(results)}.\n")
    leaks = []
    if options.passes and options.only is None:
        found = run_abandoned(options.passes, options.shape, options.seed, options.deadline, _say)
        leaks = [each for each in found if each.is_leak]
        print_growth(console, found, options.markdown)
        print(f"{options.passes:,} passes abandoned; {len(leaks)} kinds of leak.\n")
    deaths = []
    if options.trainers and options.only is None:
        deaths = run_trainer_deaths(options.trainers, options.seed, options.deadline, _say)
        print_trainer_deaths(console, deaths, options.markdown)
        print(f"{len(deaths):,} trainers died; {sum(len(each.left) for each in deaths)} processes left.\n")
    print(f"{machine_line()}. Seed {options.seed}.")
    for line in mismatches:
        print(f"MISMATCH {line}", file=sys.stderr)
    for each in leaks:
        print(f"LEAK {each.what}: {each.before:,} before, {each.after:,} after", file=sys.stderr)
    if mismatches:  # only the last round can have any
        number = results[-1].round.number
        print(f"Again: scripts/stress --seed {options.seed} --only {number}{_same(options)}", file=sys.stderr)
    return 1 if mismatches or leaks or _say_late(deaths, LATE_S) else 0


def _say_late(deaths: list[Death], late_s: float) -> bool:
    """Print the deaths that something has outlived too long; whether there are any."""
    late = [each for each in deaths if each.left or each.seconds > late_s]
    for death in late:
        left = "".join(f"\n  {line}" for line in death.left)
        print(
            f"LATE {death.seconds:.1f} s after a trainer's death by {death.way} ({death.shape}, workers "
            f"{death.workers_are}) its last process ended{left}",
            file=sys.stderr,
        )
    return bool(late)


def _storm_cluster(options: argparse.Namespace, console: Console) -> int:
    plan = Plan(options.seed, kills=options.kills_a_round, shapes=options.shape)
    results = run_cluster_storm(plan, options.kills, options.only, options.deadline, _say)
    if results:
        print_cluster_results(console, results, options.markdown)
        strikes = {
            meanwhile: [strike for each in results if each.loses_calls == loses_calls for strike in each.strikes]
            for meanwhile, loses_calls in (("other kills", False), ("other kills, lost calls", True))
        }
        print_gaps(console, strikes, options.markdown)
        print(f"{cluster_summary(results)}.\n")
    if options.gaps and options.only is None:
        with running_cluster(NODES, loses_calls=False) as cluster:
            print_gaps(console, {"nothing": measure_gaps(options.gaps, cluster, options.seed, _say)}, options.markdown)
    deaths = []
    if options.trainers and options.only is None:
        with running_cluster(NODES, loses_calls=False) as cluster:
            deaths = run_cluster_trainer_deaths(options.trainers, cluster, options.seed, options.deadline, _say)
        print_trainer_deaths(console, deaths, options.markdown)
        print(f"{len(deaths):,} trainers died; {sum(len(each.left) for each in deaths)} processes left.\n")
    print(f"{machine_line()}. Seed {options.seed}.")
    mismatches = [f"round {each.round.number}: {line}" for each in results for line in each.mismatches]
    for line in mismatches:
        print(f"MISMATCH {line}", file=sys.stderr)
    if mismatches:  # only the last round can have any
        same = f"--kills-a-round {options.kills_a_round}"
        shapes = "".join(f" --shape '{name}'" for name in options.shape if len(options.shape) < len(ON_HOSTS))
        number = results[-1].round.number
        print(f"Again: scripts/stress --ray --seed {options.seed} --only {number} {same}{shapes}", file=sys.stderr)
    return 1 if mismatches or _say_late(deaths, LEFT_AT_MOST_S) else 0


def _storm(options: argparse.Namespace) -> list[Result]:
    turn = 2 * len(options.shape)
    quota = -(-options.kills // turn) if options.seconds is None else options.kills_a_round
    plan = Plan(
        options.seed,
        kills=quota,
        supervisor_kills=max(1, -(-options.supervisor_kills // turn)),
        reader_kills=options.reader_kills,
        stops_every=options.stops_every,
        shapes=options.shape,
        is_dataset=options.tensorflow,
    )
    rounds = plan_rounds(plan)
    if options.only is not None:
        rounds = itertools.islice(rounds, options.only, options.only + 1)
    stop_at = float("inf") if options.seconds is None else time.monotonic() + options.seconds
    results: list[Result] = []
    kills = supervisor_kills = 0
    for each in rounds:
        if time.monotonic() >= stop_at:
            break
        result = run_round(each, options.deadline, stop_at)
        results.append(result)
        kills += result.counts.kills + result.faults
        supervisor_kills += result.counts.supervisor_kills
        shown = f"{each.shape.name}, {'ordered' if each.is_ordered else 'unordered'}, {each.workers} workers"
        _say(
            f"round {each.number} ({shown}): {result.passes} passes, {result.batches} batches, "
            f"{result.counts.kills + result.faults} kills, {result.restarts} restarts, "
            f"{result.supervisor_restarts} of the supervisor, {len(result.mismatches)} mismatches, "
            f"{result.seconds:.1f} s; {kills} kills in all"
        )
        is_enough = kills >= options.kills and supervisor_kills >= options.supervisor_kills and len(results) >= turn
        if result.mismatches or (options.seconds is None and is_enough):
            break
    return results


def _same(options: argparse.Namespace) -> str:
    """The options that decide what a round is."""
    same = f" --kills {options.kills} --supervisor-kills {options.supervisor_kills}"
    same += f" --reader-kills {options.reader_kills} --stops-every {options.stops_every}"
    if options.seconds is not None:
        same += f" --seconds {options.seconds:g} --kills-a-round {options.kills_a_round}"
    if options.tensorflow:
        same += " --tensorflow"
    return same + "".join(f" --shape '{name}'" for name in options.shape if len(options.shape) < len(SHAPES))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/stress", description=__doc__)
    parser.add_argument("--seconds", type=float, help="storm for so long, instead of for a number of kills")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="at least, of workers (1,600), or --ray: of all kinds (500)"
    )
    parser.add_argument("--ray", action="store_true", help="storm a Ray cluster on this machine, and a RayPool on it")
    parser.add_argument("--supervisor-kills", type=int, default=50, metavar="N", help="at least (50)")
    parser.add_argument("--reader-kills", type=int, default=2, metavar="N", help="in a round that has a reader (2)")
    parser.add_argument("--passes", type=int, default=500, metavar="N", help="to abandon (500); 0: none")
    parser.add_argument("--trainers", type=int, default=50, metavar="N", help="to die (50); 0: none")
    parser.add_argument("--gaps", type=int, default=5, metavar="N", help="--ray: each part ends alone, so often (5)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="repeats what is drawn (random)")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="only this one; may be given again")
    parser.add_argument("--only", type=int, metavar="ROUND", help="only the round of this number, and no passes")
    parser.add_argument(
        "--stops-every", type=int, default=4, metavar="N", help="rounds, one has a SIGSTOP (4); 0: none"
    )
    parser.add_argument("--kills-a-round", type=int, default=0, metavar="N", help="with --seconds (30) or --ray (12)")
    parser.add_argument("--deadline", type=float, default=120.0, metavar="S", help="seconds of a pass (120)")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument(
        "--tensorflow",
        action="store_true",
        help="take passes from as_dataset() and save them by LoaderState, where that can be",
    )
    options = parser.parse_args(arguments)
    options.kills = (500 if options.ray else 1600) if options.kills is None else options.kills
    options.kills_a_round = options.kills_a_round or (12 if options.ray else 30)
    names = options.shape or (ON_HOSTS if options.ray else SHAPES)
    options.shape = tuple(name for name in names if not options.tensorflow or can_be_dataset(SHAPES[name]))
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
