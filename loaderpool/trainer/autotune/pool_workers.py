"""The number of workers of a pool, as the trainings of its loaders need it."""

from __future__ import annotations

import collections
import logging
import threading
import weakref

from loaderpool.errors import counted
from loaderpool.system import capacity, clock
from loaderpool.trainer.autotune.autotuner import Autotuner, Windows, is_whole
from loaderpool.trainer.explain.looks import Look
from loaderpool.trainer.explain.observed import AboutLoader, Autotuned, Decision

_KEPT = 64
# A loader that gave no batch for so long, as one for validation may, has no say any more.
_IDLE_S = 600.0
# Of the memory that is free: workers beyond that might have the machine end a process.
_MEMORY_SHARE = 0.5
# A pool that is short of workers for so long cannot start them.
_START_S = 30.0
_LOG = logging.getLogger("loaderpool")
_LOG_EVERY_S = 60.0


class _Tuned:
    """One of the pool's loaders."""

    def __init__(self, about: AboutLoader, least: int, most: int) -> None:
        self.windows, self.autotuner = Windows(about), Autotuner(least, most)
        self.wanted = 0  # workers; 0: not known yet
        self.seen_s = 0.0


class PoolWorkers:
    """Finds a pool's number of workers. The loader that needs most of them decides: what it leaves idle costs little.

    Args:
        least: the fewest workers.
        most: the most.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        # What is done to it is one step each: a loader may be closed on another thread at any moment.
        self._loaders: dict[weakref.ref[object], _Tuned] = {}
        self._lock = threading.Lock()  # loaders of a pool may be iterated by threads of their own
        self._logged_s = -_LOG_EVERY_S
        self._short_since_s: float | None = None
        self._decisions: collections.deque[Decision] = collections.deque(maxlen=_KEPT)

    @property
    def autotuned(self) -> Autotuned:
        """What it did. Runs in: any thread."""
        return Autotuned(self._most, tuple(self._decisions))

    def look(self, loader: object, about: AboutLoader, look: Look, workers: int) -> int | None:
        """Take in a look at one of the loaders. Runs in: the thread that takes batches.

        Args:
            loader: whose; it is not kept.
            about: what does not change of it.
            look: the latest one.
            workers: how many there shall be now.

        Returns:
            How many there shall be instead, which is noted; None: as many.
        """
        if not self._lock.acquire(blocking=False):
            return None  # another loader's is taken in; each has one every two seconds
        try:
            return self._look(loader, about, look, workers)
        finally:
            self._lock.release()

    def forget(self, loader: object) -> None:
        """This loader is closed, and needs nothing. Runs in: any thread, also in a finalizer."""
        self._loaders.pop(weakref.ref(loader), None)

    def _look(self, loader: object, about: AboutLoader, look: Look, workers: int) -> int | None:
        now_s = look.now_ns / 1e9
        if look.workers >= workers:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s
        elif now_s - self._short_since_s >= _START_S:
            self._short_since_s, self._most = None, max(self._least, look.workers)
            return self._noted(workers, self._most, f"only {counted(look.workers, 'worker')} could be started", now_s)
        tuned = self._loaders.get(weakref.ref(loader))
        if tuned is None:
            pop = self._loaders.pop

            def forget_dead(reference: weakref.ref[object]) -> None:
                pop(reference, None)

            tuned = self._loaders[weakref.ref(loader, forget_dead)] = _Tuned(about, self._least, self._most)
        tuned.seen_s = now_s
        seen = tuned.windows.add(look, workers)
        proposal = None if seen is None else tuned.autotuner.judge(seen, now_s)
        if proposal is None:
            tuned.wanted = tuned.wanted or (workers if seen is not None and is_whole(seen) else 0)
            return None
        tuned.wanted = proposal.workers
        recent = [each.wanted for each in list(self._loaders.values()) if now_s - each.seen_s < _IDLE_S]
        wanted = max(recent, default=workers)  # none: this one was closed meanwhile
        if wanted > workers:
            wanted = max(workers, min(wanted, workers + self._more_in_memory(look)))
        return self._noted(workers, min(wanted, self._most), proposal.reason, now_s)

    def _more_in_memory(self, look: Look) -> int:
        """How many more workers there is memory for, where each takes as much of its own as those that there are."""
        pids = [worker.pid for worker in look.by_worker.values() if worker.pid]
        own = max((capacity.private_bytes(pid) for pid in pids), default=0)
        return int(capacity.available_memory_bytes() * _MEMORY_SHARE) // own if own else self._most

    def _noted(self, before: int, workers: int, reason: str, now_s: float) -> int | None:
        if workers == before:
            return None
        self._decisions.append(Decision(clock.wall_s(), before, workers, reason))
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _LOG.info("workers: %d -> %d: %s", before, workers, reason)
        return workers
