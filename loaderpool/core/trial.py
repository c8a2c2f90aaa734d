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
# For so long at most, where times vary. Fewer workers are measured for longer only if they seem to be as fast.
_MOST_ALL_S, _MOST_FEW_S = 3.0, 1.0
_LEAST_ANSWERS, _ANSWERS_EACH = 12, 3  # of all workers together, on average of each worker
_LEAST_CYCLES = 2  # from here on a worker's own cycle tells its rate
# Of the rate of all workers: fewer are as fast from here on. Unlimited ones have their share.
_AS_FAST = 0.9
_JUST_AS_FAST = 0.95  # and only from here on they replace a larger number that was as fast
# Standard errors between a measured share and what it would be otherwise. Smaller: stragglers would pass for a limit.
_CLEAR = 3.0
# Of all workers' rate: it is measured for some time until its error is small; with a large one nothing is clear.
_GOOD_ERROR, _GOOD_S, _MOST_ERROR = 0.06, 1.2, 0.12
_LEAST_ERROR = 0.02  # of a share: two rates that vary less are not known better
_FEWER = 0.8  # of the workers: more are no evidence, because noise is as large as the difference
_SAME = 0.25  # the rates of all workers before and after a pause differ by less, or the fewer are measured again
_IDLE = 0.15  # of the time: workers with less work than that are not what training waits for
_LATE_S = 0.05  # a look may come so much later than it is due


class Gauge:
    """Rate of some workers. Each counts by its own cycle, because several may always answer at the same moment."""

    def __init__(self, workers: int, now_s: float) -> None:
        self._workers, self._begun_s, self._answers, self._idle_s = workers, now_s, 0, 0.0
        self._first_s: dict[int, float] = {}  # by worker: the time of its first answer
        self._last_s: dict[int, float] = {}  # and of its latest one
        self._cycles: dict[int, list[tuple[float, int]]] = {}  # by worker: seconds between answers, and rows

    def note(self, worker: int, rows: int, now_s: float) -> None:
        """Count an answer."""
        cycles = self._cycles.setdefault(worker, [])
        if worker in self._last_s:
            cycles.append((now_s - self._last_s[worker], rows))
        self._first_s.setdefault(worker, now_s)
        self._last_s[worker] = now_s
        self._answers += 1

    def note_idle(self, seconds: float) -> None:
        """Count time in which a worker had no ticket."""
        self._idle_s += seconds

    def seconds(self, now_s: float) -> float:
        """Return for how long it has measured."""
        return now_s - self._begun_s

    def is_enough(self, now_s: float) -> bool:
        """Whether there is a rate."""
        return self.seconds(now_s) >= _LEAST_S and self._answers >= max(_LEAST_ANSWERS, _ANSWERS_EACH * self._workers)

    def is_idle(self, now_s: float) -> bool:
        """Whether the workers lacked tickets, so that the rate is not theirs."""
        return self._idle_s > _IDLE * self._workers * self.seconds(now_s)

    def rate(self, now_s: float) -> float:
        """Return samples per second."""
        rate = 0.0
        for cycles in self._cycles.values():
            took_s, rows = sum(seconds for seconds, _ in cycles), sum(rows for _, rows in cycles)
            rate += rows / (took_s if len(cycles) >= _LEAST_CYCLES and took_s else self.seconds(now_s))
        return rate

    def error(self, now_s: float) -> float:
        """Return the relative standard error of the rate, as if workers were always slow at the same time."""
        cycles = [each for cycles in self._cycles.values() for each in cycles]
        rows = sum(rows for _, rows in cycles)
        if not rows:
            return math.inf
        row_s = sum(seconds for seconds, _ in cycles) / rows
        times = [seconds / rows for seconds, rows in cycles]
        cut = [first_s - self._begun_s for first_s in self._first_s.values()]  # calls at the beginning, and at the end
        cut += [now_s - last_s for last_s in self._last_s.values()]
        cut += [self.seconds(now_s)] * (self._workers - len(self._last_s))
        times += [seconds * len(cycles) / rows for seconds in cut if seconds * len(cycles) > 2 * row_s * rows]
        variance = sum((seconds - row_s) ** 2 for seconds in times) / len(times)
        return max(_LEAST_ERROR, math.sqrt(self._workers * variance / len(times)) / max(row_s, 1e-9))


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
        self._state, self._most_s, self._looked_s = state, most_s - _LATE_S, now_s
        self._workers = self._staying()
        self._enough, self._too_few = len(self._workers), 0
        self._few = len(self._workers) // 2  # how many stay in the next pause
        self._rate = self._error = 0.0  # of all workers, and its relative standard error
        # As high as that, with its error; it is compared again with all workers after the pause.
        self._few_rate: tuple[float, float] | None = None
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
    def _has_time(self) -> bool:
        """Whether another pause may be long enough."""
        return self.paused_s + _LEAST_S <= self._most_s

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
        is_late = gauge.seconds(now_s) > _MOST_ALL_S
        if not gauge.is_enough(now_s):
            return is_late and self._end()
        if gauge.is_idle(now_s):
            return self._end()
        rate, error = gauge.rate(now_s), gauge.error(now_s)
        if self._few_rate is None:
            if error > (_MOST_ERROR if gauge.seconds(now_s) > _GOOD_S else _GOOD_ERROR):
                return is_late and self._end()
            self._rate, self._error = rate, error
            return self._pause(self._few, now_s)
        has_changed = abs(rate - self._rate) > _SAME * max(rate, self._rate)
        both = (self._rate + rate) / 2, math.hypot(self._error, error) / 2
        if has_changed:
            both = max((self._rate, self._error), (rate, error))
        is_as_fast = _is_as_fast(self._few_rate, both, self._few / len(self._workers))
        if is_as_fast is None and not is_late:
            return False
        share, self._few_rate = self._few_rate[0] / both[0], None
        if is_as_fast or (is_as_fast is False and not has_changed):
            self._rate, self._error = both
            return self._decide(share, is_as_fast, now_s)
        self._rate, self._error = rate, error
        return self._pause(self._few, now_s) if self._has_time else self._end()

    def _look_at_few(self, now_s: float) -> bool:
        gauge = self._gauge
        if gauge.is_idle(now_s):
            return self._end()
        rate, error = gauge.rate(now_s), gauge.error(now_s)
        # If these seem to be as fast, all are measured again, and for as long as it takes.
        error_of_all = 0.0 if rate >= _AS_FAST * self._rate else self._error
        is_as_fast = _is_as_fast((rate, error), (self._rate, error_of_all), self._few / len(self._workers))
        if is_as_fast is None:
            is_late = rate < _AS_FAST * self._rate and gauge.seconds(now_s) > _MOST_FEW_S
            return (is_late or self.paused_s >= self._most_s) and self._end()
        if not is_as_fast:
            return self._decide(rate / self._rate, False, now_s)
        self._few_rate = rate, error
        self._state.resume()
        self._phase, self._gauge = _Phase.ALL, Gauge(len(self._workers), now_s)
        return True

    def _decide(self, share: float, is_as_fast: bool, now_s: float) -> bool:
        """Take in that the few workers had this share of the rate of all, and go on with another number of them."""
        if is_as_fast and share < _JUST_AS_FAST and self._enough < len(self._workers):
            self._too_few = self._few  # the limit is known, and the number before loses nothing
            return self._end()
        if is_as_fast:
            self._enough = self._few
            few = self._few // 2 if not self._too_few and self._few > 1 else self._few
        else:
            self._too_few = max(self._few, self._too_few)
            few = max(math.ceil(self._few / max(share, 0.01) - 0.1), self._few + 1)  # each does its part of the rate
        if few >= self._enough or few > _FEWER * len(self._workers) or not self._has_time:
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


def _is_as_fast(few: tuple[float, float], all_: tuple[float, float], part: float) -> bool | None:
    """Whether this part of the workers is as fast as all, by their rates with errors; None: that is not clear."""
    share = few[0] / all_[0]
    clear = _CLEAR * share * math.hypot(few[1], all_[1])
    if share >= _AS_FAST:
        return True if share - part >= clear else None
    return False if 1 - share >= clear else None
