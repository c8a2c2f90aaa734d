"""Plans of epochs whose order is drawn: their batches, and their arrays in shared memory.

A drawn order may also determine which positions form a batch. Global batch g has the positions
`stops[g - 1]` to `stops[g]`. With S shards, shard r gets the global batches r, S + r, 2·S + r, ...
If the number of global batches is no multiple of S, the remaining ones are divided into S parts, as
evenly as possible. A part never has rows of two batches, because the rows of a batch may have been
chosen to fit together:

```
    position   0     3         8  9       13     16  18   stops = 3 8 9 13 16 18, S = 4
               ├─────┼─────────┼──┼───────┼──────┼───┤
    shard      │  0  │    1    │2 │   3   │0 │ 1 │2│3│
    batch      └────────────── 0 ─────────┴─── 1 ────┘
```

If the remaining batches have fewer rows than there are shards, rows are repeated.

The main process writes the arrays of an epoch into shared memory once (`write_order`), where the
supervisor and the workers find them (`read_order`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan
from loaderpool.plan.order import DrawnOrder
from loaderpool.system.hashes import checksum

if TYPE_CHECKING:
    from loaderpool.plan.taken import Start, Taken

NO_STOPS = np.empty(0, np.int64)
# Words before the arrays: number of positions, and the length of each array.
_HEAD = 4
_WORD = 8
HEAD_BYTES = _HEAD * _WORD


@dataclass(frozen=True, eq=False)
class DrawnBatches(Plan):
    """Plan of a drawn order that determines which positions form a batch.

    The plan's start counts global batches.
    """

    rows_vary: ClassVar[bool] = True

    stops: npt.NDArray[np.int64] = field(default_factory=lambda: NO_STOPS, kw_only=True)
    """Position after each global batch: int64[batches], ascending, from 1 to the order's size."""

    @cached_property
    def most_rows(self) -> int:
        """Rows of the largest global batch. The batch size, until an epoch's order is drawn."""
        if not len(self.stops):
            return self._full_rows
        return int(np.diff(self.stops, prepend=0).max())

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows of all batches of this shard."""
        sizes = np.diff(self._bounds[: self._tail], prepend=0)[self._first :]
        full = int(sizes[self.shard_index :: self.num_shards].sum())
        has_tail = self.batches_per_epoch > self._full_batches
        return full + (self.rows(0, self._full_batches) if has_tail else 0)

    def batch_rows(self, epoch: int, batch: int, count: int) -> tuple[int, ...]:
        if self.num_shards > 1 or not 0 < count <= self.batches_per_epoch - batch:
            return super().batch_rows(epoch, batch, count)
        first = self._first + batch
        stops = self._bounds[first : first + count].tolist()
        return tuple(map(operator.sub, stops, [self._before(first), *stops]))

    def positions(self, epoch: int, batch: int, count: int = 1) -> npt.NDArray[np.int64]:
        if self.num_shards > 1 or not 0 < count <= self.batches_per_epoch - batch:
            return super().positions(epoch, batch, count)
        # All batches of a single shard are consecutive.
        first = self._span(epoch, batch)[0]
        rows = np.arange(first, self._span(epoch, batch + count - 1)[1], dtype=np.int64)
        return self._located(epoch, rows)

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Arguments `batches` of `drawn`, which give this plan's batches."""
        return self.stops, NO_STOPS

    def drawn(self, table: npt.NDArray[Any], size: int, *batches: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of an epoch. `batches` are the arrays of its batches (see `arrays`)."""
        plan = super().drawn(table, size)
        return replace(plan, stops=batches[0])  # type: ignore[call-arg]

    def start_after(self, epoch: int, batches: int) -> Start:
        """Return the start after `batches` batches of each shard, in global batches."""
        if batches >= self.batches_per_epoch:
            return len(self.stops)
        return self._start_at(batches * self.num_shards)

    def _located(self, epoch: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._taken is None:
            return rows
        positions: npt.NDArray[np.int64] = self._rows_taken.numbers(rows)
        return positions

    @cached_property
    def _rows_taken(self) -> Taken:
        """The left-out global batches, as intervals of positions."""
        from loaderpool.plan.taken import Taken

        assert self._taken is not None
        bounds = np.append(0, self.stops)
        gaps = [bounds[[begin, end]].tolist() for _, begin, end in self._taken.gaps()]
        return Taken((0, *itertools.chain.from_iterable(gaps)))

    @cached_property
    def _bounds(self) -> npt.NDArray[np.int64]:
        """End of each global batch that is not left out, counted as the rows of `_located`."""
        if self._taken is None:
            return self.stops
        rows = np.diff(self.stops, prepend=0)
        left_out = [np.arange(begin, end) for _, begin, end in self._taken.gaps()]
        return np.delete(rows, np.concatenate([NO_STOPS, *left_out])).cumsum()

    @cached_property
    def _stock(self) -> tuple[tuple[int, int, int], ...]:
        full = (len(self._bounds) - self._first) // self.num_shards
        tail = 0 if self.drop_remainder else self._size - self._before(self._tail)
        return ((self.most_rows, full, tail),)

    @cached_property
    def _size(self) -> int:
        return self.order.size if self._taken is None else int(self._bounds[-1])

    @property
    def _tail(self) -> int:
        """First of the remaining global batches, whose rows are divided among all shards."""
        count = len(self._bounds)
        return count - (count - self._first) % self.num_shards

    def _before(self, batch: int) -> int:
        """Return the first row of a global batch."""
        return int(self._bounds[batch - 1]) if batch else 0

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        self._check_batches(batch)
        if batch < self._full_batches:
            number = self._first + batch * self.num_shards + self.shard_index
            return self._before(number), self._before(number + 1)
        return self._parts_of_tail[self.shard_index % len(self._parts_of_tail)]

    @cached_property
    def _parts_of_tail(self) -> list[tuple[int, int]]:
        """First row and end of each part of the remaining global batches."""
        import heapq  # imported here, because few plans divide batches

        # Until the order of an epoch is drawn, the epoch counts as one batch.
        ends = self._bounds[self._tail :].tolist() or [self.order.size]
        bounds = [*itertools.pairwise([self._before(self._tail), *ends])]
        # Add a part to the batch with the largest parts, until there is a part for each shard.
        largest: list[tuple[float, int, int]]
        largest = [(start - stop, at, 1) for at, (start, stop) in enumerate(bounds)]
        heapq.heapify(largest)
        counts = [1] * len(bounds)
        for _ in range(self.num_shards - len(bounds)):
            _, at, parts = largest[0]
            start, stop = bounds[at]
            if parts == stop - start:  # all parts have one row
                break
            counts[at] = parts + 1
            heapq.heapreplace(largest, ((start - stop) / (parts + 1), at, parts + 1))
        return [
            (start + (stop - start) * part // parts, start + (stop - start) * (part + 1) // parts)
            for (start, stop), parts in zip(bounds, counts, strict=True)
            for part in range(parts)
        ]


def checksum_of(plan: Plan) -> str:
    """Return a checksum of the arrays of a drawn order."""
    return checksum(np.ascontiguousarray(part).data for part in parts_of(plan))


def has_same_arrays(plan: Plan, other: Plan) -> bool:
    """Return True if two drawn orders have the same arrays, without a comparison of numbers."""
    mine, others = parts_of(plan), parts_of(other)
    pairs = zip(mine[1:], others[1:], strict=True)
    return plan.order.size == other.order.size and all(
        one is another or not len(one) + len(another) for one, another in pairs
    )


def order_bytes(plan: Plan) -> int:
    """Return the size of a drawn order's arrays in shared memory."""
    return sum(part.nbytes for part in parts_of(plan))


def write_order(plan: Plan, write: Callable[[int, npt.NDArray[Any]], object], offset: int) -> None:
    """Write the arrays of a drawn order into shared memory.

    Args:
        plan: Plan of the epoch.
        write: Writes an array into the shared memory, from a byte on.
        offset: First byte of the arrays.
    """
    for part in parts_of(plan):
        write(offset, np.ascontiguousarray(part))
        offset += part.nbytes


def copy_of_order(plan: Plan, memory: Any, offset: int) -> npt.NDArray[np.uint8]:
    """Return a copy of the bytes that `write_order` has written, for another machine.

    Args:
        plan: Plan of the loader.
        memory: The shared memory.
        offset: First byte of the arrays.
    """
    nbytes = order_bytes(read_order(plan, memory, offset))
    copy: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes, offset).copy()
    return copy


def read_order(plan: Plan, memory: Any, offset: int) -> Plan:
    """Return the plan of the epoch whose arrays `write_order` has written, without a copy.

    Args:
        plan: Plan of the loader.
        memory: The shared memory.
        offset: First byte of the arrays.
    """
    size, *counts = np.frombuffer(memory, np.int64, _HEAD, offset).tolist()
    assert isinstance(plan.order, DrawnOrder)
    offset += HEAD_BYTES
    parts: list[npt.NDArray[Any]] = []
    dtypes: tuple[Any, ...] = (plan.order.dtype, np.int64, np.int64)
    for count, dtype in zip(counts, dtypes, strict=True):
        parts.append(np.frombuffer(memory, dtype, count, offset))
        offset += count * _WORD
    return plan.drawn(parts[0], size, *parts[1:])


def parts_of(plan: Plan) -> tuple[npt.NDArray[Any], ...]:
    """Return the arrays of a drawn order as in shared memory: head, table, and batches."""
    assert isinstance(plan.order, DrawnOrder)
    assert plan.order.table is not None, "an order that was not drawn"
    batches = plan.arrays if isinstance(plan, DrawnBatches) else (NO_STOPS, NO_STOPS)
    arrays = (plan.order.table, *batches)
    return np.array([plan.order.size, *map(len, arrays)], np.int64), *arrays
