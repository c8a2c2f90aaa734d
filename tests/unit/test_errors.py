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


class Counted(int):
    """Counts how often two are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)


NAMED = type("bytes", (bytes,), {"__repr__": lambda self: pytest.fail("it was written whole")})
MANY = [Counted(number) for number in range(10_000, 0, -1)]


@pytest.mark.parametrize(
    "value", [NAMED(1 << 20), dict.fromkeys(MANY), {*MANY}, frozenset(MANY)], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("within", [lambda value: value, lambda value: [(value,)], lambda value: {"key": value}])
def test_what_is_large_is_cut_before_it_is_written_or_sorted(value: Any, within: Any) -> None:
    Counted.compared = 0
    brief(within(value))
    assert Counted.compared < 1000
