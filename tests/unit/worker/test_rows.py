"""Results that are collected for a block: memory that the function may change is detected, and no
other memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.element.spec import ArraySpec, ElementSpec, sample_spec
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm
from loaderpool.worker.rows import Converter, share_memory

ROWS = 4


def converter_of(sample: Any) -> tuple[Converter, list[Any]]:
    """Return a converter for samples of this kind, and the arrays of a slot."""
    spec = sample_spec(sample, None)
    components = tuple(ArraySpec((ROWS, *c.shape), c.dtype) for c in spec.components)
    form = BatchForm(ElementSpec(spec.structure, components), "sample", ROWS, None, 1, False, 0)
    arrays = [np.zeros((ROWS, *c.shape), c.dtype) for c in spec.components]
    return Converter(form, is_given=False), arrays


def write(make: Callable[[int], Any]) -> list[Any] | None:
    """Return the rows that one call of `write_block` writes. None: they must be made one by one."""
    converter, arrays = converter_of(make(0))
    take = converter.take or (lambda result: result)
    results = [take(make(index)) for index in range(ROWS)]
    return (
        [array.tolist() for array in arrays] if converter.write_block(arrays, 0, results) else None
    )


def returning(kept: Any, fill: Callable[[Any, int], object]) -> Any:
    def make(index: int) -> Any:
        fill(kept, index)
        return kept

    return make


@pytest.mark.parametrize(
    "make",
    [
        returning({"x": np.zeros(2)}, lambda kept, i: kept["x"].fill(i)),
        returning([0, 0], lambda kept, i: kept.__setitem__(0, i)),
        returning(np.zeros(2), lambda kept, i: kept.fill(i)),
    ],
    ids=["dict of an array", "list", "array"],
)
def test_an_array_or_list_that_is_filled_again_does_not_wait(make: Callable[[int], Any]) -> None:
    assert write(make) is None


@pytest.mark.parametrize("odd", ["text", 2**70, 1.5], ids=str)
def test_a_row_that_does_not_fit_is_left_to_its_own_call(odd: Any) -> None:
    assert write(lambda index: (index, odd if index == 2 else index)) is None


@pytest.mark.parametrize(
    "odd", [np.zeros((2, 3)), np.zeros((2, 1)), np.array(1.0), np.zeros(3), np.zeros(0), np.zeros(2, np.float32)],
    ids=lambda odd: f"{odd.dtype}{odd.shape}",
)  # fmt: skip
def test_arrays_of_another_kind_are_left_to_be_written_one_by_one(odd: Any) -> None:
    for odd_rows in ({2}, {1, 2, 3}):
        assert (
            write(
                lambda index, rows=odd_rows: (
                    odd.copy() if index in rows else np.full(2, float(index))
                )
            )
            is None
        )


BUFFER = np.zeros((4, 4))
OWN = [np.zeros(3) for _ in range(3)]
FIXED = np.zeros(3)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([OWN[0], {"x": OWN[0]}], id="the same array"),
        pytest.param([BUFFER[0], BUFFER[1]], id="rows of one buffer"),
        pytest.param([{"x": 1}] * 2, id="the same dict"),
    ],
)
def test_results_in_one_buffer_share_memory(results: list[Any]) -> None:
    assert share_memory(results)


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(OWN, id="own arrays"),
        pytest.param([(array, array) for array in OWN], id="one array twice in a result"),
        pytest.param([array[1:] for array in OWN], id="views of own arrays"),
        pytest.param([np.frombuffer(b"abcd", np.uint8)] * 3, id="read-only bytes"),
        pytest.param([FIXED, FIXED], id="a read-only array"),
        pytest.param([1, 1, "a", None], id="scalars"),
        pytest.param([([1],), ([2],)], id="own lists"),
    ],
)
def test_separate_results_share_no_memory(results: list[Any]) -> None:
    assert not share_memory(results)


def test_an_allowed_shared_buffer_does_not_count() -> None:
    assert not share_memory([BUFFER[0], BUFFER[1]], but=[BUFFER])


@pytest.mark.parametrize("make", [
    lambda index: np.arange(8.0).reshape(4, 2)[index],
    lambda index: (np.arange(8.0).reshape(4, 2)[index], np.int64(index), True),
    lambda index: {"x": float(index), "y": np.float32(index), "z": index},
])  # fmt: skip
def test_writer_copies_each_result_before_the_next_call(make: Callable[[int], Any]) -> None:
    converter, arrays = converter_of(make(0))
    put = converter.writer(arrays, 1)
    for index in range(3):
        put(make(index))
    for index in range(3):
        expected = converter.row(make(index), index)
        for array, leaf in zip(arrays, expected, strict=True):
            assert np.array_equal(array[1 + index], leaf)


@pytest.mark.parametrize("odd", [np.zeros(3), np.zeros(2, np.float32), 1.5, "text", None], ids=str)
def test_writer_refuses_what_does_not_fit(odd: Any) -> None:
    converter, arrays = converter_of(np.zeros(2))
    with pytest.raises(SpecMismatchError):
        converter.writer(arrays, 0)(odd)
