"""Representation of values in messages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from loaderpool.errors import brief, counted

Unrelated = type(
    "array", (), {"__repr__": lambda self: "mine"}
)  # reprlib takes a class with this name for Python's own


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        ("a\nb", "'a\\nb'"),
        ([1, (2, None)], "[1, (2, None)]"),
        (b"abc", "b'abc'"),
    ],
)
def test_a_value_is_shown_by_its_repr(value: Any, shown: str) -> None:
    assert brief(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(10**5000, "<int.*>"), (Unrelated(), "<array>|mine")], ids=["int", "class"]
)
def test_a_value_that_reprlib_refuses_is_shown_by_its_type(value: Any, shown: str) -> None:
    assert re.fullmatch(shown, brief(value))  # Python 3.14 accepts both


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 item"), (0, "0 items"), (1_234_567, "1,234,567 items"), (1.5, "1.5 items")],
)
def test_counts_have_all_digits_and_a_plural(number: float, text: str) -> None:
    assert counted(number, "item") == text
