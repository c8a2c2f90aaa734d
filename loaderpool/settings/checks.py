"""Checks of what users give, whose errors name the argument: whole numbers, bytes, functions that can be called."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

from loaderpool.errors import ArgumentError, ArgumentTypeError

# Below: nanoseconds that round to 0 would mean "no timeout". Above: what the messages' 64-bit words do not hold.
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 0.001, 10**9
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


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


def read_bytes_count(name: str, value: Any) -> int | None:
    """A number of bytes from an int or a text such as "512MiB" or "1.5GB"; None stays None.

    Raises:
        ArgumentError: not a positive number of bytes.
        ArgumentTypeError: neither int nor str.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(?:b|bytes)?\s*", value, re.IGNORECASE)
        if match is None:
            raise ArgumentError(f'{name} must be bytes such as 536870912 or "512MiB", got {value!r}')
        amount = float(match[1]) * _UNITS[(match[2] or "").lower()]
        if not math.isfinite(amount):
            raise ArgumentError(f"{name} is more bytes than there are anywhere, got {value!r}")
        count = int(amount)
    else:
        count = whole_number(name, value, at_least=1, hint='bytes; "512MiB" is read too')
    if count < 1:
        raise ArgumentError(f"{name} must be at least 1 byte, got {value!r}")
    return count


def auto_flag(name: str, value: Any) -> bool | Literal["auto"]:
    """True, False or "auto".

    Raises:
        ArgumentTypeError: something else.
    """
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(f'{name} must be True, False or "auto", got {value!r}')


def read_seconds(name: str, value: Any) -> float | None:
    """A number of seconds that a wait can have; None stays None.

    Raises:
        ArgumentError: too short or too long.
        ArgumentTypeError: no number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number of seconds or None, got {value!r}")
    seconds: Any = value  # `Real` has no comparison with numbers, for mypy
    if not _MIN_TIMEOUT_S <= seconds <= _MAX_TIMEOUT_S:  # not NaN either
        raise ArgumentError(
            f"{name} must be seconds from {_MIN_TIMEOUT_S} to {_MAX_TIMEOUT_S}, or None for no limit, got {value!r}"
        )
    return float(value)


def read_path(name: str, value: Any) -> Path:
    """The path of a file that shall be written; whether it can be is not looked at.

    Raises:
        ArgumentTypeError: it is no path.
        ArgumentError: no file can be called so.
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(text := os.fspath(value), bytes):
        raise ArgumentTypeError(f"{name} must be the path of a file, got {value!r} of type {type(value).__name__}")
    if not text or "\0" in text:
        raise ArgumentError(f"{name} must be the path of a file, got {text!r}")
    return Path(text)


def whole_numbers(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> tuple[int, ...]:
    """Whole numbers within bounds, out of anything that has an order and can be iterated.

    Raises:
        ArgumentError: one is out of bounds.
        ArgumentTypeError: no list, or one of something else.
    """
    if isinstance(value, (str, bytes, Mapping, AbstractSet)) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{name} must be a list of whole numbers, got {value!r} of type {type(value).__name__}")
    return tuple(
        whole_number(f"{name}[{number}]", each, at_least=at_least, at_most=at_most) for number, each in enumerate(value)
    )


def check_signature(name: str, function: Callable[..., Any], example: str, may_take: tuple[str, ...]) -> None:
    """Check that a function can be called as it will be.

    Args:
        name: of the argument.
        function: the user's.
        example: what it will be given; empty: nothing.
        may_take: what it is given besides, by name, if it has such parameters.

    Raises:
        ArgumentTypeError: it cannot.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function without one
        return
    arguments = [None] if example else []
    keywords = {word: None for word in may_take if word in signature.parameters}
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} must be callable as {name}({example}), but {_name_of(function)}{signature} is not: {error}"
        ) from None


def parameters_of(function: Callable[..., Any] | None) -> set[str]:
    """Names of the function's parameters; none where there is no function or its signature cannot be read."""
    if function is None:
        return set()
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
