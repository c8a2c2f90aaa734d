"""`pad=`: fill values of components, refused values, and the axes that several samples show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.element.spec import ArraySpec, check_padding, fill_value, padding_of
from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, SpecMismatchError
from tests.support.samples import Point

NESTED = {"x": (1, 2), "y": 3}


@pytest.mark.parametrize(
    ("pad", "sample", "expected"),
    [
        (True, 1, [None]),
        (7, NESTED, [7, 7, 7]),
        ({"y": -1, "x": None}, NESTED, [None, None, -1]),
        ({"x": (0.5, False), "y": True}, NESTED, [0.5, False, None]),
        ((1, 2), Point(1, 2), [1, 2]),
        (Point(1, 2), Point(1, 2), [1, 2]),
        (("", b"x"), ("a", b"b"), ["", b"x"]),
    ],
)
def test_a_value_holds_for_the_component_in_its_place_or_for_all_in_it(
    pad: Any, sample: Any, expected: Any
) -> None:
    assert padding_of(check_padding(pad), Structure.of(sample)) == expected


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"x": 0}, r"pad has no value for component \['y'\].*False for no padding"),
        ({"x": 0, "y": 0, "z": 0}, r"pad has \['z'\], but the function returns"),
        ({"x": (0,), "y": 0}, r"pad\['x'\] has no value for component \[1\]"),
        (
            {"x": 0, "y": {"z": 1}},
            r"pad\['y'\] is \{'z': int\}, but the function returns one component there",
        ),
        ((0, 1), r"pad is \(int, int\), but the function returns .*'x'"),
    ],
)
def test_padding_that_is_built_otherwise_than_the_sample_is_refused(pad: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        padding_of(pad, Structure.of(NESTED))


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ([0], r"pad must be .*got \[0\]"),
        ({"x": [0]}, r"pad\['x'\] must be"),
        ((0, np.zeros(2)), r"pad\[1\] must be"),
        (None, "pad must be"),
    ],
)
def test_what_is_no_padding_fails_in_the_callers_line(pad: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lp.Loader(range(4), pad=pad, workers=0)


@pytest.mark.parametrize(
    ("pad", "component", "filled"),
    [
        (None, ArraySpec((None,), "f4"), 0),
        (None, ArraySpec((None,), str), ""),
        (None, ArraySpec((None,), bytes), b""),
        ("é", ArraySpec((None,), bytes), "é".encode()),
        (b"x", ArraySpec((None,), str), "x"),
        (-1, ArraySpec((None,), "i4"), -1),
        (1, ArraySpec((None,), bool), True),
        (0.1, ArraySpec((None,), "f4"), np.float32(0.1)),
        (np.int8(3), ArraySpec((None,), "u1"), 3),
        (-np.inf, ArraySpec((None,), "f2"), -np.inf),
    ],
)
def test_a_pad_value_becomes_one_of_the_components_kind(
    pad: Any, component: ArraySpec, filled: Any
) -> None:
    value = fill_value(pad, component, "")
    assert value == filled
    assert component.text is not None or value.dtype == component.dtype
    assert component.text is None or type(value) is type(filled)


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (-1, "u1"),
        (256, "u1"),
        (0.5, "i4"),
        (np.nan, "i4"),
        (1e300, "f4"),
        (1j, "f4"),
        ("", "f4"),
        (0, str),
        (2, bool),
    ],
)
def test_a_pad_value_that_does_not_fit_names_the_component(pad: Any, dtype: Any) -> None:
    with pytest.raises(
        SpecMismatchError, match=r"component \['x'\]: the pad value .* does not fit its .*pad=\{"
    ):
        fill_value(pad, ArraySpec((None,), dtype), "['x']")
