"""Batches of items of similar length: a plan whose batches are filled bucket by bucket.

The items of an epoch are taken in its order, and each goes into the bucket of its length. Let B be
the rows of a batch of that bucket and S the number of shards. Then B·S items of a bucket are a
global batch. Batches are numbered in the order in which they become full. At the end, the items
left in the buckets follow in the order of the buckets, one batch each.

```
    position   0  1  2  3  4  5  6  7  8  9     two buckets, a and b, two rows a batch, one shard
    bucket     a  b  a  a  b  b  a  a  b  b
    full             0     1     2     3        batches 0: 0 2   1: 1 4   2: 3 6   3: 5 8
                                                        4: 7     5: 9
```

Shard r has the rows r·B to (r+1)·B of each global batch. So all shards have a batch of the same
bucket at the same step. Items left over are split as `batches.Plan` splits its tail. The number of
batches depends only on the number of items in each bucket, so it is the same in each epoch. The
order of the batches depends on the epoch.

Items of a bucket are taken in order. So the point at which an epoch was left is the number of items
taken from each bucket, for any number of shards. These numbers are the plan's *start*. If batches
are left out (`taken`), the start also has the bounds of the left-out part of each bucket.

The items of a batch depend on the number of earlier items in its bucket. So a process keeps a table
for each epoch in progress. The table has all positions, sorted by bucket, then by position: 4 bytes
per item (8 from 2**32 items on).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan
from loaderpool.plan.order import kept
from loaderpool.plan.permutation import permuted_blocks
from loaderpool.plan.taken import Start, Taken
from loaderpool.system.hashes import checksum

Positions = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


class ItemBuckets:
    """Bucket of each item of a source; never changes. It is pickled without its tables.

    Attributes:
        numbers: the bucket of each item, `uint8[n]` or `uint16[n]`, which sort in linear time.
        counts: number of items in each bucket.
        firsts: start of each bucket in the positions of an epoch, sorted by bucket.
    """

    def __init__(self, numbers: npt.NDArray[Any], count: int) -> None:
        self.numbers = numbers
        self.counts: tuple[int, ...] = tuple(np.bincount(numbers, minlength=count).tolist())
        self.firsts: tuple[int, ...] = (0, *np.cumsum(self.counts, dtype=np.int64).tolist()[:-1])

    @staticmethod
    def of(lengths: npt.NDArray[Any], boundaries: tuple[int, ...]) -> ItemBuckets:
        """Return the buckets of items of these lengths.

        Bucket i has the lengths from boundaries[i-1] to below boundaries[i].
        """
        count = len(boundaries) + 1
        numbers = np.array(boundaries, np.int64).searchsorted(lengths, side="right")
        return ItemBuckets(numbers.astype(np.uint8 if count <= 1 << 8 else np.uint16), count)

    @cached_property
    def checksum(self) -> str:
        """Checksum of the bucket of each item, in order."""
        numbers = self.numbers.astype("<u2") if self.numbers.itemsize > 1 else self.numbers
        return checksum([np.ascontiguousarray(numbers).data])

    def __reduce__(self) -> tuple[object, ...]:
        return ItemBuckets, (self.numbers, len(self.counts))


class _Epoch(NamedTuple):
    """Global batches of one epoch, in order."""

    positions: Positions  # all positions of the epoch, sorted by bucket
    buckets: npt.NDArray[np.int64]  # bucket of each batch
    firsts: npt.NDArray[np.int64]  # index in `positions` at which each batch begins
    rows: npt.NDArray[np.int64]  # number of rows of each batch, over all shards


@dataclass(frozen=True, eq=False, repr=False)
class BucketPlan(Plan):
    """Plan whose batches have items of one bucket each."""

    rows_vary: ClassVar[bool] = True

    start: tuple[int, ...] = ()
    """Items taken from each bucket or left out, as in `taken`. Empty if there are none."""
    buckets: ItemBuckets = field(kw_only=True)
    """Bucket of each item."""
    batch_sizes: tuple[int, ...] = field(kw_only=True)
    """Rows of a full batch of one shard, for each bucket."""

    def start_after(self, epoch: int, batches: int) -> Start:
        """Return the number of items that all shards have taken from each bucket.

        Each shard has taken `batches` batches of the epoch.
        """
        if batches == 0 and self.batches_per_epoch:  # this result needs no table
            return self.start
        if batches >= self.batches_per_epoch:
            return self.buckets.counts
        table = self._epoch(epoch)
        taken = np.bincount(table.buckets[:batches], table.rows[:batches], self._buckets)
        return self._taken.start_at((taken.astype(np.int64) + self._taken.first).tolist())

    def _located(self, epoch: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._epoch(epoch).positions[rows].astype(np.int64)

    @property
    def _buckets(self) -> int:
        return len(self.batch_sizes)

    @cached_property
    def _taken(self) -> Taken:
        return Taken(self.start, self._buckets)

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """End of each bucket's items, counted without those left out."""
        return np.array(self.buckets.counts, np.int64) - self._taken.left_out

    @property
    def rows_left(self) -> int:
        return int(self._counts.sum()) - sum(self._taken.first)

    @cached_property
    def _stock(self) -> tuple[tuple[int, int, int], ...]:
        stock = []
        for rows, count, gone in zip(
            self.batch_sizes, self._counts.tolist(), self._taken.first, strict=True
        ):
            full, rest = divmod(count - gone, rows * self.num_shards)
            stock.append((rows, full, 0 if self.drop_remainder else rest))
        return tuple(stock)

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the range of a batch in the epoch's positions, which are sorted by bucket."""
        starts, stops = self._spans(epoch, batch, 1)
        return int(starts[0]), int(stops[0])

    def _spans(
        self, epoch: int, batch: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        self._check_batches(batch, count)
        table, chosen = self._epoch(epoch), slice(batch, batch + count)
        starts, rows = table.firsts[chosen], table.rows[chosen]
        if self.num_shards > 1:
            shares = np.array([*map(self._share, rows.tolist())], np.int64).reshape(count, 2)
            starts, rows = starts + shares[:, 0], shares[:, 1]
        return starts, starts + rows

    @cached_property
    def _epochs(self) -> dict[int, _Epoch]:
        return {}

    def _epoch(self, epoch: int) -> _Epoch:
        return kept(self._epochs, epoch if self.order.shuffle else 0, lambda: self._walked(epoch))

    def _walked(self, epoch: int) -> _Epoch:
        """Return the batches of an epoch, ordered by the position at which each becomes full."""
        size, numbers = self.order.size, self.buckets.numbers
        if self.order.shuffle and size:
            blocks = permuted_blocks(size, self.order.seed, epoch)
            numbers = np.concatenate([numbers[block] for block in blocks])
        positions: Positions = numbers.argsort(kind="stable").astype(
            np.int64 if size > 1 << 32 else np.uint32
        )
        left_out = [
            slice(self.buckets.firsts[bucket] + begin, self.buckets.firsts[bucket] + end)
            for bucket, begin, end in self._taken.gaps()
        ]
        if left_out:
            is_left = np.ones(size, bool)
            for part in left_out:
                is_left[part] = False
            positions = positions[is_left]
        sizes, full, rest = np.array(self._stock, np.int64).T
        ends = self._counts.cumsum()
        firsts = ends - self._counts
        buckets = np.repeat(np.arange(len(full)), full)
        rows = sizes[buckets] * self.num_shards
        # number of each batch within its bucket
        number = np.arange(len(buckets)) - np.repeat(full.cumsum() - full, full)
        begins = (firsts + self._taken.first)[buckets] + number * rows
        order = positions[begins + rows - 1].argsort(kind="stable")
        rests = np.flatnonzero(rest)
        return _Epoch(
            positions,
            np.append(buckets[order], rests),
            np.append(begins[order], (ends - rest)[rests]),
            np.append(rows[order], rest[rests]),
        )
