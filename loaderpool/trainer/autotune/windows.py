"""Looks at a loader, cut into windows of one number of workers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from loaderpool.trainer.explain.looks import AboutLoader, Look, observed_in
from loaderpool.trainer.explain.observed import FIRST_STEPS, LEAST_STEPS, Observed

# Less is told by noise; and what is decided shall hold for longer than it took.
_LEAST_S = 6.0


class Window(NamedTuple):
    """What was observed with one number of workers."""

    observed: Observed
    is_whole: bool  # long enough for small differences; before it is, only large ones count


class Windows:
    """Cuts them. A window begins when all workers are there, and ends when it is whole.

    Args:
        about: the loader.
    """

    def __init__(self, about: AboutLoader) -> None:
        self._about = about
        self._begun: Look | None = None
        # That the loader has when a window may begin: the first ones compile, and what they find was made meanwhile.
        self._least_steps = FIRST_STEPS + 1
        self._workers = 0  # of the latest look

    def add(self, look: Look, workers: int) -> Window | None:
        """Take in the latest look; `workers` is how many there shall be. None: there is no window to judge yet."""
        there = look.work.worker_count
        if there < self._workers:  # what the others have made ahead hides what is missing now
            self._least_steps = look.steps.steps + look.work.slots
        self._workers = there
        begun = self._begun
        if begun is None or begun.work.workers.keys() != look.work.workers.keys():
            is_settled = there == workers and look.steps.steps >= self._least_steps
            self._begun = look if is_settled else None
            return None
        observed = observed_in([begun, look], self._about, float("inf"))
        is_whole = observed.steps >= LEAST_STEPS and observed.seconds >= _LEAST_S
        if is_whole:
            self._begun = look
        elif observed.steps < LEAST_STEPS:
            return None
        return Window(dataclasses.replace(observed, paces=()), is_whole)
