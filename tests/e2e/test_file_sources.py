"""Files of every format in a Loader: the same bits for any number of workers and after a resume.
Damaged records are skipped.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read

FILES, ROWS = 3, 40
TOTAL = FILES * ROWS


@pytest.fixture(scope="module")
def folder(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numbers 0 to TOTAL - 1, in three files of each format."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(FILES):
        numbers = np.arange(file * ROWS, (file + 1) * ROWS)
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for number in numbers:
                writer.write(number.tobytes() * (1 + number % 3))
        with h5py.File(folder / f"{file}.h5", "w") as store:
            store.create_dataset(
                "x", data=numbers, chunks=(7,), compression="gzip", fletcher32=True
            )
            store.create_dataset("deep/y", data=numbers[:, None] * [1.0, 2.0])
        table = pa.table({"x": numbers, "text": [str(number) for number in numbers]})
        pq.write_table(
            table, folder / f"{file}.parquet", row_group_size=9, write_page_checksum=True
        )
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for number in numbers:
                for name, data in (("npy", number.tobytes()), ("txt", str(number).encode() * 50)):
                    info = tarfile.TarInfo(f"some/{number}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        with open(folder / f"{file}.jsonl", "w") as lines:
            lines.writelines(
                json.dumps({"x": int(number), "text": "ä" * (number % 5)}) + "\n"
                for number in numbers
            )
    return folder


def paths(folder: Path, ending: str) -> list[Path]:
    return [folder / f"{file}.{ending}" for file in range(FILES)]


SOURCES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tfrecord": (lp.TFRecords, lambda item: np.frombuffer(item[:8], np.int64)[0]),
    "h5": (
        lambda paths: lp.HDF5(paths, {"a": "x", "b": ("x", "deep/y")}),
        lambda item: item["b"][0],
    ),
    "parquet": (lp.ParquetRows, lambda item: item["x"]),
    "tar": (lp.TarSamples, lambda item: np.frombuffer(item["npy"], np.int64)[0]),
    "jsonl": (lp.JsonLines, lambda item: item["x"]),
}


@pytest.mark.parametrize("ending", SOURCES)
def test_all_workers_give_the_bits_that_this_process_gives(
    on: Place, folder: Path, ending: str
) -> None:
    make, number_of = SOURCES[ending]

    def sample(item: Any, rng: np.random.Generator) -> Any:
        return number_of(item), rng.random()

    def made(workers: int) -> list[Any]:
        source = make(paths(folder, ending))
        assert len(source) == TOTAL
        return read(
            lp.Loader(source, sample, batch_size=7, shuffle=True, seed=1, **on(workers)), passes=2
        )

    expected = made(0)
    numbers = [batch[0] for batch in expected]
    for epoch in (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]):
        assert np.array_equal(np.sort(np.concatenate(epoch)), np.arange(TOTAL))
        assert not np.array_equal(np.concatenate(epoch), np.arange(TOTAL))
    assert_same(made(2), expected)
    assert_same(made(3), expected)


def test_damage_is_named_and_can_be_skipped(on: Place, folder: Path, tmp_path: Path) -> None:
    _, number_of = SOURCES["h5"]
    path = tmp_path / "0.h5"
    data = bytearray((folder / path.name).read_bytes())
    with h5py.File(folder / path.name) as store:
        data[store["x"].id.get_chunk_info(2).byte_offset + 2] ^= 1
    path.write_bytes(data)
    source, lost = lp.HDF5(path, {"a": "x", "b": ("x", "deep/y")}), set(range(14, 21))
    expected = [number for number in range(ROWS) if number not in lost]
    for workers in (0, 2):
        with lp.Loader(source, number_of, batch_size=5, on_error="skip", **on(workers)) as loader:
            assert [int(number) for batch in loader for number in batch] == expected
            assert set(loader.statistics().skipped_indices) == lost
        with lp.Loader(
            source, number_of, batch_size=20, on_error="replace", **on(workers)
        ) as loader:
            numbers = [int(number) for batch in loader for number in batch]
            assert len(numbers) == ROWS and lost.isdisjoint(numbers)
        with lp.Loader(source, number_of, batch_size=5, **on(workers)) as loader:
            with pytest.raises(lp.SampleError) as caught:
                list(loader)
            assert isinstance(caught.value, lp.SourceError) and str(path) in str(caught.value)
            assert caught.value.index == min(lost)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_workers_are_forked_and_the_trainer_has_no_file_open(on: Place, folder: Path) -> None:
    for ending, (make, number_of) in SOURCES.items():
        with lp.Loader(make(paths(folder, ending)), number_of, batch_size=10, workers=2) as loader:
            assert len(list(loader)) == TOTAL // 10
            assert loader.statistics().workers_start == "fork", ending
        targets = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
        assert not [
            target
            for target in targets
            if target.startswith(str(folder.resolve())) and ending in target
        ]
