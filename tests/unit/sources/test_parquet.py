"""Parquet by row: values of the columns' own types, row groups that are decoded once, and errors
for damaged files.
"""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import loaderpool as lp
from tests.support.child import run_child

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NOON = datetime.datetime(2024, 5, 6, 12, 0, 0, 1)


def table_of(rows: int, begin: int = 0) -> pa.Table:
    numbers = np.arange(begin, begin + rows)
    return pa.table(
        {
            "id": numbers.astype(np.int32),
            "score": (numbers / 3).astype(np.float32),
            "text": [f"näme {n}" for n in numbers],
            "is_odd": numbers % 2 == 1,
        }
    )


def write(path: Path, table: pa.Table, **how: Any) -> Path:
    pq.write_table(table, path, **how)
    return path


def ids(source: Any, indices: Any) -> list[int]:
    return [int(source[at]["id"]) for at in indices]


# ---- rows ----


def test_rows_are_dicts_of_the_columns_own_types(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{n}.parquet", table_of(10, 10 * n), row_group_size=4) for n in range(3)
    ]
    source = lp.ParquetRows([str(paths[0]), *paths[1:]])
    assert len(source) == 30 and ids(source, range(30)) == list(range(30)) == ids(
        source, range(-30, 0)
    )
    row = source[13]
    assert row == {"id": 13, "score": np.float32(13 / 3), "text": "näme 13", "is_odd": True}
    kinds = [type(value) for value in row.values()]
    assert kinds == [np.int32, np.float32, str, np.bool_]
    some = pickle.loads(pickle.dumps(lp.ParquetRows(paths, columns=["text", "id"])))
    assert some[29] == {"text": "näme 29", "id": 29} and list(some[29]) == ["text", "id"]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three rows with columns of every kind. The second row has many nulls."""
    table = pa.table(
        {
            "int": pa.array([1, None, 3], pa.int16()),
            "bool": [None, True, False],
            "float": pa.array([1.5, None, 2.5], pa.float32()),
            "bytes": [b"\x00\xff", None, b""],
            "text": ["a", None, ""],
            "kind": pa.array(["a", None, "b"]).dictionary_encode(),
            "vector": pa.array([[1, 2], None, []], pa.list_(pa.float32())),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
            "holes": [[1, None], [2], []],
            "texts": [["a"], [], ["b", "c"]],
            "struct": [{"x": 1}, {"x": 2}, {"x": 3}],
            "time": pa.array([NOON, None, NOON], pa.timestamp("us")),
            "span": pa.array([1, 2, 3], pa.duration("s")),
            "day": [NOON.date()] * 3,
            "large": pa.array(["x", "y", "z"], pa.large_string()),
        }
    )
    return list(lp.ParquetRows(write(tmp_path_factory.mktemp("kinds") / "x.parquet", table)))


def test_numbers_have_the_type_of_their_column(kinds: Any) -> None:
    first, second, third = kinds
    assert first["int"] == 1 and type(first["int"]) is np.int16 and type(third["int"]) is np.int16
    assert second["bool"] and type(second["bool"]) is np.bool_
    assert type(first["float"]) is np.float32


def test_a_null_is_none(kinds: Any) -> None:
    assert kinds[0]["bool"] is None
    lacking = {"int", "float", "bytes", "text", "kind", "vector", "time"}
    assert {name for name, value in kinds[1].items() if value is None} == lacking


def test_texts_and_bytes_are_python_objects(kinds: Any) -> None:
    first, _, third = kinds
    found = (first["bytes"], first["text"], third["kind"], third["large"])
    assert found == (b"\x00\xff", "a", "b", "z")


def test_lists_of_numbers_are_separate_arrays(kinds: Any) -> None:
    first, _, third = kinds
    assert first["vector"].dtype == np.float32 and first["vector"].tolist() == [1, 2]
    assert third["vector"].shape == (0,)
    assert third["fixed"].dtype == np.int8 and third["fixed"].tolist() == [5, 6]
    first["vector"][0] = 7  # the row has its own memory


def test_other_nested_columns_are_lists_and_dicts(kinds: Any) -> None:
    first, second, third = kinds
    assert (first["holes"], third["texts"], second["struct"]) == ([1, None], ["b", "c"], {"x": 2})


def test_times_are_numpy_scalars_and_days_are_dates(kinds: Any) -> None:
    first, _, third = kinds
    assert first["time"] == np.datetime64(NOON) and third["span"] == np.timedelta64(3, "s")
    assert first["day"] == NOON.date()


@hypothesis.given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    group=st.integers(1, 5),
    data=st.data(),
)
@hypothesis.settings(
    max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_row_in_any_order(
    tmp_path: Path, counts: list[int], group: int, data: st.DataObject
) -> None:
    paths, total = [], 0
    for number, count in enumerate(counts):
        paths.append(
            write(tmp_path / f"{number}.parquet", table_of(count, total), row_group_size=group)
        )
        total += count
    if not total:
        with pytest.raises(lp.ArgumentError, match="found no rows in"):
            lp.ParquetRows(paths)
        return
    order = data.draw(st.lists(st.integers(0, total - 1)))
    source = lp.ParquetRows(paths, ["id"])
    assert ids(source, order) == order
    rows = source.read_rows(order) if order else []
    assert [int(row["id"]) for row in rows] == order
    assert len(set(map(id, rows))) == len(order)


def test_workers_know_registered_extension_types() -> None:
    run_child("""
import pyarrow as pa, pyarrow.parquet as pq
import loaderpool as lp

class Cents(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.int64(), "test.cents")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()

    def __arrow_ext_scalar_class__(self):
        return Euros

class Euros(pa.ExtensionScalar):
    def as_py(self, **_):
        return self.value.as_py() / 100

pa.register_extension_type(Cents())
prices = pa.ExtensionArray.from_storage(Cents(), pa.array(range(10)))
pq.write_table(pa.table({"price": prices}), "x.parquet")
source = lp.ParquetRows("x.parquet")
with lp.Loader(source, batch_size=10, workers=2) as loader:
    assert next(iter(loader))["price"].tolist() == [cents / 100 for cents in range(10)]
""").check()


# ---- damage ----


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with four row groups, with a checksum on each page."""
    path = tmp_path_factory.mktemp("checked") / "checked.parquet"
    return write(
        path,
        table_of(40),
        row_group_size=10,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )


def test_a_damaged_row_group_is_an_error_of_its_rows_alone(checked: Path) -> None:
    facts = pq.ParquetFile(checked).metadata.row_group(2).column(0)
    data = bytearray(checked.read_bytes())
    data[facts.data_page_offset + facts.total_compressed_size - 3] ^= 1
    path = checked.with_name("flipped.parquet")
    path.write_bytes(data)
    source = lp.ParquetRows(path)
    assert ids(source, [*range(20), *range(30, 40)]) == [*range(20), *range(30, 40)]
    for row in (20, 29):
        with pytest.raises(
            lp.SourceError, match=rf"row {row} of .*flipped\.parquet cannot be read: OSError: .*CRC"
        ):
            source[row]


@hypothesis.given(cut=st.floats(0, 0.9999))
@hypothesis.settings(max_examples=30)
def test_a_file_that_is_cut_is_refused(checked: Path, cut: float) -> None:
    path = checked.with_name("cut.parquet")
    data = checked.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(lp.SourceError, match=r"cut\.parquet cannot be read as Parquet"):
        lp.ParquetRows(path)


# ---- refused ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["id", "nome"],), r"x\.parquet lacks 'nome'; it has 'id', 'score', 'text', 'is_odd'"),
        (("id",), "columns must be a list of names, got 'id'"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(lp.ArgumentError, match=message):
        lp.ParquetRows(write(tmp_path / "x.parquet", table_of(3)), *arguments)


def test_files_of_other_columns_are_named(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a", table_of(3)),
        write(tmp_path / "b", table_of(3).drop_columns(["text"])),
    ]
    with pytest.raises(lp.ArgumentError, match=r"b lacks 'text'; it has"):
        lp.ParquetRows(paths)
    assert len(lp.ParquetRows(paths, ["id"])) == 6
