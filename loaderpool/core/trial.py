"""Compares the rate of all workers with that of fewer, while the others are paused for a moment. Pure.

    ALL --measured--> DRAIN --paused workers are idle--> FEW --measured--> ALL --measured--> next number, or the end

Fewer workers that are as fast as all show that workers wait for something that they share. The supervisor calls `note`
for each answer and `look` after each deal. A trial ends by its own clock, whatever the main process does.
"""

from __future__ import annotations

import enum
import math

from loaderpool.core.state import State
from loaderpool.memory.board import TrialResult

# A rate is measured over this time at least. Shorter: one slow ticket decides. Longer: a pause costs more.
_LEAST_S = 0.4
# A rate that is neither clearly as high nor clearly lower is measured for longer.
_MOST_FEW_S = 0.8
# All workers are measured for this long at most: slower ones would need a longer pause than there is.
_MOST_ALL_S = 3.0
_LEAST_ANSWERS, _ANSWERS_EACH = 12, 3  # of all workers together, on average of each worker
_CYCLE_ANSWERS = 3  # from here on a worker's own cycle tells its rate
# Of the rate of all workers: fewer are as fast from here on. Unlimited ones have at most `_FEWER` of it.
_AS_FAST = 0.9
_CLEAR = (0.8, 0.93)  # a rate outside of these needs no longer look
_FEWER = 0.8  # of the workers: more are no evidence, because noise is as large as the difference
_SAME = 0.25  # the rates of all workers before and after a pause differ by less, or something else has changed
_IDLE = 0.15  # of the time: workers with less work than that are not what training waits for


class Gauge:
    """Rate of some workers. Each counts by its own cycle, because several may always answer at the same moment."""

    def __init__(self, workers: int, now_s: float) -> None:
        self._workers, self._begun_s, self._answers, self._idle_s = workers, now_s, 0, 0.0
        self._by_worker: dict[int, list[float]] = {}  # answers, rows of the first, rows, time of the first, of the last

    def note(self, worker: int, rows: int, now_s: float) -> None:
        """Count an answer."""
        counts = self._by_worker.setdefault(worker, [0, rows, 0, now_s, now_s])
        counts[0] += 1
        counts[2] += rows
        counts[4] = now_s
        self._answers += 1

    def note_idle(self, seconds: float) -> None:
        """Count time in which a worker had no ticket."""
        self._idle_s += seconds

    def seconds(self, now_s: float) -> float:
        """Return for how long it has measured."""
        return now_s - self._begun_s

    def is_enough(self, now_s: float) -> bool:
        """Whether the rate is known well enough."""
        return self.seconds(now_s) >= _LEAST_S and self._answers >= max(_LEAST_ANSWERS, _ANSWERS_EACH * self._workers)

    def is_idle(self, now_s: float) -> bool:
        """Whether the workers lacked tickets, so that the rate is not theirs."""
        return self._idle_s > _IDLE * self._workers * self.seconds(now_s)

    def rate(self, now_s: float) -> float:
        """Return samples per second."""
        rate = 0.0
        for answers, first_rows, rows, first_s, last_s in self._by_worker.values():
            if answers >= _CYCLE_ANSWERS and last_s > first_s:
                rate += (rows - first_rows) / (last_s - first_s)
            else:
                rate += rows / max(self.seconds(now_s), 1e-9)
        return rate


class _Phase(enum.Enum):
    ALL = enum.auto()  # measures all workers
    DRAIN = enum.auto()  # waits for the tickets of paused workers
    FEW = enum.auto()  # measures those that stay
    OVER = enum.auto()


class Trial:
    """Search for the fewest workers that are as fast as all.

    Attributes:
        paused_s: for how long workers were paused.
        idle_s: time in which paused workers had no ticket, summed over them.

    Args:
        state: the supervisor's, whose workers are paused and resumed.
        most_s: for how long workers may be paused, in all.
        now_s: the time.
    """

    def __init__(self, state: State, most_s: float, now_s: float) -> None:
        self._state, self._most_s, self._looked_s = state, most_s, now_s
        self._workers = self._staying()
        self._enough, self._too_few = len(self._workers), 0
        self._few = math.ceil(len(self._workers) / 2)  # how many stay in the next pause
        self._rate = 0.0  # of all workers
        self._few_rate = 0.0  # as high as that; it is compared again with all workers after the pause; 0.0: none is
        self._loader: int | None = None
        self.paused_s = self.idle_s = 0.0
        self._phase, self._gauge = _Phase.ALL, Gauge(len(self._workers), now_s)
        if len(self._workers) < 2:
            self._phase = _Phase.OVER

    @property
    def is_over(self) -> bool:
        """Whether `result` is final."""
        return self._phase is _Phase.OVER

    @property
    def result(self) -> TrialResult:
        """What it found out."""
        has_found = self._too_few or self._enough < len(self._workers)
        rate = self._rate if has_found else 0.0
        return TrialResult(len(self._workers), self._enough, self._too_few, rate, self.paused_s)

    def note(self, worker: int, loader: int | None, rows: int, now_s: float) -> None:
        """Take in an answer of a worker. Samples of two loaders cannot be compared."""
        if loader is None or self.is_over:
            return
        self._loader = self._loader or loader
        if loader != self._loader:
            self._end()
        self._gauge.note(worker, rows, now_s)

    def look(self, now_s: float) -> bool:
        """Go on to what is next, if it is time; returns whether workers were paused or resumed."""
        if self.is_over:
            return False
        if self._staying() != self._workers or (self._phase is not _Phase.ALL and not self._paused()):
            return self._end()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._gauge.note_idle(passed_s * self._count_idle(is_paused=False))
        if self._phase is _Phase.ALL:
            return self._look_at_all(now_s)
        self.paused_s += passed_s
        idle = self._count_idle(is_paused=True)
        self.idle_s += passed_s * idle
        if self._phase is _Phase.DRAIN and idle == len(self._paused()):
            self._phase, self._gauge = _Phase.FEW, Gauge(self._few, now_s)
        elif self._phase is _Phase.FEW and self._gauge.is_enough(now_s):
            return self._look_at_few(now_s)
        return self.paused_s >= self._most_s and self._end()

    def _look_at_all(self, now_s: float) -> bool:
        gauge = self._gauge
        if not gauge.is_enough(now_s):
            return gauge.seconds(now_s) > _MOST_ALL_S and self._end()
        rate = gauge.rate(now_s)
        if gauge.is_idle(now_s) or (self._rate and abs(rate - self._rate) > _SAME * max(rate, self._rate)):
            return self._end()
        if not self._few_rate:
            self._rate = rate
            return self._pause(self._few, now_s)
        self._rate, few_rate, self._few_rate = (self._rate + rate) / 2, self._few_rate, 0.0
        return self._decide(few_rate / self._rate, now_s)

    def _look_at_few(self, now_s: float) -> bool:
        gauge, is_out = self._gauge, self.paused_s >= self._most_s
        if gauge.is_idle(now_s):
            return self._end()
        share = gauge.rate(now_s) / self._rate
        if _CLEAR[0] < share < _CLEAR[1] and gauge.seconds(now_s) < _MOST_FEW_S and not is_out:
            return False
        if share < _AS_FAST:
            return self._decide(share, now_s)
        self._few_rate = gauge.rate(now_s)
        self._state.resume()
        self._phase, self._gauge = _Phase.ALL, Gauge(len(self._workers), now_s)
        return True

    def _decide(self, share: float, now_s: float) -> bool:
        """Take in that the few workers had this share of the rate of all, and go on with another number of them."""
        if share >= _AS_FAST:
            self._enough = self._few
            few = math.ceil(self._few / 2) if not self._too_few and self._few > 1 else self._few
        else:
            self._too_few = max(self._few, self._too_few)
            few = max(math.ceil(self._few / max(share, 0.01) - 0.1), self._few + 1)  # each does its part of the rate
        if few >= self._enough or few > _FEWER * len(self._workers) or self.paused_s + _LEAST_S > self._most_s:
            return self._end()
        self._few = few
        return self._pause(few, now_s)

    def _pause(self, staying: int, now_s: float) -> bool:
        self._state.pause(staying)
        self._phase, self._gauge = _Phase.DRAIN, Gauge(staying, now_s)
        return True

    def _end(self) -> bool:
        self._state.resume()
        self._phase = _Phase.OVER
        return True

    def _staying(self) -> list[int]:
        return [worker.number for worker in self._state.workers.values() if not worker.is_leaving]

    def _paused(self) -> list[int]:
        return [worker.number for worker in self._state.workers.values() if worker.is_paused]

    def _count_idle(self, is_paused: bool) -> int:
        return sum(not each.jobs and each.is_paused is is_paused for each in self._state.workers.values())
