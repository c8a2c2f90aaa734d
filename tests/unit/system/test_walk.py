"""A walk visits all that functions, classes and objects hold, by every path, and names it as code
would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loaderpool.system.walk import _MOST_ITEMS, parts_of, walk

TABLE = [1, 2]


def names(root: Any, enters: Callable[[Any], bool] = lambda value: True) -> set[str]:
    return {found.name for found in walk({"fn": root}, enters)}


def test_data_are_not_entered() -> None:
    assert names([[1]] * (_MOST_ITEMS + 1)) == {"fn"}


def test_each_way_to_a_value_comes_and_a_ring_ends() -> None:
    ring: list[Any] = [TABLE, TABLE]
    ring.append(ring)
    assert [each.name for each in walk({"fn": ring}, lambda _: True)].count("fn[0]") == 1
    assert {"fn[1]", "fn[2]"} <= names(ring)


def test_no_code_of_the_users_is_called() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    assert [part.value for part in parts_of(Proxy())] == [Proxy]
