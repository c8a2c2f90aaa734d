"""`Plan`: the positions of an epoch's order that make up each batch of each shard.

`Plan` divides the order into ranges. `buckets.BucketPlan` groups its items by length. Let B =
`batch_size` and S = `num_shards`. The global batch k is the positions k·B·S to (k+1)·B·S. Shard r
has the rows r·B to (r+1)·B of it:

```
    position   0      B      2B     3B     4B     5B     6B   size      B rows each, S = 3, a tail
               ├──────┼──────┼──────┼──────┼──────┼──────┼──┬──┬──┤
    shard      │  0   │  1   │  2   │  0   │  1   │  2   │0 │1 │2 │
    batch      └───────── 0 ────────┴───────── 1 ────────┴─── 2 ──┘
```

With `drop_remainder`, the tail is dropped. Otherwise it is split evenly, and the first shards have
one row more. If it has fewer rows than shards, rows are repeated, so that every shard has the same
number of batches. In data-parallel training, the other shards would wait for a shard with one batch
less.

A training that continues where another one stopped needs the rest of an epoch. The rest is a
separate plan (`Plan.after`) with the same positions and perhaps another number of shards. So each
row keeps its item and its random stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.order import Order, kept

if TYPE_CHECKING:
    from loaderpool.plan.shares import MixOrder
    from loaderpool.plan.taken import Start, Taken

# Number of rests of epochs that are kept. Smaller: simultaneous passes make the rests and their
# tables again for each batch.
_KEPT_RESTS = 4


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Order of one shard in every epoch: batches of consecutive positions.

    All batches have the same size except the last. Batches are formed here and never by a worker,
    so they are the same for any number of workers. No order is stored, so a size of 10**12 costs
    nothing.
    """

    rows_vary: ClassVar[bool] = False
    """True if any batch may have another number of rows than the batch before.

    The number of a batch's rows then also differs between epochs.
    """

    order: Order
    """Order of the source's items."""
    batch_size: int | None
    """Most rows of a batch of one shard.

    None: each item is an element, planned as a batch of one row.
    """
    drop_remainder: bool = False
    """True if a tail that is too short for a full batch on every shard is left out."""
    num_shards: int = 1
    """Number of processes that share the epoch."""
    shard_index: int = 0
    """Number of this process among them, from 0."""
    lanes: int = 0
    """Number of generators whose batches take turns, or 0 for a source without generators.

    Their batches have at most the rows of a full batch.
    """
    is_open: bool = False
    """True if the size is only a bound: the source is endless, or a stream with unknown end."""
    is_endless: bool = False
    """True if the source has an index but no end. It then has as many batches as are requested."""
    stated_batches: int | None = None
    """Batches of this shard per epoch, if its generators' numbers of items are given, else None."""
    start: Start = 0
    """The start passed to `after`: the positions that were taken or left out, as in `taken`."""
    mix: MixOrder | None = None
    """Order of the records of a mix, if the source is one. `order` gives the indices of the mix."""

    # ---- numbers, the same in each epoch ----

    @property
    def packed_length(self) -> int:
        """Length of a row into which several items are packed; 0 if each row is one item."""
        return 0

    @property
    def row_plan(self) -> Plan:
        """Plan of the rows of arrays: this one, unless several items are packed into a row."""
        return self

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches of this shard in an epoch. It is the same for every shard."""
        return sum(full + (rest > 0) for _, full, rest in self._stock)

    @cached_property
    def most_rows(self) -> int:
        """Largest number of rows of a batch of this shard.

        If orders are drawn, other epochs may have larger batches than this one.
        """
        if self.order.is_drawn:
            return self._full_rows
        found = (rows if full else self._share(rest)[1] for rows, full, rest in self._stock)
        return max(found) or max(rows for rows, _, _ in self._stock)

    @cached_property
    def last_rows(self) -> int:
        """Number of rows of the last batch. It may be less than `most_rows`.

        Unless rows vary, all other batches have `most_rows` rows.
        """
        return (
            self.rows(0, self.batches_per_epoch - 1) if self.batches_per_epoch else self.most_rows
        )

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows of all batches of this shard."""
        return sum(rows * full + self._share(rest)[1] for rows, full, rest in self._stock)

    @property
    def repeated_rows(self) -> int:
        """Number of rows that come twice in an epoch, over all shards.

        They are repeated so that no shard has a batch less than the others.
        """
        return sum(max(0, self.num_shards - rest) for _, _, rest in self._stock if rest)

    # ---- the rest of an epoch ----

    def after(self, start: Start) -> Plan:
        """Return the plan of the rest of an epoch from `start` on.

        `start` counts from the epoch's beginning. If it is falsy, return the plan of the whole
        epoch.
        """
        if start == self.start or not (start or self.start):
            return self
        return kept(self._rests, start, lambda: replace(self, start=start), _KEPT_RESTS)

    def closed(self, size: int) -> Plan:
        """Return the same plan for a stream that has ended after `size` items."""
        return replace(self, order=replace(self.order, size=size), is_open=False)

    def drawn(self, table: npt.NDArray[Any], size: int, *batches: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of an epoch whose order was drawn.

        Args:
            table: Array of the order, as in `DrawnOrder`.
            size: Number of positions of the epoch.
            *batches: Unused, because this plan needs no arrays for its batches.
        """
        order = replace(self.order, table=table, size=size)  # type: ignore[call-arg]
        return replace(self, order=order)

    def start_after(self, epoch: int, batches: int) -> Start:
        """Return the start that all shards together have reached after `batches` batches each.

        After the last batch, it includes the rows that `drop_remainder` leaves out.
        """
        if batches >= self.batches_per_epoch:
            return self.order.size
        return self._start_at(batches * self._full_rows * self.num_shards)

    def without(self, epoch: int, batches: range) -> Start:
        """Return this plan's start, with more batches left out.

        Args:
            epoch: Number of the epoch.
            batches: Numbers of the batches, counted from the beginning of this shard's epoch. Each
                shard leaves out its own batches with these numbers.
        """
        from loaderpool.plan.taken import Taken

        whole = self.after(0)
        begin, end = (whole.start_after(epoch, each) for each in (batches.start, batches.stop))
        start: Start = Taken(self.start, self._buckets).without(begin, end)
        return start

    # ---- batches ----

    def rows(self, epoch: int, batch: int) -> int:
        """Return the number of rows of a batch of this shard, at least 1.

        Raises:
            IndexError: the epoch has no such batch.
        """
        start, stop = self._span(epoch, batch)
        return stop - start

    def batch_rows(self, epoch: int, batch: int, count: int) -> tuple[int, ...]:
        """Return the number of rows of each of `count` consecutive batches. Raises like `rows`."""
        starts, stops = self._spans(epoch, batch, count)
        return tuple((stops - starts).tolist())

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        """Return the positions of `count` consecutive batches, one batch after the other.

        These are the positions of a chunk. Batches are numbered from 0.

        Returns:
            int64[rows of all these batches], ascending within each batch.

        Raises:
            IndexError: the epoch does not have all of these batches.
        """
        stop = batch + count
        if not 0 <= batch <= stop <= self.batches_per_epoch:
            raise IndexError(
                f"batches {batch} to {stop} are not in range({self.batches_per_epoch})"
            )
        if not count:
            return np.empty(0, np.int64)
        if self.rows_vary:
            return self._located(epoch, joined_ranges(*self._spans(epoch, batch, count)))
        first, last = self._span(epoch, batch)[0], self._span(epoch, stop - 1)[1]
        if self.num_shards == 1 or count == 1:
            return self._located(epoch, np.arange(first, last, dtype=np.int64))
        full = min(stop, self._full_batches) - batch
        rows, step = self._full_rows, self._full_rows * self.num_shards
        starts = np.arange(first, first + full * step, step, dtype=np.int64)
        found = (starts[:, None] + np.arange(rows, dtype=np.int64)).ravel()
        if full < count:
            found = np.concatenate((found, np.arange(*self._span(epoch, stop - 1))))
        return self._located(epoch, found)

    def record(self, epoch: int, index: int) -> int:
        """Return the number by which the item at a source index is read in an epoch.

        It is the index, unless the source is a mix. If rows vary, each epoch has the items of
        epoch 0, because their lengths determined the batches.
        """
        return index if self.mix is None else self.mix.record(epoch * (not self.rows_vary), index)

    def records(self, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of several items, as `record`."""
        if self.mix is None:
            return indices
        return self.mix.records(epoch * (not self.rows_vary), indices)

    # ---- internals ----

    @property
    def _buckets(self) -> int:
        return 1

    @cached_property
    def _taken(self) -> Taken | None:
        """Positions that were taken or left out. None if no part is left out after `start`."""
        if isinstance(self.start, int):
            return None
        # Imported here, because few epochs have parts left out.
        from loaderpool.plan.taken import Taken

        return Taken(self.start)

    @cached_property
    def _first(self) -> int:
        """First position that was not taken; first global batch if the order determines batches."""
        if self._taken is not None:
            return self._taken.first[0]
        assert isinstance(self.start, int)
        return self.start

    @cached_property
    def _size(self) -> int:
        """End of the epoch's positions, counted without those left out."""
        return self.order.size - (0 if self._taken is None else self._taken.left_out[0])

    def _start_at(self, more: int) -> Start:
        """Return the start after `more` further positions, or global batches of a drawn order."""
        left = self._first + more
        return left if self._taken is None else self._taken.start_at([left])

    def _located(self, epoch: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert rows, which are counted without the parts left out, into positions."""
        if self._taken is None:
            return rows
        positions: npt.NDArray[np.int64] = self._taken.numbers(rows)
        return positions

    @cached_property
    def _full_rows(self) -> int:
        return 1 if self.batch_size is None else self.batch_size

    @property
    def rows_left(self) -> int:
        """Number of items from the start on, over all shards."""
        return self._size - self._first

    @cached_property
    def _stock(self) -> tuple[tuple[int, int, int], ...]:
        """For each bucket: rows of a full batch, number of full global batches, items left over."""
        full, rest = divmod(self.rows_left, self._full_rows * self.num_shards)
        if self.lanes:  # so that batch n of all epochs is of lane n modulo their number
            full -= full % self.lanes
        return ((self._full_rows, full, 0 if self.drop_remainder or self.is_open else rest),)

    @cached_property
    def _full_batches(self) -> int:
        return self._stock[0][1]

    def _share(self, rows: int) -> tuple[int, int]:
        """Return this shard's first row and number of rows in a global batch of `rows` rows."""
        if 0 < rows < self.num_shards:
            return self.shard_index % rows, 1
        share, longer = divmod(rows, self.num_shards)
        return self.shard_index * share + min(self.shard_index, longer), share + (
            self.shard_index < longer
        )

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the first row and the end of a batch, counted as the rows of `_located`."""
        if 0 <= batch < self._full_batches:
            start = self._first + (batch * self.num_shards + self.shard_index) * self._full_rows
            return start, start + self._full_rows
        self._check_batches(batch)
        tail = self._stock[0][2]
        first, rows = self._share(tail)
        return self._size - tail + first, self._size - tail + first + rows

    def _spans(
        self, epoch: int, batch: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first row and the end of each of `count` consecutive batches, as `_span`."""
        spans = [self._span(epoch, each) for each in range(batch, batch + count)]
        starts, stops = np.array(spans, np.int64).reshape(count, 2).T
        return starts, stops

    def _check_batches(self, batch: int, count: int = 1) -> None:
        """Raise `IndexError` if one of `count` consecutive batches is not in an epoch."""
        if not 0 <= batch <= batch + count <= self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")

    @cached_property
    def _rests(self) -> dict[Start, Plan]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without tables, for pickling."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Numbering:
    """Position of each batch number in a plan of whole epochs.

    All epochs are whole, except that `epoch` starts at `rest` if `rest` is not 0. Its remaining
    batches (`Plan.after`) keep the numbers that they have in the whole epoch.

    Attributes:
        batches_per_epoch: Number of batches of an epoch.
        lanes: Number of generators, as in `Plan`.
        batch_size: Largest number of rows of a batch.
        usual_rows: Number of rows of a batch; the mean, if batches differ.
    """

    def __init__(self, plan: Plan, epoch: int = 0, rest: Start = 0) -> None:
        self._plan, self._epoch, self._rest = plan, epoch, rest
        self._rest_plan = plan.after(rest) if rest else plan
        self.batches_per_epoch, self.lanes = plan.batches_per_epoch, plan.lanes
        self.batch_size = self.usual_rows = plan.most_rows
        if plan.rows_vary and self.batches_per_epoch:
            self.usual_rows = -(-plan.rows_per_epoch // self.batches_per_epoch)
        self._missing = self.batches_per_epoch - self._rest_plan.batches_per_epoch

    def locate(self, number: int) -> tuple[int, int, Start]:
        """Return the epoch of batch `number`, the batch's number within it, and its start.

        The start is that of the epoch, 0 if it is whole.
        """
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._rest and epoch == self._epoch:
            return epoch, batch - self._missing, self._rest
        return epoch, batch, 0

    def alike(self, number: int) -> int:
        """Return the number of batches from `number` on that may share a slot.

        The last batch of an epoch is not among them if it is shorter.
        """
        _, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        if plan.rows_vary:
            plan = plan.row_plan
        is_shorter = not plan.rows_vary and plan.last_rows < plan.most_rows
        return max(1, plan.batches_per_epoch - batch - is_shorter)

    def total_rows(self, number: int, count: int) -> int:
        """Return the number of rows of `count` batches from `number` on, all of one epoch."""
        epoch, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        if plan.rows_vary:
            return sum(plan.batch_rows(epoch, batch, count))
        has_last = batch + count == plan.batches_per_epoch
        return (count - 1) * plan.most_rows + (plan.last_rows if has_last else plan.most_rows)

    def batch_rows(self, number: int, count: int) -> tuple[int, ...]:
        """Return the number of rows of each of `count` batches of one epoch, from `number` on."""
        epoch, batch, rest = self.locate(number)
        return (self._rest_plan if rest else self._plan).batch_rows(epoch, batch, count)


def joined_ranges(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the numbers of several ranges, one range after the other."""
    counts = stops - starts
    before = counts.cumsum() - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def bounds_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and stop row of each batch in the concatenation of all batches."""
    return list(itertools.pairwise(itertools.accumulate(rows, initial=0)))
