"""`BlockOrder`: a shuffle that reads items near each other in the source at about the same time.

Sources such as HDF5, zarr and Parquet store rows in blocks (chunks, row groups), and reading one
row decodes its whole block. So the blocks are shuffled, and then all rows of a window of `window`
consecutive blocks:

```
    source       ├─ 0 ─┼─ 1 ─┼─ 2 ─┼─ 3 ─┼─ 4 ─┼5┤        six blocks of 8 rows, the last of 3
    blocks       ├─ 3 ─┼─ 0 ─┼5┼─ 4 ─┼─ 2 ─┼─ 1 ─┤        shuffled
    windows      └─── 19 rows ─┴───── 24 rows ───┘        three blocks each, their rows shuffled
```

A process that keeps the latest `window` blocks decodes each block once. Both shuffles depend only
on seed and epoch. A process keeps the order of the blocks, 16 bytes per block, and the orders of a
few small windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.plan.order import Order, kept
from loaderpool.plan.permutation import TABLE_SIZE, Permutation, random_bits, stream_key

_Integers = npt.NDArray[np.int64]
# Number of windows whose permutations are kept. Smaller: batches of two windows, read in turn by
# two passes, make the permutations again.
_KEPT_WINDOWS = 8
_PLACE = np.uint64(TABLE_SIZE * 2 - 1)  # mask for the low bits, which have a row's place


class _Epoch(NamedTuple):
    """Shuffled blocks of one epoch."""

    ends: _Integers  # position after the last row of each block
    rows: _Integers  # number of rows of each block
    shifts: _Integers  # source index of each block's first row, minus its position
    windows: _Integers  # position after the last row of each window


class _Window(NamedTuple):
    """Shuffled rows of one window of blocks."""

    first: int  # first position
    indices: _Integers | None  # source index of each position, if the window is small
    shuffle: Permutation | None  # shuffle of the rows, if the window is large


@dataclass(frozen=True, eq=False)
class BlockOrder(Order):
    """Shuffle of blocks, and of the rows within each window of blocks."""

    starts: _Integers = field(kw_only=True)
    """First index of each block: int64[blocks], ascending from 0. A block ends at the next one."""
    window: int = field(kw_only=True)
    """Number of blocks whose rows are shuffled together, at least 1."""

    @cached_property
    def most_rows(self) -> int:
        """Rows of the largest block."""
        return int(np.diff(self.starts, append=self.size).max(initial=1))

    def take(self, epoch: int, positions: _Integers) -> _Integers:
        """Return the source indices at positions of an epoch."""
        found = [*self._parts(epoch, positions)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _parts(self, epoch: int, positions: _Integers) -> Iterator[_Integers]:
        """Yield source indices for consecutive parts of `positions`, each within one window."""
        windows, start, size = self._epoch(epoch).windows, 0, len(positions)
        numbers = windows.searchsorted(positions, side="right")
        changes = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
        for stop in (*changes, size):
            if start < stop:
                yield self._of_window(epoch, int(numbers[start]), positions[start:stop])
            start = stop
        if not size:
            yield positions

    def _of_window(self, epoch: int, number: int, positions: _Integers) -> _Integers:
        first, indices, shuffle = kept(
            self._windows, (epoch, number), lambda: self._window(epoch, number), _KEPT_WINDOWS
        )
        if indices is not None:
            return indices[positions - first]
        assert shuffle is not None
        return self._in_source(epoch, number, shuffle.take(positions - first) + first)

    def _in_source(self, epoch: int, number: int, places: _Integers) -> _Integers:
        """Return the source indices of places in a window whose rows are not shuffled."""
        table, blocks = self._epoch(epoch), self._blocks(number)
        found = table.ends[blocks].searchsorted(places, side="right")
        return table.shifts[blocks][found] + places

    def _blocks(self, number: int) -> slice:
        """Return the places of a window's blocks among the shuffled blocks."""
        return slice(number * self.window, (number + 1) * self.window)

    def _window(self, epoch: int, number: int) -> _Window:
        windows = self._epoch(epoch).windows
        first = int(windows[number - 1]) if number else 0
        rows = int(windows[number]) - first
        key = stream_key(f"window-{number}", self.seed, epoch)
        if rows > TABLE_SIZE:
            return _Window(first, None, Permutation(rows, key))
        places = np.arange(rows)
        # The low bits make all numbers different. So every sorting algorithm gives the same order.
        bits = random_bits(key, places) & ~_PLACE | places.astype(np.uint64)
        bits.sort()
        # The source indices of all rows are found without a search, and then moved.
        table, blocks = self._epoch(epoch), self._blocks(number)
        in_order = table.shifts[blocks].repeat(table.rows[blocks]) + (places + first)
        return _Window(first, in_order[(bits & _PLACE).view(np.int64)], None)

    def rank(self, epoch: int, block: int) -> int:
        """Return the place of a block among the shuffled blocks of an epoch."""

        def make() -> _Integers:
            ends, _, shifts, _ = self._epoch(epoch)
            firsts = np.append(0, ends[:-1])  # first position of each block
            ranks: _Integers = (shifts + firsts).argsort()
            return ranks

        return int(kept(self._ranks, epoch, make)[block])

    @cached_property
    def _ranks(self) -> dict[int, _Integers]:
        return {}

    @cached_property
    def _windows(self) -> dict[tuple[int, int], _Window]:
        return {}

    @cached_property
    def _epochs(self) -> dict[int, _Epoch]:
        return {}

    def _epoch(self, epoch: int) -> _Epoch:
        return kept(self._epochs, epoch, lambda: self._shuffled(epoch))

    def _shuffled(self, epoch: int) -> _Epoch:
        blocks = len(self.starts)
        order = Permutation(blocks, stream_key("blocks", self.seed, epoch)).take(np.arange(blocks))
        rows = np.diff(self.starts, append=self.size)[order]
        ends = rows.cumsum()
        windows = np.append(ends[self.window - 1 :: self.window], ends[-1:])
        return _Epoch(ends, rows, self.starts[order] - ends + rows, windows)
