"""HDF5 by row: the values of h5py, files that each process opens itself, and errors for damaged
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import loaderpool as lp
from tests.support.batches import assert_same
from tests.support.child import run_child

h5py = pytest.importorskip("h5py")


def write(path: Path, rows: int, seed: int = 0, **how: Any) -> Path:
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=rng.integers(0, 255, (rows, 4, 3), np.uint8), **how)
        file.create_dataset("train/labels", data=rng.integers(0, 9, rows, np.int16))
        file.create_dataset(
            "names", data=[f"näme {n}" for n in range(rows)], dtype=h5py.string_dtype()
        )
        file["one"] = 3.5
    return path


# ---- rows ----


def test_rows_are_those_of_h5py(tmp_path: Path) -> None:
    sizes = [5, 1, 30]
    paths = [write(tmp_path / f"{n}.h5", rows, n, chunks=(1, 4, 3)) for n, rows in enumerate(sizes)]
    keys = {"image": "images", "rest": ("train/labels", "names")}
    source = lp.HDF5([str(paths[0]), *paths[1:]], keys)
    assert len(source) == 36
    expected = []
    for path in paths:
        with h5py.File(path) as file:
            for row in range(len(file["images"])):
                rest = file["train/labels"][row], file["names"][row]
                expected.append({"image": file["images"][row], "rest": rest})
    for at in (*range(36), *range(-36, 0)):
        item = source[at]
        assert list(item) == ["image", "rest"] and isinstance(item["rest"][1], bytes)
        assert_same(item["image"], expected[at]["image"])
        assert item["rest"] == expected[at]["rest"] and item["rest"][0].dtype == np.int16
    single = lp.HDF5(paths[2], "images")
    assert_same(np.array(single), np.array([item["image"] for item in expected[6:]]))


def test_a_fork_opens_files_of_its_own() -> None:
    """HDF5 returns a file that is already open, also an inherited one. Both processes would then
    move the same position.
    """
    run_child("""
import os, sys
import h5py, numpy as np
import loaderpool as lp

def descriptor():
    ((file, _),) = source._handles.values()
    return file.id.get_vfd_handle()

with h5py.File("x.h5", "w") as file:
    file["x"] = np.arange(10)
source = lp.HDF5("x.h5", "x")
assert source[3] == 3
number = descriptor()
place = os.lseek(number, 0, os.SEEK_CUR)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.lseek(number, 0, os.SEEK_CUR) == place
    assert source[9] == 9
    sys.exit()
assert source[4] == 4
os.lseek(descriptor(), place + 7, os.SEEK_SET)
""").check()


def test_workers_import_filters_that_the_program_has() -> None:
    run_child("""
import sys
import h5py, numpy as np
import loaderpool as lp

with h5py.File("x.h5", "w") as file:
    file["x"] = np.arange(10)
with open("hdf5plugin.py", "w") as file:
    file.write("pass")
sys.path.insert(0, "")

def has_filters(row):
    return "hdf5plugin" in sys.modules

without = lp.HDF5("x.h5", "x")
import hdf5plugin
for source, expected in ((without, 0), (lp.HDF5("x.h5", "x"), 10)):
    with lp.Loader(source, has_filters, batch_size=5, workers=2) as loader:
        assert sum(batch.sum() for batch in loader) == expected
""").check()


# ---- damage ----


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with ten chunks of one row, each with a checksum."""
    path = tmp_path_factory.mktemp("packed") / "packed.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(10_000).reshape(10, 1000)
        file.create_dataset("x", data=data, chunks=(1, 1000), fletcher32=True)
    return path


def test_a_damaged_chunk_is_an_error_of_its_rows_alone(packed: Path) -> None:
    with h5py.File(packed) as file:
        place = file["x"].id.get_chunk_info(4).byte_offset
    path = packed.with_name("flipped.h5")
    data = bytearray(packed.read_bytes())
    data[place + 17] ^= 1
    path.write_bytes(data)
    source = lp.HDF5(path, {"a": "x"})
    for row in (0, 3, 5, 9):
        assert source[row]["a"].tolist() == list(range(1000 * row, 1000 * row + 1000))
    for _ in range(2):
        with pytest.raises(lp.SourceError, match=r"row 4 of .*flipped\.h5 cannot be read: OSError"):
            source[4]


@hypothesis.given(cut=st.floats(0, 0.999))
@hypothesis.settings(max_examples=30)
def test_a_file_that_is_cut_is_refused(packed: Path, cut: float) -> None:
    path = packed.with_name("cut.h5")
    data = packed.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(lp.SourceError, match=r"cut\.h5 cannot be read as HDF5"):
        lp.HDF5(path, "x")


# ---- refused ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "image",
            r"'image' in .* is no dataset with rows; the file has the datasets 'images', 'names', 'one'",
        ),
        ("train", "'train' in .* is no dataset with rows"),
        ("one", "'one' in .* is no dataset with rows"),
        (["images"], r"keys must be the name of a dataset, .* got \['images'\]: write 'images'"),
        (3, "keys must be the name of a dataset, or a tuple or dict of names, got 3"),
        ({"a": ("images", 3)}, r"keys\['a'\]\[1\] must be the name of a dataset, .* got 3"),
        ((), "keys has an empty tuple"),
        (None, "keys has None"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, keys: Any, message: str) -> None:
    with pytest.raises((lp.ArgumentError, lp.SpecMismatchError), match=message):
        lp.HDF5(write(tmp_path / "x.h5", 3), keys)


def test_datasets_of_different_lengths_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", 3)
    with h5py.File(path, "a") as file:
        file["more"] = np.zeros(4)
    with pytest.raises(
        lp.ArgumentError, match=r"x\.h5 .* number of rows, but 'images' has 3, 'more' has 4"
    ):
        lp.HDF5(path, ("images", "more"))
