"""`Fetched`: the items of a ticket, read from the source with one call for many rows.

A batch has one part, or several if it is large. A part is read when the first of its items is
needed. Parts depend on the plan alone, so the source gets the same calls for any number of workers.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loaderpool.sources.many_rows import MOST_ROWS
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.worker.rows import copy_of

_NO_ITEM = object()  # in place of an item that was returned already, or that was not read
_NOT_NOTED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class RowsReader(Protocol):
    """Reads rows of the source. `item_reader.ItemReader` implements it."""

    stops_at_errors: bool
    """True if no more rows are needed after the first one that fails."""
    through_cache: Callable[[int, Callable[[int], object]], object] | None
    """Returns the result of `fn` for a source index from the cache. If it is not stored, `fn` is
    called with the item that the second argument returns. None: there is no cache.
    """
    refusal: Exception | None
    """The `SourceError` of `read_many`. It concerns all rows, so none is skipped."""

    def read_many(self, indices: list[int]) -> list[object]:
        """Return the items of these source indices, read with one call.

        Raises:
            SourceError: The source has not returned one item for each index.
            BaseException: The exception of the source.
        """

    def begin_rows(self, epoch: int, position: int) -> None:
        """Seed the generators for a part, whose first row has this position."""

    def noting_read(self, index: int, rows: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that notes a read on the board while it runs.

        Args:
            index: Source index of the first row.
            rows: Number of rows.
        """

    def rows_to_read(self, epoch: int, row: int, indices: Sequence[int]) -> Sequence[int]:
        """Return the rows to read with the next call for a part. Row 0 is the part's first one.

        Args:
            epoch: The epoch.
            row: Row that is needed now.
            indices: Source indices of all rows of the part.
        """


class _Part:
    """Consecutive rows of a batch that are read with one call."""

    __slots__ = ("is_whole", "items", "lock", "start", "stop", "unused_from")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.items: list[object] = []  # empty: they were not read yet
        self.unused_from = 0  # no item from this row on was returned; row 0 is `start`
        self.is_whole = False  # True if one call has returned all items
        self.lock = threading.Lock()


class _Failed:
    """The error of a row that could not be read, in place of its item."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Fetched:
    """Items of a ticket. If an item is needed a second time, its part is read again.

    If a call raises, each row of the part is read by a call of its own. The error then belongs to
    the rows whose calls raise.

    Args:
        reader: reads rows.
        epoch: the ticket's epoch.
        positions, indices: position and source index of each row.
        bounds: first and end row of each batch.
        is_alone: True if each row is read by a call of its own, because a row may have ended the
            process.

    Attributes:
        others: returns the items of all tickets that threads work on. While another thread reads
            the part that a thread needs, that thread reads another part. None: there is one thread.
        spent_ns: time of all calls.
    """

    def __init__(
        self,
        reader: RowsReader,
        epoch: int,
        positions: npt.NDArray[np.int64],
        indices: Sequence[int],
        bounds: Iterable[tuple[int, int]],
        is_alone: bool,
    ) -> None:
        self._reader, self._epoch, self._is_alone = reader, epoch, is_alone
        self._positions, self._indices = positions, indices
        self._parts = [
            _Part(first, min(first + MOST_ROWS, stop))
            for start, stop in bounds
            for first in range(start, stop, MOST_ROWS)
        ]
        self._starts = [part.start for part in self._parts]
        self.others: Callable[[], Iterable[Fetched]] | None = None
        self.spent_ns = 0

    def reset(self) -> None:
        """Forget all items, because all rows of the ticket are made again."""
        for part in self._parts:
            part.items = []

    def value(self, row: int) -> object:
        """Return what the first function is called with: the item of a row, or a cached result."""
        through_cache = self._reader.through_cache
        if through_cache is None:
            return self.item(row)
        return through_cache(self._indices[row], lambda _: self.item(row))

    def item(self, row: int) -> object:
        """Return the item of a row.

        Raises:
            SourceError: the source has not returned one item for each row.
            BaseException: the exception of the source.
        """
        part = self._part(row)
        if self.others is None:
            item = self._take(part, row)
        else:
            with self._lock_of(part):
                item = self._take(part, row)
        if type(item) is _Failed:
            raise item.error
        return item

    def _take(self, part: _Part, row: int) -> object:
        at = row - part.start
        if not part.items or part.items[at] is _NO_ITEM:
            self._read(part, row)
        part.unused_from = max(part.unused_from, at + 1)
        item, part.items[at] = part.items[at], _NO_ITEM
        return item

    def prepare(self, row: int) -> None:
        """Read the item of a row, unless it was read before. `item` raises the errors of rows."""
        part = self._part(row)
        with self._lock_of(part):
            if not part.items:
                self._read(part, row)

    def values(self, start: int, stop: int) -> Iterable[object]:
        """Return the `value` of consecutive rows. No other thread may need their parts."""
        if self._reader.through_cache is not None:
            return (self.value(row) for row in range(start, stop))
        part = self._part(start)
        if stop <= part.stop:
            return self._of_part(part, start, stop)
        return self._of_parts(start, stop)

    def _of_parts(self, start: int, stop: int) -> Iterator[object]:
        for part in self._parts[bisect.bisect_right(self._starts, start) - 1 :]:
            if part.start >= stop:
                return
            yield from self._of_part(part, max(start, part.start), min(stop, part.stop))

    def _of_part(self, part: _Part, start: int, stop: int) -> Iterable[object]:
        if not part.items:
            self._read(part, start)
        first, end = start - part.start, stop - part.start
        if not part.is_whole or part.unused_from > first:
            # with `map`, a StopIteration would end all rows
            return (self.item(row) for row in range(start, stop))
        items, part.unused_from = part.items[first:end], end
        part.items[first:end] = [_NO_ITEM] * (end - first)
        return items

    def part_end(self, row: int) -> int:
        """Return the end row of the part that has this row."""
        return self._part(row).stop

    def read_ahead(self) -> bool:
        """Read a part that no thread has read or is reading. Return False if there is none."""
        for part in self._parts:
            if not part.items and part.lock.acquire(blocking=False):
                try:
                    if not part.items:
                        self._read(part, part.start)
                        return True
                finally:
                    part.lock.release()
        return False

    def _part(self, row: int) -> _Part:
        return self._parts[bisect.bisect_right(self._starts, row) - 1]

    def _lock_of(self, part: _Part) -> contextlib.AbstractContextManager[object]:
        """Return the lock of a part. If another thread reads it, read another part first."""
        if self.others is not None and part.lock.locked() and not part.items:
            any(other.read_ahead() for other in self.others())
        return part.lock

    def _read(self, part: _Part, row: int) -> None:
        """Read the items of a part, because this row is needed."""
        begun_ns, reader, first = clock.monotonic_ns(), self._reader, part.start
        all_indices = self._indices[first : part.stop]
        rows = reader.rows_to_read(self._epoch, row - first, all_indices)
        if not rows:  # they are all left out
            part.items = [_NO_ITEM] * len(all_indices)
            return
        indices = [*all_indices]
        if len(rows) < len(indices):
            indices = [all_indices[each] for each in rows]
        items: list[object] = []
        is_alone = self._is_alone
        if not is_alone:
            reader.begin_rows(self._epoch, int(self._positions[first]))
            items = self._call(indices)
            is_alone = len(indices) > 1 and type(items[0]) is _Failed
        if is_alone:
            items = []
            reader.begin_rows(self._epoch, int(self._positions[first]))
            for index in indices:
                # Copies, because the next call may refill the memory of this one's item.
                items += map(copy_of, self._call([index]))
                if reader.stops_at_errors and type(items[-1]) is _Failed:
                    items += [items[-1]] * (len(indices) - len(items))
                    break
        part.is_whole = (
            len(rows) == len(all_indices) and not is_alone and type(items[0]) is not _Failed
        )
        if len(rows) == len(all_indices):
            part.items, part.unused_from = items, 0
        else:
            part.items = part.items or [_NO_ITEM] * len(all_indices)
            for each, item in zip(rows, items, strict=True):
                part.items[each] = item
        self.spent_ns += clock.monotonic_ns() - begun_ns

    def _call(self, indices: list[int]) -> list[object]:
        """Return the items of one call. If it raises, return one `_Failed`."""
        is_noted = self.others is None
        with self._reader.noting_read(indices[0], len(indices)) if is_noted else _NOT_NOTED:
            try:
                return self._reader.read_many(indices)
            except Exception as error:
                if is_of_a_handler(error) or error is self._reader.refusal:
                    raise
                return [_Failed(error)]
