"""Trials of fewer workers: their scheduling, and their results per function and source.

A trial pauses some of a fixed number of workers for a moment (`supervisor/trial.py`). If the rate
stays the same, the source is the limit, and fewer workers are enough. Batches do not change,
because results are ordered by the plan.
"""

from __future__ import annotations

from collections.abc import Hashable

from loaderpool.memory.board import TrialResult
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import Tried, Window

# Seconds in each period for which workers of one function and source may be paused. This costs
# below one percent even if all of it is lost.
MOST_PAUSED_S, PERIOD_S = 2.0, 300.0
_LEAST_PAUSED_S = 0.8  # seconds; a shorter pause shows nothing
_AGAIN_S = 4.0  # seconds until the next trial after one without a result
# Share of the time spent waiting. With less waiting, a pause costs more than better advice would
# bring.
_WAITS = 0.1
_MOST_LOGS = 64


class TrialLog:
    """Results and costs of the trials of a function and its source."""

    def __init__(self) -> None:
        self.tried: Tried | None = None
        # Time of the request and seconds of pause of each trial.
        self._paused: dict[Hashable, tuple[float, float]] = {}
        self._next_s = 0.0  # time from which the same trial may be repeated

    def budget_s(self, now_s: float) -> float:
        """Return the seconds for which workers may be paused now."""
        self._paused = {
            trial: each for trial, each in self._paused.items() if now_s - each[0] < PERIOD_S
        }
        return MOST_PAUSED_S - sum(paused_s for _, paused_s in self._paused.values())

    def is_due(self, seen: Window, now_s: float) -> bool:
        """Return True if a trial may show that the source is the limit.

        Also True if it may show that even fewer workers are enough.
        """
        if seen.workers < 2 or seen.lanes or seen.autotuned.most or seen.steady_wait_share < _WAITS:
            return False
        if self.budget_s(now_s) < _LEAST_PAUSED_S or (
            now_s < self._next_s and self._is_known(seen)
        ):
            return False
        verdict, tried = find_verdict(seen).verdict, self.tried
        if verdict is Verdict.SOURCE_LIMIT and tried is not None:
            return not tried.too_few and seen.workers <= tried.enough
        return verdict is Verdict.SOURCE_WAITS

    def note_request(self, trial: Hashable, now_s: float) -> float:
        """Note that a trial begins. Return the seconds for which it may pause workers.

        Until its result is noted, all of these seconds count as used.
        """
        most_s = self.budget_s(now_s)
        self._paused[trial] = now_s, most_s
        self._next_s = now_s + _AGAIN_S
        return most_s

    def note_result(self, trial: Hashable, found: TrialResult, seen: Window) -> None:
        """Note the result of a trial. `seen` is the window of the trial.

        Workers that wait for CPUs show nothing. If the supervisor ended during a trial, all of its
        seconds count.
        """
        if trial not in self._paused or not found.workers:
            return
        self._paused[trial] = self._paused[trial][0], found.paused_s
        if found.rate and seen.samples and not seen.has_full_cpus:
            new = Tried(found.workers, found.enough, found.too_few, seen.samples_per_s)
            self.tried = new if self.tried is None else self.tried.merged(new)
            self._next_s = self._paused[trial][0] + PERIOD_S

    def _is_known(self, seen: Window) -> bool:
        """Return True if the latest trial was of a training like this one."""
        tried = self.tried
        return tried is None or (
            tried.is_like(seen.samples_per_s) and tried.too_few < seen.workers <= tried.most
        )


_logs: dict[Hashable, TrialLog] = {}


def log_of(function_and_source: Hashable) -> TrialLog:
    """Return the log of a function and its source. It lives as long as this process."""
    if function_and_source not in _logs and len(_logs) >= _MOST_LOGS:
        del _logs[next(iter(_logs))]
    return _logs.setdefault(function_and_source, TrialLog())


def has_logs() -> bool:
    """Return True if a loader of this process may have started a trial."""
    return bool(_logs)
