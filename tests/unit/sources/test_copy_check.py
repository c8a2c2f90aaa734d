"""Whether a generator can ask which of its copies it is: seen in its code and in what that refers to."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

import loaderpool as lp
from loaderpool.sources.copy_check import asks_which_copy

ROWS = list(range(10))


def plain() -> Iterator[int]:
    yield from ROWS


def asking() -> Iterator[int]:
    info = lp.worker_info()
    assert info is not None
    yield from ROWS[info.index :: info.count]


def asking_late() -> Iterator[Any]:
    yield "header"
    from loaderpool import worker_info

    yield worker_info()


def by_a_function() -> Iterator[int]:
    return itertools.chain(asking(), [1])


class Reader:
    def rows(self) -> Iterator[int]:
        yield from self._part

    @property
    def _part(self) -> list[int]:
        return list(asking())


class Derived(Reader):
    pass


class Callables:
    def __call__(self) -> Iterator[int]:
        return asking()

    @staticmethod
    def plain() -> Iterator[int]:
        return plain()


class Scenes:
    """What it reads is chosen outside."""

    def __init__(self) -> None:
        self.rows = np.arange(5)

    def generate_data(self) -> Iterator[Any]:
        yield from pd.DataFrame({"a": self.rows})["a"]


def in_a_table() -> Callable[[], Iterator[int]]:
    table = {"a": plain, "b": asking}
    return lambda: table["b"]()


def of_an_object() -> Callable[[], Iterator[int]]:
    readers = [Derived()]
    return lambda: itertools.chain.from_iterable(reader.rows() for reader in readers)


@functools.wraps(plain)
def wrapped() -> Any:
    return asking()


@pytest.mark.parametrize(
    "make",
    [
        asking, asking_late, by_a_function, Reader().rows, lambda: Derived().rows(), Callables(), in_a_table(), wrapped,
        of_an_object(), functools.partial(lambda reader: reader.rows(), Derived()), functools.lru_cache(asking),
        lambda ask=lp.worker_info: [ask()],
    ],
)  # fmt: skip
def test_one_that_asks_is_seen(make: Any) -> None:
    assert asks_which_copy(make)


@pytest.mark.parametrize(
    "make",
    [
        plain, lambda: iter([1]), itertools.count, Scenes().generate_data, lambda: Scenes().generate_data(),
        functools.partial(iter, ROWS), lambda: map(np.sqrt, ROWS), lambda: (lp.RaggedArray for _ in ROWS),
        lambda: pd.read_csv("x.csv", chunksize=4),
    ],
)  # fmt: skip
def test_one_that_never_asks_is_seen(make: Any) -> None:
    assert not asks_which_copy(make)


@pytest.mark.parametrize("knows", [True, False])
def test_installed_packages_are_followed_where_they_know_loaderpool(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = types.ModuleType("their_library")
    library.__file__ = "/x/site-packages/their_library/__init__.py"
    if knows:
        library.__dict__["loaderpool"] = lp
    exec("def inner():\n    return loaderpool.worker_info()\ndef rows():\n    return inner()\n", vars(library))
    monkeypatch.setitem(sys.modules, "their_library", library)

    def make() -> Any:
        import their_library  # type: ignore[import-not-found]

        return their_library.rows()

    assert asks_which_copy(make) == knows


class Lazy:
    """Such as six.moves has: what it stands for is imported at the first look, and may not be there."""

    def __getattr__(self, name: str) -> Any:
        raise ModuleNotFoundError(f"asked for {name}")


class Holding:
    of_the_class = Lazy()

    def __init__(self, held: Any) -> None:
        self.held = held

    def rows(self) -> Iterator[int]:
        yield from ROWS


class Asking(Holding):
    def parts(self) -> Iterator[Any]:
        yield self.held.worker_info()


def test_what_loads_at_a_look_is_not_loaded() -> None:
    assert not asks_which_copy(Holding(Lazy()).rows)


def test_a_module_that_an_object_holds_is_followed_as_one_that_a_function_names() -> None:
    tools = types.ModuleType("their_tools")
    vars(tools)["lp"] = lp
    for module in (lp, np, tools):
        assert not asks_which_copy(Holding(module).rows)
    assert asks_which_copy(Asking(lp).parts)
    exec("def rows():\n    return lp.worker_info()\n", vars(tools))
    assert asks_which_copy(Holding(tools).rows)
