"""What the signatures of the user's functions say: whether they can be called as they will be, and what they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from loaderpool.errors import ArgumentTypeError

__all__ = ["check_signature", "parameters_of"]


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
