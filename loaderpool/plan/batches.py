"""`Plan`: which positions of an epoch's order make up which batch of which shard; pure functions of the plan.

`Plan` cuts the order into ranges, `buckets.BucketPlan` groups its items by length. With B = `batch_size` and
S = `num_shards`, the global batch k is positions k·B·S to (k+1)·B·S, and shard r has rows r·B to (r+1)·B of it:

```
    position   0      B      2B     3B     4B     5B     6B   size      B rows each, S = 3, and a tail
               ├──────┼──────┼──────┼──────┼──────┼──────┼──┬──┬──┤
    shard      │  0   │  1   │  2   │  0   │  1   │  2   │0 │1 │2 │
    batch      └───────── 0 ────────┴───────── 1 ────────┴─── 2 ──┘
```

The tail is dropped with `drop_remainder`. Else it is split evenly, the first shards having one row more. Where it has
fewer rows than shards they are dealt again, so that every shard has the same number of batches: in data-parallel
training a shard that has one batch less leaves the others waiting for it.

The rest of an epoch, for a training that goes on where another one stopped, is a plan of its own (`Plan.after`), with
the same positions and perhaps another number of shards. So each row keeps its item and its random stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.order import Order

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)

# Rests of epochs that are kept. Fewer: passes that go on side by side make them, and their tables, for each batch.
_KEPT_RESTS = 4
# Where an epoch was left, so that its rest can be made elsewhere; falsy: the whole epoch.
Start = int | tuple[int, ...]


def kept(
    latest: dict[_Key, _Value], key: _Key, make: Callable[[], _Value], most: int = 2
) -> _Value:
    """Return what was made for a key, now or as one of the latest; threads may share `latest`."""
    value = latest.get(key)
    if value is None:
        value = make()
        for old in [*latest][: 1 - most]:
            latest.pop(old, None)
        latest[key] = value
    return value


@dataclass(frozen=True)
class Plan:
    """The order of one shard in every epoch: batches of consecutive positions, all of the same size but the last.

    Batches are formed here and never by a worker, hence they are the same for any number of workers. Nothing of it is
    stored, so a size of 10**12 costs nothing.

    """

    rows_vary: ClassVar[bool] = False
    """Whether any batch may have other rows than the one before, and another number in each epoch."""

    order: Order
    """Items of the source by position."""
    batch_size: int | None
    """Most rows of a batch of one shard; None: each item is an element by itself, planned as a batch of one row."""
    drop_remainder: bool = False
    """Whether what is too short for a full batch on every shard is left out."""
    num_shards: int = 1
    """Processes that share the epoch among them."""
    shard_index: int = 0
    """This process's number among them, from 0."""
    lanes: int = 0
    """Generators whose batches take turns; 0: there are none. Their batches have any number of rows up to the full."""
    is_open: bool = False
    """Whether the size is only a bound: of a stream, whose end is not known before it comes, or of what has no end."""
    is_endless: bool = False
    """Whether it is known to have no end, though it has an index: as many batches as are asked for."""
    stated_batches: int | None = None
    """Batches of this shard in an epoch of generators whose numbers of items were stated; None: unknown."""
    start: Any = 0
    """The start that it was given: the first position that no consumer has taken."""

    # ---- numbers, the same in each epoch ----

    @cached_property
    def batches_per_epoch(self) -> int:
        """Batches of this shard in an epoch; the same for every shard."""
        return sum(full + (rest > 0) for _, full, rest in self._stock)

    @cached_property
    def most_rows(self) -> int:
        """The most rows that a batch of this shard has."""
        found = (rows if full else self._share(rest)[1] for rows, full, rest in self._stock)
        return max(found) or max(rows for rows, _, _ in self._stock)

    @cached_property
    def last_rows(self) -> int:
        """Rows of the last batch, which alone may have fewer than `most_rows`, unless rows vary."""
        return (
            self.rows(0, self.batches_per_epoch - 1) if self.batches_per_epoch else self.most_rows
        )

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all batches of this shard."""
        return sum(rows * full + self._share(rest)[1] for rows, full, rest in self._stock)

    @property
    def repeated_rows(self) -> int:
        """Rows that come a second time in an epoch, over all shards, so that no shard has a batch less."""
        return sum(max(0, self.num_shards - rest) for _, _, rest in self._stock if rest)

    # ---- the rest of an epoch ----

    def after(self, start: Start) -> Plan:
        """Return the rest of an epoch from there on, counted from its beginning; falsy: the whole of it."""
        if start == self.start or not (start or self.start):
            return self
        return kept(self._rests, start, lambda: replace(self, start=start), _KEPT_RESTS)

    def closed(self, size: int) -> Plan:
        """Return the same plan, now that the stream has ended and had this many items."""
        return replace(self, order=replace(self.order, size=size), is_open=False)

    def start_after(self, epoch: int, batches: int) -> Any:
        """Return the start that all shards together have reached with their first so many batches.

        After the last batch it is also what `drop_remainder` leaves out.
        """
        if batches >= self.batches_per_epoch:
            return self.order.size
        return self.start + batches * self._full_rows * self.num_shards

    # ---- batches ----

    def rows(self, epoch: int, batch: int) -> int:
        """Return how many rows a batch of this shard has, at least 1.

        Raises:
            IndexError: the epoch has no such batch.
        """
        start, stop = self._span(epoch, batch)
        return stop - start

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        """Return the positions of `count` consecutive batches, from 0, one after the other: what a chunk holds.

        Returns:
            int64[rows of all these batches], of each batch ascending.

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
            return np.concatenate(
                [np.arange(*self._span(epoch, each), dtype=np.int64) for each in range(batch, stop)]
            )
        first, last = self._span(epoch, batch)[0], self._span(epoch, stop - 1)[1]
        if self.num_shards == 1 or count == 1:
            return np.arange(first, last, dtype=np.int64)
        full = min(stop, self._full_batches) - batch
        rows, step = self._full_rows, self._full_rows * self.num_shards
        starts = np.arange(first, first + full * step, step, dtype=np.int64)
        positions = (starts[:, None] + np.arange(rows, dtype=np.int64)).ravel()
        return (
            positions
            if full == count
            else np.concatenate((positions, self.positions(epoch, stop - 1)))
        )

    # ---- within ----

    @cached_property
    def _full_rows(self) -> int:
        return 1 if self.batch_size is None else self.batch_size

    @property
    def _rows_left(self) -> int:
        """Items from the start on, over all shards."""
        left: int = self.order.size - self.start
        return left

    @cached_property
    def _stock(self) -> tuple[tuple[int, int, int], ...]:
        """For each bucket the rows of a full batch, its full global batches, and the items left over for one more."""
        full, rest = divmod(self._rows_left, self._full_rows * self.num_shards)
        if self.lanes:  # so that batch n of all epochs is of lane n modulo their number
            full -= full % self.lanes
        return ((self._full_rows, full, 0 if self.drop_remainder or self.is_open else rest),)

    @cached_property
    def _full_batches(self) -> int:
        return self._stock[0][1]

    def _share(self, rows: int) -> tuple[int, int]:
        """Return this shard's part of a global batch, full or not: its first row there, and how many."""
        if 0 < rows < self.num_shards:
            return self.shard_index % rows, 1
        share, longer = divmod(rows, self.num_shards)
        return self.shard_index * share + min(self.shard_index, longer), share + (
            self.shard_index < longer
        )

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the first position of a batch and the one after its last; its positions are always consecutive."""
        if 0 <= batch < self._full_batches:
            start = self.start + (batch * self.num_shards + self.shard_index) * self._full_rows
            return start, start + self._full_rows
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} is not in range({self.batches_per_epoch})")
        tail = self._stock[0][2]
        first, rows = self._share(tail)
        return self.order.size - tail + first, self.order.size - tail + first + rows

    @cached_property
    def _rests(self) -> dict[Start, Plan]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: the fields, and no tables."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Numbering:
    """Where each batch number is in a plan of whole epochs, but for one `epoch` that begins at `rest`, if it is not 0.

    The rest of an epoch (`Plan.after`) has that epoch's last numbers.
    """

    def __init__(self, plan: Plan, epoch: int = 0, rest: Start = 0) -> None:
        self._plan, self._epoch, self._rest = plan, epoch, rest
        self._rest_plan = plan.after(rest) if rest else plan
        self.batches_per_epoch, self.lanes = plan.batches_per_epoch, plan.lanes
        self.batch_size = plan.most_rows
        self._missing = self.batches_per_epoch - self._rest_plan.batches_per_epoch

    @property
    def first(self) -> int:
        """The number of the first batch of `epoch`."""
        return self._epoch * self.batches_per_epoch + self._missing

    def locate(self, number: int) -> tuple[int, int, Start]:
        """Return the epoch of batch `number`, which batch of it that is, and where it begins (0: it is whole)."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._rest and epoch == self._epoch:
            return epoch, batch - self._missing, self._rest
        return epoch, batch, 0

    def alike(self, number: int) -> int:
        """Return how many batches from `number` on may share a slot: the last one of an epoch may be shorter."""
        _, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        is_shorter = not plan.rows_vary and plan.last_rows < plan.most_rows
        return max(1, plan.batches_per_epoch - batch - is_shorter)

    def total_rows(self, number: int, count: int) -> int:
        """Return the rows of `count` batches from `number` on, all of one epoch."""
        epoch, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        if plan.rows_vary:
            return sum(plan.rows(epoch, each) for each in range(batch, batch + count))
        has_last = batch + count == plan.batches_per_epoch
        return (count - 1) * plan.most_rows + (plan.last_rows if has_last else plan.most_rows)


def bounds_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each of several batches begins and ends in what has one after the other."""
    return list(itertools.pairwise(itertools.accumulate(rows, initial=0)))
