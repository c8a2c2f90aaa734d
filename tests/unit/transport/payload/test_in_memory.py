"""Objects that pickle as the name of a store in memory are refused, with the cure."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import UnpicklableError
from loaderpool.transport.payload.in_memory import CURE
from loaderpool.transport.payload.ship import ship

VALUES = np.arange(1, 13, dtype=np.float32)
METADATA = {"shape": [12], "chunks": [2], "dtype": "<f4"}


class Stored:
    """A store that pickles as its address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> Any:
        return Stored, (self.address,)


def store_class(module: str, name: str) -> Any:
    """Return a class of this name, as a library's module defines it."""
    return type(name, (Stored,), {"__module__": module})


def refused(store: Any) -> str:
    """Return the message for a function that has captured a store."""

    def fn(index: int) -> Any:
        return store[index]

    with pytest.raises(UnpicklableError) as caught:
        ship({"source": range(3), "fn": fn})
    text = str(caught.value)
    assert "fn → closure variable 'store' of function " in text
    assert "its data is in the memory of this process" in text and text.endswith(CURE)
    return text


def is_sent(store: Any) -> bool:
    return len(ship({"source": range(3), "fn": lambda index: store}).pickled) > 0


# ---- tensorstore ----


@pytest.fixture
def array() -> Any:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr", "kvstore": "memory://a/", "metadata": METADATA}
    found = tensorstore.open(spec, create=True).result()
    found.write(VALUES).result()
    return found


def test_a_tensorstore_array_in_memory_is_refused(array: Any) -> None:
    assert "of type tensorstore.TensorStore" in refused(array)


def test_views_of_a_tensorstore_array_in_memory_are_refused(array: Any) -> None:
    import tensorstore

    refused(array[2:5])
    refused(tensorstore.cast(array, tensorstore.float64))
    refused(tensorstore.stack([array, array]))


def test_a_tensorstore_key_value_store_in_memory_is_refused() -> None:
    tensorstore = pytest.importorskip("tensorstore")
    refused(tensorstore.KvStore.open("memory://k/").result())


def test_other_tensorstore_arrays_are_sent(tmp_path: Any) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    store = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": METADATA}
    on_disk = tensorstore.open(spec, create=True).result()
    assert is_sent(on_disk) and is_sent(tensorstore.array(VALUES))


# ---- fsspec ----


@pytest.fixture
def memory() -> Any:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe("/loaderpool/x", b"hello")
    yield files
    files.rm("/loaderpool", recursive=True)


def test_fsspecs_memory_file_system_is_refused(memory: Any) -> None:
    assert "of type fsspec.implementations.memory.MemoryFileSystem" in refused(memory)


def test_what_refers_to_fsspecs_memory_files_is_refused(memory: Any) -> None:
    import fsspec

    class Own(type(memory)):  # type: ignore[misc]
        pass

    for store in (
        fsspec.open("memory://loaderpool/x"),
        fsspec.get_mapper("memory://loaderpool"),
        fsspec.filesystem("dir", path="/loaderpool", fs=memory),
        fsspec.filesystem("simplecache", target_protocol="memory"),
        fsspec.filesystem("reference", fo={"version": 1, "refs": {}}, remote_protocol="memory"),
        Own(),
        {"files": [memory]},
    ):
        refused(store)


def test_other_fsspec_file_systems_are_sent() -> None:
    fsspec = pytest.importorskip("fsspec")
    local = fsspec.filesystem("file")
    assert is_sent(local) and is_sent(fsspec.filesystem("dir", path="memory", fs=local))
    assert is_sent(fsspec.open("/tmp/memory/x"))


# ---- other libraries, imitated by classes with their names ----


@pytest.mark.parametrize(
    ("package", "name", "address"),
    [
        ("deeplake._deeplake", "DatasetView", "mem://a"),
        ("icechunk.session", "Session", "type in_memory_object_store_provider"),
        ("icechunk.store", "IcechunkStore", "type in_memory_object_store_provider"),
        ("kuzu.database", "Database", ":memory:"),
        ("lance.dataset", "LanceDataset", "memory://a"),
        ("lance.fragment", "LanceFragment", "memory://a"),
        ("tiledb.array", "Array", "mem://a"),
    ],
)
def test_a_librarys_store_is_refused_by_its_address(package: str, name: str, address: str) -> None:
    kind = type("Derived", (store_class(package, name),), {"__module__": "elsewhere"})
    refused(kind(address))
    assert is_sent(kind("/data/memory/a"))


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("obstore.store", "MemoryStore"),
        ("rasterio.io", "MemoryFile"),
        ("torchcodec.decoders._video_decoder", "VideoDecoder"),
        ("upath.a", "MemoryPath"),
    ],
)
def test_a_librarys_memory_store_is_refused(package: str, name: str) -> None:
    refused(store_class(package, name)("anything"))


class Settings:
    """Settings of an imitation of rtree's index, pickled as a dict, as in rtree."""

    def __init__(self, storage: int, overwrite: bool) -> None:
        self.storage, self.overwrite = storage, overwrite


@pytest.mark.parametrize(("storage", "overwrite"), [(0, True), (0, False), (1, True)])
def test_an_rtree_index_is_refused_unless_a_file_has_it(storage: int, overwrite: bool) -> None:
    refused(store_class("rtree.index", "Index")(Settings(storage, overwrite)))


def test_an_rtree_index_of_a_file_that_was_there_is_sent() -> None:
    assert is_sent(store_class("rtree.index", "Index")(Settings(1, False)))


def test_real_rtree_indexes_are_refused(tmp_path: Any) -> None:
    index = pytest.importorskip("rtree.index")
    path = str(tmp_path / "boxes")
    made = index.Index(path)
    made.insert(0, (0, 0, 1, 1))
    refused(made)
    refused(index.Index())
    made.close()
    assert is_sent(index.Index(path))


def test_a_store_that_cannot_be_pickled_says_its_own_reason() -> None:
    class Session(store_class("icechunk.session", "Session")):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            raise pickle.PicklingError("a writable session")

    store = Session("")
    with pytest.raises(UnpicklableError, match=r"PicklingError: a writable session\. Open or"):
        ship({"source": range(3), "fn": lambda index: store})
