"""Elements are flattened into leaves and rebuilt, and errors describe the difference of
structures.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest

from loaderpool.element.structure import Structure
from loaderpool.errors import SpecMismatchError
from tests.support.samples import Point

NESTED = {"a": (1, Point(2, {"deep": 3})), 7: 4}


@pytest.mark.parametrize(
    "make",
    [
        OrderedDict,
        lambda pairs: defaultdict(list, pairs),
        lambda pairs: UserDict(pairs),
        lambda p: ChainMap(dict(p)),
    ],
    ids=["OrderedDict", "defaultdict", "UserDict", "ChainMap"],
)
def test_mappings_are_read_as_dicts_and_come_back_plain(make: Any) -> None:
    value = make([("b", 1), ("a", 2)])
    structure = Structure.of({"b": 0, "a": 0})
    assert Structure.of(value) == structure
    assert structure.flatten(value) == [1, 2]
    assert type(Structure.of(value).unflatten([1, 2])) is dict
    with pytest.raises(SpecMismatchError, match="without 'c' and with extra 'b'"):
        Structure.of({"a": 0, "c": 0}).flatten(value)
    assert list(value) == ["b", "a"], "none is invented"


def test_leaves_follow_the_order_of_keys_first_seen() -> None:
    structure = Structure.of({"b": 0, "a": 0})
    assert structure.flatten({"a": 1, "b": 2}) == [2, 1]
    assert list(structure.unflatten([2, 1])) == ["b", "a"]


def test_a_namedtuple_of_the_same_fields_is_taken_and_rebuilt_with_the_first_class() -> None:
    twin = namedtuple("twin", "x y")  # noqa: PYI024 - a class made in each call is what is meant here
    structure = Structure.of(Point(1, 2))
    assert structure.flatten(twin(3, 4)) == [3, 4]
    assert type(structure.unflatten([3, 4])) is Point


def test_a_tuple_subclass_without_fields_is_a_tuple() -> None:
    class Pair(tuple):
        pass

    structure = Structure.of(Pair((1, 2)))
    assert structure == Structure.of((0, 0))
    assert structure.flatten(Pair((3, 4))) == [3, 4]
    assert type(structure.unflatten([3, 4])) is tuple

    class Odd(tuple):
        _fields = ("a", "b", "c")

    assert Structure.of(Odd((1, 2))).paths == ("[0]", "[1]"), "fields alone make no namedtuple"


MISMATCHES = [
    (0, (1, 2), r"the element has another structure: expected one array, got \(int, int\)"),
    (0, None, r"expected one array, got None"),
    ((0, 0), (1, 2, 3), r"expected \(\*, \*\), got \(int, int, int\)"),
    ((0, 0), [1, 2], r"expected \(\*, \*\), got list"),
    ((0, 0), Point(1, 2), r"expected \(\*, \*\), got Point\(x=int, y=int\)"),
    ((0, 0), (1, None), r"component \[1\] has another structure: expected one array, got None"),
    (
        {"a": 0, "b": 0},
        {"a": 1},
        r"expected a dict of 'a', 'b', got one without 'b'; all items must have the same",
    ),
    ({"a": 0}, {"a": 1, "z": 2}, r"expected a dict of 'a', got one with extra 'z'"),
    ({"a": 0, "b": 0}, {"a": 1, "c": 2}, r"without 'b' and with extra 'c'"),
    (
        {"a": 0},
        {"a": None},
        r"component \['a'\] has another structure: expected one array, got None",
    ),
    (Point(0, 0), (1, 2), r"expected Point\(x=\*, y=\*\), got \(int, int\)"),
    (
        NESTED,
        {**NESTED, "a": (1, Point(2, {"flat": 3}))},
        r"component \['a'\]\[1\]\.y has another structure: .*'flat'",
    ),
    (
        NESTED,
        {**NESTED, "a": (1, (2, 3))},
        r"component \['a'\]\[1\] has another structure: expected Point\(x=\*, y=",
    ),
]


@pytest.mark.parametrize(("first", "value", "message"), MISMATCHES)
def test_what_is_built_otherwise_is_refused_by_path(first: Any, value: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        Structure.of(first).flatten(value)


REFUSED = [
    (None, r"fn returned None\. Did you forget a return statement\?"),
    ((), "fn returned an empty tuple: "),
    ({}, "fn returned an empty dict: "),
    ((1, None), r"fn returned None at \[1\]: "),
    ({"a": {"b": ()}}, r"fn returned an empty tuple at \['a'\]\['b'\]: "),
    (Point(1, None), r"fn returned None at \.y: "),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_nothing_is_no_element(value: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        Structure.of(value)


def test_structures_with_the_same_leaves_are_equal() -> None:
    assert Structure.of((1, 2)) == Structure.of(("a", [3]))
    assert hash(Structure.of(NESTED)) == hash(Structure.of(NESTED))


def test_other_structures_differ() -> None:
    values = (0, (0,), (0, 0), {"a": 0}, {"b": 0}, Point(0, 0), {"a": 0, "b": 0}, {"b": 0, "a": 0})
    assert len({Structure.of(value) for value in values}) == len(values)
    assert Structure.of(0) != 0


def test_the_repr_of_a_structure_shows_its_leaves() -> None:
    assert repr(Structure.of(NESTED)) == "Structure({'a': (*, Point(x=*, y={'deep': *})), 7: *})"
    assert repr(Structure.of((1,))) == "Structure((*,))"
