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

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.keys import stream_key
from loaderpool.plan.permutation import MAX_SIZE, Permutation

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """The order of one shard in every epoch; nothing of it is stored, so a size of 10**12 costs nothing.

    Batches are formed here and never by a worker, hence they are the same for any number of workers.

    Raises:
        ArgumentError: a field is out of its range.
    """

    size: int
    """Items in the source, over all shards."""
    batch_size: int | None
    """Rows of a full batch of one shard; None: each item is an element by itself, planned as a batch of one row."""
    shuffle: bool = False
    """Whether each epoch has an order of its own."""
    seed: int = 0
    """Sets the orders of all epochs; any number from 0."""
    drop_remainder: bool = False
    """Whether the tail, too short for a full batch on every shard, is left out."""
    num_shards: int = 1
    """Processes that share the epoch among them."""
    shard_index: int = 0
    """This process's number among them, from 0."""
    start: int = 0
    """The first position: those before it were taken earlier."""
    lanes: int = 0
    """Generators whose batches take turns; 0: there are none. Their batches have any number of rows up to the full."""
    is_open: bool = False
    """Whether the size is only a bound: of a stream, whose end nobody knows before it comes."""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise ArgumentError(f"size must be 0 to 2**62, got {self.size}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, or None, got {self.batch_size}")
        if self.seed < 0:
            raise ArgumentError(f"seed must not be negative, got {self.seed}")
        if not 0 <= self.start <= self.size:
            raise ArgumentError(f"start must be 0 to size={self.size}, got {self.start}")
        if self.num_shards < 1:
            raise ArgumentError(f"num_shards must be at least 1, got {self.num_shards}")
        if not 0 <= self.shard_index < self.num_shards:
            raise ArgumentError(
                f"shard_index must be 0 to num_shards - 1, got {self.shard_index} with num_shards={self.num_shards}"
            )

    @cached_property
    def batches_per_epoch(self) -> int:
        """Batches of this shard in an epoch; the same for every shard."""
        return self._global_batches + (self._tail_rows > 0)

    @cached_property
    def full_batches(self) -> int:
        """How many batches, counted from the first, have exactly `batch_size` rows; at most one batch follows."""
        return self._global_batches + (self._tail[1] == self._full_rows)

    @cached_property
    def repeated_rows(self) -> int:
        """Rows that come a second time in an epoch, over all shards, so that no shard is without a last batch."""
        return max(0, self.num_shards - self._tail_rows) if self._tail_rows else 0

    def after(self, start: int) -> Plan:
        """The rest of an epoch from this position on.

        Raises:
            ArgumentError: there is no such position, nor is it the size.
        """
        return self if start == self.start else _after(self, start)

    def closed(self, size: int) -> Plan:
        """The same plan, now that the stream has ended and had this many items."""
        return replace(self, size=size, is_open=False)

    def position_after(self, batches: int) -> int:
        """The first position that no shard has in its first so many batches; the size after the last one."""
        if batches >= self.batches_per_epoch:
            return self.size
        return self.start + batches * self._full_rows * self.num_shards

    def rows(self, batch: int) -> int:
        """How many rows a batch of this shard has, at least 1.

        Raises:
            IndexError: the epoch has no such batch.
        """
        start, stop = self._span(batch)
        return stop - start

    def positions(self, batch: int, row_start: int = 0, row_stop: int | None = None) -> npt.NDArray[np.int64]:
        """The positions of a batch's rows, or of its rows `row_start` up to but without `row_stop`.

        Args:
            batch: which batch of this shard, from 0.
            row_start: first row, from 0.
            row_stop: the row after the last, at most `rows(batch)`; None: to the end of the batch.

        Returns:
            int64[row_stop - row_start], ascending.

        Raises:
            IndexError: the epoch has no such batch, or the batch no such rows.
        """
        start, stop = self._span(batch)
        if row_stop is None:
            row_stop = stop - start
        if not 0 <= row_start <= row_stop <= stop - start:
            raise IndexError(f"rows {row_start} to {row_stop} are not in batch {batch} of {stop - start} rows")
        return np.arange(start + row_start, start + row_stop, dtype=np.int64)

    def positions_of(self, batch: int, count: int) -> npt.NDArray[np.int64]:
        """The positions of `count` consecutive batches, one after the other: what a chunk holds.

        Args:
            batch: the first of them.
            count: how many, from 0.

        Returns:
            int64[rows of all these batches].

        Raises:
            IndexError: the epoch does not have all of these batches.
        """
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
        return positions if full == count else np.concatenate((positions, self.positions(stop - 1)))

    def indices(self, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
        """The source's indices at these positions in an epoch; without `shuffle` the positions themselves.

        Args:
            epoch: which epoch, from 0.
            positions: int64[n], each 0 to size - 1.

        Returns:
            n indices, as Python integers, since a source may be a list or a user's own class.

        Raises:
            IndexError: with `shuffle`, a position is not below the size.
        """
        if self.shuffle and positions.size:
            positions = _permutation(self.size, self.seed, epoch).take(positions)
        indices: list[int] = positions.tolist()
        return indices

    def position_of(self, epoch: int, index: int) -> int:
        """The position at which an epoch has the source's item `index`; the way back from `indices`.

        Args:
            epoch: which epoch, from 0.
            index: 0 to size - 1.

        Raises:
            IndexError: the source has no such item.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is not in range({self.size})")
        return _permutation(self.size, self.seed, epoch).position_of(index) if self.shuffle else index

    def place(self, position: int) -> tuple[int, int] | None:
        """The batch of this shard that has the position, and the row in it; None where another shard or none has it.

        Args:
            position: in the global order, 0 to size - 1.
        """
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
        """Rows after those batches, over all shards: less than `batch_size * num_shards`."""
        return 0 if self.drop_remainder else (self.size - self.start) % (self._full_rows * self.num_shards)

    @cached_property
    def _tail(self) -> tuple[int, int]:
        """This shard's part of the tail: its first position and its rows."""
        first = self.size - self._tail_rows
        if 0 < self._tail_rows < self.num_shards:
            return first + self.shard_index % self._tail_rows, 1
        share, longer_shards = divmod(self._tail_rows, self.num_shards)
        start = first + self.shard_index * share + min(self.shard_index, longer_shards)
        return start, share + (self.shard_index < longer_shards)

    def _span(self, batch: int) -> tuple[int, int]:
        """The first position of a batch and the one after its last; its positions are always consecutive."""
        if 0 <= batch < self._global_batches:
            start = self.start + (batch * self.num_shards + self.shard_index) * self._full_rows
            return start, start + self._full_rows
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")
        start, rows = self._tail
        return start, start + rows


@lru_cache(maxsize=8)
def _after(plan: Plan, start: int) -> Plan:
    return replace(plan, start=start)


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> Permutation:
    """An epoch's order, kept for the few epochs that are under way at once (this one, the next, other passes)."""
    return Permutation(size, stream_key("shuffle", seed, epoch))
