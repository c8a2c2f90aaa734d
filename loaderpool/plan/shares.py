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
known without adding up from the start. Tables keep the blocks that were made, and most mixes need
the same blocks in each epoch.

Each epoch continues in each source where the epoch before stopped, so every record is read in time.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.order import kept
from loaderpool.plan.permutation import MAX_SIZE, orders_by_hash, stream_key
from loaderpool.system.hashes import shake_256

BLOCK = 256
"""Number of items whose order is drawn together.

Smaller: the order is less random, down to strict alternation of two sources. Larger: an item that
is read out of order takes longer than the current 0.1 ms, because its whole block is made.
"""

_WINDOW = BLOCK << 16
"""Number of consecutive items in a table, of 4 bytes each (8 in an epoch of 2**31 items or more).

Smaller: a shuffled pass over more items makes blocks many times, which takes as long as 20 rows.
Larger: a process may use more than the current two tables of 64 MiB.
"""

_TOGETHER = 64
"""Number of blocks that are made by the same calls of NumPy.

Smaller: more calls. Larger: temporary arrays take more memory.
"""

_OFFSET_BITS = 32
"""Number of bits of an offset.

Smaller: expected counts are off by more than a 2**32th of an item. Larger: divisions have longer
numbers.
"""

_Integers = npt.NDArray[np.int64]
_Tables = dict[tuple[int, int], npt.NDArray[Any]]  # for each epoch and window


class _Epoch(NamedTuple):
    """Items of an epoch, numbered consecutively, one source after the other."""

    ends: list[int]  # number after the last item of each source
    offsets: list[int]  # number of each source's first item, minus its items in epochs before
    turns: list[int]  # number of times that each source was read to its end before
    shifts: list[int]  # index of each source's first item in the source, minus the item's number
    are_records: bool  # True if the numbers are also those of the records


def _filled(
    table: npt.NDArray[Any], places: _Integers, make: Callable[[_Integers], _Integers]
) -> _Integers:
    """Return the numbers at places of a table, and make their blocks if they are missing.

    Args:
        table: Each number, plus 1; 0 if its block was not made yet. All processes store the same
            numbers, each at once, so none waits for another.
        places: Places in the table.
        make: Returns the numbers of ascending blocks.
    """
    found = table[places]
    if not found.all():
        missing = np.unique(places[found == 0] // BLOCK)
        for part in np.split(missing, range(_TOGETHER, len(missing), _TOGETHER)):
            table.reshape(-1, BLOCK)[part] = make(part) + 1
        found = table[places]
    numbers: _Integers = np.subtract(found, 1, dtype=np.int64)
    return numbers


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
        self._goes_on = goes_on
        self._inner = {at: each for at, each in enumerate(sources) if isinstance(each, MixOrder)}
        self._sizes = [each.size if isinstance(each, MixOrder) else each for each in sources]
        counts = [each.count if isinstance(each, MixOrder) else each for each in sources]
        self._starts = [*itertools.accumulate(counts, initial=0)]
        self.count: int = self._starts[-1]
        if self.count > MAX_SIZE:
            raise ArgumentError("sources have more than 2**62 items together")
        self._epochs: dict[int, _Epoch] = {}
        # Numbers of the items at the indices of an epoch, as `_filled` reads them.
        self._tables: _Tables = {}
        # The same for each window: the keyed orders of its blocks, if each epoch has other numbers.
        self._order_tables: _Tables = {}
        # Forks of this process share these tables, so one of the workers makes each block.
        self._table(self._tables, 0, 0)
        if goes_on:
            self._table(self._order_tables, 0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixOrder, self._arguments

    def records(self, epoch: int, indices: _Integers) -> _Integers:
        """Return the records at these indices of an epoch, from 0 to size - 1."""
        of, numbers = self._epoch(epoch), self._numbers(epoch, indices)
        if of.are_records:
            return numbers
        sources = np.array(of.ends).searchsorted(numbers, side="right")
        numbers += np.array(of.shifts)[sources]
        turns, records = np.divmod(numbers, np.array(self._sizes)[sources])
        for source, inner in self._inner.items():
            is_inner = sources == source
            for turn in {*turns[is_inner].tolist()}:
                taken = is_inner & (turns == turn)
                records[taken] = inner.records(of.turns[source] + turn, records[taken])
        records += np.array(self._starts)[sources]
        return records

    def record(self, epoch: int, index: int) -> int:
        """Return the record at an index of an epoch."""
        source, turn, place = self._found(epoch, index)
        if source in self._inner:
            place = self._inner[source].record(turn, place)
        return self._starts[source] + place

    def origin(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the number of the source at an index of an epoch, and the index in that source."""
        source, _, place = self._found(epoch, index)
        return source, place

    def _found(self, epoch: int, index: int) -> tuple[int, int, int]:
        """Return a source, how often it was read to its end before, and an index in it."""
        window, place = divmod(index, _WINDOW)
        table = self._table(self._tables, epoch * self._goes_on, window)
        of, number = self._epoch(epoch), table.item(place) - 1
        if number < 0:
            number = self._of_window(epoch, window, np.array([place])).item()
        source = bisect.bisect_right(of.ends, number)
        turn, place = divmod(number + of.shifts[source], self._sizes[source])
        return source, of.turns[source] + turn, place

    def _numbers(self, epoch: int, indices: _Integers) -> _Integers:
        """Return the numbers of the items at these indices of an epoch."""
        if self.size <= _WINDOW:
            return self._of_window(epoch, 0, indices)
        numbers, windows = np.empty_like(indices), indices // _WINDOW
        for window in {*windows.tolist()}:
            are_here = windows == window
            places = indices[are_here] - window * _WINDOW
            numbers[are_here] = self._of_window(epoch, window, places)
        return numbers

    def _of_window(self, epoch: int, window: int, places: _Integers) -> _Integers:
        """Return the numbers of the items at these places of a table."""
        table = self._table(self._tables, epoch * self._goes_on, window)
        first = window * (_WINDOW // BLOCK)
        return _filled(table, places, lambda blocks: self._made(epoch, first + blocks))

    def _orders(self, blocks: _Integers) -> _Integers:
        """Return the keyed orders of ascending blocks, all of one window."""
        if not self._goes_on:
            return self._hashed(blocks)
        first = int(blocks[0]) // (_WINDOW // BLOCK) * (_WINDOW // BLOCK)
        places = (blocks - first)[:, None] * BLOCK + np.arange(BLOCK)
        table = self._table(self._order_tables, 0, first // (_WINDOW // BLOCK))
        return _filled(table, places, lambda missing: self._hashed(first + missing))

    def _hashed(self, blocks: _Integers) -> _Integers:
        orders = orders_by_hash(
            BLOCK, [stream_key("mix", self._seed, each) for each in blocks.tolist()]
        )
        last, width = orders[-1], self.size - blocks[-1] * BLOCK
        orders[-1] = np.concatenate((last[last < width], last[last >= width]))
        return orders

    def _table(self, tables: _Tables, epoch: int, window: int) -> npt.NDArray[Any]:
        def make() -> npt.NDArray[Any]:
            items = min(_WINDOW, self.size - window * _WINDOW)
            dtype = np.dtype(np.int32 if self.size < 1 << 31 else np.int64)
            # Its pages take no memory until they are written.
            memory = mmap.mmap(-1, max(1, -(-items // BLOCK)) * BLOCK * dtype.itemsize)
            return np.frombuffer(memory, dtype)

        return kept(tables, (epoch, window), make)

    def _made(self, epoch: int, blocks: _Integers) -> _Integers:
        """Return the numbers of the items in ascending blocks: int64[blocks, BLOCK].

        The last block of an epoch may be shorter. It ends with other numbers.
        """
        starts = (blocks * BLOCK).tolist()
        stops = [min(start + BLOCK, self.size) for start in starts]
        firsts, ends = (
            np.array([self._next(epoch, each) for each in edges]) for edges in (starts, stops)
        )
        counts = ends - firsts
        counts[:, -1] += BLOCK - counts.sum(axis=1)
        # Items of a block, one source after the other.
        sources = np.arange(counts.shape[1], dtype=np.min_scalar_type(counts.shape[1]))
        in_order = np.tile(sources, len(blocks)).repeat(counts.ravel()).reshape(-1, BLOCK)
        firsts += counts - counts.cumsum(axis=1)
        numbers = firsts.ravel().repeat(counts.ravel()).reshape(-1, BLOCK) + np.arange(BLOCK)
        # Each source's items fill its places in their order.
        at_places = np.take_along_axis(in_order, self._orders(blocks), 1)
        made = np.empty_like(numbers)
        np.put_along_axis(made, at_places.argsort(axis=1, kind="stable"), numbers, 1)
        return made

    def _next(self, epoch: int, index: int) -> list[int]:
        """Return the number of each source's next item before an index of an epoch."""
        epoch *= self._goes_on
        counts = self._shares.counts(epoch * self.size + index)
        return [*map(operator.add, counts, self._epoch(epoch).offsets)]

    def _epoch(self, epoch: int) -> _Epoch:
        return kept(self._epochs, epoch, lambda: self._counted(epoch))

    def _counted(self, epoch: int) -> _Epoch:
        if self._goes_on:
            before, until = (self._shares.counts(each * self.size) for each in (epoch, epoch + 1))
            counts = [*map(operator.sub, until, before)]
        else:
            counts = self._shares.counts(self.size)
            before = [epoch * count for count in counts]
        firsts = [*itertools.accumulate(counts, initial=0)]
        turns, rests = zip(*map(divmod, before, self._sizes), strict=True)
        are_whole = not self._inner and not any(rests) and counts == self._sizes
        offsets, shifts = (
            [*map(operator.sub, *pair)] for pair in ((firsts, before), (rests, firsts))
        )
        return _Epoch(firsts[1:], offsets, [*turns], shifts, are_whole)
