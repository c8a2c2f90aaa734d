"""Indices with the semantics of Python sequences."""

from __future__ import annotations

import operator
from typing import Protocol, SupportsIndex


class Indexed(Protocol):
    """A source that a loader reads by index, from 0 to its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def position_of(index: SupportsIndex, size: int) -> int:
    """Return the position of an index from 0 on; a negative index counts from the end.

    Raises:
        IndexError: the index is out of range.
        TypeError: the index is not an integer.
    """
    position = operator.index(index)
    if position < 0:
        position += size
    if not 0 <= position < size:
        raise IndexError(
            f"index {operator.index(index)} is out of range for a source of {size} items"
        )
    return position
