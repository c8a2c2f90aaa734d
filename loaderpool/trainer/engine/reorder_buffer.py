"""Where a run's batches wait until they are taken, in order or not, and which of them were taken already."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from loaderpool.errors import LoaderpoolError
from loaderpool.transport.reports import RowFailure

__all__ = ["Arrival", "OrderedShelf", "Shelf", "UnorderedShelf"]


@dataclasses.dataclass(slots=True)
class Arrival:
    """A slot whose batches are all there (or whose error is)."""

    first: int
    count: int
    rows: int  # of each batch
    slot: int | None  # None: it holds another arrival
    rows_done: int = 0
    # Makes the error anew for who takes it: a kept exception would keep, through its traceback, all its frames.
    make_error: Callable[[], LoaderpoolError] | None = None
    error_row: int = 0
    oversize: tuple[Any, int] | None = None  # mapped memory file and its length
    row_failures: tuple[RowFailure, ...] = ()
    ticket: int = 0  # one of those whose work the slot holds
    keep: tuple[int, ...] | None = None  # which of the batches are wanted, counted from `first`; None: all


class Shelf(Protocol):
    """What the two shelves have in common. The caller holds the session's lock."""

    @property
    def begin_at(self) -> int:
        """The first batch that was not taken."""

    @property
    def taken(self) -> int:
        """How many batches were taken, counted from the run's first epoch on."""

    @property
    def done_before(self) -> int:
        """All batches before this one were taken, and nobody makes any of them again."""

    def put(self, arrival: Arrival) -> bool:
        """Keep an arrival for its turn; False: all its batches were taken before the run began anew."""

    def is_ready(self) -> bool:
        """Whether `front` has something."""

    def front(self) -> Arrival:
        """The arrival whose turn it is. It stays until `drop_front`."""

    def drop_front(self) -> None:
        """The arrival in front is taken."""

    def clear(self) -> list[Arrival]:
        """Take out all that wait."""

    def rest(self) -> Shelf:
        """An empty shelf for what was not taken from this one."""


class OrderedShelf:
    """Batches in their order.

    Args:
        begin_at: the first batch.
    """

    def __init__(self, begin_at: int) -> None:
        self.begin_at = begin_at
        self._by_first: dict[int, Arrival] = {}

    @property
    def taken(self) -> int:
        """See `Shelf`."""
        return self.begin_at

    @property
    def done_before(self) -> int:
        """See `Shelf`."""
        return self.begin_at

    def put(self, arrival: Arrival) -> bool:
        """See `Shelf`."""
        self._by_first[arrival.first] = arrival
        return True

    def is_ready(self) -> bool:
        """See `Shelf`."""
        return self.begin_at in self._by_first

    def front(self) -> Arrival:
        """See `Shelf`."""
        return self._by_first[self.begin_at]

    def drop_front(self) -> None:
        """See `Shelf`."""
        count = self._by_first[self.begin_at].count
        del self._by_first[self.begin_at]
        self.begin_at += count

    def clear(self) -> list[Arrival]:
        """See `Shelf`."""
        waiting, self._by_first = self._by_first, {}
        return list(waiting.values())

    def rest(self) -> OrderedShelf:
        """See `Shelf`."""
        return OrderedShelf(self.begin_at)


class UnorderedShelf:
    """Batches as they come, epoch by epoch.

    Args:
        begin_at: the first batch that was not taken.
        batches_per_epoch: of this shard.
        taken: stretches of batches behind `begin_at` that were taken: their first ones and lengths.
        taken_count: how many batches were taken, counted from the run's first epoch on; None: those before `begin_at`.
    """

    def __init__(
        self, begin_at: int, batches_per_epoch: int, taken: dict[int, int] | None = None, taken_count: int | None = None
    ) -> None:
        self.begin_at = begin_at
        self._per_epoch = batches_per_epoch
        self._taken = taken or {}
        self._taken_count = begin_at if taken_count is None else taken_count
        self._before = frozenset(batch for first, count in self._taken.items() for batch in range(first, first + count))
        self._by_epoch: dict[int, collections.deque[Arrival]] = {}
        # Of what this shelf was begun for all has arrived before this one, taken earlier or not.
        self._arrived_before = begin_at
        self._arrived: dict[int, int] = {}  # stretches behind that one

    @property
    def taken(self) -> int:
        """See `Shelf`."""
        return self._taken_count

    @property
    def done_before(self) -> int:
        """See `Shelf`. A batch that was taken may be in one ticket with one that was not."""
        return min(self.begin_at, self._arrived_before)

    def put(self, arrival: Arrival) -> bool:
        """See `Shelf`. The workers make stretches without gaps, so after a new begin some batches may come again."""
        self._arrived[arrival.first] = arrival.count
        while count := self._arrived.pop(self._arrived_before, 0):
            self._arrived_before += count
        if self._before:
            keep = tuple(at for at in range(arrival.count) if arrival.first + at not in self._before)
            if not keep:
                return False
            if len(keep) < arrival.count:
                arrival.keep = keep
        self._by_epoch.setdefault(arrival.first // self._per_epoch, collections.deque()).append(arrival)
        return True

    def is_ready(self) -> bool:
        """See `Shelf`."""
        return self._taken_count // self._per_epoch in self._by_epoch

    def front(self) -> Arrival:
        """See `Shelf`."""
        return self._by_epoch[self._taken_count // self._per_epoch][0]

    def drop_front(self) -> None:
        """See `Shelf`."""
        epoch = self._taken_count // self._per_epoch
        queue = self._by_epoch[epoch]
        arrival = queue.popleft()
        if not queue:
            del self._by_epoch[epoch]
        if arrival.keep is None:
            self._taken[arrival.first] = arrival.count
            self._taken_count += arrival.count
        else:
            self._taken.update((arrival.first + at, 1) for at in arrival.keep)
            self._taken_count += len(arrival.keep)
        while count := self._taken.pop(self.begin_at, 0):
            self.begin_at += count

    def clear(self) -> list[Arrival]:
        """See `Shelf`."""
        waiting, self._by_epoch = self._by_epoch, {}
        return [arrival for queue in waiting.values() for arrival in queue]

    def rest(self) -> UnorderedShelf:
        """See `Shelf`."""
        return UnorderedShelf(self.begin_at, self._per_epoch, dict(self._taken), self._taken_count)
