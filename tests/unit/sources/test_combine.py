"""Sources made of other sources: a mix keeps its weights, and has every record if they follow
sizes; a zip pairs items.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.plan.shares import BLOCK
from loaderpool.sources.recognise import as_source

SMALL, LARGE = [f"small {i}" for i in range(50)], [f"large {i}" for i in range(500)]

ROWS = np.arange(12.0).reshape(4, 3)


class Items:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        return f"item {index}"


def origins(mixed: Any) -> list[tuple[int, int]]:
    return [mixed.origin(index) for index in range(len(mixed))]


# ---- by weight ----


def test_weights_are_proportions_in_any_unit_and_type() -> None:
    expected = list(lp.mix([SMALL, LARGE], [1, 3], seed=7, stop=400))
    huge = [10**400, 3 * 10**400]
    for weights in (
        (0.25, 0.75),
        np.array([1, 3], np.float32),
        [Fraction(1, 7), Fraction(3, 7)],
        huge,
    ):
        assert list(lp.mix([SMALL, LARGE], weights, seed=7, stop=400)) == expected


def test_weights_are_hit_in_every_range_and_by_size_each_record_comes_once() -> None:
    which = np.array([source for source, _ in origins(lp.mix([SMALL, LARGE], seed=5))])
    assert sorted(lp.mix([SMALL, LARGE], seed=5)) == sorted(SMALL + LARGE)
    windows = np.lib.stride_tricks.sliding_window_view(which == 0, 64).sum(axis=1)
    assert (
        1 <= windows.min() <= windows.max() <= 16
    )  # about 64 / 11 of 64 items come from the small one
    given = np.array(
        [
            lp.mix([range(9)] * 3, [0.1, 0.3, 0.6], seed, stop=512).origin(77)[0]
            for seed in range(1500)
        ]
    )
    assert np.abs(np.bincount(given, minlength=3) / 1500 - [0.1, 0.3, 0.6]).max() < 0.05


# ---- access to any item ----


def test_an_item_of_a_huge_mix_is_read_without_those_before_it() -> None:
    mixed = lp.mix([range(10**12), range(10**13)])
    assert len(mixed) == 11 * 10**12
    source, record = mixed.origin(10**13)
    assert abs(record - 10**13 * (1, 10)[source] // 11) < BLOCK
    for index in range(0, len(mixed), len(mixed) // 700):
        mixed.origin(index)
    assert len(mixed.order._tables) <= 2


def test_negative_indices_and_ends_are_those_of_a_list() -> None:
    mixed = lp.mix([SMALL, LARGE])
    assert mixed[-1] == mixed[np.int64(549)] and mixed[-550] == mixed[0]
    for index in (550, -551):
        with pytest.raises(IndexError, match="550 items"):
            mixed[index]
    with pytest.raises(TypeError):
        mixed[1:3]  # type: ignore[misc]


def test_the_order_is_set_by_the_seed_and_never_changes() -> None:
    """Recorded, because a change here gives every user another order for the same seed."""
    which = "".join(
        str(source) for source, _ in origins(lp.mix([range(10), range(20), range(30)], seed=1))
    )
    assert which == "212221102222212021222201120211102012211111110222222212002021"
    assert origins(lp.mix([SMALL, LARGE], seed=1)) != origins(lp.mix([SMALL, LARGE], seed=2))


def test_mixes_of_mixes_and_of_columns_are_sources() -> None:
    inner = lp.mix([range(10), range(10, 30)], seed=1)
    columns = {"x": np.arange(30, 40), "y": np.arange(10)}
    mixed = as_source(lp.mix([inner, columns], seed=2))
    assert len(mixed) == 40
    numbers = [
        item["x"] if isinstance(item, dict) else item for item in (mixed[i] for i in range(40))
    ]
    assert sorted(numbers) == list(range(40))


# ---- zip ----


def test_an_item_is_the_tuple_of_the_items_of_sources_of_any_kind() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3, 4], "b": list("wxyz")})
    zipped = lp.zip_sources(
        ROWS, ["p", "q", "r", "s"], Items(4), frame, (ROWS, [5, 6, 7, 8]), range(4)
    )
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
    with pytest.raises(
        lp.ArgumentError, match=r"sources\[0\] has 4, sources\[1\] has 3 \(strict=False ends"
    ):
        lp.zip_sources(ROWS, Items(3))
    with pytest.raises(lp.ArgumentError, match=r"sources\['x'\] has 1, sources\['y'\] has 2"):
        lp.zip_sources({"x": [0], "y": [0, 0]})
    with pytest.raises(lp.ArgumentError, match=r"sources\[7\] has 8, \.\.\. \(strict"):
        lp.zip_sources(*(range(size) for size in range(1, 12)))


def test_not_strict_ends_with_the_shortest() -> None:
    zipped = lp.zip_sources(Items(5), [7, 8], strict=False)
    assert list(zipped) == [("item 0", 7), ("item 1", 8)]
    assert zipped[-1] == ("item 1", 8)
    for index in (2, -3):
        with pytest.raises(IndexError):
            zipped[index]


def test_zips_travel_and_nest() -> None:
    zipped = lp.zip_sources(
        lp.zip_sources(ROWS, Items(4)), {"x": lp.mix([[1, 2], [3, 4]]), "y": ROWS}["x"]
    )
    there = pickle.loads(pickle.dumps(zipped))
    assert len(as_source(there)) == 4
    (row, text), number = there[3]
    assert np.array_equal(row, ROWS[3]) and text == "item 3" and number == zipped[3][1]
    assert repr(there) == "<zip of 2 sources: 4 items>"


# ---- refused ----


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lp.mix, ((),), "sources is empty"),
        (lp.mix, ([SMALL, []],), r"sources\[1\]: source is empty: a list of length 0"),
        *(
            (
                lp.mix,
                ([SMALL, LARGE], wrong),
                "weights must be one finite number >= 0 for each of the 2 sources",
            )
            for wrong in (
                1,
                [1],
                ["1", 1],
                [1, -0.5],
                [math.inf, 1],
                [1, math.nan],
                [0, 0.0],
                {0: 1, 1: 1},
            )
        ),
        (
            lp.mix,
            ([SMALL, LARGE], [1, 1e-30], 0, "all"),
            r"weights differ so much .* 2\*\*62 items",
        ),
        (
            lp.mix,
            ([SMALL, range(2**62)], [1, 1], 0, 10),
            r"sources have more than 2\*\*62 items together",
        ),
        (lp.mix, ([SMALL], None, -1), "seed must be at least 0, got -1"),
        (
            lp.mix,
            ([SMALL], None, 0, "last"),
            'stop must be "first", "all" or a number of items, got \'last\'',
        ),
        (lp.mix, ([SMALL], None, 0, 0), "stop must be at least 1, got 0"),
        (lp.mix, ([SMALL], None, 0, None), "stop must be an integer, got None"),
        (lp.mix, ([SMALL], None, 0, 2**70), "stop must be at most 4611686018427387904, got"),
        (lp.zip_sources, (), "sources is empty"),
        (lp.zip_sources, ({},), "sources is empty"),
        (
            lp.zip_sources,
            ([ROWS, ROWS],),
            r"got one list: pass each source as an argument, as in zip_sources\(a, b\)",
        ),
        (lp.zip_sources, ({"x": ROWS, "y": []},), r"sources\['y'\]: source is empty"),
        (
            functools.partial(lp.zip_sources, strict=1),
            (ROWS, ROWS),
            "strict must be True or False, got 1",
        ),
    ],
)
def test_wrong_arguments_are_named(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(lp.ArgumentError, match=message):
        make(*arguments)


def test_a_part_that_is_no_source_is_named() -> None:
    with pytest.raises(lp.SourceError, match=r"sources\[1\]: source is one str, 'x.txt'"):
        lp.mix([SMALL, "x.txt"])
    with pytest.raises(lp.SourceError, match=r"sources\[1\]: source is a str_?(ascii_)?iterator"):
        lp.zip_sources(SMALL, iter("ab"))


@pytest.mark.parametrize("call", [lambda: lp.mix(range(5), range(3)), lambda: lp.mix(["a", "b"])])
def test_sources_that_are_not_in_one_list_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(lp.ArgumentError, match=r"^sources must be a list .*mix\(\[a, b\]\)"):
        call()
