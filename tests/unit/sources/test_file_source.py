"""`FileSource`: features of every format, and a user's own format with two methods."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources import files, tfrecord
from loaderpool.sources.recognise import as_source
from loaderpool.system import progress
from loaderpool.trainer.saved_state import describe_source
from tests.support.child import run_child


class Blocks(files.FileSource):
    """Records of ten bytes after a head of four bytes. The first byte is the number."""

    kind, unit = "blocks", "block"

    def __init__(self, paths: Any, width: int = 1) -> None:
        self.width = width
        super().__init__(paths, makes=width)

    def index(self, path: str) -> Any:
        return list(range(4, os.path.getsize(path) + 1, 10))

    def read(self, handle: Any, record: files.Record) -> Any:
        return handle.read(record)[0] * self.width


class Arrays(files.FileSource):
    """Rows of `.npy` files, by number."""

    def index(self, path: str) -> int:
        return len(np.load(path, mmap_mode="r"))

    def open(self, path: str) -> Any:
        return np.load(path, mmap_mode="r")

    def read(self, handle: Any, record: files.Record) -> Any:
        return int(handle[record.number])


def write_blocks(path: Path, numbers: list[int]) -> None:
    path.write_bytes(b"head" + b"".join(bytes([number]) * 10 for number in numbers))


def write_array(path: Path, numbers: list[int]) -> None:
    with path.open("wb") as file:
        np.save(file, np.array(numbers, np.int64))


def write_records(path: Path, numbers: list[int]) -> None:
    with path.open("wb") as file:
        for data in (b"%d" % number for number in numbers):
            length = struct.pack("<Q", len(data))
            file.write(length + masked_crc(length) + data + masked_crc(data))


def masked_crc(data: bytes) -> bytes:
    import google_crc32c

    return struct.pack("<I", tfrecord._masked(google_crc32c.value(data)))


def write_tar(path: Path, numbers: list[int]) -> None:
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            for name in ("txt", "cls"):
                member = tarfile.TarInfo(f"{number}.{name}")
                member.size = len(b"%d" % number)
                tar.addfile(member, io.BytesIO(b"%d" % number))


def write_hdf5(path: Path, numbers: list[int]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["x"] = np.array(numbers, np.int64)


def write_parquet(path: Path, numbers: list[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": np.array(numbers, np.int64)}), path)


# For each format: a source of paths, a function that writes numbers, and a function that returns an
# item's number.
FORMATS: dict[
    str, tuple[Callable[[Any], Any], Callable[[Path, list[int]], Any], Callable[[Any], int]]
] = {
    "Blocks": (Blocks, write_blocks, int),
    "Arrays": (Arrays, write_array, int),
    "TextLines": (
        lp.TextLines,
        lambda path, numbers: path.write_text("".join(f"{n}\n" for n in numbers)),
        int,
    ),
    "JsonLines": (
        lp.JsonLines,
        lambda path, numbers: path.write_text(
            "".join(json.dumps({"x": n}) + "\n" for n in numbers)
        ),
        lambda item: item["x"],
    ),
    "TFRecords": (lp.TFRecords, write_records, int),
    "TarSamples": (lp.TarSamples, write_tar, lambda item: int(item["txt"])),
    "HDF5": (functools.partial(lp.HDF5, keys="x"), write_hdf5, int),
    "ParquetRows": (lp.ParquetRows, write_parquet, lambda item: item["x"]),
}
SIZES = [5, 0, 1, 30]  # records of the files
BYTES = [
    name for name in FORMATS if name not in ("Arrays", "HDF5", "ParquetRows")
]  # formats whose index is offsets
KEPT_OPEN = [
    name for name in FORMATS if name != "ParquetRows"
]  # ParquetRows opens its file for each row group


# Modules that sources of these formats import when they are made.
LIBRARIES = {"TFRecords": "google_crc32c", "HDF5": "h5py", "ParquetRows": "pyarrow.parquet"}


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    """Skip a format whose library is not installed."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(name: str, folder: Path, sizes: list[int] = SIZES) -> list[Path]:
    paths, begin = [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number:02}.data")
        FORMATS[name][1](paths[-1], list(range(begin, begin + size)))
        begin += size
    return paths


def numbers_of(name: str, source: Any) -> list[int]:
    return [int(FORMATS[name][2](item)) for item in source]


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def open_of(folder: Path) -> int:
    """Return the number of files of a folder that this process has open or mapped."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("looks into /proc")
    gc.collect()
    descriptors = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    mapped = {
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/" in line
    }
    return sum(each.startswith(str(folder.resolve())) for each in descriptors | mapped)


# ---- records ----


def test_records_of_all_files_in_order(name: str, tmp_path: Path) -> None:
    paths = written(name, tmp_path)
    source = FORMATS[name][0]([str(paths[0]), *paths[1:]])
    assert len(source) == 36 and numbers_of(name, source) == list(range(36))
    assert numbers_of(name, (source[-1 - at] for at in range(36))) == list(range(36))[::-1]
    assert repr(source) == f"<36 {source.unit}s of 4 files from {paths[0]} on>"
    assert repr(FORMATS[name][0](paths[2])) == f"<1 {source.unit} of {paths[2]}>"
    for index in (36, -37):
        with pytest.raises(IndexError, match="36 items"):
            source[index]
    with pytest.raises(lp.ArgumentError, match=rf"^paths: found no {source.unit}s in {paths[1]}"):
        FORMATS[name][0](paths[1])


def test_another_working_directory_and_a_copy_change_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(name, tmp_path)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    source = FORMATS[name][0]("03.data")
    monkeypatch.chdir(tmp_path / "below")
    assert numbers_of(name, source) == list(range(6, 36))
    monkeypatch.setattr(type(source), "index", None)  # a copy is not indexed again
    copy = pickle.loads(pickle.dumps(source))
    assert numbers_of(name, copy) == list(range(6, 36)) and repr(copy) == repr(source)


def test_saved_states_know_it_by_what_it_makes_and_not_by_its_place(
    name: str, tmp_path: Path
) -> None:
    make = FORMATS[name][0]
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        paths = written(name, tmp_path / folder)
        known = describe_source(make(paths))
        assert known == describe_source(pickle.loads(pickle.dumps(make(paths))))
    here = written(name, tmp_path / "here")
    assert known == describe_source(make(here))
    assert len({known, describe_source(make(here[:2])), describe_source(make(here[::-1]))}) == 3
    assert describe_source(Blocks(written("Blocks", tmp_path), 2)) != describe_source(
        Blocks(written("Blocks", tmp_path))
    )


@pytest.mark.parametrize("name", BYTES)
def test_the_index_takes_4_bytes_a_record_and_leaves_the_pickle_as_a_buffer(
    name: str, tmp_path: Path
) -> None:
    (path,) = written(name, tmp_path, [200])
    source = FORMATS[name][0](path)
    assert source._starts.nbytes == 4 * 201
    for pickler in (pickle, cloudpickle):
        buffers: list[pickle.PickleBuffer] = []
        stream = pickler.dumps(as_source(source), protocol=5, buffer_callback=buffers.append)
        assert np.shares_memory(np.frombuffer(buffers[0].raw(), np.uint32), source._starts)
        assert numbers_of(name, pickle.loads(stream, buffers=buffers)) == list(range(200))


@pytest.mark.parametrize("name", BYTES)
def test_the_index_takes_8_bytes_a_record_where_a_file_is_large(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SHORT_OFFSETS", 18)
    source = FORMATS[name][0](written(name, tmp_path))
    assert source._starts.dtype == np.int64 and numbers_of(name, source) == list(range(36))


# ---- open files ----


@pytest.mark.parametrize("name", KEPT_OPEN)
def test_files_are_opened_when_first_read_and_closed_with_the_source(
    name: str, tmp_path: Path
) -> None:
    source = FORMATS[name][0](written(name, tmp_path))
    assert open_of(tmp_path) == 0
    source[0]
    assert open_of(tmp_path) == 1
    copy = pickle.loads(pickle.dumps(source))
    assert open_of(tmp_path) == 1
    copy[0]
    del source, copy
    assert open_of(tmp_path) == 0


@pytest.mark.parametrize("name", KEPT_OPEN)
def test_few_of_many_files_are_open_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_OPEN", 4)
    paths = written(name, tmp_path, [2] * 20)
    source, other = FORMATS[name][0](paths), FORMATS[name][0](paths[:7])
    assert numbers_of(name, source) == numbers_of(name, source) == list(range(40))
    assert numbers_of(name, other) == list(range(14))
    assert open_of(tmp_path) == 4


def test_a_fork_opens_files_of_its_own_and_leaves_the_others_alone() -> None:
    def fork() -> None:
        import gc
        import os
        from pathlib import Path

        import loaderpool as lp

        Path("x.txt").write_text("a\nb\n")
        source = lp.TextLines("x.txt")
        assert source[0] == "a"
        (number,) = (each._descriptor for each in source._handles.values())
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert source[1] == "b"
            return
        # As in a worker, a descriptor is closed by other code, and another file gets its number.
        os.close(number)
        assert os.open("other", os.O_RDWR | os.O_CREAT) == number
        assert source[1] == "b"
        del source
        gc.collect()
        os.fstat(number)

    run_child(fork).check()


def test_threads_read_at_the_same_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_OPEN", 2)
    source = FORMATS[name][0](written(name, tmp_path, [2] * 6))
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.extend(numbers_of(name, source) for _ in range(30)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(12))] * 120


# ---- files that have changed ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: os.truncate(path, 3),
            r"00\.data has changed since it was indexed \(was \d+ bytes, now 3\)",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
            r"00\.data has changed since it was indexed \(was \d+ bytes, now",
        ),
        (touch, r"00\.data has changed since it was indexed \(same size"),
    ],
    ids=["shorter", "longer", "touched"],
)
def test_a_file_that_changed_is_refused_where_it_is_opened(
    name: str, tmp_path: Path, change: Any, message: str
) -> None:
    source = FORMATS[name][0](written(name, tmp_path))
    change(tmp_path / "00.data")
    with pytest.raises(lp.SourceError, match=message):
        source[0]
    assert numbers_of(name, [source[10]]) == [10]


def test_a_file_that_is_gone_is_an_error_of_the_system(name: str, tmp_path: Path) -> None:
    source = FORMATS[name][0](written(name, tmp_path))
    os.unlink(tmp_path / "00.data")
    with pytest.raises(FileNotFoundError, match=r"00\.data"):
        source[0]
    assert numbers_of(name, [source[10]]) == [10]


def test_a_file_that_is_replaced_is_the_old_one_where_it_was_open_and_refused_elsewhere(
    name: str, tmp_path: Path
) -> None:
    paths = written(name, tmp_path)
    source = FORMATS[name][0](paths)
    assert numbers_of(name, [source[0]]) == [0]
    os.replace(paths[3], paths[0])
    assert numbers_of(name, [source[1]]) == [1]
    with pytest.raises(lp.SourceError, match="has changed since"):
        pickle.loads(pickle.dumps(source))[0]


def test_a_file_that_is_written_to_while_it_is_indexed_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = written(name, tmp_path)
    make = FORMATS[name][0]
    kind = type(make(paths))
    index = kind.index
    monkeypatch.setattr(kind, "index", lambda self, path: (touch(Path(path)), index(self, path))[1])
    with pytest.raises(lp.SourceError, match=r"00\.data has changed since it was indexed"):
        make(paths)


def test_a_file_that_was_cut_while_it_is_open_is_an_error_of_the_record(tmp_path: Path) -> None:
    source = Blocks(written("Blocks", tmp_path)[0])
    assert source[0] == 0
    os.truncate(source.paths[0], 20)
    with pytest.raises(
        lp.SourceError, match=r"00\.data ends before byte 24\. Create the source again"
    ):
        source[1]


def test_progress_is_reported_if_finding_records_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text("line\n" * 300)
    lp.TextLines(paths)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_QUIET_NS", 0)
    lp.TextLines(paths)
    (line,) = capsys.readouterr().err.splitlines()  # the next one would come after five seconds
    assert line.startswith("loaderpool: finding lines: 1.5 KiB of 4.4 KiB were read in ")


# ---- refused ----


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (
            [],
            lp.ArgumentError,
            r"paths is empty: pass at least one .* file\. If it comes from glob, check the pattern",
        ),
        (3, lp.ArgumentError, "must be a path, or a list of paths, got 3 of type int"),
        ("no/such.data", FileNotFoundError, "No such file or directory: .*no/such.data"),
        (
            "some/*.data",
            lp.ArgumentError,
            r"no file some/\*\.data\. .*: pass sorted\(glob\.glob\('some/\*\.data'\)\)",
        ),
        (
            "/dev/null",
            lp.ArgumentError,
            "is a pipe, socket or device: write its data to a regular file first",
        ),
        ("a\0b", ValueError, "embedded null (byte|character)"),
    ],
)
def test_wrong_paths_are_named(name: str, paths: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FORMATS[name][0](paths)


def test_a_pattern_that_is_a_files_name_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "lines[1].txt"
    path.write_text("a\nb\n")
    assert list(lp.TextLines(path)) == ["a", "b"]


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name != "Blocks"]
)  # only requests the size
def test_a_directory_is_an_error_of_the_system_or_the_format(name: str, tmp_path: Path) -> None:
    with pytest.raises((OSError, lp.SourceError), match=r"(?i)is a directory"):
        FORMATS[name][0](tmp_path)


def test_what_a_subclass_says_wrongly_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = written("Blocks", tmp_path)
    for found in (
        None,
        "25",
        [3, 2],
        [0, 2000],
        [-1, 3],
        [1.5, 2.5],
        [[1, 2]],
        iter([[4, 14], [10]]),
    ):
        monkeypatch.setattr(Blocks, "index", lambda self, path, found=found: found)
        with pytest.raises(
            lp.SourceError,
            match=r"^Blocks\.index must return a number of records, or ascending offs",
        ):
            Blocks(paths)
    with pytest.raises(NotImplementedError, match=r"FileSource must define index\(path\)"):
        files.FileSource(paths)
    monkeypatch.setattr(Blocks, "index", lambda self, path: 1)
    monkeypatch.delattr(Blocks, "read")
    with pytest.raises(NotImplementedError, match=r"Blocks must define read\(handle, record\)"):
        Blocks(paths)[0]


def test_errors_of_a_subclass_name_the_file_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise error

    paths = written("Blocks", tmp_path)
    source = Blocks(paths)
    error: Exception = KeyError("no header")
    monkeypatch.setattr(Blocks, "read", fails)
    with pytest.raises(
        lp.SourceError,
        match=r"^block 2 of .*00\.data \(at byte 14\) cannot be read: KeyError: 'no h",
    ):
        source[1]
    monkeypatch.setattr(Blocks, "open", fails)
    monkeypatch.setattr(Blocks, "index", fails)
    for make in (lambda: Blocks(paths)[0], lambda: source[30]):
        error = KeyError("no header")
        with pytest.raises(
            lp.SourceError,
            match=r"data cannot be read as blocks \(KeyError: 'no header'\)\. The file",
        ):
            make()
        error = PermissionError(13, "Permission denied")
        with pytest.raises(PermissionError, match="Permission denied"):
            make()
        error = lp.SourceError("as it is")
        with pytest.raises(lp.SourceError, match=r"^as it is$"):
            make()


def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = written("Blocks", tmp_path)
    monkeypatch.setattr(Blocks, "_library", "blocklib.reading")
    with pytest.raises(
        ImportError,
        match=r"Blocks needs blocklib, which is not installed: pip .*'loaderpool\[files\]'",
    ):
        Blocks(paths)
    (tmp_path / "blocklib.py").write_text("import something_else_entirely")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_else_entirely"):
        Blocks(paths)


@pytest.mark.parametrize("paths", [None, [3], {"a": "b"}.values(), range(3)])
def test_paths_of_another_type_are_refused(paths: Any) -> None:
    with pytest.raises(lp.ArgumentError, match=r"^paths must be a path, or a list of paths, got"):
        lp.TextLines(paths)
