"""The loader that is stormed, and those that go on where it was stopped."""

from __future__ import annotations

import os
import random
from typing import Any

import loaderpool as lp
from tests.support.processes import descendants, describe, wait_gone

from .readings import DatasetReading, LoopReading, Reading
from .rounds import WORKERS, Result, Round
from .shapes import Faults, make
from .targets import find_readers

__all__ = ["Succession"]

_GONE_S = 10.0  # after close


class Succession:
    """One loader after the other, each with other workers and another memory limit, on one pool or a pool each.

    Attributes:
        loader: the present one.

    Args:
        this: what is stormed.
        faults: of the function.
        seed: of all loaders.
        pool: that they share; None: each has one of its own.
        killer: is told when no supervisor may die.
        draw: the successors' settings.
        result: what was met is noted there.
    """

    _memory_limits: tuple[str | None, ...] = (None, "24MiB", "96MiB")

    def __init__(
        self, this: Round, faults: Faults, seed: int, pool: lp.Pool | None, killer: Any, draw: random.Random,
        result: Result,
    ) -> None:  # fmt: skip
        self._round, self._faults, self._seed, self._pool = this, faults, seed, pool
        self._killer, self._draw, self._result = killer, draw, result
        self.loader = self._make(this.workers)
        self._is_read = False  # a pass over it has begun

    def stand_before(self, epoch: int) -> None:
        """Have a loader whose next pass is of that epoch."""
        if self._round.shape.is_one_shot and self._is_read:
            self.succeed()
            self.loader.epoch = epoch
        self._is_read = True

    def read(self, place: Any) -> Reading:
        """Begin to take a pass, from a saved place on if there is one."""
        return (DatasetReading if self._round.is_dataset else LoopReading)(self.loader, place, self._faults.folder)

    def resize(self, workers: int) -> None:
        """Have another number of workers."""
        self.loader.resize(workers)

    def succeed(self) -> None:
        """Have another loader."""
        self.close()
        self._killer.has_first_batch = False
        self.loader = self._make(self._draw.choice(WORKERS), memory=self._draw.choice(self._memory_limits))

    def close(self) -> None:
        """Close the loader, and look for what it leaves behind."""
        statistics, result = self.loader.statistics(), self._result
        result.restarts += statistics.restarts - self._restarts_before[0]
        result.supervisor_restarts += statistics.supervisor_restarts - self._restarts_before[1]
        mine = descendants(os.getpid()) if self._pool is None else find_readers()
        self.loader.close()
        result.mismatches += [f"left behind by close(): {describe(pid)}" for pid in wait_gone(mine, _GONE_S)]

    def _make(self, workers: int, **settings: Any) -> lp.Loader:
        where = workers if self._pool is None else self._pool
        this = self._round
        loader = make(this.shape, self._faults, self._seed, deterministic=this.is_ordered, workers=where, **settings)
        statistics = loader.statistics()  # a pool's are those of all its loaders
        self._restarts_before = statistics.restarts, statistics.supervisor_restarts
        return loader
