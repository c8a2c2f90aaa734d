"""Tables and columns of polars and pyarrow are read by row, with the values that the library itself gives."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.cache.identity import describe
from loaderpool.errors import ArgumentError
from loaderpool.sources.recognise import as_source

pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

LONG = "ä text that is longer than twelve bytes"
DAY = dt.date(2024, 2, 29)
TIME = dt.datetime(1969, 12, 31, 23, 59, 58, 123456)

# Values without null, by Arrow's type. Those of the first table become arrays. The others stay
# objects.
READ: dict[str, tuple[pa.DataType, list[Any]]] = {
    **{str(kind): (kind, [1, 2, 100, 3, 0, 7, 9, 4, 5, 6, 8]) for kind in (
        pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()
    )},
    "float16": (pa.float16(), [np.float16(n / 2) for n in range(11)]),
    "float32": (pa.float32(), [n / 2 for n in range(11)]),
    "float64": (pa.float64(), [n / 3 for n in range(11)]),
    "bool": (pa.bool_(), [n % 3 == 0 for n in range(11)]),
    "string": (pa.string(), ["", "a", LONG, *(f"{n} {LONG * n}" for n in range(8))]),
    "large_string": (pa.large_string(), ["", "a", LONG, *(f"{n} {LONG * n}" for n in range(8))]),
    "string_view": (pa.string_view(), ["", "a", LONG, *(f"{n} {LONG * n}" for n in range(8))]),
    "binary": (pa.binary(), [b"", b"\x00", b"\xff" * 30, *(bytes([n]) * n for n in range(8))]),
    "large_binary": (pa.large_binary(), [b"", b"\x00", b"\xff" * 30, *(bytes([n]) * n for n in range(8))]),
    "binary_view": (pa.binary_view(), [b"", b"\x00", b"\xff" * 30, *(bytes([n]) * n for n in range(8))]),
    "date32": (pa.date32(), [DAY + dt.timedelta(days=1000 * n - 9000) for n in range(11)]),
    "timestamp": (pa.timestamp("us"), [TIME + dt.timedelta(hours=n) for n in range(11)]),
    "duration": (pa.duration("ms"), [dt.timedelta(milliseconds=n - 4) for n in range(11)]),
    "list": (pa.list_(pa.int32()), [list(range(n)) for n in range(11)]),
    "large_list": (pa.large_list(pa.float64()), [[n / 2] * (n % 3) for n in range(11)]),
    "fixed_size_list": (pa.list_(pa.int16(), 3), [[n, n + 1, n + 2] for n in range(11)]),
    "fixed_of_fixed": (pa.list_(pa.list_(pa.int8(), 2), 3), [[[n, 1], [2, n], [n, n]] for n in range(11)]),
    "categories": (pa.dictionary(pa.int8(), pa.string()), ["red", "green", LONG, "red"] * 2 + ["green"] * 3),
}  # fmt: skip
AS_OBJECTS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "struct": (pa.struct([("x", pa.int32())]), [{"x": n} for n in range(11)]),
    "decimal": (pa.decimal128(5, 2), [decimal.Decimal(n) / 4 for n in range(11)]),
    "time": (pa.time64("us"), [dt.time(n, n) for n in range(11)]),
    "list of text": (pa.list_(pa.string()), [["a"] * n for n in range(11)]),
}
TYPES = READ | AS_OBJECTS


def chunked(kind: pa.DataType, values: list[Any], shape: str) -> pa.ChunkedArray:
    """Return the values in one chunk, in three (one of them empty, with their own dictionaries), or
    as a slice.
    """
    if shape == "whole":
        return pa.chunked_array([pa.array(values, kind)])
    if shape == "chunks":
        return pa.chunked_array(
            [pa.array(part, kind) for part in (values[:3], [], values[3:7], values[7:])]
        )
    whole = pa.chunked_array(
        [pa.array(values[::-1] * 3 + values, kind), pa.array(values[:1], kind)]
    )
    return whole.slice(3 * len(values), len(values))


def to_polars(column: pa.ChunkedArray) -> pl.Series | None:
    try:
        return pl.Series("c", pl.from_arrow(column))
    except Exception:  # polars lacks some types, such as views
        return None


def plain(value: Any) -> Any:
    """Return a value as a Python object, for comparison with `to_pylist`."""
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else value.item()
    if isinstance(value, np.timedelta64):
        return None if np.isnat(value) else value.item()
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value


def rows_of(source: Any) -> list[Any]:
    return [plain(source[row]) for row in range(len(source))]


def holes(values: list[Any]) -> list[Any]:
    return [None if row % 4 == 1 else value for row, value in enumerate(values)]


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("shape", ["whole", "chunks", "slice"])
@pytest.mark.parametrize("name", TYPES)
def test_rows_are_what_the_library_gives(name: str, shape: str, nulls: bool) -> None:
    kind, values = TYPES[name]
    values = holes(values) if nulls else values
    column = chunked(kind, values, shape)
    series = to_polars(column)
    for given in (
        column,
        series,
        *(() if shape == "slice" else (pa.concat_arrays(column.unify_dictionaries().chunks),)),
    ):
        if given is None:
            continue
        expected = given.to_list() if isinstance(given, pl.Series) else given.to_pylist()
        source = as_source(given)
        assert len(source) == len(values)
        assert rows_of(source) == expected
        again = pickle.loads(pickle.dumps(source, 5))
        assert rows_of(again) == expected
    table = pa.table({"n": np.arange(len(values)), "c": column})
    frames = [table, *table.combine_chunks().to_batches()] + (
        [] if series is None else [pl.DataFrame({"n": range(11), "c": series})]
    )
    for frame in frames:
        source = as_source(frame)
        assert [source[row]["n"] for row in range(11)] == list(range(11))
        assert [plain(source[row]["c"]) for row in range(11)] == (
            frame["c"].to_list() if isinstance(frame, pl.DataFrame) else column.to_pylist()
        )


@pytest.mark.parametrize("name", [name for name in READ if name not in ("list", "large_list")])
def test_types_are_the_columns_own(name: str) -> None:
    kind, values = READ[name]
    row = as_source(pa.table({"c": pa.array(values, kind)}))[2]["c"]
    if isinstance(row, np.generic):
        assert row.dtype == {"date32": "M8[D]", "timestamp": "M8[us]", "duration": "m8[ms]"}.get(
            name, name
        )
    elif isinstance(row, np.ndarray):
        assert (row.dtype, row.shape) == {
            "fixed_size_list": ("int16", (3,)),
            "fixed_of_fixed": ("int8", (3, 2)),
        }[name]
    else:
        assert type(row) is (bytes if "binary" in name else str)


@pytest.mark.parametrize("is_arrow", [False, True])
def test_a_null_is_nan_nat_or_none(is_arrow: bool) -> None:
    frame = pl.DataFrame({"i": [1, None], "f": pl.Series([0.5, None], dtype=pl.Float32), "b": [True, None],
                          "s": ["a", None], "t": [TIME, None], "l": [[1], None], "n": [None, None]})  # fmt: skip
    first, last = as_source(frame.to_arrow() if is_arrow else frame)
    assert first["i"].dtype == np.float64 and first["f"].dtype == np.float32
    assert np.isnan(last["i"]) and np.isnan(last["f"]) and np.isnat(last["t"])
    assert [last[name] for name in "bsln"] == [None] * 4


BIG = pl.DataFrame({"id": [2**53 + 1, None]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (BIG, r"source\['id'\] has nulls, .*beyond 2\*\*53.*Fill its nulls"),
        (pl.Series([-(2**63), None]), "Fill its nulls"),
    ],
)
def test_nulls_beside_integers_beyond_float64_are_refused(source: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        as_source(source)


def test_large_integers_without_nulls_are_read() -> None:
    assert as_source(BIG.drop_nulls())[0]["id"] == 2**53 + 1


@pytest.mark.parametrize("make", [pl.DataFrame, pa.table])
def test_numbers_are_not_copied_and_outlive_the_table(make: Callable[[Any], Any]) -> None:
    numbers = np.arange(100_000)
    table = make({"a": numbers, "b": numbers / 2})
    source = as_source(table)
    column = source._columns[0]  # type: ignore[union-attr]
    assert not column.flags.owndata and column.base is not None
    if isinstance(table, pa.Table):
        assert column.__array_interface__["data"][0] == table["a"].chunk(0).buffers()[1].address
    del table
    gc.collect()
    assert np.array_equal(column, numbers)
    assert source[7] == {"a": 7, "b": 3.5}


def test_a_slice_of_text_does_not_take_the_rest_along() -> None:
    frame = pl.DataFrame({"s": [LONG * (row % 50) for row in range(20_000)]})
    for table in (frame[100:110], frame.to_arrow()[100:110], frame.sample(10, seed=1)):
        assert len(pickle.dumps(as_source(table), 5)) < 100_000
    assert as_source(frame[101:110])[0] == {"s": LONG}


def test_python_objects_in_a_frame() -> None:
    things = [{1}, {2}]
    assert as_source(pl.DataFrame({"o": pl.Series(things, dtype=pl.Object)}))[1] == {"o": {2}}


def test_tables_are_columns_of_a_tuple() -> None:
    frame = pl.DataFrame({"a": [1, 2, 3]})
    source = as_source(
        (
            frame,
            pl.Series(["x", "y", "z"]),
            pa.array([0.5, 1.5, 2.5]),
            pa.chunked_array([[1], [2, 3]]),
        )
    )
    assert source[2] == ({"a": 3}, "z", 2.5, 3)
    zipped = lp.zip_sources(frame, frame.to_arrow())
    assert zipped[1] == ({"a": 2}, {"a": 2})


def test_polars_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ImportError, match=r"source\['a'\] from polars needs pyarrow.*loaderpool\[files\]"
    ):
        as_source(pl.DataFrame({"a": [1]}))


def test_mistakes_are_named() -> None:
    for empty in (
        pl.DataFrame({"a": []}),
        pa.table({"a": pa.array([], pa.int64())}),
        pl.Series([], dtype=pl.String),
    ):
        with pytest.raises(ArgumentError, match="source is empty"):
            as_source(empty)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ArgumentError, match=r"Table with several columns of one name.*'a'"):
        as_source(twice)


def test_equal_tables_are_one_to_a_cache_wherever_their_texts_lie() -> None:
    texts = [LONG * (row % 5) for row in range(40)]
    whole = pl.DataFrame({"s": texts})
    parts = pl.concat([pl.DataFrame({"s": texts[:7]}), pl.DataFrame({"s": texts[7:]})])
    other = pl.DataFrame({"s": [*texts[:-1], "x"]})
    first, second, third = (
        describe(len, None, as_source(frame)) for frame in (whole, parts, other)
    )
    assert first == second != third
