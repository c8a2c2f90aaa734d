"""Batches of items of like length: a plan whose batches are filled bucket by bucket.

An epoch's items are walked through in its order, and each falls into the bucket of its length. With B rows a batch for
that bucket and S shards, B·S items of a bucket are a global batch; batches are numbered in the order in which they get
full. What is left in the buckets at the end follows in the order of the buckets, one batch each.

```
    position   0  1  2  3  4  5  6  7  8  9        two buckets, a and b, two rows a batch each, one shard
    bucket     a  b  a  a  b  b  a  a  b  b
    full             0     1     2     3           batches 0: 0 2   1: 1 4   2: 3 6   3: 5 8   4: 7   5: 9
```

Of each global batch shard r has rows r·B to (r+1)·B, so all shards have a batch of the same bucket at the same step;
what is left over is split as `order.Plan` splits its tail. How many batches there are depends on how many items each
bucket has, and so is the same in each epoch; which batch comes when depends on the epoch.

A bucket's items are taken in their order, so where an epoch was left is said by how many of each bucket are taken,
whatever the number of shards was: that is the plan's *start* (see `base`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, brief
from loaderpool.plan.base import BasePlan, Start, share_of
from loaderpool.plan.bucket_order import ItemBuckets, LatestEpochs, Positions

_KEPT_RESTS = 4
"""Rests of epochs that are kept, with their tables. Fewer: passes that go on side by side make them again and again."""


_RANGE = 1024
"""Batches between two places at which an epoch's table says what is taken."""


class _Epoch(NamedTuple):
    """The global batches of one epoch, in their order."""

    positions: Positions  # all of the epoch, sorted by bucket
    buckets: npt.NDArray[np.int64]  # of each batch
    firsts: npt.NDArray[np.int64]  # where in `positions` it begins
    rows: npt.NDArray[np.int64]  # how many it has there, over all shards
    full_before: npt.NDArray[np.int64]  # for each range of batches the full ones of each bucket that come before it


@dataclass(frozen=True)
class BucketPlan(BasePlan):
    """A plan of batches that have items of one bucket each.

    Raises:
        ArgumentError: a field is out of its range.
    """

    rows_vary: ClassVar[bool] = True

    buckets: ItemBuckets = field(kw_only=True)
    """Which bucket each item is in."""
    batch_sizes: tuple[int, ...] = field(kw_only=True)
    """Rows of a full batch of one shard, for each bucket."""
    taken: tuple[int, ...] = ()
    """How many items of each bucket were taken earlier; empty: none of any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.buckets.counts
        if len(self.batch_sizes) != len(counts) or min(self.batch_sizes) < 1:
            raise ArgumentError(f"batch_sizes must be {len(counts)} numbers from 1 on, got {self.batch_sizes}")
        if sum(counts) != self.size:
            raise ArgumentError(f"size must be {sum(counts)}, as the buckets have so many items, got {self.size}")
        if self.taken:
            self._check_taken(self.taken)

    @cached_property
    def batches_per_epoch(self) -> int:
        return sum(full + (rest > 0) for full, rest in self._stock)

    @property
    def full_batches(self) -> int:
        """All of them: the engine does not know their rows."""
        return self.batches_per_epoch

    @cached_property
    def most_rows(self) -> int:
        found = [size if full else self._share(rest)[1] for size, (full, rest) in self._sizes_and_stock()]
        return max(found) or max(self.batch_sizes)

    @property
    def last_rows(self) -> int:
        """`most_rows`: any batch may be the last one."""
        return self.most_rows

    @cached_property
    def rows_per_epoch(self) -> int:
        return sum(size * full + self._share(rest)[1] for size, (full, rest) in self._sizes_and_stock())

    @cached_property
    def rows_left_out(self) -> int:
        return sum(self._left) - sum(
            size * self.num_shards * full + rest for size, (full, rest) in self._sizes_and_stock()
        )

    @cached_property
    def repeated_rows(self) -> int:
        return sum(max(0, self.num_shards - rest) for _, rest in self._stock if rest)

    @property
    def begins_at(self) -> tuple[int, ...]:
        """How many items of each bucket are taken."""
        return self.taken

    def after(self, start: Start) -> BucketPlan:
        """Return the rest of an epoch when so many items of each bucket are taken."""
        if (start or ()) == self.taken:
            return self
        if isinstance(start, int) and start:
            raise ArgumentError(f"start must be a number for each bucket, got {brief(start)}")
        taken = start or ()
        rest = self._rests.get(taken)
        if rest is None:
            if len(self._rests) >= _KEPT_RESTS:
                self._rests.clear()
            rest = self._rests[taken] = dataclasses.replace(self, taken=taken)
        return rest

    def start_after(self, epoch: int, batches: int) -> tuple[int, ...]:
        """Return how many items of each bucket all shards have taken with their first so many batches."""
        if batches == 0 and self.batches_per_epoch:  # no table is needed to say so
            return self.taken
        if batches >= self.batches_per_epoch:
            return self.buckets.counts
        table = self._epoch(epoch)
        full = min(batches, sum(full for full, _ in self._stock))
        number = full // _RANGE
        since = np.bincount(table.buckets[number * _RANGE : full], minlength=len(self.batch_sizes))
        taken = (table.full_before[number] + since) * self.batch_sizes * self.num_shards
        for rest in range(full, batches):
            taken[table.buckets[rest]] += table.rows[rest]
        if self.taken:
            taken += self.taken
        return tuple(taken.tolist()) if taken.any() else ()

    def read_start(self, value: Any) -> tuple[int, ...]:
        if type(value) is int and value == 0:  # nothing is taken, in any plan's words
            return ()
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"position is {brief(value)}, not a number for each bucket")
        taken = tuple(value)
        if taken:
            try:
                self._check_taken(taken)
            except ArgumentError as error:
                raise ValueError(str(error)) from None
            for gone, size, count in zip(taken, self.batch_sizes, self.buckets.counts, strict=True):
                if gone % size and gone != count:
                    raise ValueError(
                        f"position is {brief(value)}: no batch of {size} rows ends after {gone} of a bucket"
                    )
        return taken if any(taken) else ()

    def rows(self, epoch: int, batch: int) -> int:
        return self._share(int(self._epoch(epoch).rows[self._checked(batch)]))[1]

    def positions(
        self, epoch: int, batch: int, row_start: int = 0, row_stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        table = self._epoch(epoch)
        start, rows = self._share(int(table.rows[self._checked(batch)]))
        if row_stop is None:
            row_stop = rows
        if not 0 <= row_start <= row_stop <= rows:
            raise IndexError(f"rows {row_start} to {row_stop} are not in batch {batch} of {rows} rows")
        start += int(table.firsts[batch])
        return table.positions[start + row_start : start + row_stop].astype(np.int64)

    def positions_of(self, epoch: int, batch: int, count: int) -> npt.NDArray[np.int64]:
        stop = batch + count
        if not 0 <= batch <= stop <= self.batches_per_epoch:
            raise IndexError(f"batches {batch} to {stop} are not in range({self.batches_per_epoch})")
        parts = [self.positions(epoch, number) for number in range(batch, stop)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def place(self, epoch: int, position: int) -> tuple[int, int] | None:
        table = self._epoch(epoch)
        (index,) = self.indices(epoch, np.array([position], np.int64))
        bucket = int(self.buckets.numbers[index])
        first = self.buckets.firsts[bucket]
        last = first + self.buckets.counts[bucket]
        at = first + int(table.positions[first:last].searchsorted(position))
        found = np.flatnonzero((table.buckets == bucket) & (table.firsts <= at) & (at < table.firsts + table.rows))
        if not found.size:
            return None
        batch = int(found[0])
        start, rows = self._share(int(table.rows[batch]))
        row = at - int(table.firsts[batch]) - start
        return (batch, row) if 0 <= row < rows else None

    def batch_of_another_bucket(self, epoch: int) -> int | None:
        buckets = self._epoch(epoch).buckets
        others = np.flatnonzero(buckets != buckets[0]) if buckets.size else buckets
        return int(others[0]) if others.size else None

    @cached_property
    def _rests(self) -> dict[Start, BucketPlan]:
        return {}

    @cached_property
    def _left(self) -> tuple[int, ...]:
        """Items of each bucket that are not taken."""
        taken = self.taken or (0,) * len(self.batch_sizes)
        return tuple(count - gone for count, gone in zip(self.buckets.counts, taken, strict=True))

    @cached_property
    def _stock(self) -> tuple[tuple[int, int], ...]:
        """For each bucket its full global batches, and the items left over that make one more."""
        stock = [divmod(left, size * self.num_shards) for size, left in zip(self.batch_sizes, self._left, strict=True)]
        return tuple((full, 0 if self.drop_remainder else rest) for full, rest in stock)

    def _sizes_and_stock(self) -> list[tuple[int, tuple[int, int]]]:
        return list(zip(self.batch_sizes, self._stock, strict=True))

    def _share(self, rows: int) -> tuple[int, int]:
        """Return this shard's part of a global batch, full or not: its first row there, and how many."""
        return share_of(rows, self.num_shards, self.shard_index)

    def _checked(self, batch: int) -> int:
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")
        return batch

    def _check_taken(self, taken: tuple[Any, ...]) -> None:
        counts = self.buckets.counts
        fits = len(taken) == len(counts) and all(
            type(each) is int and 0 <= each <= count for each, count in zip(taken, counts, strict=True)
        )
        if not fits:
            raise ArgumentError(f"taken must be a number for each bucket, at most {counts}, got {taken}")

    @cached_property
    def _epochs(self) -> LatestEpochs[_Epoch]:
        return LatestEpochs()

    def _epoch(self, epoch: int) -> _Epoch:
        return self._epochs.get(epoch if self.shuffle else 0, lambda: self._walked(epoch))

    def _walked(self, epoch: int) -> _Epoch:
        """Return the batches of an epoch, by the position at which each gets full."""
        positions = self.buckets.sorted_positions(self.seed, epoch, self.shuffle)
        taken = self.taken or (0,) * len(self.batch_sizes)
        buckets, firsts, rows = [], [], []
        for bucket, (size, (full, _)) in enumerate(self._sizes_and_stock()):
            step = size * self.num_shards
            buckets.append(np.full(full, bucket, np.int64))
            firsts.append(self.buckets.firsts[bucket] + taken[bucket] + step * np.arange(full, dtype=np.int64))
            rows.append(np.full(full, step, np.int64))
        numbers, begins, lengths = (np.concatenate(parts) for parts in (buckets, firsts, rows))
        order = positions[begins + lengths - 1].argsort(kind="stable")
        rests = [(bucket, rest) for bucket, (_, rest) in enumerate(self._stock) if rest]
        ends = [first + count for first, count in zip(self.buckets.firsts, self.buckets.counts, strict=True)]
        return _Epoch(
            positions,
            np.append(numbers[order], [bucket for bucket, _ in rests]).astype(np.int64),
            np.append(begins[order], [ends[bucket] - rest for bucket, rest in rests]).astype(np.int64),
            np.append(lengths[order], [rest for _, rest in rests]).astype(np.int64),
            _counts_before(numbers[order], len(self.batch_sizes)),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: the fields, and no tables."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}


def _counts_before(buckets: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Count, for each range of batches and for the end, how many of each bucket come before it."""
    ranges = len(buckets) // _RANGE + 1
    keys = np.arange(len(buckets)) // _RANGE * count + buckets
    within = np.bincount(keys, minlength=ranges * count).reshape(ranges, count)
    return np.concatenate([np.zeros((1, count), np.int64), within.cumsum(axis=0)[:-1]])
