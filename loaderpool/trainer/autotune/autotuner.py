"""How many workers a loader's training needs: decided window by window, each decision tried before it is kept.

What counts is the consumer's step, never how busy workers are: more of them are kept where steps became shorter, fewer
where they became no longer. The model that `explain()` has (`trainer/explain/observed.py`) says where to go at once,
and steps of one worker do the rest. What was tried in vain is not tried again for a while, unless the training changes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import NamedTuple

from loaderpool.errors import counted, readable_s
from loaderpool.trainer.explain.looks import FIRST_STEPS, Look, observed_in
from loaderpool.trainer.explain.observed import FEEDS, LEAST_STEPS, SPARE, AboutLoader, Observed
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict

# A window is whole then; before it is, only large differences count. Less is told by noise, and what is decided shall
# hold for longer than it took.
_WHOLE_S = 6.0
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


class Windows:
    """Cuts looks at a loader into windows of one number of workers.

    A window begins when all workers are there, and ends when it is whole.

    Args:
        about: the loader.
    """

    def __init__(self, about: AboutLoader) -> None:
        self._about = about
        self._begun: Look | None = None
        # That the loader has when a window may begin: the first ones compile, and what they find was made meanwhile.
        self._least_steps = FIRST_STEPS + 1
        self._workers = 0  # of the latest look

    def add(self, look: Look, workers: int) -> Observed | None:
        """Take in the latest look; `workers` is how many there shall be. None: there is no window to judge yet."""
        if look.workers < self._workers:  # what the others have made ahead hides what is missing now
            self._least_steps = look.steps + look.slots
        self._workers = look.workers
        begun = self._begun
        if begun is None or begun.by_worker.keys() != look.by_worker.keys():
            is_settled = look.workers == workers and look.steps >= self._least_steps
            self._begun = look if is_settled else None
            return None
        seen = dataclasses.replace(observed_in([begun, look], self._about, math.inf), paces=())
        if is_whole(seen):
            self._begun = look
        return seen if seen.steps >= LEAST_STEPS else None


def is_whole(seen: Observed) -> bool:
    """Whether a window is long enough for small differences."""
    return seen.steps >= LEAST_STEPS and seen.seconds >= _WHOLE_S


class Proposal(NamedTuple):
    """A number of workers, and why that one."""

    workers: int
    reason: str


class _Bound(NamedTuple):
    """A number beyond which it is not worth to go, for a while, in a training like the one in which it was found."""

    workers: int
    until_s: float
    seen: Observed
    others: float  # CPUs that other processes used, where CPUs were full; it holds for as long as they do

    def holds(self, seen: Observed, now_s: float) -> bool:
        """Whether training and machine are still as they were: what a batch takes, and the consumer's own time."""
        pairs = ((self.seen.making_s, seen.making_s), (_own_s(self.seen), _own_s(seen)))
        is_like = all(abs(then - now) <= _CHANGED * max(then, now) for then, now in pairs)
        return now_s < self.until_s and is_like and self.others - seen.cpus_of_others <= _FREED


class Autotuner:
    """Decides for one loader. It reads no clock, and changes nothing itself.

    Args:
        least: the fewest workers.
        most: the most.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._before: Observed | None = None  # before a change whose effect is not known yet,
        self._tried = 0  # which was to so many workers
        self._floor: _Bound | None = None  # fewer than that were too few
        self._ceiling: _Bound | None = None  # more than that were no faster
        self._enough: int | None = None  # how many would do, by the latest whole window; None: data were not ready
        self._changes: collections.deque[float] = collections.deque(maxlen=_CHANGES)
        self._in_vain, self._paused_until_s = 0, 0.0

    def judge(self, seen: Observed, now_s: float) -> Proposal | None:
        """Return another number of workers than the window's; None: that one stays for now."""
        before, proposal = self._before, None
        if before is not None and self._tried == seen.workers:
            has_helped = _has_helped(before, seen)
            if has_helped is None:
                return None
            if not has_helped:
                return self._go_back(before, seen, now_s)
            self._keep(before, seen, now_s)
            proposal = self._without_useless(before, seen)
        self._before = None  # or others had their way
        proposal = proposal or self._propose(seen, now_s)
        are_many = len(self._changes) == _CHANGES and now_s - self._changes[0] < _WITHIN_S
        if proposal is None or now_s < self._paused_until_s or are_many:
            return None
        self._before, self._tried = seen, proposal.workers
        self._changes.append(now_s)
        return proposal

    # -- what was tried

    def _keep(self, before: Observed, seen: Observed, now_s: float) -> None:
        self._enough, self._in_vain = None, 0
        if seen.workers < before.workers and before.steady_wait_share > _WAITS:  # the others were of no use
            others = max(_others(before), _others(seen))
            self._ceiling = _Bound(seen.workers, now_s + _VAIN_FOR_S, seen, others)

    def _go_back(self, before: Observed, seen: Observed, now_s: float) -> Proposal:
        self._before = self._enough = None
        until_s, others = now_s + _VAIN_FOR_S, max(_others(before), _others(seen))
        if seen.workers > before.workers:
            self._ceiling, than = _Bound(before.workers, until_s, before, others), "no shorter than"
        else:
            self._floor, than = _Bound(seen.workers + 1, until_s, before, others), "longer than"
        self._in_vain += 1
        self._paused_until_s = now_s + _PAUSE_S * 2**self._in_vain
        self._changes.append(now_s)
        step, step_before = readable_s(seen.step_s), readable_s(before.step_s)
        reason = f"steps of {step} were {than} with {counted(before.workers, 'worker')} ({step_before})"
        return Proposal(before.workers, reason)

    def _without_useless(self, before: Observed, seen: Observed) -> Proposal | None:
        """Return how many would have been as fast, where something that workers share lets no more be faster."""
        as_fast = math.ceil(SPARE * before.workers * before.step_s / seen.step_s)
        is_more = seen.workers > before.workers
        if not is_more or seen.steady_wait_share <= _WAITS or as_fast > _USELESS * seen.workers:
            return None
        return self._fewer(seen, as_fast, f"steps of {readable_s(seen.step_s)} need no more workers than that")

    # -- what to try

    def _propose(self, seen: Observed, now_s: float) -> Proposal | None:
        bounds = [bound for bound in (self._floor, self._ceiling) if bound is not None]
        if not all(bound.holds(seen, now_s) for bound in bounds):  # what was in vain may not be so any more
            self._floor = self._ceiling = None
            self._in_vain, self._paused_until_s = 0, 0.0
        wait_share = seen.steady_wait_share
        if wait_share > _WAITS and (is_whole(seen) or wait_share > _WAITS_MUCH):
            return self._when_waiting(seen, now_s)
        if not is_whole(seen):
            return None
        is_fed = wait_share < _FED or (wait_share <= _WAITS and seen.has_full_cpus)  # more would not help
        enough_before, self._enough = self._enough, _enough_in(seen) if is_fed else None
        if self._enough is None or enough_before is None:
            return None
        return self._fewer(seen, max(self._enough, enough_before), "data was always ready")

    def _when_waiting(self, seen: Observed, now_s: float) -> Proposal | None:
        verdict, enough = find_verdict(seen, waits_above=_WAITS).verdict, seen.least_workers
        if verdict in _MORE_HELP or (verdict is Verdict.CPUS_FULL and enough > seen.workers):
            found_s = now_s if self._ceiling is None else self._ceiling.until_s - _VAIN_FOR_S
            if verdict is Verdict.TOO_FEW_WORKERS and now_s - found_s >= _OVERRULED_AFTER_S:
                self._ceiling = None  # pauses between tries in vain get longer
            return self._more(seen)
        if verdict is Verdict.CPUS_FULL and is_whole(seen):
            return self._fewer(seen, enough, "no CPU is free for more")
        return None

    def _more(self, seen: Observed) -> Proposal | None:
        most = self._most if self._ceiling is None else min(self._most, self._ceiling.workers)
        workers = max(seen.least_workers, seen.workers + max(1, seen.workers // 4))
        if not seen.is_ready_measured:
            workers = min(workers, _MOST_TIMES_MORE * seen.workers)
        workers = min(workers, most)
        if workers <= seen.workers:
            return None
        waited = f"training waited {seen.steady_wait_share:.0%} of the time"
        return Proposal(workers, f"{waited}; a batch takes one worker {readable_s(seen.making_s)}")

    def _fewer(self, seen: Observed, enough: int, why: str) -> Proposal | None:
        workers = max(enough, self._least, self._least if self._floor is None else self._floor.workers)
        if workers >= seen.workers:
            return None
        return Proposal(workers, f"{why}; {counted(workers, 'worker')} should be as fast")


def _has_helped(before: Observed, seen: Observed) -> bool | None:
    """Whether steps became shorter with more workers, or no longer with fewer; None: the window is too short."""
    longer = seen.step_s / before.step_s - 1
    if seen.workers > before.workers:
        return longer <= -_SHORTER if is_whole(seen) or longer <= -_MUCH else None
    if not is_whole(seen) and longer < _MUCH:
        return None
    waited, waits = before.steady_wait_share, seen.steady_wait_share
    return longer <= _NO_LONGER and not (waited <= _WAITS and waits - waited > _WAITS)


def _enough_in(seen: Observed) -> int:
    """How many workers feed the step with something to spare, but no more than one."""
    needed = seen.making_s / max(seen.target_s, seen.step_s)
    return max(1, min(math.ceil(SPARE * needed), math.ceil(FEEDS * needed) + 1))


def _own_s(seen: Observed) -> float:
    return (seen.seconds - seen.wait_s) / seen.steps


def _others(seen: Observed) -> float:
    """How many CPUs other processes use, where they are full."""
    return seen.cpus_of_others if seen.has_full_cpus else 0.0
