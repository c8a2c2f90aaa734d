"""Compare the rate of all workers with the rate of fewer, while the others are paused. Pure.

    ALL --measured--> DRAIN --idle--> FEW --measured--> ALL --measured--> next number, or the end

If fewer workers are as fast as all, workers wait for something that they share. The supervisor
calls `note` for each answer, and `look` after each assignment of tickets. A trial ends by its own
clock, whatever the main process does.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from loaderpool.memory.board import TrialResult
from loaderpool.supervisor.state import State

# Least time to measure a rate. Smaller: one slow ticket decides. Larger: a pause costs more.
_LEAST_S = 0.4
# Greatest time to measure all workers, and fewer workers. Fewer workers are measured for longer
# only if they seem to be as fast.
_MOST_ALL_S, _MOST_FEW_S = 3.0, 1.0
# Least number of answers for a rate: of all workers together, and on average of each worker.
_LEAST_ANSWERS, _ANSWERS_EACH = 12, 3
# Least number of a worker's cycles for a rate from these cycles.
_LEAST_CYCLES = 2
# Least share of the rate of all workers at which fewer workers count as fast. If workers share no
# limit, half of them have a share of 0.5.
_AS_FAST = 0.9
# Least share at which fewer workers replace a larger number that was as fast.
_JUST_AS_FAST = 0.95
# Standard errors between a measured share and the alternative. Smaller: slow workers would look
# like a shared limit.
_CLEAR = 3.0
# Relative errors of all workers' rate. It is measured until its error is at most `_GOOD_ERROR`.
# After `_GOOD_S` seconds, `_MOST_ERROR` is enough. With a larger error, no result is clear.
_GOOD_ERROR, _GOOD_S, _MOST_ERROR = 0.06, 1.2, 0.12
# Least number of workers with which the error of `Rates.in_all` is evidence, and number of parts of
# the time whose rates give this error.
_MANY, _PARTS = 3, 8
_LEAST_ERROR = 0.02  # least relative error of a rate, however little it varies
# Greatest part of the workers that a pause leaves. With more workers, noise is as large as the
# difference.
_FEWER = 0.8
# Relative difference of all workers' rates before and after a pause. With a larger difference, the
# fewer workers are measured again.
_SAME = 0.25
# Part of the workers' time without a ticket. With a larger part, training does not wait for them.
_IDLE = 0.15
_LATE_S = 0.05  # greatest delay of a `look`


class Rate(NamedTuple):
    """Samples per second, with their relative standard error."""

    per_s: float
    error: float


class Rates(NamedTuple):
    """The same rate, measured in two ways."""

    # Sum of each worker's rate. Its error is large if some workers are slow, because it assumes
    # that all workers are slow at the same time.
    by_cycles: Rate
    # All answers by the time. Its error comes from the rates in parts of the time. It is small for
    # a steady source, even if that serves some workers more slowly than others.
    in_all: Rate


class Gauge:
    """Measures the rate of some workers.

    The rate of each worker comes from its own cycle, the time between two of its answers. Otherwise
    workers that always answer at the same moment would distort the rate.

    Args:
        workers: Number of workers.
        now_s: Time in seconds.
    """

    def __init__(self, workers: int, now_s: float) -> None:
        self._workers, self._begun_s, self._idle_s = workers, now_s, 0.0
        self._first_s: dict[int, float] = {}  # time of the first answer, by worker
        self._last_s: dict[int, float] = {}  # time of the latest answer, by worker
        self._log: list[tuple[float, int]] = []  # (time, rows) of all answers
        # (seconds since the last answer, rows) of each answer but the first, by worker.
        self._cycles: dict[int, list[tuple[float, int]]] = {}

    def note(self, worker: int, rows: int, now_s: float) -> None:
        """Count an answer of a worker."""
        cycles = self._cycles.setdefault(worker, [])
        if worker in self._last_s:
            cycles.append((now_s - self._last_s[worker], rows))
        self._first_s.setdefault(worker, now_s)
        self._last_s[worker] = now_s
        self._log.append((now_s, rows))

    def note_idle(self, seconds: float) -> None:
        """Add time in which workers had no ticket, summed over them."""
        self._idle_s += seconds

    def seconds(self, now_s: float) -> float:
        """Return the seconds since the start of the measurement."""
        return now_s - self._begun_s

    def is_enough(self, now_s: float) -> bool:
        """Return True if time and answers are enough for a rate."""
        return self.seconds(now_s) >= _LEAST_S and len(self._log) >= max(
            _LEAST_ANSWERS, _ANSWERS_EACH * self._workers
        )

    def is_idle(self, now_s: float) -> bool:
        """Return True if the workers lacked tickets, so that they do not limit the rate."""
        return self._idle_s > _IDLE * self._workers * self.seconds(now_s)

    def rates(self, now_s: float) -> Rates:
        """Return the rate, measured in both ways."""
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
        # Cycles that are cut off by the start and the end of the measurement.
        cut = [first_s - self._begun_s for first_s in self._first_s.values()]
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
        # Computed here, because importing `statistics` would delay the supervisor's start by 4 %.
        mean = sum(rows) / _PARTS
        variance = sum((count - mean) ** 2 for count in rows) / (_PARTS - 1)
        error = math.sqrt(variance / _PARTS) / mean
        return Rate(sum(rows) / self.seconds(now_s), max(_LEAST_ERROR, error))


class _Phase(enum.Enum):
    ALL = enum.auto()  # measure all workers
    DRAIN = enum.auto()  # wait until paused workers have answered their tickets
    FEW = enum.auto()  # measure the workers that are not paused
    OVER = enum.auto()  # the result is final


class Search:
    """The numbers of workers that a trial has compared with all.

    The fewest that are as fast are more than `too_few`, and at most `enough`.

    Attributes:
        enough: fewest workers that were as fast; at first all.
        too_few: most workers that were slower; 0: none were.
        few: number of workers to compare next.

    Args:
        workers: number of all workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = self.enough = workers
        self.too_few = 0
        self.few = workers // 2
        # True once the measurement is repeated, because only the rates in all supported its first
        # result. Slow workers may make the error of these rates too small.
        self._is_repeated = False

    def note(self, share: float, is_as_fast: bool, is_sure: bool) -> bool:
        """Note the result for `few` workers. Return True if the new `few` should be compared.

        Args:
            share: Rate of the few workers as a share of the rate of all.
            is_as_fast: True if the few are as fast as all.
            is_sure: True if the rates by cycles show it.
        """
        few, is_first = self.few, self.enough == self._workers
        if is_as_fast and not is_sure and is_first and not self._is_repeated:
            self._is_repeated = True
        elif is_as_fast and share < _JUST_AS_FAST and not is_first:
            self.too_few = few  # the limit is known, and `enough` workers lose nothing
            return False
        elif is_as_fast:
            self.enough = few
            few = few // 2 if not self.too_few and few > 1 else few
        else:
            self.too_few = max(few, self.too_few)
            # The number at which the rate would be that of all, if each worker adds its part.
            few = max(math.ceil(few / max(share, 0.01) - 0.1), few + 1)
        self.few = few
        return few < self.enough and few <= _FEWER * self._workers


class Trial:
    """A search for the fewest workers that are as fast as all.

    Attributes:
        paused_s: Seconds in which workers were paused.
        idle_s: Seconds in which paused workers had no ticket, summed over them.

    Args:
        state: State of the supervisor, whose workers the trial pauses and resumes.
        most_s: Greatest time of all pauses together, in seconds.
        now_s: Time in seconds.
    """

    def __init__(self, state: State, most_s: float, now_s: float) -> None:
        self._state, self._most_s, self._looked_s = state, most_s - _LATE_S, now_s
        self._workers = self._staying()
        self._search = Search(len(self._workers))
        self._rates: Rates | None = None  # rates of all workers
        # Rates of fewer workers that seem to be as fast. They are compared again with the rates of
        # all workers after the pause.
        self._few_rates: Rates | None = None
        self._loader: int | None = None  # loader whose answers are counted
        self.paused_s = self.idle_s = 0.0
        self._phase, self._gauge = _Phase.ALL, Gauge(len(self._workers), now_s)
        if len(self._workers) < 2:
            self._phase = _Phase.OVER

    @property
    def is_over(self) -> bool:
        """True if `result` is final."""
        return self._phase is _Phase.OVER

    @property
    def _has_time(self) -> bool:
        """True if the remaining time is enough for another pause."""
        return self.paused_s + _LEAST_S <= self._most_s

    @property
    def result(self) -> TrialResult:
        """Result of the trial so far."""
        search = self._search
        has_found = search.too_few or search.enough < len(self._workers)
        rate = self._rates.in_all.per_s if has_found and self._rates is not None else 0.0
        return TrialResult(len(self._workers), search.enough, search.too_few, rate, self.paused_s)

    def note(self, worker: int, loader: int | None, rows: int, now_s: float) -> None:
        """Count an answer of a worker. Called by the supervisor for each `Done`.

        An answer of a second loader ends the trial, because their samples cannot be compared.
        """
        if loader is None or self.is_over:
            return
        self._loader = self._loader or loader
        if loader != self._loader:
            self._end()
        self._gauge.note(worker, rows, now_s)

    def look(self, now_s: float) -> bool:
        """Start the next phase if it is time. Return True if workers were paused or resumed.

        Called by the supervisor after each assignment of tickets.
        """
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
            self._phase, self._gauge = _Phase.FEW, Gauge(self._search.few, now_s)
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
            return self._pause(self._search.few, now_s)
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
        return self._pause(self._search.few, now_s) if self._has_time else self._end()

    def _look_at_few(self, now_s: float) -> bool:
        gauge, all_ = self._gauge, self._rates
        assert all_ is not None
        if gauge.is_idle(now_s):
            return self._end()
        few = gauge.rates(now_s)
        # If the few seem to be as fast, all are measured again, until the result is clear. So the
        # error of the earlier rate of all is left out here.
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
        """Compare the rate of the few workers with the rate of all.

        Returns:
            True if the few are as fast (None: not clear); their share of the rate; and True if the
            rates by cycles show it, not only the rates in all.
        """
        part, found, share = self._search.few / len(self._workers), None, 0.0
        for one, other in list(zip(few, all_, strict=True))[: 2 if self._are_many else 1]:
            share = one.per_s / other.per_s
            clear = _CLEAR * share * math.hypot(one.error, other.error)
            if (share - part if share >= _AS_FAST else 1 - share) >= clear:
                found = share >= _AS_FAST
                break
        return found, share, one is few.by_cycles

    @property
    def _are_many(self) -> bool:
        """True if the rates in all are evidence. With few workers, one slow one distorts them."""
        return len(self._workers) >= _MANY and self._search.few <= len(self._workers) / 2

    def _decide(self, share: float, is_as_fast: bool, is_sure: bool, now_s: float) -> bool:
        """Note the result for the few workers, and pause for another number of them, or end."""
        if self._search.note(share, is_as_fast, is_sure) and self._has_time:
            return self._pause(self._search.few, now_s)
        return self._end()

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
