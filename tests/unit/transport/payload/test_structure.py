"""Pickles of the same objects mean the same, even if their bytes differ. Pickles of changed objects
do not.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.ship import ship
from loaderpool.transport.payload.structure import compare, means_the_same, name_of_array


@dataclasses.dataclass
class Settings:
    size: int = 1
    names: list[str] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("items", "size")

    def __init__(self) -> None:
        self.size, self.items = 1, [2]


class Names(list[str]):
    pass


def scaled(item: int, by: list[int]) -> int:
    return item * by[0]


def make() -> Any:
    """Return an object whose class and functions are pickled by value, with many kinds of
    attributes.
    """
    table, stage = [1], 0

    class Color(enum.Enum):
        RED = 1
        BLUE = "b"

    def helper(item: int) -> int:
        def inner() -> int:
            return stage + len(table)

        return inner() + item

    class Dataset:
        kind = "train"

        def __init__(self) -> None:
            self.mode, self.size, self.items = "train", 1, [1, 2, 3]
            self.many = list(range(100))
            self.floats = [0.5, float("nan"), -0.0]
            self.named = {"a": 1, "b": [1]}
            self.words, self.numbers = {"x", "y", "z"}, frozenset({1, 2})
            self.array, self.large = np.arange(5), np.zeros(100_000)
            self.color, self.colors = Color.RED, {Color.RED, Color.BLUE}
            self.settings, self.slotted = Settings(), Slotted()
            self.names, self.ordered = Names(["a"]), collections.OrderedDict(a=1)
            self.lists, self.queue = (
                collections.defaultdict(list, {1: [2]}),
                collections.deque([1, 2], 5),
            )
            self.path, self.day, self.pattern = (
                pathlib.Path("/a"),
                datetime.date(2020, 1, 1),
                re.compile("a+"),
            )
            self.partial, self.bound = functools.partial(scaled, by=[1]), self.is_training
            self.nested, self.raw = (1, (2, [3])), bytearray(b"abc")
            self.self, self.same_items = self, self.items
            self.helper = helper

        def is_training(self) -> bool:
            return self.mode == "train"

        @functools.cached_property
        def heavy(self) -> list[int]:
            return [len(self.items)] * 3

    def rebind(value: int) -> None:
        nonlocal stage
        stage = value

    dataset = Dataset()
    dataset.table, dataset.rebind = table, rebind  # type: ignore[attr-defined]
    return dataset


def pickled(dataset: Any) -> bytes:
    rebind = vars(dataset).pop("rebind")  # changes the value of a variable, and is not pickled
    try:
        return ship({"source": dataset}).pickled
    finally:
        dataset.rebind = rebind


def set_to(name: str, value: Any) -> Callable[[Any], object]:
    return lambda dataset: setattr(dataset, name, value)


def bind_again(name: str) -> Callable[[Any], object]:
    return lambda dataset: setattr(dataset, name, type(dataset)().__dict__[name])


SAME: dict[str, Callable[[Any], object]] = {
    "nothing": lambda dataset: None,
    "an equal string": set_to("mode", "".join(["tr", "ain"])),
    "a value is computed and kept": lambda dataset: dataset.heavy,
    "a kept value is dropped": lambda dataset: vars(dataset).pop("heavy", None),
    "the order of attributes": lambda dataset: setattr(dataset, "size", vars(dataset).pop("size")),
    "an equal set": set_to("words", set("zyx")),
    "an equal frozenset": set_to("numbers", frozenset({2, 1})),
    "equal floats": set_to("floats", [0.5, float("nan"), -0.0]),
    "an equal tuple": set_to("nested", (1, (2, [3]))),
    "equal settings": bind_again("settings"),
    "an equal partial": bind_again("partial"),
    "another large array, which is beside the pickle": set_to("large", np.ones(100_000)),
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "a string": set_to("mode", "val"),
    "an int becomes a float": set_to("size", 1.0),
    "an int becomes a bool": set_to("size", True),
    "an item of a list": lambda dataset: dataset.items.__setitem__(0, 5),
    "an item more": lambda dataset: dataset.items.append(5),
    "the type of an item of many": lambda dataset: dataset.many.__setitem__(50, 50.0),
    "the sign of zero": set_to("floats", [0.5, float("nan"), 0.0]),
    "a value of a dict": lambda dataset: dataset.named.update(a=2),
    "the order of a dict": lambda dataset: dataset.named.__setitem__("a", dataset.named.pop("a")),
    "a set": lambda dataset: dataset.words.add("w"),
    "a small array": lambda dataset: dataset.array.__setitem__(0, 7),
    "the shape of a large array": set_to("large", np.zeros((100, 1000))),
    "another member of an enum": lambda dataset: setattr(
        dataset, "color", type(dataset.color).BLUE
    ),
    "a set of members": lambda dataset: dataset.colors.discard(dataset.color),
    "a field of a dataclass": lambda dataset: setattr(dataset.settings, "size", 2),
    "a list in a dataclass": lambda dataset: dataset.settings.names.append("x"),
    "a slot": lambda dataset: setattr(dataset.slotted, "size", 2),
    "a list in a slot": lambda dataset: dataset.slotted.items.append(1),
    "a subclass of list": lambda dataset: dataset.names.append("b"),
    "an ordered dict": lambda dataset: dataset.ordered.update(b=2),
    "a defaultdict": lambda dataset: dataset.lists[5],
    "a deque": lambda dataset: dataset.queue.append(5),
    "a path": set_to("path", pathlib.Path("/b")),
    "a partial": set_to("partial", functools.partial(scaled, by=[2])),
    "a list in a partial": lambda dataset: dataset.partial.keywords["by"].append(1),
    "a list in a tuple": lambda dataset: dataset.nested[1][1].append(1),
    "a bytearray": lambda dataset: dataset.raw.extend(b"d"),
    "two lists that were one": lambda dataset: setattr(dataset, "same_items", [1, 2, 3]),
    "a closure variable": lambda dataset: dataset.rebind(3),
    "a list in a closure": lambda dataset: dataset.table.append(3),
    "another function": set_to("helper", lambda item: item),
    "a class attribute": lambda dataset: setattr(type(dataset), "kind", "val"),
    "a method": lambda dataset: setattr(type(dataset), "is_training", lambda self: False),
    "a new method": lambda dataset: setattr(type(dataset), "more", lambda self: 1),
    "a new attribute": set_to("more", 1),
    "an attribute less": lambda dataset: vars(dataset).pop("size"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_equal_objects_mean_the_same(change: Callable[[Any], object]) -> None:
    dataset = make()
    before = pickled(dataset)
    change(dataset)
    now = pickled(dataset)
    assert means_the_same(before, now)
    assert means_the_same(now, before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_objects_do_not(change: Callable[[Any], object]) -> None:
    dataset = make()
    before = pickled(dataset)
    change(dataset)
    now = pickled(dataset)
    assert not means_the_same(before, now)
    assert not means_the_same(now, before)


class Keeping:
    """An object without attributes until one is computed."""

    made: Any = 5

    @functools.cached_property
    def heavy(self) -> Any:
        return self.made() if callable(self.made) else self.made


def keeping_with_slots() -> Any:
    class Both(Slotted, Keeping):
        pass

    return Both()


KEPT: dict[str, Callable[[], Any]] = {
    "an int": lambda: 5,
    "a list": lambda: [1] * 100,
    "a small array": lambda: np.arange(4),
    "a large array": lambda: np.arange(100_000),
    "a path": lambda: pathlib.Path("/a"),
    "a generator": lambda: np.random.default_rng(3),
    "objects": lambda: [Settings(), Slotted(), enum.Enum("Color", "RED BLUE")],
    "a function": lambda: lambda item: [item, Settings()],
    "a class": lambda: type("Local", (Settings,), {"size": 2}),
}


@pytest.mark.parametrize("make_kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("make_object", [Keeping, keeping_with_slots])
def test_what_a_cached_property_keeps_does_not_count(
    make_object: Callable[[], Any], make_kept: Callable[[], Any]
) -> None:
    first, second = make_object(), make_object()
    registry = Registry({"source": [first, second]})

    def shipped() -> bytes:
        return ship(
            {"source": [first, second, [first]], "config": _Config}, registry=registry
        ).pickled

    type(first).made = staticmethod(make_kept)
    before = shipped()
    assert first.heavy is not None
    assert "heavy" in vars(first)
    now = shipped()
    assert means_the_same(before, now)
    assert means_the_same(now, before)
    second.size = 7
    assert not means_the_same(now, shipped())
    assert not means_the_same(shipped(), before)


def test_numbers_of_arrays_and_generators_are_paired() -> None:
    holder = Keeping()
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    parts = [holder, np.zeros(100_000), first, second, np.ones(100_000)]
    registry = Registry({"source": [first, second]})
    type(holder).made = staticmethod(lambda: (np.zeros(50_000), np.random.default_rng(3)))

    def shipped() -> bytes:
        return ship({"source": parts, "config": _Config}, registry=registry).pickled

    before = shipped()
    assert holder.heavy
    found = compare(before, shipped())
    assert found.difference is None
    assert list(found.arrays) == [(0, 1), (1, 2)]
    assert list(found.generators) == [(0, 1), (1, 2)]


CHANGES: dict[str, Callable[[Any], object]] = {
    "source.mode": set_to("mode", "val"),
    "source.settings.size": lambda dataset: setattr(dataset.settings, "size", 2),
    "source.settings.names": lambda dataset: dataset.settings.names.append("x"),
    "source.slotted.items": lambda dataset: dataset.slotted.items.append(1),
    "source.partial.by": lambda dataset: dataset.partial.keywords["by"].append(1),
    "source.more": set_to("more", [1, {"a": Settings()}]),
    "source.old[1]['a'].size": lambda dataset: setattr(dataset.old[1]["a"], "size", 2),
    "source.table": lambda dataset: dataset.table.append(3),
    "source.kind": lambda dataset: setattr(type(dataset), "kind", "val"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_has_a_name(name: str) -> None:
    dataset = make()
    dataset.old = [1, {"a": Settings()}]
    before = pickled(dataset)
    CHANGES[name](dataset)
    difference = compare(before, pickled(dataset)).difference
    assert difference is not None and difference.name == name


def test_a_changed_array_is_named_in_messages() -> None:
    dataset = make()
    dataset.large[5] = 1
    assert name_of_array(pickled(dataset), 0) == "source.large"


def test_a_state_that_another_function_sets_counts() -> None:
    holder = [Assigned(1), Keeping()]
    before = ship({"source": holder}).pickled
    type(holder[1]).made = staticmethod(lambda: [Settings()])
    assert holder[1].heavy
    assert means_the_same(before, ship({"source": holder}).pickled)
    holder[0].number = 2
    assert not means_the_same(before, ship({"source": holder}).pickled)


class Assigned:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (Assigned,), Number(self.number), None, None, assign


class Number:
    def __init__(self, number: int) -> None:
        self.number = number


def assign(target: Assigned, state: Number) -> None:
    target.number = state.number


class _Config:
    seed_globals, threads = None, 1


def test_two_lists_that_become_one_are_a_change() -> None:
    dataset = make()
    dataset.same_items = [1, 2, 3]
    before = pickled(dataset)
    dataset.same_items = dataset.items
    assert not means_the_same(before, pickled(dataset))


def test_a_module_that_was_imported_meanwhile_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, at the first use of `numpy.random`: a function that uses it then refers to
    it.
    """
    package, submodule = types.ModuleType("lazy_package"), types.ModuleType("lazy_package.random")
    package.__package__ = "lazy_package"
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    function = eval("lambda: (lazy_package.random, number)", {"lazy_package": package, "number": 1})
    before = ship({"source": function}).pickled
    monkeypatch.setitem(sys.modules, "lazy_package.random", submodule)
    now = ship({"source": function}).pickled
    assert before != now
    assert means_the_same(before, now)
    assert means_the_same(now, before)
    function.__globals__["number"] = 2
    assert not means_the_same(before, ship({"source": function}).pickled)


def test_what_is_no_pickle_differs() -> None:
    assert not means_the_same(b"x", b"y")
    assert means_the_same(b"x", b"x")


def test_nothing_is_imported_or_called() -> None:
    class Loud:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            return shout, (self.number,)

    assert means_the_same(ship({"source": Loud(1)}).pickled, ship({"source": Loud(1)}).pickled)
    assert not means_the_same(ship({"source": Loud(1)}).pickled, ship({"source": Loud(2)}).pickled)


def shout(number: int) -> None:
    raise AssertionError("it was called")
