"""Another loader on the stormed one's pool, which must be as whole as that."""

from __future__ import annotations

import loaderpool as lp

from .shapes import SHAPES, Faults, make
from .streams import Twin, digest

__all__ = ["Companion"]


class Companion:
    """A loader from which a batch is taken now and then; ordered, compared as it comes."""

    def __init__(self, pool: lp.Pool, faults: Faults, seed: int) -> None:
        shape = SHAPES["single batches"]
        self._loader = make(shape, faults, seed + 1, pool=pool)
        self._twin = Twin(shape, faults, seed + 1)
        self._batches = iter(self._loader)
        self._expected: list[bytes] = []
        self._epoch = -1
        self.batches = 0
        self.mismatches: list[str] = []

    def take(self) -> None:
        """The next batch, of this epoch or the next."""
        if not self._expected:
            self._epoch += 1
            self._batches = iter(self._loader)
            self._expected = list(reversed(self._twin.epoch(self._epoch)[0]))
        batch = next(self._batches, None)
        self.batches += 1
        if batch is None or digest(batch) != self._expected.pop():
            self.mismatches.append(f"the companion's batch {self.batches} (epoch {self._epoch}) is not its twin's")
            self._expected.clear()

    def close(self) -> None:
        """It is needed no more."""
        del self._batches
        self._twin.close()
        self._loader.close()
