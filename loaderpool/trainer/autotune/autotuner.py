"""How many workers a loader's training needs: decided window by window, each decision tried before it is kept.

What counts is the consumer's step, never how busy workers are: more of them are kept where steps became shorter, fewer
where they became no longer. The model that `explain()` has (`trainer/explain/demand.py`) says where to go at once, and
steps of one worker do the rest. What was tried in vain is not tried again for a while, unless the training changes.
"""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from loaderpool.errors import counted, readable_s
from loaderpool.trainer.autotune.windows import Window
from loaderpool.trainer.explain.case import Case
from loaderpool.trainer.explain.demand import cpus_of_others
from loaderpool.trainer.explain.observed import FEEDS, SPARE, Observed
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict

# Of the time: less waiting is noise, and a worker more would show in nothing.
_FED = 0.01
_WAITS = 0.02
# Where so much is waited, a short window tells as much as a whole one.
_WAITS_MUCH = 0.2
# Steps became shorter, or no longer, by more than noise.
_SHORTER = 0.02
_NO_LONGER = 0.015
_MUCH = 0.2  # a short window tells, too
# Where no step found data ready, what the consumer's step would be is not known, and nor is how many workers it needs.
_MOST_TIMES_MORE = 4
# Of the workers: so many would have been as fast, and the others are of no use.
_USELESS = 0.5
# A window that differs by more in what a batch or the consumer's step takes is one of another training.
_CHANGED = 0.25
_VAIN_FOR_S = 1800.0  # what was tried in vain, in a training that stays as it is
_OVERRULED_AFTER_S = 45.0  # a ceiling, where workers compute all the time and CPUs are free
# CPUs that other processes have given back: fewer are noise.
_FREED = 0.25
# Changes within a minute: a jump and its corrections. More would be going to and fro.
_CHANGES, _WITHIN_S = 5, 60.0
# After a try in vain the next one waits, each time for twice as long.
_PAUSE_S = 20.0

_MORE_HELP = (Verdict.TOO_FEW_WORKERS, Verdict.SOURCE_WAITS)


class Proposal(NamedTuple):
    """A number of workers, and why that one."""

    workers: int
    reason: str


class _Kind(NamedTuple):
    """What tells one training from another with as many workers: what a batch takes, and the consumer's own time."""

    making_s: float
    own_s: float

    def is_like(self, other: _Kind) -> bool:
        """Whether both are those of one training."""
        return all(abs(mine - its) <= _CHANGED * max(mine, its) for mine, its in zip(self, other, strict=True))


class _Try(NamedTuple):
    """A change whose effect is not known yet, and what was observed before it."""

    before: int  # workers
    workers: int
    step_s: float
    wait_share: float
    kind: _Kind
    others: float  # CPUs

    @property
    def is_more(self) -> bool:
        """Whether it was one to more workers."""
        return self.workers > self.before

    def has_helped(self, window: Window) -> bool | None:
        """Whether steps became shorter with more workers, or no longer with fewer; None: the window is too short."""
        seen = window.observed
        longer = seen.step_s / self.step_s - 1
        if self.is_more:
            return longer <= -_SHORTER if window.is_whole or longer <= -_MUCH else None
        if not window.is_whole and longer < _MUCH:
            return None
        waits_more = self.wait_share <= _WAITS and Case.of(seen).steady_wait_share - self.wait_share > _WAITS
        return longer <= _NO_LONGER and not waits_more


class _Bound(NamedTuple):
    """A number beyond which it is not worth to go, for a while, in a training like this."""

    workers: int
    until_s: float
    kind: _Kind
    others: float = 0.0  # CPUs that other processes used, where CPUs were full; it holds for as long as they do

    def holds(self, seen: Observed, now_s: float) -> bool:
        """Whether training and machine are still as they were."""
        is_freed = self.others - cpus_of_others(seen) > _FREED
        return now_s < self.until_s and self.kind.is_like(_kind(seen)) and not is_freed


class Autotuner:
    """Decides for one loader. It reads no clock, and changes nothing itself.

    Args:
        least: the fewest workers.
        most: the most.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._try: _Try | None = None
        self._floor: _Bound | None = None  # fewer than that were too few
        self._ceiling: _Bound | None = None  # more than that were no faster
        self._enough: int | None = None  # how many would do, by the latest whole window; None: data were not ready
        self._changes: collections.deque[float] = collections.deque(maxlen=_CHANGES)
        self._in_vain, self._paused_until_s = 0, 0.0

    def judge(self, window: Window, now_s: float) -> Proposal | None:
        """Return another number of workers than the window's; None: that one stays for now."""
        seen, tried = window.observed, self._try
        useless = None
        if tried is not None and tried.workers == seen.workers:
            has_helped = tried.has_helped(window)
            if has_helped is None:
                return None
            if not has_helped:
                return self._go_back(tried, seen, now_s)
            self._keep(tried, seen, now_s)
            useless = self._without_useless(tried, seen)
        self._try = None  # or others had their way
        proposal = useless or self._propose(window, now_s)
        if proposal is None or not self._may_change(now_s):
            return None
        wait_share = Case.of(seen).steady_wait_share
        self._try = _Try(seen.workers, proposal.workers, seen.step_s, wait_share, _kind(seen), _others(seen))
        self._changes.append(now_s)
        return proposal

    def _may_change(self, now_s: float) -> bool:
        are_many = len(self._changes) == _CHANGES and now_s - self._changes[0] < _WITHIN_S
        return now_s >= self._paused_until_s and not are_many

    # -- what was tried

    def _keep(self, tried: _Try, seen: Observed, now_s: float) -> None:
        self._enough, self._in_vain = None, 0
        if not tried.is_more and tried.wait_share > _WAITS:  # the others were of no use
            self._ceiling = _Bound(tried.workers, now_s + _VAIN_FOR_S, _kind(seen), max(tried.others, _others(seen)))

    def _go_back(self, tried: _Try, seen: Observed, now_s: float) -> Proposal:
        self._try = self._enough = None
        workers = tried.before if tried.is_more else tried.workers + 1
        bound = _Bound(workers, now_s + _VAIN_FOR_S, tried.kind, max(tried.others, _others(seen)))
        if tried.is_more:
            self._ceiling = bound
        else:
            self._floor = bound
        self._in_vain += 1
        self._paused_until_s = now_s + _PAUSE_S * 2**self._in_vain
        self._changes.append(now_s)
        than = "no shorter than" if tried.is_more else "longer than"
        step, before = readable_s(seen.step_s), readable_s(tried.step_s)
        return Proposal(tried.before, f"steps of {step} were {than} with {counted(tried.before, 'worker')} ({before})")

    def _without_useless(self, tried: _Try, seen: Observed) -> Proposal | None:
        """Return how many would have been as fast, where something that workers share lets no more be faster."""
        as_fast = math.ceil(SPARE * tried.before * tried.step_s / seen.step_s)
        if not tried.is_more or Case.of(seen).steady_wait_share <= _WAITS or as_fast > _USELESS * seen.workers:
            return None
        return self._fewer(seen, as_fast, f"steps of {readable_s(seen.step_s)} need no more workers than that")

    # -- what to try

    def _propose(self, window: Window, now_s: float) -> Proposal | None:
        seen = window.observed
        wait_share = Case.of(seen).steady_wait_share
        self._forget_bounds(window, now_s)
        if wait_share > _WAITS and (window.is_whole or wait_share > _WAITS_MUCH):
            return self._when_waiting(window, now_s)
        if not window.is_whole:
            return None
        is_fed = wait_share < _FED or (wait_share <= _WAITS and Case.of(seen).has_full_cpus)  # more would not help
        enough_before, self._enough = self._enough, self._enough_in(seen) if is_fed else None
        if self._enough is None or enough_before is None:
            return None
        return self._fewer(seen, max(self._enough, enough_before), "data was always ready")

    def _when_waiting(self, window: Window, now_s: float) -> Proposal | None:
        seen = window.observed
        finding, case = find_verdict(seen, waits_above=_WAITS), Case.of(seen)
        enough = case.demand.least_workers()
        if finding.verdict in _MORE_HELP or (finding.verdict is Verdict.CPUS_FULL and enough > seen.workers):
            found_s = now_s if self._ceiling is None else self._ceiling.until_s - _VAIN_FOR_S
            if finding.verdict is Verdict.TOO_FEW_WORKERS and now_s - found_s >= _OVERRULED_AFTER_S:
                self._ceiling = None  # pauses between tries in vain get longer
            return self._more(case)
        if finding.verdict is Verdict.CPUS_FULL and window.is_whole:
            return self._fewer(seen, enough, "no CPU is free for more")
        return None

    def _more(self, case: Case) -> Proposal | None:
        seen, demand = case.seen, case.demand
        most = min(self._most, self._most if self._ceiling is None else self._ceiling.workers)
        workers = max(demand.least_workers(), seen.workers + max(1, seen.workers // 4))
        if not demand.is_ready_measured:
            workers = min(workers, _MOST_TIMES_MORE * seen.workers)
        workers = min(workers, most)
        if workers <= seen.workers:
            return None
        waited = f"training waited {Case.of(seen).steady_wait_share:.0%} of the time"
        return Proposal(workers, f"{waited}; a batch takes one worker {readable_s(demand.making_s)}")

    def _fewer(self, seen: Observed, enough: int, why: str) -> Proposal | None:
        workers = max(enough, self._least, self._least if self._floor is None else self._floor.workers)
        if workers >= seen.workers:
            return None
        return Proposal(workers, f"{why}; {counted(workers, 'worker')} should be as fast")

    def _enough_in(self, seen: Observed) -> int:
        """How many workers feed the step with something to spare, but no more than one."""
        demand = Case.of(seen).demand
        needed = demand.making_s / max(demand.target_s, seen.step_s)
        return max(1, min(math.ceil(SPARE * needed), math.ceil(FEEDS * needed) + 1))

    def _forget_bounds(self, window: Window, now_s: float) -> None:
        """What was in vain may not be so any more."""
        bounds = [bound for bound in (self._floor, self._ceiling) if bound is not None]
        if all(bound.holds(window.observed, now_s) for bound in bounds):
            return
        self._floor = self._ceiling = None
        self._in_vain, self._paused_until_s = 0, 0.0


def _kind(seen: Observed) -> _Kind:
    return _Kind(Case.of(seen).demand.making_s, (seen.seconds - seen.wait_s) / seen.steps)


def _others(seen: Observed) -> float:
    """How many CPUs other processes use, where they are full."""
    return cpus_of_others(seen) if Case.of(seen).has_full_cpus else 0.0
