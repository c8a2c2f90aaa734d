"""Where a cache is kept: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

import loaderpool as lp


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), lp.ArgumentTypeError, 'must be "memory", a directory or a loaderpool.Cache, got 5'),
        (("",), lp.ArgumentError, 'must be "memory" or a directory, got an empty text'),
        (("a\0b",), lp.ArgumentError, r"'a\\x00b' has a NUL character, which no file name has"),
        (("memory", 0), lp.ArgumentError, "max_bytes must be at least 1, got 0"),
        (("memory", "lots"), lp.ArgumentError, "max_bytes must be bytes such as .*, got 'lots'"),
        (("somewhere", 100), lp.ArgumentError, "max_bytes of a cache on disk must be at least 4,194,304, got 100"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lp.Cache(*arguments)
