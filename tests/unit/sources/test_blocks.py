"""Blocks that sources store together, and the order that reads them together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources.blocks import block_starts
from loaderpool.sources.recognise import as_source


def starts_of(source: object, rows: int | None = None) -> list[int] | None:
    found = block_starts(as_source(source), rows)
    return None if found is None else found.tolist()


def test_given_rows_divide_any_source() -> None:
    assert starts_of(range(10), 4) == [0, 4, 8]
    assert starts_of([1, 2, 3]) is None


def test_hdf5_files_have_their_chunks(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    paths = [tmp_path / "a.h5", tmp_path / "b.h5"]
    for path, chunks in zip(paths, [(8, 1), None], strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(20)[:, None], chunks=chunks)
    assert starts_of(lp.HDF5(paths, "x")) == [0, 8, 16, 20]


def test_parquet_files_have_their_row_groups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": range(50)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    rows = lp.ParquetRows(tmp_path / "a.parquet")
    assert starts_of(rows) == [0, 20, 40]
    with lp.Loader(rows, batch_size=50, order=lp.Blocks(window=1), workers=0) as loader:
        (batch,) = loader
    assert len({int(item) // 20 for item in batch["x"][:10]}) == 1
    assert sorted(batch["x"].tolist()) == [*range(50)]


def test_zarr_arrays_have_their_chunks(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(store=tmp_path / "z", shape=(50, 2), chunks=(9, 2), dtype="i4")
    array[:] = 1
    expected = [0, 9, 18, 27, 36, 45]
    assert starts_of(array) == starts_of((array, np.arange(50))) == expected


def test_given_rows_begin_again_in_each_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"]
    for path, lines in zip(paths, (5, 0, 3), strict=True):
        path.write_text("line\n" * lines)
    lines = lp.TextLines(paths)
    assert starts_of(lines, 2) == [0, 2, 4, 5, 7]
    assert starts_of(lp.zip_sources(lines, range(6), strict=False), 2) == [0, 2, 4, 5]


def test_the_largest_chunks_are_the_blocks(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    h5py = pytest.importorskip("h5py")
    data = np.zeros((40, 8))
    wide = zarr.create_array(tmp_path / "wide", data=data, chunks=(10, 4))
    label = zarr.create_array(tmp_path / "label", data=data[:, 0], chunks=(20,))
    assert starts_of((label, wide)) == [0, 10, 20, 30]
    shards = zarr.create_array(tmp_path / "shards", data=data, chunks=(5, 8), shards=(20, 8))
    assert starts_of(shards) == [*range(0, 40, 5)]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("label", data=data[:, 0], chunks=(20,))
        file.create_dataset("wide", data=data, chunks=(10, 4))
    assert starts_of(lp.HDF5(tmp_path / "x.h5", ("label", "wide"))) == [0, 10, 20, 30]
