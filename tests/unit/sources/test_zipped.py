"""Sources side by side: tuples or dicts of the i-th items, and lengths that must agree."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas
import pytest

import loaderpool as lp
from loaderpool.sources import as_source

ROWS = np.arange(12.0).reshape(4, 3)


class Items:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        return f"item {index}"


def test_an_item_is_the_tuple_of_the_items_of_sources_of_any_kind() -> None:
    frame = pandas.DataFrame({"a": [1, 2, 3, 4], "b": list("wxyz")})
    zipped = lp.zip_sources(ROWS, ["p", "q", "r", "s"], Items(4), frame, (ROWS, [5, 6, 7, 8]), range(4))
    row, text, item, record, (column, number), index = zipped[2]
    assert np.shares_memory(row, ROWS) and np.array_equal(row, ROWS[2])
    assert (text, item, record, number, index) == ("r", "item 2", {"a": 3, "b": "y"}, 7, 2)
    assert np.array_equal(column, ROWS[2])
    assert len(zipped) == 4


def test_a_dict_of_sources_gives_dicts() -> None:
    zipped = lp.zip_sources({"text": Items(2), 1: [7, 8]})
    assert list(zipped) == [{"text": "item 0", 1: 7}, {"text": "item 1", 1: 8}]
    assert list(zipped[0]) == ["text", 1]
    assert list(lp.zip_sources({"only": [1, 2]})) == [{"only": 1}, {"only": 2}]


def test_unequal_lengths_are_an_error_that_names_them() -> None:
    with pytest.raises(lp.ArgumentError, match=r"sources\[0\] has 4, sources\[1\] has 3; strict=False ends"):
        lp.zip_sources(ROWS, Items(3))
    with pytest.raises(lp.ArgumentError, match=r"sources\['x'\] has 1, sources\['y'\] has 2"):
        lp.zip_sources({"x": [0], "y": [0, 0]})
    with pytest.raises(lp.ArgumentError, match=r"sources\[7\] has 8, \.\.\.; strict"):
        lp.zip_sources(*(range(size) for size in range(1, 12)))


def test_not_strict_ends_with_the_shortest() -> None:
    zipped = lp.zip_sources(Items(5), [7, 8], strict=False)
    assert list(zipped) == [("item 0", 7), ("item 1", 8)]
    assert zipped[-1] == ("item 1", 8)
    for index in (2, -3):
        with pytest.raises(IndexError):
            zipped[index]


def test_the_length_of_an_object_is_that_of_when_it_was_zipped() -> None:
    items = Items(2)
    zipped = lp.zip_sources(items, [1, 2])
    items.size = 9
    assert len(zipped) == 2


def test_zips_travel_and_nest() -> None:
    zipped = lp.zip_sources(lp.zip_sources(ROWS, Items(4)), {"x": lp.mix([[1, 2], [3, 4]]), "y": ROWS}["x"])
    there = pickle.loads(pickle.dumps(zipped))
    assert len(as_source(there)) == 4
    (row, text), number = there[3]
    assert np.array_equal(row, ROWS[3]) and text == "item 3" and number == zipped[3][1]
    assert repr(there) == "<zip of 2 sources: 4 items>"


def test_the_data_of_arrays_leave_the_pickle_as_buffers() -> None:
    big = np.zeros(100_000)
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(lp.zip_sources(big, range(100_000)), 5, buffer_callback=buffers.append)) < 1000
    assert np.shares_memory(np.frombuffer(buffers[0].raw()), big)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), lp.ArgumentError, "sources is empty"),
        (({},), lp.ArgumentError, "sources is empty"),
        (([ROWS, ROWS],), lp.ArgumentTypeError, r"got one list: pass them one by one, as in zip_sources\(a, b\)"),
        ((ROWS, "labels.txt"), lp.SourceError, r"sources\[1\]: source is one str, 'labels.txt'"),
        (({"x": ROWS, "y": []},), lp.ArgumentError, r"sources\['y'\]: source is empty"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lp.zip_sources(*arguments)


def test_strict_is_a_flag() -> None:
    with pytest.raises(lp.ArgumentTypeError, match="strict must be True or False, got 1"):
        lp.zip_sources(ROWS, ROWS, strict=1)  # type: ignore[arg-type]


def test_a_dict_of_columns_that_are_none_points_to_zip_sources() -> None:
    with pytest.raises(lp.SourceError, match=r"source\['x'\] is a Items, not an array or list \(zip_sources"):
        as_source({"x": Items(3), "y": [1, 2, 3]})
