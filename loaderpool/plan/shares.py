"""Number of the first n items from each source, exactly by weight, and their order in a mix.

A binary tree divides the sources. At each fork, n items are split between the left and the right
side:

```
    left(n)  = floor(n · weight of the left / weight of both + offset)
    right(n) = n - left(n)

    0 <= offset < 1, hashed from the seed
```

Neither side ever decreases, or grows by more than n does. So this is true of the counts of all
sources too, and they always sum to n. If n is a multiple of the sum of the weights, every count is
exact, because floor removes the offset, which is less than one. Because the offset is uniform, the
expected count is n · weight at every n. With a fixed offset, a rare source would come first at the
same place under every seed. Weights are integers, so rounding of floats cannot make two machines
differ.

Items are taken in blocks of `BLOCK`. The counts at the two ends of a block determine its number of
items of each source, and a keyed order determines their places. So the item at any position is
known without adding up from the start.

Each epoch continues in each source where the epoch before stopped, so every record is read in time.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.permutation import MAX_SIZE, Permutation, stream_key
from loaderpool.system.hashes import shake_256

BLOCK = 256
"""Number of items whose order is drawn together.

Smaller: the order is less random, down to strict alternation of two sources. Larger: an item that
is read out of order takes longer than the current 0.1 ms, because its whole block is made.
"""

_KEPT_BLOCKS = 1 << 15
"""Number of blocks of an epoch whose records are kept, 1.7 KiB each (2.7 from 2**31 records on).

Smaller: a shuffled pass over some million items makes each block many times, which takes as long as
60 rows. Larger: a worker may use more than the current 56 MiB for an epoch of 8 million items.
"""

_KEPT_ORIGINS = 512
"""Number of blocks whose sources are kept for `origin`, 6 KiB each."""

_OFFSET_BITS = 32
"""Number of bits of an offset.

Smaller: expected counts are off by more than a 2**32th of an item. Larger: divisions have longer
numbers.
"""

_Integers = npt.NDArray[np.int64]


class _Block(NamedTuple):
    """Items of one block of an epoch."""

    sources: _Integers  # number of the source of each item
    indices: _Integers  # index of each item in its source
    records: Sequence[int]  # number of each item among the records of all sources


class Shares:
    """Counts of the first n items for each source; a pure function of weights and seed.

    Weights are integers from 0 on, of any size, and not all 0.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self._weights = list(weights)
        count = len(self._weights)
        key = stream_key("mix-offsets", seed, count).to_bytes(16, "little")
        stream = shake_256(b"loaderpool shares" + key).digest(_OFFSET_BITS // 8 * count)
        self._offsets = struct.unpack(f"<{count}I", stream)
        self._ends = list(itertools.accumulate(self._weights, initial=0))

    def counts(self, stop: int) -> list[int]:
        """Return the number of the first `stop` items from each source. They sum to `stop`."""
        counts = [0] * len(self._weights)
        ranges = [(0, len(self._weights), stop)]
        while ranges:
            first, last, items = ranges.pop()
            if not items:
                continue
            if last - first == 1:
                counts[first] = items
                continue
            middle = (first + last) // 2
            left, both = (
                self._ends[middle] - self._ends[first],
                self._ends[last] - self._ends[first],
            )
            of_left = (items * (left << _OFFSET_BITS) + self._offsets[middle] * both) // (
                both << _OFFSET_BITS
            )
            ranges += [(first, middle, of_left), (middle, last, items - of_left)]
        return counts

    def longest(self, sizes: Sequence[int]) -> int:
        """Return the largest n for which the first n items take no source's items twice."""
        return _last(
            lambda stop: all(
                count <= size for count, size in zip(self.counts(stop), sizes, strict=True)
            )
        )

    def shortest(self, sizes: Sequence[int]) -> int:
        """Return the smallest n for which the first n items contain all items of every source.

        Sources of weight 0 do not count.
        """
        wanted = [size if weight else 0 for size, weight in zip(sizes, self._weights, strict=True)]
        return 1 + _last(
            lambda stop: any(
                count < size for count, size in zip(self.counts(stop), wanted, strict=True)
            )
        )


def _last(holds: Callable[[int], bool]) -> int:
    """Return the last number for which `holds` is true. It must be true up to there, and false
    after it.

    Raises:
        ArgumentError: it holds for all numbers below `MAX_SIZE`.
    """
    first_not = bisect.bisect_left(range(MAX_SIZE), True, key=lambda number: not holds(number))
    if first_not == MAX_SIZE:
        raise ArgumentError("weights differ so much that the mix would have more than 2**62 items")
    return max(0, first_not - 1)


class MixOrder:
    """Order of the records of a mix: the record at each index of an epoch.

    The records of all sources are numbered consecutively, one source after the other. Items of a
    source keep their order. The last block is shorter, so that the counts are right at the end,
    too. Threads may share it. It is pickled without its blocks.

    Attributes:
        size: Number of items in each epoch.
        count: Number of records of all sources.

    Args:
        weights: Weight of each source.
        seed: Seed of the order.
        size: Number of items in each epoch.
        goes_on: True if the counts continue from epoch to epoch. Then one epoch may have one more
            item of a source than another, and a very rare source is in some epochs only.
            Otherwise all epochs have the same number of items of each source, at the same places.
        sources: Number of items of each source; or its order, if it is itself a mix. Each time that
            such a source was read to its end, its next epoch begins.

    Raises:
        ArgumentError: The sources have more than 2**62 records together.
    """

    def __init__(
        self,
        weights: Sequence[int],
        seed: int,
        size: int,
        goes_on: bool,
        sources: Sequence[int | MixOrder],
    ) -> None:
        self._arguments = weights, seed, size, goes_on, sources
        self._shares, self._seed, self.size = Shares(weights, seed), seed, size
        # Items of each source in an epoch. None: they differ, because the counts continue.
        self._each = None if goes_on else self._shares.counts(size)
        self._inner = {at: each for at, each in enumerate(sources) if isinstance(each, MixOrder)}
        self._sizes = [each.size if isinstance(each, MixOrder) else each for each in sources]
        counts = [each.count if isinstance(each, MixOrder) else each for each in sources]
        self._starts = [*itertools.accumulate(counts, initial=0)]
        self.count: int = self._starts[-1]
        if self.count > MAX_SIZE:
            raise ArgumentError("sources have more than 2**62 items together")
        self._dtype = np.int32 if self.count < 1 << 31 else np.int64
        # Records of each block, for the latest two epochs.
        self._epochs: dict[int, dict[int, Sequence[int]]] = {}
        self._block = functools.lru_cache(_KEPT_ORIGINS)(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixOrder, self._arguments

    def records(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """Return the records at these indices of an epoch, from 0 to size - 1."""
        # A loop with few calls, because it runs for each row.
        blocks = self._epochs.get(epoch)
        if blocks is None:
            for old in [*self._epochs][:-1]:
                self._epochs.pop(old, None)
            blocks = self._epochs[epoch] = {}
        found: list[int] = []
        latest, records = -1, cast(Sequence[int], ())
        for index in indices:
            number = index // BLOCK
            if number != latest:
                latest, records = number, blocks.get(number) or self._records(blocks, epoch, number)
            found.append(records[index % BLOCK])
        return found

    def record(self, epoch: int, index: int) -> int:
        """Return the record at an index of an epoch."""
        return self.records(epoch, [index])[0]

    def origin(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the number of the source at an index of an epoch, and the index in that source."""
        number, place = divmod(index, BLOCK)
        block = self._block(epoch, number)
        return int(block.sources[place]), int(block.indices[place])

    def _records(self, blocks: dict[int, Sequence[int]], epoch: int, number: int) -> Sequence[int]:
        """Make a block, and keep its records."""
        records = self._made(epoch, number).records
        if len(blocks) >= _KEPT_BLOCKS:
            # All blocks, not only the oldest, because a single `clear` is atomic among threads.
            blocks.clear()
        blocks[number] = records
        return records

    def _made(self, epoch: int, number: int) -> _Block:
        start = number * BLOCK
        places = np.arange(min(BLOCK, self.size - start), dtype=np.int64)
        before, until = (self._taken(epoch, start + each) for each in (0, len(places)))
        count = np.array([*map(operator.sub, until, before)])
        order = Permutation(len(places), stream_key("mix", self._seed, number)).take(places)
        sources = np.repeat(np.arange(len(count)), count)[order]
        # Places of each source in the block, ascending, one source after the other. Each source's
        # items fill its places in order.
        ranks = np.empty_like(places)
        ranks[sources.argsort(kind="stable")] = places - np.repeat(count.cumsum() - count, count)
        turns, rests = zip(*map(divmod, before, self._sizes), strict=True)
        more_turns, indices = np.divmod(
            ranks + np.array(rests)[sources], np.array(self._sizes)[sources]
        )
        records = indices.copy()
        for source, inner in self._inner.items():
            for turn in {*more_turns[sources == source].tolist()}:
                taken = (sources == source) & (more_turns == turn)
                records[taken] = inner.records(turns[source] + turn, indices[taken].tolist())
        records += np.array(self._starts)[sources]
        return _Block(sources, indices, memoryview(records.astype(self._dtype)))

    def _taken(self, epoch: int, index: int) -> list[int]:
        """Return the number of items of each source before an index, from epoch 0 on."""
        if self._each is None:
            return self._shares.counts(epoch * self.size + index)
        counts = self._shares.counts(index)
        return [epoch * each + count for each, count in zip(self._each, counts, strict=True)]
