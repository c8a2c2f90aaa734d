"""`PackedPlan`: batches of rows in each of which several items are packed.

A drawn order says which positions make a row. Batches are made of rows as `batches.Plan` makes them
of positions. So all batches have the same number of rows, except the last one of an epoch:

```
    position   0  1  2  3  4  5  6  7  8  9  10      stops = 3 4 8 10 11, two rows a batch
               ├── 0 ───┼ 1┼─── 2 ─────┼─ 3 ─┼4 ┤    rows
    batch      └──── 0 ────┴──────── 1 ──────┴2 ┘
```

To all other modules, a batch is made of its items: `rows` and `positions` are theirs. Only
`worker.packing` puts several of them into a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import NO_STOPS, DrawnBatches
from loaderpool.plan.order import Order


@dataclass(frozen=True, eq=False)
class PackedPlan(DrawnBatches):
    """Plan of a drawn order that says which positions make a row. Its start is a number of rows."""

    length: int = field(kw_only=True)
    """Length of a row."""
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: NO_STOPS, kw_only=True)
    """Length of the item at each position: int64[positions]."""

    @property
    def packed_length(self) -> int:
        return self.length

    @cached_property
    def most_rows(self) -> int:
        """Most items of a batch; until an epoch was drawn, its rows."""
        return int(self._counts.max()) if len(self._counts) else self._full_rows

    @cached_property
    def batches_per_epoch(self) -> int:
        return self._of_rows.batches_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        return int(self._counts.sum()) if len(self.stops) else self._of_rows.rows_per_epoch

    @property
    def repeated_rows(self) -> int:
        return self._of_rows.repeated_rows

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.stops, self.lengths

    def drawn(self, table: npt.NDArray[Any], size: int, *batches: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of an epoch with these rows, and lengths of the items in their order."""
        plan = super().drawn(table, size, *batches)
        return replace(plan, lengths=batches[1])  # type: ignore[call-arg]

    @property
    def rows_left(self) -> int:
        return self._of_rows.rows_left

    def start_after(self, epoch: int, batches: int) -> Any:
        """Return the rows that all shards together have taken."""
        return self._of_rows.start_after(epoch, batches)

    def rows(self, epoch: int, batch: int) -> int:
        return sum(map(len, self.row_lengths(epoch, batch)))

    def batch_rows(self, epoch: int, batch: int, count: int) -> tuple[int, ...]:
        return Plan.batch_rows(self, epoch, batch, count)

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        return Plan.positions(self, epoch, batch, count)

    def row_lengths(self, epoch: int, batch: int) -> list[list[int]]:
        """Return the lengths of the items in each row of a batch. Raises as `rows`."""
        return [self.lengths[begin:end].tolist() for begin, end in self._items_of(epoch, batch)]

    # ---- internals ----

    @cached_property
    def _of_rows(self) -> Plan:
        """Plan whose positions are the numbers of rows. Until an epoch was drawn, a row is an item."""
        return Plan(
            Order(len(self.stops) or self.order.size),
            self.batch_size,
            self.drop_remainder,
            self.num_shards,
            self.shard_index,
            start=self.start,
        )

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """First position of each row, then the order's size."""
        return np.append(0, self.stops)

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Number of items of each batch of this shard; empty until an epoch was drawn."""
        if not (len(self.stops) and self.batches_per_epoch):
            return NO_STOPS
        numbers = self._of_rows.positions(0, 0, self.batches_per_epoch)
        firsts = np.arange(self.batches_per_epoch) * self._full_rows
        counts: npt.NDArray[np.int64] = np.add.reduceat(np.diff(self._ends)[numbers], firsts)
        return counts

    def _items_of(self, epoch: int, batch: int) -> list[tuple[int, int]]:
        """Return the first position and the one after the last, for each row of a batch."""
        numbers = self._of_rows.positions(epoch, batch)
        ends = self._ends
        return [*zip(ends[numbers].tolist(), ends[numbers + 1].tolist(), strict=True)]

    def _rows_of(self, epoch: int, batch: int) -> npt.NDArray[np.int64]:
        ranges = [np.arange(*bounds, dtype=np.int64) for bounds in self._items_of(epoch, batch)]
        return np.concatenate(ranges)

    def _located(self, epoch: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows  # `_rows_of` has left out rows already
