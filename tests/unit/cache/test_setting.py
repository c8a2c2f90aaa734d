"""Where a cache is kept: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

import loaderpool as lp


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), lp.ArgumentError, 'Cache.where must be "memory" or a directory, got 5'),
        (("",), lp.ArgumentError, "Cache.where must be .* a directory, got ''"),
        (("a\0b",), lp.ArgumentError, r"Cache.where must be .* a directory, got 'a\\x00b'"),
        (("memory", 0), lp.ArgumentError, "Cache.max_bytes must be at least 1, got 0"),
        (("memory", "lots"), lp.ArgumentError, "Cache.max_bytes must be a number of bytes .*, got 'lots'"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        lp.Cache(*arguments)
