"""How many workers a pool's trainings need: decided window by window, each decision tried before it is kept.

What counts is the consumer's step, never how busy workers are: more of them are kept where steps became shorter, fewer
where they became no longer. The model that `explain()` has (`trainer/explain/window.py`) says where to go at once,
and steps of one worker do the rest. What was tried in vain is not tried again until the training changes.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import weakref
from typing import NamedTuple

from loaderpool.errors import counted, readable_s
from loaderpool.system import capacity, clock, ranks
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import (
    FIRST_STEPS,
    LEAST_STEPS,
    Autotuned,
    Decision,
    Snapshot,
    Window,
    window_of,
)

# A window is whole then; before it is, only large differences count. Less is told by noise, and what is decided shall
# hold for longer than it took.
_WHOLE_S = 6.0
# Of the time: less waiting is noise, and a worker more would show in nothing.
_WAITS = 0.02
_WAITS_MUCH = 0.2  # a short window tells, too
# Steps became shorter, or no longer, by more than noise.
_SHORTER = 0.02
_NO_LONGER = 0.015
_MUCH = 0.2  # a short window tells, too
# Where no step found data ready, what the consumer's step would be is not known, and nor is how many workers it needs.
_MOST_TIMES_MORE = 4
# A window that differs by more in what a batch or the consumer's step takes is one of another training.
_CHANGED = 0.25
# After a try in vain the next one waits, each time for twice as long.
_PAUSE_S = 20.0

_MORE_HELP = (Verdict.TOO_FEW_WORKERS, Verdict.SOURCE_WAITS)
_KEPT = 64  # decisions
# A loader that gave no batch for so long, as one for validation may, has no say any more.
_IDLE_S = 600.0
# Of the memory that is free: workers beyond that might have the machine end a process.
_MEMORY_SHARE = 0.5
_LOG = logging.getLogger("loaderpool")


def is_whole(seen: Window) -> bool:
    """Whether a window is long enough for small differences."""
    return seen.steps >= LEAST_STEPS and seen.seconds >= _WHOLE_S


class Proposal(NamedTuple):
    """A number of workers, and why that one."""

    workers: int
    reason: str


class Autotuner:
    """Decides for one loader, between two numbers of workers. It reads no clock, and changes nothing itself."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._begun: Snapshot | None = (
            None  # where the window begins: all workers are there; it ends when it is whole
        )
        self._least_steps = (
            FIRST_STEPS + 1
        )  # that the loader has when one may begin: the first ones compile
        self._had = 0  # workers, in the latest snapshot
        self.wanted, self.seen_s = (
            0,
            0.0,
        )  # workers that it needs, 0: not known yet; when it was looked at last
        self._before: Window | None = None  # before a change whose effect is not known yet,
        self._tried = 0  # which was to so many workers
        # Fewer were too few, and more were no faster, in a training like in this window.
        self._floor, self._ceiling = least, most
        self._like: Window | None = None
        self._in_vain, self._paused_until_s = 0, 0.0

    def look(self, now: Snapshot, workers: int) -> Proposal | None:
        """Return another number than these workers, as the loader's latest snapshot wants it; None: it stays."""
        self.seen_s = now.now_ns / 1e9
        seen = self.window(now, workers)
        if seen is None:
            return None
        proposal = self.judge(seen, self.seen_s)
        if proposal is not None:
            self.wanted = proposal.workers
        elif is_whole(seen):
            self.wanted = self.wanted or workers
        return proposal

    def window(self, now: Snapshot, workers: int) -> Window | None:
        """Return what was measured with this number of workers until now; None: nothing yet that could be judged."""
        if now.workers < self._had:  # what the others have made ahead hides what is missing now
            self._least_steps = now.steps + now.slots
        self._had, begun = now.workers, self._begun
        if begun is None or begun.by_worker.keys() != now.by_worker.keys():
            is_settled = now.workers == workers and now.steps >= self._least_steps
            self._begun = now if is_settled else None
            return None
        # What was tried in vain is known here, too, and only for as long as the training stays as it was then.
        seen = dataclasses.replace(
            window_of([begun, now], math.inf), autotuned=Autotuned(), tried=None
        )
        if is_whole(seen):
            self._begun = now
        return seen if seen.steps >= LEAST_STEPS else None

    def judge(self, seen: Window, now_s: float) -> Proposal | None:
        """Return another number of workers than the window's; None: that one stays for now."""
        before = self._before
        if before is not None and self._tried == seen.workers:
            has_helped = _has_helped(before, seen)
            if has_helped is None:
                return None
            if not has_helped:
                return self._go_back(before, seen, now_s)
            self._in_vain = 0
            if (
                seen.workers < before.workers and before.steady_wait_share > _WAITS
            ):  # the others were of no use
                self._ceiling, self._like = seen.workers, seen
        self._before = None  # or others had their way
        proposal = self._propose(seen)
        if proposal is None or now_s < self._paused_until_s:
            return None
        self._before, self._tried = seen, proposal.workers
        return proposal

    # -- what was tried

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

    # -- what to try

    def _propose(self, seen: Window) -> Proposal | None:
        if self._like is not None and not _are_like(self._like, seen):
            self._floor, self._ceiling, self._like = (
                self._least,
                self._most,
                None,
            )  # it may be in vain no more
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
            if verdict is Verdict.TOO_FEW_WORKERS:  # they compute, and CPUs are free
                self._ceiling = self._most  # pauses between tries in vain get longer
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
    """Whether steps became shorter with more workers, or no longer with fewer; None: the window is too short."""
    longer = seen.step_s / before.step_s - 1
    if seen.workers > before.workers:
        return longer <= -_SHORTER if is_whole(seen) or longer <= -_MUCH else None
    if not is_whole(seen) and longer < _MUCH:
        return None
    waited, waits = before.steady_wait_share, seen.steady_wait_share
    return longer <= _NO_LONGER and not (waited <= _WAITS and waits - waited > _WAITS)


def _are_like(then: Window, now: Window) -> bool:
    """Whether these are of the same training: by what a batch takes, and the consumer's own time."""
    pairs = [(each.making_s, (each.seconds - each.wait_s) / each.steps) for each in (then, now)]
    return all(abs(a - b) <= _CHANGED * max(a, b) for a, b in zip(*pairs, strict=True))


class PoolWorkers:
    """Finds a pool's number of workers. The loader that needs most decides: what it leaves idle costs little."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._loaders: weakref.WeakKeyDictionary[object, Autotuner] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # loaders of a pool may be iterated by threads of their own
        self._decisions: collections.deque[Decision] = collections.deque(maxlen=_KEPT)

    @property
    def autotuned(self) -> Autotuned:
        """What it did. Runs in: any thread."""
        return Autotuned(self._most, tuple(self._decisions))

    def look(self, loader: object, now: Snapshot, workers: int) -> int | None:
        """Return how many workers there shall be instead, by a loader's latest snapshot; None: as many.

        Runs in: the thread that takes batches. The loader is not kept.
        """
        if not self._lock.acquire(blocking=False):
            return None  # another loader's is taken in; each has one every two seconds
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
        """How many more workers there is memory for, where each takes as much of its own as those that there are."""
        own = max(
            (capacity.private_bytes(each.pid) for each in now.by_worker.values() if each.pid),
            default=0,
        )
        return int(ranks.memory_bytes() * _MEMORY_SHARE) // own if own else self._most
