"""Which items of a source fall into which bucket, and where an epoch has them.

An epoch's order is not to be known at any position for nothing, as it is without buckets: which items make up a batch
depends on how many of its bucket came before. So for each epoch that is under way a process keeps a table of all
positions, sorted by bucket, and by position within a bucket: 4 bytes an item (8 from 2**32 items on).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.base import permutation

Positions = npt.NDArray[np.uint32] | npt.NDArray[np.int64]

_KEPT_EPOCHS = 2
"""Epochs whose tables are kept. Fewer: at the edge of two epochs, which are under way together, they are made again for
each batch. More: memory, of which each worker takes its own."""

_BLOCK = 1 << 16
"""Positions that are permuted together. Larger: temporary arrays outgrow the cache. Smaller: 47 ns an item, not 23."""

_Table = TypeVar("_Table")


class LatestEpochs(Generic[_Table]):
    """What was made for the latest epochs that were asked for; threads may share it."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._turn = threading.RLock()  # a signal's handler may ask for a state

    def get(self, epoch: int, make: Callable[[], _Table]) -> _Table:
        """Return the epoch's table, made now if it was not."""
        with self._turn:
            table = self._tables.pop(epoch, None)
            if table is None:
                table = make()
            while len(self._tables) >= _KEPT_EPOCHS:
                del self._tables[next(iter(self._tables))]
            self._tables[epoch] = table  # as the latest
            return table


class ItemBuckets:
    """The bucket of each of a source's items; never changes, and travels without its tables.

    Attributes:
        counts: how many items each bucket has.
        firsts: where each bucket begins in what `sorted_positions` gives.

    Args:
        numbers: the bucket of each item, below `count`, `uint8[n]` or `uint16[n]`, which sort in linear time.
        count: how many buckets there are.
    """

    def __init__(self, numbers: npt.NDArray[Any], count: int) -> None:
        self.numbers = numbers
        counts = np.zeros(count, np.int64)
        for start in range(0, len(numbers), _BLOCK):  # of all at once it would take eight bytes an item
            counts += np.bincount(numbers[start : start + _BLOCK], minlength=count)
        self.counts: tuple[int, ...] = tuple(counts.tolist())
        self.firsts: tuple[int, ...] = (0, *np.cumsum(self.counts, dtype=np.int64).tolist()[:-1])
        self._orders: LatestEpochs[Positions] = LatestEpochs()

    @staticmethod
    def of(lengths: npt.NDArray[Any], boundaries: tuple[int, ...]) -> ItemBuckets:
        """The buckets of items of these lengths: in bucket i are those from boundaries[i-1] to below boundaries[i]."""
        count = len(boundaries) + 1
        numbers = np.empty(len(lengths), np.uint8 if count <= 1 << 8 else np.uint16)
        edges = np.array(boundaries, np.int64)
        for start in range(0, len(lengths), _BLOCK):
            numbers[start : start + _BLOCK] = edges.searchsorted(lengths[start : start + _BLOCK], side="right")
        return ItemBuckets(numbers, count)

    def sorted_positions(self, seed: int, epoch: int, shuffle: bool) -> Positions:
        """Return all positions of an epoch, those of the first bucket in front, each bucket's ascending.

        Args:
            seed: sets the orders of all epochs; always the same for one object.
            epoch: which epoch.
            shuffle: whether epochs differ; always the same for one object.
        """
        return self._orders.get(epoch if shuffle else 0, lambda: self._sorted(seed, epoch, shuffle))

    def _sorted(self, seed: int, epoch: int, shuffle: bool) -> Positions:
        """Sort by counting, block by block, so that little more memory is needed than for the result."""
        size, count = len(self.numbers), len(self.counts)
        positions: Positions = np.empty(size, np.int64 if size > 1 << 32 else np.uint32)
        order = permutation(size, seed, epoch) if shuffle and size else None
        filled = np.array(self.firsts, np.int64)
        for start in range(0, size, _BLOCK):
            places = np.arange(start, min(size, start + _BLOCK))
            numbers = self.numbers[places if order is None else order.take(places)]
            counts = np.bincount(numbers, minlength=count)
            moved = filled - (counts.cumsum() - counts)  # from where a bucket begins in the block to where it goes on
            positions[np.arange(len(places)) + moved.repeat(counts)] = places[numbers.argsort(kind="stable")]
            filled += counts
        return positions

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum of the bucket of each item, in order."""
        import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

        numbers = self.numbers.astype("<u2") if self.numbers.itemsize > 1 else self.numbers
        return hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ItemBuckets):
            return NotImplemented
        return self is other or (self.counts == other.counts and bool(np.array_equal(self.numbers, other.numbers)))

    def __hash__(self) -> int:
        return hash(self.counts)

    def __reduce__(self) -> Any:
        return ItemBuckets, (self.numbers, len(self.counts))
