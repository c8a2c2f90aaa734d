"""Results that wait together for their block: whatever may be changed under us is told, and nothing else is."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from loaderpool.element.spec import ArraySpec, ElementSpec, sample_spec
from loaderpool.errors import SpecMismatchError
from loaderpool.worker.rows import Converter, ReusedBuffer, RowWriter

ROWS = 4


class Point(NamedTuple):
    x: Any
    y: Any


def write(make: Callable[[int], Any]) -> list[Any]:
    """The rows that one call of `write` leaves, for results that were all made before it."""
    results = [make(index) for index in range(ROWS)]
    arrays = [np.zeros((ROWS, *c.shape), c.dtype) for c in sample_spec(results[0], None).components]
    writer_for(results[0]).write(arrays, 0, results, range(ROWS))
    return [array.tolist() for array in arrays]


def writer_for(sample: Any) -> RowWriter:
    spec = sample_spec(sample, None)
    components = tuple(ArraySpec((ROWS, *c.shape), c.dtype) for c in spec.components)
    return RowWriter(Converter(ElementSpec(spec.structure, components), is_given=False, has_batch_axis=False))


def returning(kept: Any, fill: Callable[[Any, int], object], wrap: Callable[[Any], Any] = lambda it: it) -> Any:
    def make(index: int) -> Any:
        fill(kept, index)
        return wrap(kept)

    return make


def put(target: Any, index: int) -> None:
    target["x"] = index


REUSED: dict[str, Callable[[int], Any]] = {
    "dict of numbers": returning({}, put),
    "OrderedDict": returning(collections.OrderedDict(), put),
    "in a tuple": returning({}, put, lambda inner: (0, inner)),
    "in a namedtuple": returning({}, put, lambda inner: Point(inner, 0)),
    "in a dict": returning({}, put, lambda inner: {"a": 1, "b": inner}),
    "in a tuple in a dict": returning({}, put, lambda inner: {"a": (1, {"b": inner})}),
    "beside an array": returning({}, put, lambda inner: (np.zeros(2), inner)),
    "dict of an array": returning({"x": np.zeros(2)}, lambda kept, i: kept["x"].fill(i)),
    "list": returning([0, 0], lambda kept, i: kept.__setitem__(0, i)),
}


@pytest.mark.parametrize("name", REUSED)
def test_a_container_that_comes_again_is_told(name: str) -> None:
    with pytest.raises(ReusedBuffer):
        write(REUSED[name])


def test_arrays_that_come_again_in_another_place_are_told() -> None:
    kept = [np.zeros(2) for _ in range(ROWS + 1)]
    with pytest.raises(ReusedBuffer):
        write(lambda index: (kept[index], kept[index + 1]))


def test_containers_that_come_again_in_another_place_are_told() -> None:
    kept = [{"x": 0} for _ in range(ROWS + 1)]
    with pytest.raises(ReusedBuffer):
        write(lambda index: {"a": kept[index], "b": kept[index + 1]})


def test_an_array_that_comes_again_in_a_later_row_is_told_where_rows_repeat_their_own() -> None:
    kept = [np.zeros(2) for _ in range(5)]
    pairs = [(kept[0], kept[0]), (kept[1], kept[2]), (kept[3], kept[3]), (kept[2], kept[4])]
    with pytest.raises(ReusedBuffer):
        write(lambda index: pairs[index])


def test_one_array_for_two_components_of_a_row_is_no_reuse() -> None:
    def twice(index: int) -> Any:
        array = np.full(2, index)
        return array, {"again": array}

    first, again = write(twice)
    assert first == again == [[index] * 2 for index in range(ROWS)]


def test_one_dict_for_two_components_of_a_row_is_no_reuse() -> None:
    def twice(index: int) -> Any:
        inner = {"x": index}
        return {"a": inner, "b": inner}

    assert write(twice) == [list(range(ROWS))] * 2


def test_what_cannot_be_changed_may_come_again() -> None:
    constant = (1, Point(2.0, True))
    assert write(lambda index: constant) == [[1] * ROWS, [2.0] * ROWS, [True] * ROWS]


def test_containers_made_anew_for_each_row_are_written() -> None:
    assert write(lambda index: {"a": {"x": index}, "b": (index, float(-index))}) == [
        list(range(ROWS)),
        list(range(ROWS)),
        [-float(index) for index in range(ROWS)],
    ]


@pytest.mark.parametrize("last", [{}, {"x": None}, {"x": "text"}, {"x": 2**70}], ids=str)
def test_a_container_whose_last_filling_is_wrong_is_told_before_a_wrong_row_is_named(last: dict[str, Any]) -> None:
    def fill(kept: dict[str, Any], index: int) -> None:
        kept.clear()
        kept.update(last if index == ROWS - 1 else {"x": index})

    kept: dict[str, Any] = {"x": 0}
    writer = writer_for((0, {"x": 0}))
    results = []
    for index in range(ROWS):
        fill(kept, index)
        results.append((index, kept))
    with pytest.raises(ReusedBuffer):
        writer.write([np.zeros(ROWS, np.int64)] * 2, 0, results, range(ROWS))


def test_a_wrong_row_among_containers_of_their_own_is_named() -> None:
    with pytest.raises(SpecMismatchError, match="index 2"):
        write(lambda index: {"x": None if index == 2 else index})


@pytest.mark.parametrize(
    "odd", [np.zeros((2, 3)), np.zeros((2, 1)), np.array(1.0), np.zeros(3), np.zeros(0)], ids=np.shape
)
def test_arrays_of_another_shape_are_left_to_be_written_one_by_one(odd: Any) -> None:
    for odd_rows in ({2}, {1, 2, 3}):
        with pytest.raises(ReusedBuffer):  # who then writes them alone names the row
            write(lambda index, rows=odd_rows: odd.copy() if index in rows else np.full(2, float(index)))


@pytest.mark.parametrize(
    "view",
    [
        lambda: np.zeros(4)[:2],
        lambda: np.zeros(1)[:1],
        lambda: np.frombuffer(bytearray(16)),
        lambda: np.zeros((1, 2))[0],
    ],
    ids=["slice", "of one number", "of bytes", "row"],
)
def test_arrays_that_look_at_memory_of_others_do_not_wait(view: Callable[[], Any]) -> None:
    with pytest.raises(ReusedBuffer):
        write(lambda index: view())
