"""A walk comes to all that functions, classes and objects hold, by every way, and names it as code would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from loaderpool.system.walk import MOST_ITEMS, parts_of, walk

TABLE = [1, 2]


class Settings:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 3


class Dataset:
    scale = 1.5

    def __init__(self) -> None:
        self.settings = Settings()
        self.files = {"a": b"x"}

    def load(self, i: int) -> Any:
        return TABLE[i]


def functions() -> dict[str, Any]:
    records, dataset = ["one"], Dataset()

    def closure(i: int, guard: str = "first", *, keyword: str = "second") -> Any:
        return records[i], dataset, lambda: TABLE

    @functools.wraps(closure)
    def wrapper(i: int) -> Any:
        return closure(i)

    return {
        "closure": closure,
        "wrapper": wrapper,
        "method": dataset.load,
        "partial": functools.partial(max, records, key=closure),
        "cached": functools.lru_cache(closure),
        "builtin": records.append,
    }


def names(root: Any, enters: Callable[[Any], bool] = lambda value: True) -> set[str]:
    return {found.name for found in walk({"fn": root}, enters)}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("closure", {"records", "TABLE", "guard", "keyword", "dataset.settings.size", "dataset.files['a']"}),
        ("wrapper", {"closure", "records", "closure.__wrapped__"}),
        ("method", {"fn.settings", "TABLE", "fn.settings.size"}),
        ("partial", {"key", "records"}),
        ("cached", {"records"}),
        ("builtin", {"fn[0]"}),
    ],
)
def test_what_a_function_leads_to_is_named_as_code_names_it(form: str, expected: set[str]) -> None:
    assert expected <= names(functions()[form])


def test_only_what_is_to_be_entered_is() -> None:
    assert names(functions()["closure"], lambda value: not isinstance(value, Dataset)).isdisjoint({"dataset.settings"})
    assert names([[1]] * (MOST_ITEMS + 1)) == {"fn"}  # data


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
