"""Decoded blocks: rows equal those of the array, and the kept bytes have a limit."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.plan.block_order import BlockOrder
from loaderpool.sources import decoded
from loaderpool.sources.decoded import ChunkedRows, KeptBlocks
from loaderpool.sources.many_rows import blocks_reader_of
from loaderpool.sources.recognise import as_source
from tests.support.child import run_child

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr", minversion="3")

ROWS = 20
NUMBERS = np.arange(ROWS * 6).reshape(ROWS, 2, 3)


def kinds_of_hdf5() -> dict[str, dict[str, Any]]:
    """Return arguments of `create_dataset`, by the kind of the dataset."""
    texts = [f"näme {row}" for row in range(ROWS)]
    lists = np.empty(ROWS, object)
    lists[:] = [np.arange(row % 4, dtype=np.int32) for row in range(ROWS)]
    grid = np.empty((ROWS, 2), object)
    for row in range(ROWS):
        grid[row] = [lists[row], lists[row - 1]]
    pairs = np.zeros(ROWS, [("a", "i4"), ("b", "f8", (2,))])
    pairs["a"] = range(ROWS)
    return {
        "numbers": {"data": NUMBERS, "chunks": (7, 1, 2)},
        "one axis": {"data": NUMBERS[:, 0, 0], "chunks": (7,)},
        "big endian": {"data": NUMBERS.astype(">i4"), "chunks": (7, 2, 3)},
        "booleans": {"data": NUMBERS[:, 0, 0] % 2 == 1, "chunks": (7,)},
        "texts": {"data": texts, "dtype": h5py.string_dtype(), "chunks": (7,)},
        "short texts": {"data": np.array([b"ab", b"c"] * 10), "chunks": (7,)},
        "tables": {"data": pairs, "chunks": (7,)},
        "lists": {"data": lists, "dtype": h5py.vlen_dtype("i4"), "chunks": (7,)},
        "grids of lists": {"data": grid, "dtype": h5py.vlen_dtype("i4"), "chunks": (7, 2)},
        "texts in tables": {
            "data": np.array(
                [(row, text) for row, text in enumerate(texts)],
                [("a", "i4"), ("b", h5py.string_dtype())],
            ),
            "chunks": (7,),
        },
        "references": {"shape": (ROWS,), "dtype": h5py.ref_dtype, "chunks": (7,)},
        "no chunks": {"data": NUMBERS},
        "one row": {"data": NUMBERS, "chunks": (1, 2, 3)},
    }


def arrays(folder: Path) -> Iterator[tuple[str, Any]]:
    file = h5py.File(folder / "kinds.h5", "w")
    for name, how in kinds_of_hdf5().items():
        yield f"hdf5 {name}", file.create_dataset(name, **how)
    for name, data, how in (
        ("numbers", NUMBERS, {"chunks": (7, 1, 2)}),
        ("one axis", NUMBERS[:, 0, 0], {"chunks": (7,)}),
        ("shards", NUMBERS, {"chunks": (2, 2, 3), "shards": (8, 2, 3)}),
        ("one row", NUMBERS, {"chunks": (1, 2, 3)}),
        ("version 2", NUMBERS, {"chunks": (7, 2, 3), "zarr_format": 2}),
        ("times", NUMBERS[:, 0, 0].astype("M8[s]"), {"chunks": (7,)}),
    ):
        yield f"zarr {name}", zarr.create_array(folder / f"{name}.zarr", data=data, **how)
    texts = zarr.create_array(folder / "texts.zarr", shape=(ROWS,), chunks=(7,), dtype=str)
    texts[:] = np.array([f"näme {row}" for row in range(ROWS)])
    yield "zarr texts", texts


def assert_equal(actual: Any, expected: Any, where: str) -> None:
    """Check that two rows have the same type and the same values."""
    assert type(actual) is type(expected), where
    if isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        if expected.dtype == object:
            for one, other in zip(actual.reshape(-1), expected.reshape(-1), strict=True):
                assert_equal(one, other, where)
        else:
            assert actual.tolist() == expected.tolist(), where
    else:
        assert getattr(actual, "dtype", None) == getattr(expected, "dtype", None), where
        # references of h5py are never equal
        assert str(actual) == str(expected) if "ref" in where else actual == expected, where


def test_rows_are_those_of_the_array(tmp_path: Path) -> None:
    order = [*np.random.default_rng(0).permutation(ROWS).tolist(), 3, 3, 0]
    for name, array in arrays(tmp_path):
        source = as_source(array)
        assert type(source) is ChunkedRows and len(source) == ROWS
        read_rows = blocks_reader_of(source)
        assert read_rows is not None
        for rows in (
            [source[row] for row in order],
            read_rows(order),
            ChunkedRows(array).read_rows(order),
        ):
            for row, index in zip(rows, order, strict=True):
                assert_equal(row, array[index], name)


def test_rows_share_no_memory(tmp_path: Path) -> None:
    for name, array in arrays(tmp_path):
        source = ChunkedRows(array)
        rows = [source[3], source[3], *source.read_rows([3, 3, 4, 5, 9, 9])]
        parts = [row for row in rows if isinstance(row, np.ndarray)]
        for row in [*parts]:
            if row.dtype == object:
                parts += [part for part in row.reshape(-1) if isinstance(part, np.ndarray)]
        assert all(part.base is None for part in parts), name
        assert len(set(map(id, parts))) == len(parts), name


def test_lazy_arrays_have_chunks(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    tensorstore = pytest.importorskip("tensorstore")
    data = xarray.Dataset({"x": (("row", "column"), NUMBERS[:, 0])})
    data.to_zarr(tmp_path / "x.zarr", consolidated=False, encoding={"x": {"chunks": (6, 2)}})
    opened = xarray.open_zarr(tmp_path / "x.zarr", chunks=None, consolidated=False)["x"]
    store = {"driver": "file", "path": str(tmp_path / "x.zarr" / "x")}
    lazy = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
    for array in (opened, lazy):
        source = as_source(array)
        assert type(source) is ChunkedRows and source.stored_rows == source._rows == 6
        for row, expected in zip(source.read_rows([7, 19, 8]), [7, 19, 8], strict=True):
            assert_equal(row, NUMBERS[expected, 0], "lazy")
            assert_equal(source[expected], NUMBERS[expected, 0], "lazy")


# ---- each block is decoded once ----


class CountedFile(io.FileIO):
    """File that counts the bytes that are read from it."""

    nbytes = 0

    def readinto(self, buffer: Any) -> Any:
        count = super().readinto(buffer)
        type(self).nbytes += count or 0
        return count


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Callable[[], float]]]]:
    """Return a dataset of incompressible rows, and a function that counts the reads of it."""
    opened: list[Any] = []

    def make(chunks: tuple[int, ...] | None) -> tuple[Any, Callable[[], float]]:
        path = tmp_path / f"{chunks}.h5"
        data = np.random.default_rng(0).integers(0, 256, (64, 4096), np.uint8)
        with h5py.File(path, "w") as file:
            how = {} if chunks is None else {"chunks": chunks, "compression": "gzip"}
            file.create_dataset("x", data=data, **how)
        kind = type("Counted", (CountedFile,), {"nbytes": 0})
        raw = kind(path)
        file = h5py.File(raw, "r")
        opened.extend([file, raw])
        dataset = file["x"]
        before = kind.nbytes
        return dataset, lambda: (kind.nbytes - before) / data.nbytes

    yield make
    for file in opened:
        file.close()


@pytest.mark.parametrize("chunks", [(8, 4096), (8, 1000), (1, 4096), None])
def test_reading_in_order_decodes_once(
    counted: Callable[..., Any], chunks: tuple[int, ...] | None
) -> None:
    for batch in (1, 5, 64):
        dataset, times = counted(chunks)
        source = ChunkedRows(dataset)
        for start in range(0, 64, batch):
            source.read_rows(range(start, min(64, start + batch)))
        assert 0.9 < times() < 1.3


def test_blocks_of_the_window_are_kept(
    counted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "_FREE_BYTES", 0)
    dataset, times = counted((8, 4096))
    source = ChunkedRows(dataset)
    order = BlockOrder(64, True, 3, starts=np.arange(0, 64, 8), window=4)
    decoded.reserve(order, order)
    indices = order.indices(0, np.arange(64))
    for start in range(0, 64, 3):
        source.read_rows(indices[start : start + 3])
    assert times() < 1.3
    assert len(source._kept._blocks) == 4
    gc.collect()
    del order
    assert source._kept.needed == 2


@pytest.mark.parametrize(
    ("rows", "of", "blocks"), [(8, 8, 1), (16, 8, 2), (4, 8, 1), (5, 8, 2), (9, 8, 2), (10, 8, 3)]
)
def test_a_window_touches_these_blocks(rows: int, of: int, blocks: int) -> None:
    firsts = range(0, rows * of, rows)
    most = max((first + rows - 1) // of - first // of + 1 for first in firsts)
    assert decoded._most_overlapped(rows, of) == blocks >= most


def test_a_uniform_batch_decodes_each_chunk_once(
    counted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "_FREE_BYTES", 0)
    dataset, times = counted((8, 4096))
    source = ChunkedRows(dataset)
    source.read_rows(np.random.default_rng(1).permutation(64).tolist())
    assert times() < 1.3


def test_threads_decode_a_block_once() -> None:
    kept, decodes, begun = KeptBlocks(), [], threading.Barrier(4)

    def decode() -> tuple[Any, int, int]:
        decodes.append(1)
        return "block", 1, 1

    def get() -> None:
        begun.wait()
        assert kept.get(0, decode) == "block"

    threads = [threading.Thread(target=get) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(decodes) == 1


def test_a_failed_decode_is_repeated() -> None:
    kept = KeptBlocks()

    def fail() -> tuple[Any, int, int]:
        raise OSError("damaged")

    for _ in range(2):
        with pytest.raises(OSError, match="damaged"):
            kept.get(0, fail)
    assert kept.get(0, lambda: ("good", 1, 1)) == "good"


# ---- memory ----


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(decoded, "_stores", weakref.WeakSet())
    monkeypatch.setattr(decoded, "_FREE_BYTES", 100)
    monkeypatch.setattr(decoded, "_most_bytes", lambda: 1000)
    return 1000


def test_all_sources_share_the_limit(limit: int) -> None:
    order = BlockOrder(100, True, 0, starts=np.arange(100), window=50)
    decoded.reserve(order, order)
    stores = [KeptBlocks() for _ in range(3)]
    for number in range(30):
        for store in stores:
            store.put(number, number, 1, 90)
            assert sum(each.nbytes for each in stores) <= limit
    # the most recent blocks
    assert [list(store._blocks) for store in stores] == [[26, 27, 28, 29][-n:] for n in (3, 4, 4)]


def test_each_source_keeps_its_latest_block(limit: int) -> None:
    stores = [KeptBlocks() for _ in range(3)]
    for number in range(3):
        for store in stores:
            store.put(number, number, 1, 5000)
    assert [list(store._blocks) for store in stores] == [[2]] * 3


def test_blocks_die_with_their_source(limit: int) -> None:
    gone, stays = KeptBlocks(), KeptBlocks()
    gone.put(0, "x", 1, 900)
    del gone
    gc.collect()
    for number in range(2):
        stays.put(number, "x", 1, 450)
    assert len(stays._blocks) == 2


def test_blocks_larger_than_the_limit_are_read_by_row(limit: int, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "x.zarr", data=np.arange(400).reshape(2, 200), chunks=(2, 200)
    )
    source = ChunkedRows(array)
    assert source._rows == 1 and source.stored_rows == 2
    for row, expected in zip(source.read_rows([1, 0]), [array[1], array[0]], strict=True):
        assert_equal(row, expected, "large")
    assert not source._kept._blocks


def test_a_fork_begins_without_blocks() -> None:
    run_child("""
import os, sys
from loaderpool.sources.decoded import KeptBlocks

kept = KeptBlocks()
kept.put("a", "block", 1, 1 << 20)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept.find("a") == "block" and kept.nbytes == 1 << 20
    sys.exit()
assert kept.find("a") is None and kept.nbytes == 0
assert kept.get("a", lambda: ("new", 1, 5)) == "new" and kept.nbytes == 5
""").check()


# ---- files and columns ----


def write(path: Path, rows: int = 40, first: int = 0) -> Path:
    with h5py.File(path, "w") as file:
        data = np.arange(first, first + rows)[:, None] * [1, 1]
        file.create_dataset("x", data=data, chunks=(8, 2), compression="gzip")
    return path


def test_a_file_that_changes_is_refused_at_its_next_block(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5")
    source = lp.HDF5(path, "x")
    assert source[0].tolist() == [0, 0]
    with path.open("r+b") as file:
        file.write(file.read(1))
    os.utime(path, (1, 1))
    with pytest.raises(lp.SourceError, match="has changed since it was indexed"):
        source[20]


def test_a_subclass_may_read_otherwise(tmp_path: Path) -> None:
    class Doubled(lp.HDF5):
        def read(self, handle: Any, record: Any) -> Any:
            return super().read(handle, record) * 2  # type: ignore[operator]

    source = Doubled(write(tmp_path / "x.h5"), "x")
    assert blocks_reader_of(as_source(source)) is None
    with lp.Loader(source, batch_size=40, workers=0) as loader:
        assert next(iter(loader))[:, 0].tolist() == [*range(0, 80, 2)]


def test_columns_are_read_together_unless_one_is_the_users(tmp_path: Path) -> None:
    class Own:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> int:
            return index

    rows = lp.HDF5(write(tmp_path / "x.h5"), "x")
    reader = blocks_reader_of(as_source(lp.zip_sources(rows, np.arange(40), [*range(40)])))
    assert reader is not None
    assert [(x[0], y, z) for x, y, z in reader([9, 3])] == [(9, 9, 9), (3, 3, 3)]  # type: ignore[misc]
    assert blocks_reader_of(as_source(lp.zip_sources(rows, Own()))) is None
    assert blocks_reader_of(as_source(lp.zip_sources(np.arange(4), [*range(4)]))) is None
