"""Choice of a pool's number of workers for `workers="auto"`.

Each change is tried before it is kept. The consumer's step decides, not how busy workers are. More
workers are kept if steps became shorter, and fewer if steps became no longer. The model of
`explain()` (`trainer/explain/window.py`) sets the target of a change. A change that did not help
is not repeated until the training changes.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import weakref
from typing import NamedTuple

from loaderpool.config import FIRST_STEPS
from loaderpool.errors import counted, readable_s
from loaderpool.system import capacity, clock, ranks
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import (
    LEAST_STEPS,
    Autotuned,
    Decision,
    Snapshot,
    Window,
    window_of,
)

# Seconds from which a window is whole. In a shorter window only large differences count. Smaller:
# noise decides. Larger: the pool adapts later.
_WHOLE_S = 6.0
# Share of the time spent waiting. Less waiting is noise, and one more worker would have no visible
# effect.
_WAITS = 0.02
_WAITS_MUCH = 0.2  # share of waiting that counts in a short window, too
# Relative changes of the step beyond noise: shorter, or no longer.
_SHORTER = 0.02
_NO_LONGER = 0.015
_MUCH = 0.2  # relative change of the step that counts in a short window, too
# Largest factor of one change if no step found data ready. Then the consumer's own time, and the
# needed number of workers, are not known.
_MOST_TIMES_MORE = 4
# If batch or step time changes by more than this share, forget earlier results.
_CHANGED = 0.25
# Seconds until the next change after one that did not help; doubled each time.
_PAUSE_S = 20.0

_MORE_HELP = (Verdict.TOO_FEW_WORKERS, Verdict.SOURCE_WAITS)
_KEPT = 64  # decisions kept
# Seconds without a batch after which a loader no longer counts. It may be one for validation.
_IDLE_S = 600.0
# Share of the free memory for new workers. With more, the kernel might kill a process.
_MEMORY_SHARE = 0.5
_LOG = logging.getLogger("loaderpool")


def is_whole(seen: Window) -> bool:
    """Return True if a window is long enough for small differences."""
    return seen.steps >= LEAST_STEPS and seen.seconds >= _WHOLE_S


class Proposal(NamedTuple):
    """A number of workers, and the reason for it."""

    workers: int
    reason: str


class _SteadyWindow:
    """Window throughout which the same workers run. A whole window is followed by a new one."""

    def __init__(self) -> None:
        # Start of the window, with all workers running; replaced when the window is whole.
        self._begun: Snapshot | None = None
        # Steps of the loader before a window may begin; the first ones compile.
        self._least_steps = FIRST_STEPS + 1
        self._had = 0  # workers in the latest snapshot

    def until(self, now: Snapshot, workers: int) -> Window | None:
        """Return the window with this number of workers up to now. None: too few steps."""
        # Batches that the removed workers made ahead would hide a lack of workers.
        if now.workers < self._had:
            self._least_steps = now.steps + now.slots
        self._had, begun = now.workers, self._begun
        if begun is None or begun.by_worker.keys() != now.by_worker.keys():
            is_settled = now.workers == workers and now.steps >= self._least_steps
            self._begun = now if is_settled else None
            return None
        # Remove the results of trials: they are known here already, and hold only while the
        # training stays the same.
        seen = dataclasses.replace(
            window_of([begun, now], math.inf), autotuned=Autotuned(), tried=None
        )
        if is_whole(seen):
            self._begun = now
        return seen if seen.steps >= LEAST_STEPS else None


class Autotuner:
    """Chooses the number of workers for one loader, between two bounds.

    It reads no clock, and changes nothing itself. Called by `PoolWorkers`.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._window = _SteadyWindow()
        # Workers that the loader needs, 0: not known yet; time of the latest snapshot.
        self.wanted, self.seen_s = 0, 0.0
        self._before: Window | None = None  # window before a change whose effect is not known yet
        self._tried = 0  # number of workers after that change
        # Bounds from trials: fewer workers were too few, and more were no faster. `_like` is a
        # window of the training for which the bounds hold.
        self._floor, self._ceiling = least, most
        self._like: Window | None = None
        self._in_vain, self._paused_until_s = 0, 0.0

    def look(self, now: Snapshot, workers: int) -> Proposal | None:
        """Return another number of workers if the latest snapshot supports it.

        None: the present number stays.
        """
        self.seen_s = now.now_ns / 1e9
        seen = self._window.until(now, workers)
        if seen is None:
            return None
        proposal = self.judge(seen, self.seen_s)
        if proposal is not None:
            self.wanted = proposal.workers
        elif is_whole(seen):
            self.wanted = self.wanted or workers
        return proposal

    def judge(self, seen: Window, now_s: float) -> Proposal | None:
        """Return another number of workers than the window's. None: it stays for now."""
        before = self._before
        if before is not None and self._tried == seen.workers:
            has_helped = _has_helped(before, seen)
            if has_helped is None:
                return None
            if not has_helped:
                return self._go_back(before, seen, now_s)
            self._in_vain = 0
            # The removed workers had given no speed-up.
            if seen.workers < before.workers and before.steady_wait_share > _WAITS:
                self._ceiling, self._like = seen.workers, seen
        self._before = None  # cleared also if another loader has set a different number of workers
        proposal = self._propose(seen)
        if proposal is None or now_s < self._paused_until_s:
            return None
        self._before, self._tried = seen, proposal.workers
        return proposal

    # -- after a change --

    def _go_back(self, before: Window, seen: Window, now_s: float) -> Proposal:
        self._before, self._like = None, before
        if seen.workers > before.workers:
            self._ceiling, than = before.workers, "no shorter than"
        else:
            self._floor, than = seen.workers + 1, "longer than"
        self._in_vain += 1
        self._paused_until_s = now_s + _PAUSE_S * 2**self._in_vain
        step, step_before = readable_s(seen.step_s), readable_s(before.step_s)
        reason = (
            f"steps of {step} were {than} with {counted(before.workers, 'worker')} ({step_before})"
        )
        return Proposal(before.workers, reason)

    # -- the next change --

    def _propose(self, seen: Window) -> Proposal | None:
        if self._like is not None and not _are_like(self._like, seen):
            # In another training these bounds may not hold.
            self._floor, self._ceiling, self._like = self._least, self._most, None
            self._in_vain, self._paused_until_s = 0, 0.0
        if seen.steady_wait_share > (_WAITS if is_whole(seen) else _WAITS_MUCH):
            return self._when_waiting(seen)
        return (
            self._fewer(seen, seen.enough_workers, "data was always ready")
            if is_whole(seen)
            else None
        )

    def _when_waiting(self, seen: Window) -> Proposal | None:
        verdict, enough = find_verdict(seen, waits_above=_WAITS).verdict, seen.least_workers
        if verdict in _MORE_HELP or (verdict is Verdict.CPUS_FULL and enough > seen.workers):
            if verdict is Verdict.TOO_FEW_WORKERS:  # the workers compute, and CPUs are free
                self._ceiling = self._most  # the pauses after changes that did not help get longer
            return self._more(seen)
        if verdict is Verdict.CPUS_FULL and is_whole(seen):
            return self._fewer(seen, enough, "no CPU is free for more")
        return None

    def _more(self, seen: Window) -> Proposal | None:
        workers = max(seen.least_workers, seen.workers + max(1, seen.workers // 4))
        if not seen.is_ready_measured:
            workers = min(workers, _MOST_TIMES_MORE * seen.workers)
        workers = min(workers, self._ceiling)
        if workers <= seen.workers:
            return None
        waited = f"training waited {seen.steady_wait_share:.0%} of the time"
        return Proposal(workers, f"{waited}; a batch takes one worker {readable_s(seen.making_s)}")

    def _fewer(self, seen: Window, enough: int, why: str) -> Proposal | None:
        workers = max(enough, self._floor)
        if workers >= seen.workers:
            return None
        return Proposal(workers, f"{why}; {counted(workers, 'worker')} should be as fast")


def _has_helped(before: Window, seen: Window) -> bool | None:
    """Return True if more workers made steps shorter, or fewer made them no longer.

    None: the window is too short.
    """
    longer = seen.step_s / before.step_s - 1
    if seen.workers > before.workers:
        return longer <= -_SHORTER if is_whole(seen) or longer <= -_MUCH else None
    if not is_whole(seen) and longer < _MUCH:
        return None
    waited, waits = before.steady_wait_share, seen.steady_wait_share
    return longer <= _NO_LONGER and not (waited <= _WAITS and waits - waited > _WAITS)


def _are_like(then: Window, now: Window) -> bool:
    """Return True if both windows are of the same training.

    The time of a batch and the consumer's own time are compared.
    """
    pairs = [(each.making_s, (each.seconds - each.wait_s) / each.steps) for each in (then, now)]
    return all(abs(a - b) <= _CHANGED * max(a, b) for a, b in zip(*pairs, strict=True))


class PoolWorkers:
    """Chooses a pool's number of workers, as the maximum over its loaders.

    A loader that needs fewer leaves some idle, which costs little.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._loaders: weakref.WeakKeyDictionary[object, Autotuner] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # the loaders of a pool may be iterated by several threads
        self._decisions: collections.deque[Decision] = collections.deque(maxlen=_KEPT)

    @property
    def autotuned(self) -> Autotuned:
        """Upper limit and decisions so far. Thread-safe."""
        return Autotuned(self._most, tuple(self._decisions))

    def look(self, loader: object, now: Snapshot, workers: int) -> int | None:
        """Return a new number of workers, from a loader's latest snapshot, or None for no change.

        Called in the thread that reads batches. Keeps only a weak reference to the loader.
        """
        if not self._lock.acquire(blocking=False):
            return None  # another loader is being evaluated; each is every two seconds
        try:
            if (tuner := self._loaders.get(loader)) is None:
                tuner = self._loaders[loader] = Autotuner(self._least, self._most)
            proposal = tuner.look(now, workers)
            if proposal is None:
                return None
            wanted = max(
                each.wanted
                for each in self._loaders.values()
                if tuner.seen_s - each.seen_s < _IDLE_S
            )
            if wanted > workers:
                wanted = max(workers, min(wanted, workers + self._more_in_memory(now)))
            if wanted == workers:
                return None
            self._decisions.append(Decision(clock.wall_s(), workers, wanted, proposal.reason))
            _LOG.info("workers: %d -> %d: %s", workers, wanted, proposal.reason)
            return wanted
        finally:
            self._lock.release()

    def _more_in_memory(self, now: Snapshot) -> int:
        """Return the number of workers for which there is memory, beside the present ones.

        Each is expected to need as much memory of its own as the largest present one.
        """
        own = max(
            (capacity.private_bytes(each.pid) for each in now.by_worker.values() if each.pid),
            default=0,
        )
        return int(ranks.memory_bytes() * _MEMORY_SHARE) // own if own else self._most
