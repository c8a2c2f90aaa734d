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
import itertools
import struct
from collections.abc import Callable, Sequence

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

_KEPT_BLOCKS = 512
"""Number of blocks that are kept, 4 KiB each.

Smaller: a shuffled pass over some ten thousand items makes each of them many times. Larger: each
worker uses more than the current 2 MiB.
"""

_OFFSET_BITS = 32
"""Number of bits of an offset.

Smaller: expected counts are off by more than a 2**32th of an item. Larger: divisions have longer
numbers.
"""

# The source of each item, the number of that source's items before it in this epoch, and the number
# of items of each source in earlier epochs.
Block = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]


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
    """Source of each of `size` items of an epoch, and its number within that source.

    Items of a source keep their order. The last block is shorter, so that the counts are right at
    the end, too. Threads may share it.

    Args:
        shares: the counts.
        seed: seed of the order.
        size: number of items in each epoch.
        goes_on: True if the counts continue from epoch to epoch. Then one epoch may have one more
            item of a source than another, and a very rare source is in some epochs only.
            Otherwise all epochs have the same number of items of each source, at the same places.
    """

    def __init__(self, shares: Shares, seed: int, size: int, goes_on: bool) -> None:
        self._shares = shares
        self._seed = seed
        self._size = size
        self._goes_on = goes_on
        self.each = shares.counts(size)  # items of each source in epoch 0
        self._blocks: dict[tuple[int, int], Block] = {}

    def origin(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the source at a position, 0 to size - 1, and the number of its items before."""
        number, place = divmod(position, BLOCK)
        key = (epoch if self._goes_on else 0), number
        block = self._blocks.get(key)
        if block is None:
            block = self._made(*key)
            if len(self._blocks) >= _KEPT_BLOCKS:
                # All blocks, not only the oldest, because a single `clear` is atomic among threads.
                self._blocks.clear()
            self._blocks[key] = block
        sources, counts, earlier = block
        source = int(sources[place])
        before = earlier[source] if self._goes_on else epoch * self.each[source]
        return source, before + int(counts[place])

    def _made(self, epoch: int, number: int) -> Block:
        start = number * BLOCK
        stop = min(start + BLOCK, self._size)
        earlier = self._shares.counts(epoch * self._size)
        before, until = (self._of_epoch(epoch, each, earlier) for each in (start, stop))
        count = until - before
        order = Permutation(stop - start, stream_key("mix", self._seed, number)).take(
            np.arange(stop - start)
        )
        which = np.repeat(np.arange(len(count)), count)[order]
        # Places of each source in the block, ascending, one source after the other. Each source's
        # items fill its places in order.
        places = which.argsort(kind="stable")
        counts = np.empty(stop - start, np.int64)
        counts[places] = np.arange(stop - start) + np.repeat(
            before - (count.cumsum() - count), count
        )
        return which, counts, earlier

    def _of_epoch(self, epoch: int, position: int, earlier: list[int]) -> npt.NDArray[np.int64]:
        """Return the number of items of each source before a position in its epoch.

        The numbers fit 64 bits, because they do not include the earlier epochs.
        """
        counts = self._shares.counts(epoch * self._size + position)
        of_epoch = [count - first for count, first in zip(counts, earlier, strict=True)]
        return np.array(of_epoch, np.int64)
