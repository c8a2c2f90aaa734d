"""Where a cache is kept: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

import loaderpool as lp


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), lp.ArgumentTypeError, 'Cache.where must be "memory" or a directory, got 5'),
        (("",), lp.ArgumentError, 'Cache.where must be "memory" or a directory, got an empty text'),
        (("a\0b",), lp.ArgumentError, r"Cache.where: 'a\\x00b' has a NUL character, which no file name has"),
        (("memory", 0), lp.ArgumentError, "Cache.max_bytes must be at least 1, got 0"),
        (("memory", "lots"), lp.ArgumentError, "Cache.max_bytes must be bytes such as .*, got 'lots'"),
        (
            ("somewhere", 100),
            lp.ArgumentError,
            "Cache.max_bytes of a cache on disk must be at least 4,194,304, got 100",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        lp.Cache(*arguments)
