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
what is left over is split as `batches.Plan` splits its tail. How many batches there are depends on how many items each
bucket has, and so is the same in each epoch; which batch comes when depends on the epoch.

A bucket's items are taken in their order, so where an epoch was left is said by how many of each bucket are taken,
whatever the number of shards was: that is the plan's *start*.

Which items make up a batch depends on how many of its bucket came before. So for each epoch that is under way a process
keeps a table of all positions, sorted by bucket, and by position within a bucket: 4 bytes an item (8 from 2**32 on).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan, kept
from loaderpool.plan.permutation import permutation

Positions = npt.NDArray[np.uint32] | npt.NDArray[np.int64]

# Positions that are permuted together. Larger: temporary arrays take more memory. Smaller: it takes longer.
_BLOCK = 1 << 16


class ItemBuckets:
    """The bucket of each of a source's items; never changes, and travels without its tables.

    Attributes:
        numbers: the bucket of each item, `uint8[n]` or `uint16[n]`, which sort in linear time.
        counts: how many items each bucket has.
        firsts: where each bucket begins in all positions of an epoch, sorted by bucket.
    """

    def __init__(self, numbers: npt.NDArray[Any], count: int) -> None:
        self.numbers = numbers
        self.counts: tuple[int, ...] = tuple(np.bincount(numbers, minlength=count).tolist())
        self.firsts: tuple[int, ...] = (0, *np.cumsum(self.counts, dtype=np.int64).tolist()[:-1])

    @staticmethod
    def of(lengths: npt.NDArray[Any], boundaries: tuple[int, ...]) -> ItemBuckets:
        """The buckets of items of these lengths: in bucket i are those from boundaries[i-1] to below boundaries[i]."""
        count = len(boundaries) + 1
        numbers = np.array(boundaries, np.int64).searchsorted(lengths, side="right")
        return ItemBuckets(numbers.astype(np.uint8 if count <= 1 << 8 else np.uint16), count)

    @cached_property
    def checksum(self) -> str:
        """A checksum of the bucket of each item, in order."""
        import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

        numbers = self.numbers.astype("<u2") if self.numbers.itemsize > 1 else self.numbers
        return hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=8).hexdigest()

    def __reduce__(self) -> Any:
        return ItemBuckets, (self.numbers, len(self.counts))


class _Epoch(NamedTuple):
    """The global batches of one epoch, in their order."""

    positions: Positions  # all of the epoch, sorted by bucket
    buckets: npt.NDArray[np.int64]  # of each batch
    firsts: npt.NDArray[np.int64]  # where in `positions` it begins
    rows: npt.NDArray[np.int64]  # how many it has there, over all shards


@dataclass(frozen=True, eq=False)
class BucketPlan(Plan):
    """A plan of batches that have items of one bucket each."""

    rows_vary: ClassVar[bool] = True

    start: Any = ()
    """How many items of each bucket were taken earlier; empty: none of any."""
    buckets: ItemBuckets = field(kw_only=True)
    """Which bucket each item is in."""
    batch_sizes: tuple[int, ...] = field(kw_only=True)
    """Rows of a full batch of one shard, for each bucket."""

    def start_after(self, epoch: int, batches: int) -> Any:
        """Return how many items of each bucket all shards have taken with their first so many batches."""
        if batches == 0 and self.batches_per_epoch:  # no table is needed to say so
            return self.start
        if batches >= self.batches_per_epoch:
            return self.buckets.counts
        table = self._epoch(epoch)
        taken = np.bincount(
            table.buckets[:batches], table.rows[:batches], len(self.batch_sizes)
        ).astype(np.int64)
        return tuple((taken + self._taken).tolist())

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        return self._epoch(epoch).positions[super().positions(epoch, batch, count)].astype(np.int64)

    @cached_property
    def _taken(self) -> tuple[int, ...]:
        return self.start or (0,) * len(self.batch_sizes)

    @property
    def _rows_left(self) -> int:
        return self.order.size - sum(self._taken)

    @cached_property
    def _stock(self) -> tuple[tuple[int, int, int], ...]:
        stock = []
        for rows, count, gone in zip(
            self.batch_sizes, self.buckets.counts, self._taken, strict=True
        ):
            full, rest = divmod(count - gone, rows * self.num_shards)
            stock.append((rows, full, 0 if self.drop_remainder else rest))
        return tuple(stock)

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return where a batch's rows begin and end in the epoch's positions, sorted by bucket."""
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")
        table = self._epoch(epoch)
        start, rows = self._share(int(table.rows[batch]))
        start += int(table.firsts[batch])
        return start, start + rows

    @cached_property
    def _epochs(self) -> dict[int, _Epoch]:
        return {}

    def _epoch(self, epoch: int) -> _Epoch:
        return kept(self._epochs, epoch if self.order.shuffle else 0, lambda: self._walked(epoch))

    def _walked(self, epoch: int) -> _Epoch:
        """Return the batches of an epoch, by the position at which each gets full."""
        size, numbers = self.order.size, self.buckets.numbers
        if self.order.shuffle and size:
            permuted = permutation(size, self.order.seed, epoch)
            blocks = (
                np.arange(start, min(size, start + _BLOCK)) for start in range(0, size, _BLOCK)
            )
            numbers = np.concatenate([numbers[permuted.take(block)] for block in blocks])
        positions: Positions = numbers.argsort(kind="stable").astype(
            np.int64 if size > 1 << 32 else np.uint32
        )
        sizes, full, rest = np.array(self._stock, np.int64).T
        firsts = np.array(self.buckets.firsts, np.int64)
        buckets = np.repeat(np.arange(len(full)), full)
        rows = sizes[buckets] * self.num_shards
        number = np.arange(len(buckets)) - np.repeat(
            full.cumsum() - full, full
        )  # of each batch within its bucket
        begins = (firsts + self._taken)[buckets] + number * rows
        order = positions[begins + rows - 1].argsort(kind="stable")
        rests = np.flatnonzero(rest)
        ends = firsts + self.buckets.counts
        return _Epoch(
            positions,
            np.append(buckets[order], rests),
            np.append(begins[order], (ends - rest)[rests]),
            np.append(rows[order], rest[rests]),
        )
