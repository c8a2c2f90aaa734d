"""TFRecord and tar files behind URLs: the same items, also from a server that sometimes fails."""

from __future__ import annotations

import gc
import gzip
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources import remote
from tests.support.batches import Place, assert_same, read
from tests.support.file_server import FileServer, serving
from tests.support.record_files import (
    number_of,
    numbered,
    numbered_members,
    numbered_records,
    tar_bytes,
    tfrecord_bytes,
)

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("fsspec.asyn")
pytest.importorskip("aiohttp")
pytestmark = [
    pytest.mark.may_leak(reason="the fixture `on` watches the whole file"),
    # fsspec drops connections whose first response is an error.
    pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning"),
]

FILES, ROWS = 3, 40
TOTAL = FILES * ROWS
SOURCES: dict[str, Callable[..., Any]] = {"tfrecord": lp.TFRecords, "tar": lp.TarSamples}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for file in range(FILES):
        for ending, data in (
            ("tfrecord", tfrecord_bytes(numbered_records(file * ROWS, ROWS))),
            ("tar", tar_bytes(numbered_members(file * ROWS, ROWS))),
        ):
            (folder / f"{file}.{ending}").write_bytes(data)
            (folder / f"{file}.{ending}.gz").write_bytes(gzip.compress(data))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _thread_of_fsspec() -> None:
    """Start fsspec's thread before leaks are counted, because it lives as long as the process."""
    fsspec.asyn.get_loop()


def close_connections() -> None:
    """Close the connections that fsspec keeps in this process."""
    from fsspec.implementations.http import HTTPFileSystem

    for system in [*HTTPFileSystem._cache.values()]:
        if system._session is not None:
            HTTPFileSystem.close_session(system.loop, system._session)
    HTTPFileSystem.clear_instance_cache()
    gc.collect()


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    with serving(folder) as server:
        yield server
        close_connections()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, so that a file takes several requests, and retry without a pause. In this
    process.
    """
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 7000)
    monkeypatch.setattr(remote, "_DELAYS_S", (0.0, 0.0, 0.0))


def urls(server: FileServer, ending: str) -> list[str]:
    return [f"{server.url}{file}.{ending}" for file in range(FILES)]


def local(folder: Path, ending: str) -> list[Path]:
    return [folder / f"{file}.{ending}" for file in range(FILES)]


@pytest.mark.parametrize("ending", SOURCES)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_all_workers_read_urls_as_this_process_reads_files(
    on: Place, folder: Path, server: FileServer, ending: str, packed: str
) -> None:

    def made(source: Any, workers: int) -> list[Any]:
        settings: dict[str, Any] = {"batch_size": 7, "shuffle": 10, "seed": 1}
        with lp.Loader(source, numbered, **settings, **on(workers)) as loader:
            assert len(loader) == 18
            return read(loader, passes=2)

    server.fail_every = 5
    make = SOURCES[ending]
    source = make(urls(server, ending + packed), shard_lengths=ROWS)
    expected = made(source, 0)
    numbers = np.concatenate([batch[0] for batch in expected[:18]])
    assert sorted(numbers.tolist()) == [*range(TOTAL)] != numbers.tolist()
    assert_same(made(source, 2), expected)
    if packed:
        assert_same(made(make(local(folder, ending + packed), shard_lengths=ROWS), 2), expected)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.usefixtures("quick")
def test_requests_that_fail_are_sent_again(
    folder: Path, server: FileServer, has_ranges: bool
) -> None:
    server.has_ranges = has_ranges
    for ending, make in SOURCES.items():
        expected = list(make(local(folder, ending)))
        for server.fail_every in (0, 4, 3):
            assert list(make(urls(server, ending))) == expected
    ranges = [wanted for method, wanted in server.requests if method == "GET" and wanted]
    assert len(ranges) > 30 or not has_ranges


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_goes_on_failing_is_named_with_the_record(
    server: FileServer, status: int
) -> None:
    source = lp.TFRecords(urls(server, "tfrecord"))
    records = iter(source)
    for _ in range(ROWS + 1):
        next(records)
    server.status = status
    with pytest.raises(
        lp.SourceError, match=rf"record \d+ of {server.url}1.tfrecord cannot be read in 4 tries, "
    ) as caught:
        list(records)
    assert str(status) in str(caught.value) and "from byte" in str(caught.value)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [403, 401, 400])
def test_a_refusal_is_told_at_once(server: FileServer, status: int) -> None:
    server.status = status
    with pytest.raises(
        lp.SourceError, match=rf"record 1 of {server.url}0.tfrecord cannot be read, from .*{status}"
    ):
        list(lp.TFRecords(urls(server, "tfrecord")))
    assert len([method for method, _ in server.requests if method == "GET"]) == 1


def test_a_file_that_is_not_there_is_named(server: FileServer) -> None:
    message = r"record 1 of .*no\.tfrecord cannot be read, .*FileNotFoundError"
    with (
        lp.Loader(lp.TFRecords(f"{server.url}no.tfrecord"), number_of, workers=0) as loader,
        pytest.raises(lp.SourceError, match=message),
    ):
        list(loader)


@pytest.mark.usefixtures("quick")
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.tfrecord"
    path.write_bytes(tfrecord_bytes(numbered_records(0, ROWS)))
    with serving(tmp_path) as server:
        records = iter(lp.TFRecords(f"{server.url}0.tfrecord"))
        next(records)
        path.write_bytes(tfrecord_bytes(numbered_records(1, 2 * ROWS)))
        server.gets, server.fail_every = 0, 1
        with pytest.raises(
            lp.SourceError, match=r"because the file has changed from \d+ to \d+ bytes"
        ):
            list(records)
        close_connections()


def test_a_training_goes_on_in_the_middle_of_remote_files(on: Place, server: FileServer) -> None:
    def loader(workers: int) -> lp.Loader:
        source = lp.TFRecords(urls(server, "tfrecord.gz"))
        return lp.Loader(source, number_of, batch_size=6, shuffle=8, **on(workers))

    with loader(0) as whole:
        expected = read(whole)
    with loader(2) as first:
        batches = iter(first)
        got = read([next(batches) for _ in range(8)])
        state = first.state_dict()
        del batches
    with loader(3) as second:
        second.load_state_dict(state)
        assert_same(got + read(second), expected)


def test_memory_of_this_process_is_read_without_workers_only() -> None:
    fsspec.filesystem("memory").pipe("/some/x.tar", tar_bytes(numbered_members(0, 5)))
    source = lp.TarSamples("memory://some/x.tar")
    assert [number_of(sample) for sample in source] == [*range(5)]
    with lp.Loader(source, number_of, batch_size=5, workers=0) as loader:
        assert [batch.tolist() for batch in loader] == [[*range(5)]]
    for workers in (1, "auto"):
        with pytest.raises(
            lp.ArgumentError,
            match=r"memory://some/x\.tar is in the memory of this process.*workers=0",
        ):
            lp.Loader(source, number_of, workers=workers)


def test_options_reach_the_file_system(tmp_path: Path, server: FileServer) -> None:
    (url, *_) = urls(server, "tfrecord")
    options = {
        "http": {"headers": {"X-Asked": "yes"}},
        "simplecache": {"cache_storage": str(tmp_path)},
    }
    assert len(list(lp.TFRecords(f"simplecache::{url}", storage_options=options))) == ROWS
    assert len([*tmp_path.iterdir()]) == 1
    with pytest.raises(
        lp.ArgumentError, match="storage_options must be a dict of fsspec's options, got 'anon'"
    ):
        lp.TFRecords(url, storage_options="anon")  # type: ignore[arg-type]
    with pytest.raises(lp.ArgumentError, match="storage_options needs URLs in paths, got"):
        lp.TFRecords(__file__, storage_options={})


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lp.SourceError, match=r"record 1 of nosuch://x cannot be read, .*nosuch"):
        list(lp.TFRecords("nosuch://x"))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match=r"reading s3://b/x needs fsspec.*: pip install 'loaderpool\[remote\]'"
    ):
        list(lp.TFRecords("s3://b/x"))
