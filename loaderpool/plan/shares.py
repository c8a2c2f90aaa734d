"""How many of the first n items fall to each source, exactly by weight, and in which order a mix takes them.

A tree halves the sources again and again, and at each fork n items are dealt to the left and the right side:

```
    left(n)  = floor(n · weight of the left / weight of both + offset)        0 <= offset < 1, hashed from the seed
    right(n) = n - left(n)
```

Neither side ever falls, or grows by more than n does, so this is true of the counts of all sources too, and they
always sum to n. Where n is a multiple of the sum of the weights, every count is exact: what is added is less than one,
and floor takes it away. As the offset is uniform, the expected count is n · weight at every n; with a fixed one a rare
source would come first at the same place under every seed. Weights are integers, so that no rounding of floats makes
two machines differ.

Items are taken in blocks of `BLOCK`. The counts at its two ends say what a block has of each source, and a keyed order
says where. So nothing has to be added up from the start to know the item at any position.

Each epoch goes on in each source where the epoch before stopped, so every record is read in time.
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

BLOCK = 256
"""Items whose order is drawn together. Smaller: the order is less random, down to strict alternation of two sources.
Larger: an item read out of order, for which a whole block is made, takes longer than the 0.1 ms it takes now."""

_KEPT_BLOCKS = 512
"""Blocks that are kept, 4 KiB each. Fewer: a shuffled pass over some ten thousand items makes each of them many times.
More: more than the 2 MiB that each worker has of them now."""

_OFFSET_BITS = 32
"""Of an offset. Fewer: expected counts are off by more than a 2**32th of an item. More: longer numbers to divide."""

# The source of each item, how many of that source's items are before it in this epoch, and how many
# items of each source are in earlier epochs.
Block = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]


class Shares:
    """Counts of the first n items for each source; a pure function of weights and seed.

    Weights are whole numbers from 0 on, not all 0, as large as they like.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

        self._weights = list(weights)
        count = len(self._weights)
        key = stream_key("mix-offsets", seed, count).to_bytes(16, "little")
        stream = hashlib.shake_256(b"loaderpool shares" + key).digest(_OFFSET_BITS // 8 * count)
        self._offsets = struct.unpack(f"<{count}I", stream)
        self._ends = list(itertools.accumulate(self._weights, initial=0))

    def counts(self, stop: int) -> list[int]:
        """Return how many of the first `stop` items fall to each source; they sum to `stop`."""
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
        """Return the most items for which no source is asked for more than its size."""
        return _last(
            lambda stop: all(
                count <= size for count, size in zip(self.counts(stop), sizes, strict=True)
            )
        )

    def shortest(self, sizes: Sequence[int]) -> int:
        """Return the fewest items for which every source of a weight above 0 has been asked for as many as its size."""
        wanted = [size if weight else 0 for size, weight in zip(sizes, self._weights, strict=True)]
        return 1 + _last(
            lambda stop: any(
                count < size for count, size in zip(self.counts(stop), wanted, strict=True)
            )
        )


def _last(holds: Callable[[int], bool]) -> int:
    """Return the last number for which it holds, where it holds up to some number and for none after it.

    Raises:
        ArgumentError: it holds for all below `MAX_SIZE`.
    """
    first_not = bisect.bisect_left(range(MAX_SIZE), True, key=lambda number: not holds(number))
    if first_not == MAX_SIZE:
        raise ArgumentError("weights differ so much that the mix would have more than 2**62 items")
    return max(0, first_not - 1)


class MixOrder:
    """The source of each of `size` items of an epoch, and which of that source's items it is.

    A source's items come in their order: its n-th one before its n+1-th. The last block is shorter, so that the counts
    are right at the end, too. Threads may share it.

    Args:
        shares: the counts.
        seed: of the order.
        size: items of each epoch.
        goes_on: the counts continue from epoch to epoch, so an epoch may have one more item of a
            source than another. A source too rare for each epoch is then in some. Otherwise all
            epochs have the same number of items of each source, at the same places.
    """

    def __init__(self, shares: Shares, seed: int, size: int, goes_on: bool) -> None:
        self._shares = shares
        self._seed = seed
        self._size = size
        self._goes_on = goes_on
        self.each = shares.counts(size)  # items of each source in epoch 0
        self._blocks: dict[tuple[int, int], Block] = {}

    def origin(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the source at a position, 0 to size - 1, and how many of its items come before."""
        number, place = divmod(position, BLOCK)
        key = (epoch if self._goes_on else 0), number
        block = self._blocks.get(key)
        if block is None:
            block = self._made(*key)
            if len(self._blocks) >= _KEPT_BLOCKS:
                self._blocks.clear()  # rather than the oldest: one call, which no other thread can come between
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
        # A source's places in the block, ascending, one source after the other: they take its items as they come.
        places = which.argsort(kind="stable")
        counts = np.empty(stop - start, np.int64)
        counts[places] = np.arange(stop - start) + np.repeat(
            before - (count.cumsum() - count), count
        )
        return which, counts, earlier

    def _of_epoch(self, epoch: int, position: int, earlier: list[int]) -> npt.NDArray[np.int64]:
        """Return the items of each source before a position in its epoch, which fit 64 bits."""
        counts = self._shares.counts(epoch * self._size + position)
        of_epoch = [count - first for count, first in zip(counts, earlier, strict=True)]
        return np.array(of_epoch, np.int64)
