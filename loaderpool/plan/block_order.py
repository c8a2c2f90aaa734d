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
on seed and epoch. A process keeps the order of the blocks: 16 bytes per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import kept
from loaderpool.plan.order import Order
from loaderpool.plan.permutation import Permutation, stream_key

_Integers = npt.NDArray[np.int64]
# Number of windows whose permutations are kept. Smaller: batches of two windows, read in turn by
# two passes, make the permutations again.
_KEPT_WINDOWS = 8


class _Epoch(NamedTuple):
    """Shuffled blocks of one epoch."""

    starts: _Integers  # first index of each block
    ends: _Integers  # position after the last row of each block


@dataclass(frozen=True, eq=False)
class BlockOrder(Order):
    """Shuffle of blocks, and of the rows within each window of blocks."""

    starts: _Integers = field(kw_only=True)
    """First index of each block: int64[blocks], ascending from 0. A block ends at the next one."""
    window: int = field(kw_only=True)
    """Number of blocks whose rows are shuffled together, at least 1."""

    def indices(self, epoch: int, positions: _Integers) -> list[int]:
        """Return the source indices at positions of an epoch."""
        table = self._epoch(epoch)
        ends, window = table.ends, self.window
        windows = ends.searchsorted(positions, side="right") // window
        places = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            rows = windows == number
            first, shuffle = self._window(epoch, number)
            places[rows] = first + shuffle.take(positions[rows] - first)
        blocks = ends.searchsorted(places, side="right")
        before = np.where(blocks > 0, ends[blocks - 1], 0)
        indices: list[int] = (table.starts[blocks] + places - before).tolist()
        return indices

    def _window(self, epoch: int, number: int) -> tuple[int, Permutation]:
        """Return the first position of a window, and the shuffle of its rows."""
        ends = self._epoch(epoch).ends
        before = number * self.window
        first = int(ends[before - 1]) if before else 0
        rows = int(ends[min(before + self.window, len(ends)) - 1]) - first
        key = stream_key(f"window-{number}", self.seed, epoch)
        return first, kept(
            self._shuffles, (epoch, number), lambda: Permutation(rows, key), _KEPT_WINDOWS
        )

    @cached_property
    def _shuffles(self) -> dict[tuple[int, int], Permutation]:
        return {}

    @cached_property
    def _epochs(self) -> dict[int, _Epoch]:
        return {}

    def _epoch(self, epoch: int) -> _Epoch:
        return kept(self._epochs, epoch, lambda: self._shuffled(epoch))

    def _shuffled(self, epoch: int) -> _Epoch:
        blocks = len(self.starts)
        order = Permutation(blocks, stream_key("blocks", self.seed, epoch)).take(np.arange(blocks))
        rows = np.diff(self.starts, append=self.size)
        return _Epoch(self.starts[order], rows[order].cumsum())
