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
