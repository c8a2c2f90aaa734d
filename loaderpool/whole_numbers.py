"""The one check of whole numbers that users give."""

from __future__ import annotations

import numbers
import operator
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, *, at_least: int, at_most: int | None = None, hint: str = "") -> int:
    """A whole number within bounds, from anything that is one for Python.

    Raises:
        ArgumentTypeError: it is none.
        ArgumentError: it is out of bounds.
    """
    suffix = f" ({hint})" if hint else ""
    if isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}{suffix}")
    try:
        number = operator.index(value)
    except TypeError:
        if isinstance(value, numbers.Real) and float(value).is_integer():
            suffix += f"; did you mean {int(float(value))}?"
        raise ArgumentTypeError(
            f"{name} must be a whole number, got {value!r} of type {type(value).__name__}{suffix}"
        ) from None
    if number < at_least:
        raise ArgumentError(f"{name} must be at least {at_least}, got {number}{suffix}")
    if at_most is not None and number > at_most:
        raise ArgumentError(f"{name} must be at most {at_most}, got {number}{suffix}")
    return number
