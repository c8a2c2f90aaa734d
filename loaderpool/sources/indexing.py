"""Sources that are read by index, and indices with the semantics of Python sequences."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from loaderpool.errors import brief

Keys = Sequence[int] | npt.NDArray[np.int64]
"""Numbers by which items of a source are read. Those of a mix are an array."""


class Indexed(Protocol):
    """A source that a loader reads by index, from 0 to its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class Sized:
    """A user's object with the length that it had when the loader was made.

    Its own `len` may run a query, or may change.
    """

    __slots__ = ("_size", "items")

    def __init__(self, items: Indexed, size: int) -> None:
        self.items, self._size = items, size

    def __len__(self) -> int:
        return self._size

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the user's object, for messages (`walk.parts_of`)."""
        return [("", self.items)]

    # A property that returns the object's own bound method, so reading an item costs no extra call.
    @property
    def __getitem__(self) -> Callable[[int], object]:
        return self.items.__getitem__


def position_of(index: SupportsIndex, size: int) -> int:
    """Return the position of an index from 0 on; a negative index counts from the end.

    Raises:
        IndexError: the index is out of range.
        TypeError: the index is not an integer.
    """
    try:
        position = operator.index(index)
    except TypeError:
        raise TypeError(
            f"a source index must be an integer, such as source[0], got {brief(index)}"
        ) from None
    if position < 0:
        position += size
    if not 0 <= position < size:
        raise IndexError(
            f"index {operator.index(index)} is out of range for a source of {size} items"
        )
    return position


class MixRecords:
    """Records of the sources of a mix, one source after the other."""

    def __init__(self, sources: Sequence[Indexed]) -> None:
        self.sources = sources
        self._starts = [*itertools.accumulate(map(len, sources), initial=0)]

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the sources with their numbers, for messages (`walk.parts_of`)."""
        return [(f"source [{number}]", each) for number, each in enumerate(self.sources)]

    @property
    def are_indices(self) -> bool:
        """True if the sources are ranges, and each record is its own number."""
        ranges = map(range, self._starts, self._starts[1:])
        return all(type(each) is range for each in self.sources) and [*ranges] == [*self.sources]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, record: SupportsIndex) -> object:
        record = operator.index(record)
        source = bisect_right(self._starts, record) - 1
        return self.sources[source][record - self._starts[source]]

    def parts(self, records: Keys) -> tuple[list[Indexed], list[int]]:
        """Return the source of each record, and the record's index in that source."""
        starts = np.array(self._starts)
        numbers = starts[1:].searchsorted(records, side="right")
        sources = np.fromiter(self.sources, object, len(self.sources))
        return sources[numbers].tolist(), (records - starts[numbers]).tolist()
