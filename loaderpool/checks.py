"""Checks of arguments from users: integers, bytes, paths, functions.

Each check returns the value in one form, or raises an ArgumentError that names the argument.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from loaderpool.errors import ArgumentError, brief, shortened
from loaderpool.system.annotations import Function, signature_of

if TYPE_CHECKING:
    from pathlib import Path

# Smaller: nanoseconds that round to 0 would mean "no timeout". Larger: the 64-bit words of messages
# cannot hold it.
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 0.001, 10**9
# Linux's limits, in bytes. Checked here, because the system's error contains the whole path.
_LONGEST_PATH, _LONGEST_NAME = 4095, 255
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}

_Checked = TypeVar("_Checked")


def whole_number(
    name: str, value: Any, *, at_least: int, at_most: int | None = None, hint: str = ""
) -> int:
    """Return a number within bounds from an object with `__index__`, except bool.

    Raises:
        ArgumentError: it is not such a number.
    """
    suffix = f" ({hint})" if hint else ""
    if isinstance(value, bool):
        raise ArgumentError(f"{name} must be an integer, got {brief(value)}{suffix}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(
            f"{name} must be an integer, got {brief(value)} of type {type(value).__name__}{suffix}"
        ) from None
    if number < at_least:
        raise ArgumentError(f"{name} must be at least {at_least}, got {brief(number)}{suffix}")
    if at_most is not None and number > at_most:
        raise ArgumentError(f"{name} must be at most {at_most}, got {brief(number)}{suffix}")
    return number


def or_none(
    name: str, value: object, *, check: Callable[..., _Checked], **bounds: object
) -> _Checked | None:
    """Return the checked value; None stays None."""
    return None if value is None else check(name, value, **bounds)


def one_of(name: str, value: object, *, values: Sequence[object], also: str = "") -> Any:
    """Return the value if it is one of `values`: True, False, None or a string."""
    plain = bool(value) if isinstance(value, np.bool_) else value
    if any(isinstance(plain, type(each)) and plain == each for each in values):
        return plain
    *most, last = (f'"{each}"' if isinstance(each, str) else str(each) for each in values)
    raise ArgumentError(f"{name} must be {', '.join(most)} or {last}{also}, got {brief(value)}")


flag: Callable[..., bool] = functools.partial(one_of, values=(True, False))


def read_bytes_count(name: str, value: object) -> int | None:
    """Return a number of bytes, at least 1, from an int or a string such as "512MiB" or "1.5GB".

    None stays None.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        return whole_number(
            name, value, at_least=1, hint='a number of bytes, or a string such as "512MiB"'
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(?:b|bytes)?\s*", value, re.IGNORECASE)
    amount = 0 if match is None else float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not 1 <= amount < math.inf:
        raise ArgumentError(
            f'{name} must be a number of bytes >= 1 or a string such as "512MiB", '
            f"got {brief(value)}"
        )
    return int(amount)


def read_seconds(name: str, value: object) -> float | None:
    """Return a number of seconds that a wait supports; None stays None."""
    if value is None:
        return None
    # `Real` has no comparison with numbers, for mypy.
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name} must be a number of seconds or None, got {brief(value)}")
    if not _MIN_TIMEOUT_S <= number <= _MAX_TIMEOUT_S:  # also refuses NaN
        bounds = f"from {_MIN_TIMEOUT_S} to {_MAX_TIMEOUT_S}"
        raise ArgumentError(
            f"{name} must be {bounds} seconds, or None for no limit, got {brief(value)}"
        )
    return float(value)


def read_path(name: str, value: object) -> Path:
    """Return the path of a file to write. The file system is not checked."""
    from pathlib import Path  # imported here, because `import loaderpool` does not need it

    if not isinstance(value, (str, os.PathLike)) or isinstance(text := os.fspath(value), bytes):
        raise ArgumentError(
            f"{name} must be the path of a file, got {brief(value)} of type {type(value).__name__}"
        )
    if not text or "\0" in text:
        raise ArgumentError(f"{name} must be the path of a file, got {brief(text)}")
    if len(os.fsencode(text)) > _LONGEST_PATH or any(
        len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts
    ):
        raise ArgumentError(f"{name} is too long for the path of a file, got {brief(text)}")
    return Path(text)


def whole_numbers(name: str, value: object, *, at_most: int) -> tuple[int, ...]:
    """Return integers from 1 on, from any ordered iterable."""
    if isinstance(value, (str, bytes, Mapping, AbstractSet)) or not isinstance(value, Iterable):
        raise ArgumentError(
            f"{name} must be a list of integers, got {brief(value)} of type {type(value).__name__}"
        )
    return tuple(
        whole_number(f"{name}[{number}]", each, at_least=1, at_most=at_most)
        for number, each in enumerate(value)
    )


def check_signature(name: str, function: Function, example: str, may_take: tuple[str, ...]) -> None:
    """Check that a function can be called as `example` shows.

    Keyword arguments of `may_take` that the function accepts are passed too.
    """
    # The signature of the wrapper itself counts, not the one of `functools.wraps`, if both can be
    # read.
    signature = signature_of(function, follow_wrapped=False) or signature_of(
        function, follow_wrapped=True
    )
    if signature is None:
        return
    arguments = [None] if example else []
    keywords = {
        word: None
        for word in may_take
        if open_parameter(function, word, len(arguments)) is not None
    }
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        called = (
            f"{getattr(function, '__qualname__', type(function).__name__)}"
            f"{shortened(_shown(signature))}"
        )
        missing = re.search(r"missing .*'\w*(gen|rand|rng|seed|state)\w*'", str(error))
        is_for_rng = missing is not None and "rng" in may_take and "rng" not in keywords
        more = ". Name a parameter rng to get a random number generator" * is_for_rng
        if "missing a required" in str(error) and not is_for_rng:
            more = _advice_on_missing(name, example, signature)
        text = f"{name} must be callable as {name}({example}), but {called} is not: {error}{more}"
        raise ArgumentError(text) from None


def _advice_on_missing(name: str, example: str, signature: inspect.Signature) -> str:
    """Return the advice for a function that has more parameters than its call passes."""
    required = [
        each.name
        for each in signature.parameters.values()
        if each.kind in _BY_POSITION and each.default is each.empty
    ]
    advice = ""
    if name == "make_generator" and not example:
        return f". Pass shards=, one value of {required[0]} for each generator" if required else ""
    if name in ("fn", "augment") and len(required) > 1:
        advice = f". Write def {name}({example}): {', '.join(required)} = {example}"
    if name == "fn":
        advice += (
            '. It gets one item. An item of columns in a dict has row["label"], and of columns in '
            "a tuple row[1]"
        )
    return advice


def open_parameter(function: object, name: str, given: int = 1) -> inspect.Parameter | None:
    """Return the parameter that a call with `name=` sets; None if it must not be set.

    None: there is no such parameter, or the user sets it.

    The user sets it if `partial` or a positional argument binds it, or if its default is not None.
    The functions are checked in the order of the calls. So the default of a wrapper counts, not the
    signature that `functools.wraps` shows.
    """
    if not callable(function):
        return None
    if isinstance(function, functools.partial):
        bound = sum(argument is not _PLACEHOLDER for argument in function.args)
        return (
            None
            if name in function.keywords
            else open_parameter(function.func, name, given + bound)
        )
    if isinstance(function, types.MethodType):
        return open_parameter(function.__func__, name, given + 1)
    signature = signature_of(function, follow_wrapped=False)
    if signature is not None:
        parameters = signature.parameters.values()
        by_position = [each.name for each in parameters if each.kind in _BY_POSITION][:given]
        found = next(
            (each for each in parameters if each.name == name and each.kind in _BY_NAME), None
        )
        if found is not None:
            is_open = name not in by_position and (
                found.default is None or found.default is inspect.Parameter.empty
            )
            return found if is_open else None
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
            return None
    # The function passes keyword arguments on to the function that it wraps.
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None and isinstance(function.__call__, types.MethodType):
        wrapped = function.__call__
    return open_parameter(wrapped, name, given)


def is_async(function: object) -> bool:
    """Return True if a function is declared with `async def`, so that its calls are coroutines.

    A `partial` of such a function counts, too, as does an object with an async `__call__`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004  # its declaration is read
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# Placeholder in a partial for an argument that the call passes, from Python 3.14 on.
_PLACEHOLDER: object = getattr(functools, "Placeholder", object())
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _shown(signature: inspect.Signature) -> str:
    """Return a signature as text. Python 3.14 would put quotes around annotations that are text."""
    if sys.version_info >= (3, 14):
        return signature.format(quote_annotation_strings=False)
    return str(signature)
