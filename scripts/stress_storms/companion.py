"""What is taken by turns with the pass that is stormed: another loader on its pool, another pass over it."""

from __future__ import annotations

from collections.abc import Sequence

import loaderpool as lp

from .shapes import SHAPES, Faults, make
from .streams import Twin, compare, digest
from .succession import Succession

__all__ = ["Beside", "Companion"]

# What shares a pool: work by index, a stream, generators, a cache. Not one with a reader, which the killer would meet.
_SHAPES = ("single batches", "tiny items, read on a thread", "generators of shards", "cached in memory")


class Companion:
    """A loader from which a batch is taken now and then; ordered, compared as it comes.

    Args:
        pool: of both.
        faults: of both.
        seed: of both; says which shape it has.
        shapes: one of these.
    """

    def __init__(self, pool: lp.Pool, faults: Faults, seed: int, shapes: Sequence[str] = _SHAPES) -> None:
        shape = SHAPES[shapes[seed % len(shapes)]]
        self._loader = make(shape, faults, seed + 1, workers=pool)
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


class Beside:
    """A second pass over the stormed loader, of the next epoch, from which batches are taken until it is left.

    Args:
        loaders: what is stormed.
        expected: digests of the whole epoch.
        is_ordered: whether their order counts.
    """

    def __init__(self, loaders: Succession, expected: list[bytes], is_ordered: bool) -> None:
        self._loader, self._expected, self._is_ordered = loaders.loader, expected, is_ordered
        self._batches: lp.LoaderIterator | None = None
        self._got: list[bytes] = []
        self._is_over = False
        self.losses = 0

    @property
    def batches(self) -> int:
        """How many came."""
        return len(self._got)

    def take(self) -> None:
        """The next batch, if there is one."""
        if self._is_over:
            return
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            batch = next(self._batches, None)
        except lp.SourceLostError:
            batch, self.losses = None, 1
        if batch is None:
            self._is_over = True
        else:
            self._got.append(digest(batch))

    def end(self) -> list[str]:
        """Leave it; what differs."""
        is_whole = self._is_over and not self.losses
        self._batches = None
        found = compare(self._got, self._expected, is_ordered=self._is_ordered, is_whole=is_whole)
        return [f"the pass beside it: {each}" for each in found]
