"""Which rows make up which batch of which shard, as pure functions of the plan.

A *position* is a place in the global order of an epoch, before any shuffling, 0 to size - 1. With B = `batch_size` and
S = `num_shards`, the global batch k is positions k·B·S to (k+1)·B·S, and shard r has rows r·B to (r+1)·B of it:

```
    position   0      B      2B     3B     4B     5B     6B   size      B rows each, S = 3, and a tail
               ├──────┼──────┼──────┼──────┼──────┼──────┼──┬──┬──┤
    shard      │  0   │  1   │  2   │  0   │  1   │  2   │0 │1 │2 │
    batch      └───────── 0 ────────┴───────── 1 ────────┴─── 2 ──┘
```

The tail is dropped with `drop_remainder`. Else it is split evenly, the first shards having one row more, and where it
has fewer rows than shards its rows are dealt again, so that every shard has the same number of batches: in
data-parallel training a shard that has one batch less leaves the others waiting for it.

The rest of an epoch, for a training that goes on where another one stopped, is a plan of its own (`Plan.after`): the
same positions from some first one on, perhaps with another number of shards. Each row keeps its position, and so its
item and its random stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, brief
from loaderpool.plan.base import BasePlan, Start, share_of


@dataclass(frozen=True)
class Plan(BasePlan):
    """A plan of batches of consecutive positions, all of the same size but the last.

    Nothing of it is stored, so a size of 10**12 costs nothing, and all epochs have the same positions in each batch.

    Raises:
        ArgumentError: a field is out of its range.
    """

    rows_vary: ClassVar[bool] = False

    start: int = 0
    """The first position: those before it were taken earlier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.start <= self.size:
            raise ArgumentError(f"start must be 0 to size={self.size}, got {self.start}")

    @cached_property
    def batches_per_epoch(self) -> int:
        return self._global_batches + (self._tail_rows > 0)

    @cached_property
    def full_batches(self) -> int:
        return self._global_batches + (self._tail[1] == self._full_rows)

    @property
    def most_rows(self) -> int:
        return self.rows(0, 0) if self.batches_per_epoch else self._full_rows

    @property
    def last_rows(self) -> int:
        return self.rows(0, self.batches_per_epoch - 1) if self.batches_per_epoch else self._full_rows

    @property
    def rows_per_epoch(self) -> int:
        return self._global_batches * self._full_rows + self._tail[1]

    @property
    def rows_left_out(self) -> int:
        return (self.size - self.start) % (self._full_rows * self.num_shards) if self.drop_remainder else 0

    @cached_property
    def repeated_rows(self) -> int:
        return max(0, self.num_shards - self._tail_rows) if self._tail_rows else 0

    @property
    def begins_at(self) -> int:
        """The first position."""
        return self.start

    def after(self, start: Start) -> Plan:
        """Return the rest of an epoch from this position on."""
        return self if start == self.start else _after(self, start)

    def closed(self, size: int) -> Plan:
        """Return the same plan, now that the stream has ended and had this many items."""
        return replace(self, size=size, is_open=False)

    def start_after(self, epoch: int, batches: int) -> int:
        """Return the first position that no shard has in its first so many batches; the size after the last one."""
        if batches >= self.batches_per_epoch:
            return self.size
        return self.start + batches * self._full_rows * self.num_shards

    def read_start(self, value: Any) -> int:
        """The start that a saved value says: behind a multiple of a batch's rows, for any shards, or at the end."""
        if type(value) is not int or not 0 <= value <= self.size:
            raise ValueError(f"position is {brief(value)}, of {self.size} items")
        if value % self._full_rows and value != self.size:
            raise ValueError(f"position is {value}, where no batch of {self._full_rows} rows ends")
        return value

    def rows(self, epoch: int, batch: int) -> int:
        start, stop = self._span(batch)
        return stop - start

    def positions(
        self, epoch: int, batch: int, row_start: int = 0, row_stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the positions of some rows of a batch; they are consecutive."""
        start, stop = self._span(batch)
        if row_stop is None:
            row_stop = stop - start
        if not 0 <= row_start <= row_stop <= stop - start:
            raise IndexError(f"rows {row_start} to {row_stop} are not in batch {batch} of {stop - start} rows")
        return np.arange(start + row_start, start + row_stop, dtype=np.int64)

    def positions_of(self, epoch: int, batch: int, count: int) -> npt.NDArray[np.int64]:
        stop = batch + count
        if not 0 <= batch <= stop <= self.batches_per_epoch:
            raise IndexError(f"batches {batch} to {stop} are not in range({self.batches_per_epoch})")
        if batch == stop:
            return np.empty(0, np.int64)
        first, last = self._span(batch)[0], self._span(stop - 1)[1]
        if self.num_shards == 1 or count == 1:
            return np.arange(first, last, dtype=np.int64)
        full = min(stop, self._global_batches) - batch
        rows, step = self._full_rows, self._full_rows * self.num_shards
        starts = np.arange(first, first + full * step, step, dtype=np.int64) if full > 0 else np.empty(0, np.int64)
        positions = (starts[:, None] + np.arange(rows, dtype=np.int64)).ravel()
        return positions if full == count else np.concatenate((positions, self.positions(epoch, stop - 1)))

    def place(self, epoch: int, position: int) -> tuple[int, int] | None:
        batch = (position - self.start) // (self._full_rows * self.num_shards)
        if not 0 <= batch < self.batches_per_epoch:
            return None
        start, stop = self._span(batch)
        return (batch, position - start) if start <= position < stop else None

    @cached_property
    def _full_rows(self) -> int:
        return 1 if self.batch_size is None else self.batch_size

    @cached_property
    def _global_batches(self) -> int:
        """Batches that are full on every shard."""
        return (self.size - self.start) // (self._full_rows * self.num_shards)

    @cached_property
    def _tail_rows(self) -> int:
        """Rows after those batches, over all shards: less than `batch_size * num_shards`; none of a mere bound."""
        has_none = self.drop_remainder or self.is_open
        return 0 if has_none else (self.size - self.start) % (self._full_rows * self.num_shards)

    @cached_property
    def _tail(self) -> tuple[int, int]:
        """This shard's part of the tail: its first position and its rows."""
        start, rows = share_of(self._tail_rows, self.num_shards, self.shard_index)
        return self.size - self._tail_rows + start, rows

    def _span(self, batch: int) -> tuple[int, int]:
        """Return the first position of a batch and the one after its last; its positions are always consecutive."""
        if 0 <= batch < self._global_batches:
            start = self.start + (batch * self.num_shards + self.shard_index) * self._full_rows
            return start, start + self._full_rows
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")
        start, rows = self._tail
        return start, start + rows


@lru_cache(maxsize=8)
def _after(plan: Plan, start: Start) -> Plan:
    if not isinstance(start, int):
        raise ArgumentError(f"start must be a position, got {brief(start)}")
    return replace(plan, start=start)
