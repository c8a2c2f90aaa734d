"""`PackedPlan`: plan of batches whose rows each contain several items.

The order of an epoch determines which positions form a row. Rows are grouped into batches as
`batches.Plan` groups positions. So all batches have the same number of rows, except the last one of
an epoch:

```
    position   0  1  2  3  4  5  6  7  8  9  10      stops = 3 4 8 10 11, two rows a batch
               ├── 0 ───┼ 1┼─── 2 ─────┼─ 3 ─┼4 ┤    rows
    batch      └──── 0 ────┴──────── 1 ──────┴2 ┘
```

For other modules, each item counts as a row: `rows` and `positions` count items. `worker.packing`
puts several items into a row of the array, and `row_plan` counts these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan, joined_ranges
from loaderpool.plan.drawn import NO_STOPS, DrawnBatches
from loaderpool.plan.order import Order

if TYPE_CHECKING:
    from loaderpool.plan.taken import Start


@dataclass(frozen=True, eq=False)
class PackedPlan(DrawnBatches):
    """Plan of a drawn order that determines which positions form a row. Its start counts rows."""

    length: int = field(kw_only=True)
    """Length of a row."""
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: NO_STOPS, kw_only=True)
    """Length of the item at each position: int64[positions]."""

    @property
    def packed_length(self) -> int:
        return self.length

    @cached_property
    def row_plan(self) -> Plan:
        """Plan that groups rows, by number, into batches.

        Until the order of an epoch is drawn, it assumes one item per row.
        """
        return Plan(
            Order(len(self.stops) or self.order.size),
            self.batch_size,
            self.drop_remainder,
            self.num_shards,
            self.shard_index,
            start=self.start,
        )

    @cached_property
    def most_rows(self) -> int:
        """Largest number of items in a batch. The batch size, until an epoch's order is drawn."""
        return int(self._counts.max()) if len(self._counts) else self._full_rows

    @cached_property
    def batches_per_epoch(self) -> int:
        return self.row_plan.batches_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        return int(self._counts.sum()) if len(self.stops) else self.row_plan.rows_per_epoch

    @property
    def repeated_rows(self) -> int:
        return self.row_plan.repeated_rows

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.stops, self.lengths

    def drawn(self, table: npt.NDArray[Any], size: int, *batches: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of an epoch. `batches` are the ends of rows, and the lengths of items."""
        plan = super().drawn(table, size, *batches)
        return replace(plan, lengths=batches[1])  # type: ignore[call-arg]

    @property
    def rows_left(self) -> int:
        return self.row_plan.rows_left

    def start_after(self, epoch: int, batches: int) -> Start:
        """Return the start after `batches` batches of each shard, in rows of all shards."""
        return self.row_plan.start_after(epoch, batches)

    def rows(self, epoch: int, batch: int) -> int:
        return self.batch_rows(epoch, batch, 1)[0]

    def batch_rows(self, epoch: int, batch: int, count: int) -> tuple[int, ...]:
        self._check_batches(batch, count)
        return tuple(self._counts[batch : batch + count].tolist())

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        return joined_ranges(*self._items_of(epoch, batch, count))

    def row_items(
        self, epoch: int, batch: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the length of each item of `count` consecutive batches, and the number of items in
        each of their rows. Raises like `rows`.
        """
        starts, stops = self._items_of(epoch, batch, count)
        return self.lengths[joined_ranges(starts, stops)], stops - starts

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Total length of the items in each batch of this shard."""
        return self._sums(np.add.reduceat(self.lengths, self._ends[:-1]))

    # ---- internals ----

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """First position of each row, and the size of the order after the last row."""
        return np.append(0, self.stops)

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Number of items in each batch of this shard; empty until the order is drawn."""
        if not (len(self.stops) and self.batches_per_epoch):
            return NO_STOPS
        return self._sums(np.diff(self._ends))

    def _sums(self, of_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sum over the rows of each batch of this shard."""
        numbers = self.row_plan.positions(0, 0, self.batches_per_epoch)
        firsts = np.arange(self.batches_per_epoch) * self._full_rows
        sums: npt.NDArray[np.int64] = np.add.reduceat(of_rows[numbers], firsts)
        return sums

    def _items_of(
        self, epoch: int, batch: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first position and the end of each row of `count` consecutive batches."""
        numbers = self.row_plan.positions(epoch, batch, count)
        return self._ends[numbers], self._ends[numbers + 1]
