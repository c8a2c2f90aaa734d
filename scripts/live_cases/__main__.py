"""The command `scripts/verdicts`."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchlib.fresh import run_fresh
from live_cases.trainings import CASES, FOR_AUTO

_PARTS = ("verdicts", "changes", "auto")
_RIGHT_OF_36 = 35
_AS_SAID = 0.10  # of a step's time
_ABOVE_BEST = 0.05
_FROM_ONE_S, _FROM_MANY_S = 20.0, 60.0  # until it is found
_HAVE_A_NUMBER = ("blocking", "computing", "light")  # more workers than that bring nothing
_WATCHED_S = 80.0


def main() -> int:
    """Run the parts and print their tables.

    Returns:
        The exit status: 1 if a bar is missed.
    """
    options = argparse.ArgumentParser(prog="scripts/verdicts", description=__doc__)
    options.add_argument("part", nargs="*", help=f"of {', '.join(_PARTS)}; none: all")
    options.add_argument("--runs", type=int, default=3, help="of each case")
    options.add_argument("--only", default="", help="cases, with commas")
    given = options.parse_args()
    if unknown := set(given.part) - set(_PARTS):
        options.error(f"there is no {', '.join(unknown)}")
    only = {name for name in given.only.split(",") if name}
    if unknown := only - {*CASES, *FOR_AUTO}:
        options.error(f"there is no case {', '.join(unknown)}")
    answers = {"verdicts": _verdicts, "changes": _changes, "auto": _auto}
    missed = [bar for part in given.part or _PARTS for bar in answers[part](given.runs, only)]
    for each in missed:
        print(f"MISSED {each}", file=sys.stderr)
    return 1 if missed else 0


def _one(case: str, *arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "live_cases.trainings", case, *map(str, arguments)]
    return run_fresh(command, timeout_s=300.0, name=case)


def _step_ms(found: dict[str, Any], after: float = 0.5) -> float:
    """The mean of the later steps."""
    steps = [took for _, took in found["steps"]]
    return 1e3 * statistics.fmean(steps[int(after * len(steps)) :])


def _table(names: Sequence[str]) -> None:
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def _row(*cells: Any) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


# -- the verdicts


def _verdicts(runs: int, only: set[str]) -> Iterator[str]:
    _table(["case", "should be", "was", "change"])
    right = wrong_changes = asked = 0
    for name, case in CASES.items():
        if only and name not in only:
            continue
        found = [_one(name) for _ in range(runs)]
        said = [each["verdict"] for each in found]
        changes = {each["change"] for each in found}
        is_wrong = [
            each
            for each in found
            if each["change"]
            and (not case.may_change or (each["verdict"] == case.verdict and case.change not in each["change"]))
        ]
        asked += runs
        right += said.count(case.verdict)
        wrong_changes += len(is_wrong)
        _row(
            name,
            case.verdict,
            ", ".join(f"{said.count(each)} x {each}" for each in sorted(set(said))),
            "; ".join(sorted(changes - {""})) or "-",
        )
        for each in found:
            if each["verdict"] != case.verdict or each in is_wrong:
                print(f"\n{each['said']}\n", file=sys.stderr)
    print(f"\n{right} of {asked} right, {wrong_changes} wrong changes")
    if right < asked * _RIGHT_OF_36 / 36:
        yield f"verdicts: {right} of {asked} are right, the bar is {_RIGHT_OF_36} of 36"
    if wrong_changes:
        yield f"verdicts: {wrong_changes} changes are wrong ones"


# -- what their changes bring


def _changes(runs: int, only: set[str]) -> Iterator[str]:
    """Whether a step is as long as was said, and the number within one of the best."""
    _table(["case", "change", "said, ms", "came, ms", "off by", "least that is as fast"])
    for name, numbers in {
        "sleep": (1, 2), "burn": (1, 2, 3), "blocking generators": (1, 2, 6, 7, 8, 9, 10)
    }.items():  # fmt: skip
        if only and name not in only:
            continue
        for workers in numbers[:2]:
            yield from _change(name, workers, numbers, runs)


def _change(name: str, workers: int, numbers: Sequence[int], runs: int) -> Iterator[str]:
    first = _one(name, "--workers", workers)
    change = re.search(r"(workers|threads)=(\d+)", first["change"])
    if change is None:
        _row(f"{name}, {workers}", first["change"] or "-", "", "", "", "")
        return
    what, number = change[1], int(change[2])
    arguments = ["--workers", number] if what == "workers" else ["--workers", workers, "--threads", number]
    came = statistics.median(_step_ms(_one(name, *arguments)) for _ in range(runs))
    said = 1e3 * first["expected_step_s"]
    off = came / said - 1
    least: Any = ""
    if what == "workers":
        steps = {each: _step_ms(_one(name, "--workers", each, "--seconds", 6)) for each in numbers}
        least = next(each for each, step in steps.items() if step <= (1 + _ABOVE_BEST) * min(steps.values()))
        if abs(number - least) > 1:
            yield f"changes: {name} from {workers}: {number} workers are told, {least} are the least that are as fast"
    _row(f"{name}, {workers}", first["change"], f"{said:.1f}", f"{came:.1f}", f"{off:+.1%}", least)
    if abs(off) > _AS_SAID:
        yield f"changes: {name} from {workers}: a step took {came:.1f} ms where {said:.1f} was said"


# -- the number that is found by itself


def _auto(runs: int, only: set[str]) -> Iterator[str]:
    """From one worker, and from four times as many as the least that are as fast."""
    _table(
        [
            "case",
            "from",
            "best of static, ms",
            "least as fast",
            "found",
            "its step, ms",
            "after",
            "changes",
            "later ones",
        ]
    )
    for name, numbers in {
        "blocking": (7, 8, 9, 12), "computing": (1, 2, 3), "light": (1, 2), "limited source": (2, 4, 5, 8),
        "dearer": (), "computing step": (1, 2, 4),
    }.items():  # fmt: skip
        if only and name not in only:
            continue
        steps = {each: _step_ms(_one(name, "--workers", each, "--seconds", 8)) for each in numbers}
        best = min(steps.values(), default=20.3)
        least = next((each for each, step in steps.items() if step <= (1 + _ABOVE_BEST) * best), 8)
        for first in (1, 4 * least):
            yield from _found(name, first, best, least)


def _found(name: str, first: int, best: float, least: int) -> Iterator[str]:
    found_s = _FROM_ONE_S if first == 1 and name != "dearer" else _FROM_MANY_S  # which it becomes after 20 s
    found = _one(name, "--auto-from", first, "--seconds", _WATCHED_S)
    after = 1e3 * statistics.fmean(took for end, took in found["steps"] if end >= found_s)
    times = [each["time_s"] for each in found["decisions"]]
    later = sum(1 for each in times if each > times[0] + 60)
    numbers = " → ".join(str(each["workers"]) for each in found["decisions"]) or "-"
    _row(name, first, f"{best:.1f}", least, numbers, f"{after:.1f}", f"{found_s:.0f} s", len(times), later)
    if after > (1 + _ABOVE_BEST) * best:
        yield f"auto: {name} from {first}: steps of {after:.1f} ms after {found_s:.0f} s, the best are {best:.1f}"
    if name in _HAVE_A_NUMBER and abs(found["workers"] - least) > 1:
        yield f"auto: {name} from {first}: {found['workers']} workers, {least} are the least that are as fast"


if __name__ == "__main__":
    sys.exit(main())
