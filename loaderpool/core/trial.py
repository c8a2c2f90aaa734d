"""Compares the rate of all workers with that of fewer, while the others are paused for a moment. Pure.

    ALL --measured--> DRAIN --paused workers are idle--> FEW --measured--> ALL --measured--> next number, or the end

Fewer workers that are as fast as all show that workers wait for something that they share. The supervisor calls `note`
for each answer and `look` after each deal. A trial ends by its own clock, whatever the main process does.
"""

from __future__ import annotations

import enum
import math
import statistics
from typing import NamedTuple

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
_MANY, _PARTS = 3, 8  # workers; parts of the time, whose rates are compared
_LEAST_ERROR = 0.02  # of a share: two rates that vary less are not known better
_FEWER = 0.8  # of the workers: more are no evidence, because noise is as large as the difference
_SAME = 0.25  # the rates of all workers before and after a pause differ by less, or the fewer are measured again
_IDLE = 0.15  # of the time: workers with less work than that are not what training waits for
_LATE_S = 0.05  # a look may come so much later than it is due


class Rate(NamedTuple):
    """Samples per second, with their relative standard error."""

    per_s: float
    error: float


class Rates(NamedTuple):
    """The same rate, measured in two ways."""

    by_cycles: Rate  # of each worker, as if workers were always slow at the same time: stragglers make it unsure
    in_all: Rate  # of all answers in parts of the time: sure for a source that is steady, though not fair


class Gauge:
    """Rate of some workers. Each counts by its own cycle, because several may always answer at the same moment."""

    def __init__(self, workers: int, now_s: float) -> None:
        self._workers, self._begun_s, self._answers, self._idle_s = workers, now_s, 0, 0.0
        self._first_s: dict[int, float] = {}  # by worker: the time of its first answer
        self._last_s: dict[int, float] = {}  # and of its latest one
        self._log: list[tuple[float, int]] = []  # of all: time and rows
        self._cycles: dict[
            int, list[tuple[float, int]]
        ] = {}  # by worker: seconds between answers, and rows

    def note(self, worker: int, rows: int, now_s: float) -> None:
        """Count an answer."""
        cycles = self._cycles.setdefault(worker, [])
        if worker in self._last_s:
            cycles.append((now_s - self._last_s[worker], rows))
        self._first_s.setdefault(worker, now_s)
        self._last_s[worker] = now_s
        self._log.append((now_s, rows))
        self._answers += 1

    def note_idle(self, seconds: float) -> None:
        """Count time in which a worker had no ticket."""
        self._idle_s += seconds

    def seconds(self, now_s: float) -> float:
        """Return for how long it has measured."""
        return now_s - self._begun_s

    def is_enough(self, now_s: float) -> bool:
        """Whether there is a rate."""
        return self.seconds(now_s) >= _LEAST_S and self._answers >= max(
            _LEAST_ANSWERS, _ANSWERS_EACH * self._workers
        )

    def is_idle(self, now_s: float) -> bool:
        """Whether the workers lacked tickets, so that the rate is not theirs."""
        return self._idle_s > _IDLE * self._workers * self.seconds(now_s)

    def rates(self, now_s: float) -> Rates:
        """Return the rate."""
        per_s = 0.0
        for cycles in self._cycles.values():
            took_s, rows = sum(seconds for seconds, _ in cycles), sum(rows for _, rows in cycles)
            per_s += rows / (
                took_s if len(cycles) >= _LEAST_CYCLES and took_s else self.seconds(now_s)
            )
        return Rates(Rate(per_s, self._error_of_cycles(now_s)), self._in_all(now_s))

    def _error_of_cycles(self, now_s: float) -> float:
        cycles = [each for cycles in self._cycles.values() for each in cycles]
        rows = sum(rows for _, rows in cycles)
        if not rows:
            return math.inf
        row_s = sum(seconds for seconds, _ in cycles) / rows
        times = [seconds / rows for seconds, rows in cycles]
        cut = [
            first_s - self._begun_s for first_s in self._first_s.values()
        ]  # calls at the beginning, and at the end
        cut += [now_s - last_s for last_s in self._last_s.values()]
        cut += [self.seconds(now_s)] * (self._workers - len(self._last_s))
        times += [
            seconds * len(cycles) / rows
            for seconds in cut
            if seconds * len(cycles) > 2 * row_s * rows
        ]
        variance = sum((seconds - row_s) ** 2 for seconds in times) / len(times)
        return max(
            _LEAST_ERROR, math.sqrt(self._workers * variance / len(times)) / max(row_s, 1e-9)
        )

    def _in_all(self, now_s: float) -> Rate:
        rows, part_s = [0] * _PARTS, self.seconds(now_s) / _PARTS
        for at_s, count in self._log:
            rows[min(int((at_s - self._begun_s) / part_s), _PARTS - 1)] += count
        error = statistics.stdev(rows) / math.sqrt(_PARTS) / statistics.fmean(rows)
        return Rate(sum(rows) / self.seconds(now_s), max(_LEAST_ERROR, error))


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
        self._rates: Rates | None = None  # of all workers
        self._few_rates: Rates | None = (
            None  # as high as that; compared again with all workers after the pause
        )
        self._is_repeated = (
            False  # fewer were as fast by the error in all, which stragglers may make too small
        )
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
        rate = self._rates.in_all.per_s if has_found and self._rates is not None else 0.0
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
        if self._staying() != self._workers or (
            self._phase is not _Phase.ALL and not self._paused()
        ):
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
        now, before, few = gauge.rates(now_s), self._rates, self._few_rates
        if before is None or few is None:
            error = min(rate.error for rate in now)
            if error > (_MOST_ERROR if gauge.seconds(now_s) > _GOOD_S else _GOOD_ERROR):
                return is_late and self._end()
            self._rates = now
            return self._pause(self._few, now_s)
        rates = now.in_all.per_s, before.in_all.per_s
        has_changed = max(rates) - min(rates) > _SAME * max(rates)
        both = max(now, before, key=lambda each: each.in_all) if has_changed else _mean(before, now)
        is_as_fast, share, is_sure = self._compare(few, both)
        if is_as_fast is None and not is_late:
            return False
        self._few_rates = None
        if is_as_fast or (is_as_fast is False and not has_changed):
            self._rates = both
            return self._decide(share, is_as_fast, is_sure, now_s)
        self._rates = now
        return self._pause(self._few, now_s) if self._has_time else self._end()

    def _look_at_few(self, now_s: float) -> bool:
        gauge, all_ = self._gauge, self._rates
        assert all_ is not None
        if gauge.is_idle(now_s):
            return self._end()
        few = gauge.rates(now_s)
        # If these seem to be as fast, all are measured again, and for as long as it takes.
        is_as_fast, share, is_sure = self._compare(
            few, Rates(*(rate._replace(error=0.0) for rate in all_))
        )
        if not is_as_fast:
            is_as_fast, share, is_sure = self._compare(few, all_)
        if is_as_fast is None:
            is_late = share < _AS_FAST and gauge.seconds(now_s) > _MOST_FEW_S
            return (is_late or self.paused_s >= self._most_s) and self._end()
        if not is_as_fast:
            return self._decide(share, False, is_sure, now_s)
        self._few_rates = few
        self._state.resume()
        self._phase, self._gauge = _Phase.ALL, Gauge(len(self._workers), now_s)
        return True

    def _compare(self, few: Rates, all_: Rates) -> tuple[bool | None, float, bool]:
        """Return whether the few are as fast as all (None: it is not clear), their share, and whether that is sure."""
        part, found, share = self._few / len(self._workers), None, 0.0
        for one, other in list(zip(few, all_, strict=True))[: 2 if self._are_many else 1]:
            share = one.per_s / other.per_s
            clear = _CLEAR * share * math.hypot(one.error, other.error)
            if (share - part if share >= _AS_FAST else 1 - share) >= clear:
                found = share >= _AS_FAST
                break
        return found, share, one is few.by_cycles

    @property
    def _are_many(self) -> bool:
        """Whether the error in all is evidence: of few workers, one straggler has much of the rate."""
        return len(self._workers) >= _MANY and self._few <= len(self._workers) / 2

    def _decide(self, share: float, is_as_fast: bool, is_sure: bool, now_s: float) -> bool:
        """Take in that the few workers had this share of the rate of all, and go on with another number of them."""
        few, is_first = self._few, self._enough == len(self._workers)
        if is_as_fast and not is_sure and is_first and not self._is_repeated:
            self._is_repeated = True
        elif is_as_fast and share < _JUST_AS_FAST and not is_first:
            self._too_few = few  # the limit is known, and the number before loses nothing
            return self._end()
        elif is_as_fast:
            self._enough = few
            few = few // 2 if not self._too_few and few > 1 else few
        else:
            self._too_few = max(few, self._too_few)
            few = max(
                math.ceil(few / max(share, 0.01) - 0.1), few + 1
            )  # each does its part of the rate
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
        return sum(
            not each.jobs and each.is_paused is is_paused for each in self._state.workers.values()
        )


def _mean(one: Rates, other: Rates) -> Rates:
    pairs = zip(one, other, strict=True)
    return Rates(
        *(Rate((a.per_s + b.per_s) / 2, math.hypot(a.error, b.error) / 2) for a, b in pairs)
    )
