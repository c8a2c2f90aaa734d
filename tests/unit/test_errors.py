"""Values as messages show them."""

from __future__ import annotations

from typing import Any

import pytest

from loaderpool.errors import brief

Unrelated = type("array", (), {"__repr__": lambda self: "mine"})  # by this name reprlib takes it for Python's own


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        ("a\nb", "'a\\nb'"),
        ([1, (2, None)], "[1, (2, None)]"),
        pytest.param(10**5000, "<int>", id="digits"),
        (Unrelated(), "<array>"),
        (b"abc", "b'abc'"),
    ],
)
def test_a_value_is_shown_by_its_repr(value: Any, shown: str) -> None:
    assert brief(value) == shown


LARGE = [b"x" * (1 << 20), bytearray(1 << 20), dict.fromkeys(range(1 << 20)), {*range(1 << 20)}, [0] * (1 << 20)]


@pytest.mark.parametrize("value", LARGE, ids=lambda value: type(value).__name__)
def test_of_a_large_value_little_is_written(value: Any) -> None:
    assert len(brief(value)) <= 200
