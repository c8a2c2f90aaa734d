"""Classes of dict, list and tuple that batches keep, and those that are replaced by plain ones."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.element.own_classes import own_classes
from loaderpool.element.structure import Structure
from tests.support.samples import Pair, Point

A, B, C, D = (np.full(2, number) for number in range(4))


class Batch(dict):  # type: ignore[type-arg]
    pass


class Images(list):  # type: ignore[type-arg]
    pass


class ByAttribute(dict):  # type: ignore[type-arg]
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.__dict__ = self


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings


class Scaled(dict):  # type: ignore[type-arg]
    def __init__(self, data: Any, scale: float = 1.0) -> None:
        super().__init__(data)
        self.scale = scale


class ByKeyword(dict):  # type: ignore[type-arg]
    def __init__(self, *, x: Any) -> None:
        super().__init__(x=x)


class WithSlot(dict):  # type: ignore[type-arg]
    __slots__ = ("scale",)


class Counted(dict):  # type: ignore[type-arg]
    def __init__(self, data: Any) -> None:
        super().__init__({**data, "count": len(data)})


class Doubled(tuple):  # type: ignore[type-arg]
    __slots__ = ()

    def __new__(cls, parts: Any) -> Any:
        return super().__new__(cls, [part * 2 for part in parts])


def with_attribute(value: Any) -> Any:
    value.scale = 2.0
    return value


def rebuilt(value: Any, leaves: list[Any]) -> Any:
    return Structure.of(value).rebuilder(own_classes(value))(leaves)


@pytest.mark.parametrize(
    "make",
    [
        Batch, collections.OrderedDict, collections.UserDict, ByAttribute, Encoding, Scaled, types.MappingProxyType,
        collections.ChainMap,
    ],
)  # fmt: skip
def test_a_mapping_class_made_of_its_items_stays(make: Callable[[Any], Any]) -> None:
    found = rebuilt(make({"a": A, "b": B}), [C, D])
    assert type(found) is make
    assert list(found) == ["a", "b"] and found["a"] is C and found["b"] is D


def test_attributes_that_are_items_are_the_new_ones() -> None:
    assert rebuilt(ByAttribute(a=A), [B]).a is B


@pytest.mark.parametrize("make", [Images, Pair])
def test_own_lists_and_tuples_of_arrays_stay(make: Any) -> None:
    found = rebuilt(make([A, B]), [C, D])
    assert type(found) is make
    assert found[0] is C and found[1] is D


@pytest.mark.parametrize(
    "value",
    [
        Encoding({"x": A}, encodings=["ids"]),
        Scaled({"x": A}, scale=2.0),
        with_attribute(Batch(x=A)),
        with_attribute(WithSlot(x=A)),
        ByKeyword(x=A),
        Counted({"x": A}),
        collections.defaultdict(list, x=A),
        collections.ChainMap({"x": A}, {"y": B}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_mapping_with_more_than_its_items_becomes_a_dict(value: Any) -> None:
    assert own_classes(value) is None
    assert type(Structure.of(value).unflatten([A] * len(value))) is dict


def test_a_tuple_that_changes_its_items_becomes_a_tuple() -> None:
    assert own_classes(Doubled((A, B))) is None


def test_numbers_in_an_own_list_are_one_array() -> None:
    assert Structure.of(Images([1, 2])).kind == "leaf"
    assert own_classes(Images([1, 2])) is None
    assert Structure.of({"x": A}).flatten({"x": Images([A, B])})[0] == [A, B], (
        "where an array is expected"
    )


def test_own_classes_within_others_stay() -> None:
    value = {"a": (Pair((A,)), Point(Batch(x=B), C)), "b": D}
    found = rebuilt(value, [1, 2, 3, 4])
    assert found == {"a": (Pair((1,)), Point({"x": 2}, 3)), "b": 4}
    assert (
        type(found["a"][0]) is Pair and type(found["a"][1].x) is Batch and type(found["a"]) is tuple
    )


def test_plain_values_have_no_classes() -> None:
    assert own_classes({"a": (A, Point(B, C))}) is None
    assert own_classes(A) is None
