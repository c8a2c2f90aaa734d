"""Open handles of the main process cannot be used in workers: the error names them, and advises
another way.
"""

from __future__ import annotations

import multiprocessing
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources.recognise import as_source
from loaderpool.transport.payload.ship import ship


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/images"] = np.zeros((3, 4))
        yield file


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


def refused(payload: dict[str, object]) -> str:
    with pytest.raises(lp.UnpicklableError) as caught:
        ship(payload)
    return str(caught.value)


def test_a_dataset_as_the_source_is_told_to_be_given_by_path(file: Any) -> None:
    advice = f"pass loaderpool.HDF5({file.filename!r}, 'train/images')"
    for source in (file["train/images"], {"image": file["train/images"], "label": [1, 2, 3]}):
        text = refused({"source": as_source(source), "fn": None})
        assert (
            text.startswith("Cannot send this to the workers: source")
            and "h5py" in text
            and advice in text
        )
    for whole in (file, file["train"]):
        key = "train/images" if whole != file else "key"
        with pytest.raises(
            lp.SourceError, match=r"open HDF5 .*: pass lp\.HDF5\('.*x\.h5', '?" + key
        ):
            as_source(whole)


@pytest.mark.parametrize("name", ["file", "images"])
def test_handles_in_a_function_are_named(file: Any, name: str) -> None:
    images = file["train/images"]
    functions = {
        "file": lambda index: file["train/images"][index],
        "images": lambda index: images[index],
    }
    text = refused({"source": range(3), "fn": functions[name]})
    assert f"closure variable {name!r}" in text and "open the file in setup=" in text
    assert (
        f"loaderpool.HDF5({file.filename!r}, {'key' if name == 'file' else repr('train/images')})"
        in text
    )


def test_the_datasets_of_a_captured_file_are_named(file: Any) -> None:
    file["labels"] = np.arange(3)
    assert f"HDF5({file.filename!r}, 'labels')" in refused(
        {"source": range(3), "fn": lambda index: file["labels"]}
    )
    file["ids"] = np.arange(3)
    keys = {"ids": "ids", "labels": "labels"}
    assert f"HDF5({file.filename!r}, {keys})" in refused(
        {"source": range(3), "fn": lambda index: file["ids"][index]}
    )
    file.close()
    assert "loaderpool.HDF5(path, key)" in refused(
        {"source": range(3), "fn": lambda index: file["ids"][index]}
    )


@pytest.mark.parametrize("kind", ["Connection", "Cursor"])
def test_database_connections_are_named(connection: sqlite3.Connection, kind: str) -> None:
    handle: Any = connection if kind == "Connection" else connection.cursor()
    text = refused({"source": range(3), "fn": lambda index: handle.execute("select 1")})
    assert re.search(rf"closure variable 'handle' of function .*, of type sqlite3\.{kind}\.", text)
    assert "Open or create it in setup=" in text


SHARED: dict[str, Callable[[], Any]] = {
    "Lock": multiprocessing.Lock,
    "RLock": multiprocessing.RLock,
    "Semaphore": multiprocessing.Semaphore,
    "BoundedSemaphore": multiprocessing.BoundedSemaphore,
    "Event": multiprocessing.Event,
    "Condition": multiprocessing.Condition,
    "Barrier": lambda: multiprocessing.Barrier(2),
    "Queue": multiprocessing.Queue,
    "SimpleQueue": multiprocessing.SimpleQueue,
    "JoinableQueue": multiprocessing.JoinableQueue,
    "Value": lambda: multiprocessing.Value("i", 3),
    "RawValue": lambda: multiprocessing.RawValue("i", 3),
    "Array": lambda: multiprocessing.Array("i", 4),
    "RawArray": lambda: multiprocessing.RawArray("i", 4),
    "dill's Lock": lambda: pytest.importorskip("multiprocess").Lock(),
}


@pytest.mark.parametrize("kind", SHARED)
def test_shared_objects_are_told_to_come_from_a_manager(kind: str) -> None:
    """If `setup=` made one, each worker would have its own: a lock that locks nothing."""
    shared = SHARED[kind]()
    text = refused({"source": range(3), "fn": lambda index: shared})
    assert "closure variable 'shared' of function" in text
    assert "multiprocessing.Manager()" in text and "SharedMemory" in text
    assert "setup=" not in text


@pytest.mark.parametrize("package", ["multiprocessing", "multiprocess"])
def test_an_end_of_a_pipe_is_refused(package: str) -> None:
    """Its pickle is the number of a descriptor, which belongs to another file in a worker."""
    ours, theirs = pytest.importorskip(package).Pipe()
    with ours, theirs:
        text = refused({"source": range(3), "fn": lambda index: ours})
    assert "closure variable 'ours' of function" in text
    assert "multiprocessing.Manager()" in text


def test_a_manager_is_told_to_be_left_out() -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        text = refused({"source": range(3), "fn": lambda index: manager.dict()})
    assert "closure variable 'manager' of function" in text
    assert "Capture its proxies" in text
