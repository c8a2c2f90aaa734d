"""Contestants in fresh processes, and rounds that interleave them.

    bare ▸ loader ▸ peer        round 1, each in a process of its own:  start ──▶ measure ──▶ verify ──▶ figures
    peer ▸ loader ▸ bare        round 2, the other way round
    …

so that nothing leaks from one to another and a drift of the machine's speed meets all of them alike. A contestant
verifies its results before it hands them over, so no number is ever printed for wrong batches.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator

from benchlib.fresh import print_result, run_fresh
from benchlib.model import Contestant, Measured, Window

__all__ = ["forth_and_back", "run_contestant", "serve"]


def forth_and_back(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and name of each run, in the order of the runs."""
    order = list(names)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def run_contestant(module: str, arguments: Iterable[str], window: Window, timeout_s: float, name: str) -> Measured:
    """What a contestant found, in a process of its own.

    Args:
        module: is run with the arguments and the window, and calls `serve`.
        arguments: say which contestant it is.
        window: how long it measures.
        timeout_s: a hang is named, not waited for.
        name: what to call it in errors.

    Raises:
        RunError: it failed or verified its results as wrong; the end of its stderr is in the text.
    """
    command = [sys.executable, "-m", module, *arguments, json.dumps(dataclasses.asdict(window))]
    return Measured(**run_fresh(command, timeout_s, name))


def serve(contestant: Contestant, window: str) -> None:
    """Run the contestant in this process, which `run_contestant` has started, and hand over what it found."""
    print_result(dataclasses.asdict(contestant(Window(**json.loads(window)))))
