"""What sources made of others have in common: their parts are named in errors, an index is as that of a list."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.recognise import Source, as_source
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.sources.stream import StreamSource


def named_source(source: Any, name: str) -> Source:
    """`as_source` of one of several; what is wrong with it is said of its name.

    Raises:
        SourceError: it cannot be read by index.
        ArgumentError: it is empty, or its columns are of different lengths.
    """
    try:
        found = as_source(source)
    except (ArgumentError, SourceError) as error:
        raise type(error)(f"{name}: {error}") from None
    if isinstance(found, (StreamSource, ReplicatedSource)):
        raise SourceError(
            f"{name}: source is a {found.kind}, which can only be iterated: give it __len__ and __getitem__, or pass "
            "list(source) where it fits in memory"
        )
    return found


def row_in_part(position: int, ends: Sequence[int]) -> tuple[int, int]:
    """Return which of several parts a position lies in, and which of its rows it is.

    Args:
        position: in all of them, one behind the other.
        ends: how many rows there are up to the end of each.
    """
    number = bisect.bisect_right(ends, position)
    return number, position - (ends[number - 1] if number else 0)


def position_of(index: SupportsIndex, size: int) -> int:
    """Return the position that an index means in a source of `size` items, 0 to size - 1.

    Args:
        index: -size to size - 1, of any integer type.
        size: items.

    Raises:
        IndexError: there is no such item; also what ends a plain `for` over the source.
        TypeError: it is no integer, such as a slice.
    """
    position = operator.index(index)
    if position < 0:
        position += size
    if not 0 <= position < size:
        raise IndexError(f"index {operator.index(index)} is not in a source of {size} items")
    return position
