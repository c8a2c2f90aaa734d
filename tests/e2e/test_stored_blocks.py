"""Sources stored in blocks: batches equal those of a list, and each block is decoded once."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources.recognise import as_source
from tests.support.batches import Place, assert_same, read, shared_pools

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
zarr = pytest.importorskip("zarr", minversion="3")

FILES, ROWS, BLOCK = 2, 90, 16
TOTAL = FILES * ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numbers 0 to TOTAL - 1, in two files of each format, and a zarr array for both."""
    folder = tmp_path_factory.mktemp("blocks")
    numbers = np.arange(TOTAL, dtype=np.int32)
    for number in range(FILES):
        part = numbers[number * ROWS : (number + 1) * ROWS]
        with h5py.File(folder / f"{number}.h5", "w") as file:
            wide = part[:, None] * np.ones(50, np.int32)
            file.create_dataset("x", data=wide, chunks=(BLOCK, 50), compression="gzip")
            file.create_dataset("y", data=part, chunks=(40,))
            texts = [f"{each}" for each in part]
            file.create_dataset("text", data=texts, dtype=h5py.string_dtype(), chunks=(7,))
        table = pa.table({"x": part, "holes": [int(x) if x % 3 else None for x in part]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=BLOCK)
    zarr.create_array(folder / "x.zarr", data=numbers[:, None] * [1, 1], chunks=(BLOCK, 1))
    zarr.create_array(folder / "y.zarr", data=numbers, chunks=(40,))
    return folder


def hdf5(folder: Path) -> Any:
    return lp.HDF5([folder / f"{n}.h5" for n in range(FILES)], {"x": "x", "rest": ("y", "text")})


def parquet(folder: Path) -> Any:
    return lp.ParquetRows([folder / f"{n}.parquet" for n in range(FILES)])


def arrays(folder: Path) -> Any:
    opened = [zarr.open_array(folder / f"{name}.zarr", mode="r") for name in "xy"]
    return {"x": opened[0], "y": opened[1], "z": np.arange(TOTAL)}


def mixed(folder: Path) -> Any:
    return lp.mix([hdf5(folder), parquet(folder)], seed=1)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "hdf5": hdf5, "parquet": parquet, "zarr": arrays, "mix": mixed,
}  # fmt: skip
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffle": {"shuffle": True},
    "blocks": {"order": lp.Blocks(rows=BLOCK, window=3)},
}


def sample(item: Any, rng: np.random.Generator) -> Any:
    x = item["x"]
    if x.ndim:
        x[0] += 1  # the row does not share memory with its block
    rest = item.get("rest")
    text = len(rest[1]) if rest is not None else 0
    hole = item.get("holes", 0) is None
    return int(np.ravel(x)[-1]), text, hole, rng.random(), np.random.random()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with shared_pools() as found:
        yield found


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("order", ORDERS)
def test_bits_are_those_of_a_list_of_rows(
    folder: Path, place: Place, kind: str, order: str
) -> None:
    settings: dict[str, Any] = {"batch_size": 7, "seed": 3, **ORDERS[order]}
    alone = dict(settings)
    indexed: Any = as_source(SOURCES[kind](folder))
    rows = [indexed[row] for row in range(len(indexed))]
    if order == "blocks" and kind in ("hdf5", "parquet"):
        # A list has one file, so its blocks are given by their first rows.
        with lp.Loader(SOURCES[kind](folder), sample, workers=0, **settings) as loader:
            epochs = [
                np.concatenate([loader.indices(epoch, batch) for batch in range(len(loader))])
                for epoch in range(2)
            ]
        alone["order"] = lambda epoch: epochs[epoch]
    rows = [{**row, "x": row["x"].copy()} for row in rows]
    with lp.Loader(Fresh(rows), sample, workers=0, **alone) as loader:
        expected = read(loader, passes=2)
    for workers in (0, 1, 3):
        with lp.Loader(SOURCES[kind](folder), sample, **settings, **place(workers)) as loader:
            assert_same(read(loader, passes=2), expected)


class Fresh:
    """Sequence that returns each row as a new array."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {**self.rows[index], "x": self.rows[index]["x"].copy()}


def test_given_blocks_begin_again_in_each_file(folder: Path) -> None:
    with lp.Loader(
        parquet(folder), batch_size=TOTAL, order=lp.Blocks(rows=BLOCK, window=1), workers=0
    ) as loader:
        indices = loader.indices(0, 0)
    firsts = [0]
    for one, other in itertools.pairwise(indices):
        if (one // ROWS, one % ROWS // BLOCK) != (other // ROWS, other % ROWS // BLOCK):
            firsts.append(1)
    assert len(firsts) == FILES * -(-ROWS // BLOCK)


# ---- number of times that blocks are decoded ----


def read_bytes(pids: list[int]) -> int:
    """Return the number of bytes that processes have read so far."""
    texts = [Path(f"/proc/{pid}/io").read_text() for pid in pids]
    return sum(int(text.split()[1]) for text in texts)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Incompressible rows in each format: the source, and the size of its files."""
    folder = tmp_path_factory.mktemp("large")
    rows = np.random.default_rng(0).integers(0, 256, (1024, 16384), np.uint8)
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(32, 16384), compression="gzip")
    lists = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), 16384)
    pq.write_table(pa.table({"x": lists}), folder / "x.parquet", row_group_size=32)
    zarr.create_array(folder / "x.zarr", data=rows, chunks=(32, 16384))
    return {
        "hdf5": lambda: lp.HDF5(folder / "x.h5", ("x",)),
        "parquet": lambda: lp.ParquetRows(folder / "x.parquet"),
        "zarr": lambda: (zarr.open_array(folder / "x.zarr", mode="r"),),
        "bytes": rows.nbytes,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("kind", ["hdf5", "parquet", "zarr"])
@pytest.mark.parametrize("how", [{}, {"order": lp.Blocks(window=4)}], ids=["in order", "blocks"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_process_decodes_a_block_once(
    large: dict[str, Any], kind: str, how: dict[str, Any], workers: int
) -> None:
    with lp.Loader(large[kind](), first_of, batch_size=8, workers=workers, **how) as loader:
        next(iter(loader))
        pids = [os.getpid()]
        if workers:
            pids = [worker.pid for worker in loader.statistics().workers if worker.pid]
        before = read_bytes(pids)
        loader.epoch = 5
        assert sum(len(batch) for batch in loader) == 1024
        times = (read_bytes(pids) - before) / large["bytes"]
    # the next epoch may be prefetched
    assert times < 1.2 * max(1, workers) + (0.5 if workers else 0)


def first_of(item: Any) -> Any:
    return (item["x"] if isinstance(item, dict) else item[0])[0]


# ---- arrays that change, and damaged files ----


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_reads_an_array_as_it_is_now(tmp_path: Path, workers: int, is_mixed: bool) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", data=np.zeros(64), chunks=(16,))
    source = lp.mix([array]) if is_mixed else array
    with lp.Loader(source, batch_size=16, workers=workers) as loader:
        for number in range(3):
            array[:] = number
            assert {float(value) for batch in loader for value in batch} == {number}
            loader.epoch = 0


@pytest.mark.parametrize("how", [{}, {"order": lp.Blocks(window=2)}], ids=["in order", "blocks"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_later_epochs_read_a_changed_array(tmp_path: Path, workers: int, how: Any) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", data=np.zeros(640), chunks=(16,))
    with lp.Loader(array, batch_size=16, workers=workers, **how) as loader:
        for number in range(1, 4):
            array[:] = number
            # Some or all batches of this epoch may have been made before the change.
            assert sum(len(batch) for batch in loader) == 640
            assert {float(value) for batch in loader for value in batch} == {number}


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_beside_a_damaged_block_are_read(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(64), chunks=(8,), fletcher32=True)
        offset = file["x"].id.get_chunk_info(2).byte_offset
    data = bytearray(path.read_bytes())
    data[offset + 2] ^= 1
    path.write_bytes(data)
    source = lp.HDF5(path, "x")
    with lp.Loader(source, batch_size=32, shuffle=True, on_error="skip", workers=workers) as loader:
        assert sorted(int(row) for batch in loader for row in batch) == [
            *range(16), *range(24, 64),
        ]  # fmt: skip
        assert set(loader.statistics().skipped_indices) == set(range(16, 24))
    with lp.Loader(source, batch_size=64, workers=workers) as loader:
        with pytest.raises(lp.SampleError, match="row 16 of") as caught:
            list(loader)
        assert caught.value.index == 16
        assert lp.replay(loader, 30) == 30


def number_of(item: Any, rng: np.random.Generator) -> Any:
    return int(item["x"][0]), rng.random()


@pytest.mark.parametrize("how", [{"threads": 3}, {"limits": lp.Limits(timeout_s=60)}])
def test_threads_and_time_limits_change_no_bit(folder: Path, on: Place, how: Any) -> None:
    settings: dict[str, Any] = {"batch_size": 7, "order": lp.Blocks(window=2)}
    with lp.Loader(hdf5(folder), number_of, workers=0, **settings) as loader:
        expected = read(loader)
    with lp.Loader(hdf5(folder), number_of, **settings, **how, **on(2)) as loader:
        assert_same(read(loader), expected)


def test_cached_results_are_made_of_blocks(folder: Path, tmp_path: Path) -> None:
    def number(item: Any) -> int:
        return int(item["x"])

    for _ in range(2):
        with lp.Loader(
            parquet(folder), number, batch_size=9, shuffle=True, cache=tmp_path / "c", workers=1
        ) as loader:
            assert sorted(int(x) for batch in loader for x in batch) == [*range(TOTAL)]
