"""Indices as sequences of Python have them."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def position_of(index: SupportsIndex, size: int) -> int:
    """Return the position that an index means; IndexError: there is none; TypeError: it is no integer."""
    position = operator.index(index)
    if position < 0:
        position += size
    if not 0 <= position < size:
        raise IndexError(
            f"index {operator.index(index)} is out of range for a source of {size} items"
        )
    return position
