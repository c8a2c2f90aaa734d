"""Lines of text files by index: which they are, what is kept of them, and files that are not as they were."""

from __future__ import annotations

import bz2
import functools
import gc
import gzip
import lzma
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import loaderpool as lp
from loaderpool.sources import as_source, line_index, open_files, record_index
from tests.support.child import run_child


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process look at a file."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("looks into /proc")
    return sum(os.path.realpath(entry) == str(path.resolve()) for entry in folder.iterdir())


# ---- lines ----


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ("a\nbc\n", ["a", "bc"]),
        ("a\nbc", ["a", "bc"]),
        ("a", ["a"]),
        ("\n", [""]),
        ("\n\na\n\n", ["", "", "a", ""]),
        ("a\r\nb\r\n\r\nc", ["a", "b", "", "c"]),
        ("a\rb\n", ["a\rb"]),
        (" a\t\n  \n", [" a\t", "  "]),
        ("äöü\n日本\n", ["äöü", "日本"]),
        ("one\x0btwo\x0c\u2028three\n", ["one\x0btwo\x0c\u2028three"]),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 20])
def test_lines_are_those_between_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, lines: list[str], chunk_bytes: int
) -> None:
    monkeypatch.setattr(line_index, "_CHUNK_BYTES", chunk_bytes)
    path = write(tmp_path / "x.txt", data)
    source = lp.TextLines(path)
    assert len(source) == len(lines)
    assert list(source) == lines
    assert [source[-1 - i] for i in range(len(lines))] == lines[::-1]
    kept = lp.TextLines(path, strip=False)
    assert "".join(kept) == data and len(kept) == len(lines)


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    texts = ["a\nb", "c\n", "\n", "d\n\ne"]
    paths = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)]
    source = lp.TextLines([str(paths[0]), *paths[1:]])
    assert list(source) == ["a", "b", "c", "", "d", "", "e"]
    assert repr(source) == f"<7 lines of 4 files from {paths[0]} on>"
    assert repr(lp.TextLines(paths[0])) == f"<2 lines of {paths[0]}>"
    for index in (7, -8):
        with pytest.raises(IndexError, match="7 items"):
            source[index]


def test_encodings_are_those_of_open(tmp_path: Path) -> None:
    text = "Grüße\nça\n"
    for encoding in ("latin-1", "cp1252", "utf-8", "utf-8-sig"):
        path = write(tmp_path / encoding, text.encode(encoding))
        assert list(lp.TextLines(path, encoding)) == ["Grüße", "ça"]
    assert list(lp.TextLines(write(tmp_path / "jis", "日\n本\n".encode("shift_jis")), "shift_jis")) == ["日", "本"]


def test_a_byte_order_mark_is_taken_off_the_start_of_each_file_only(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, "a\n\ufeffb\n".encode("utf-8-sig")) for name in "xy"]
    assert list(lp.TextLines(paths, "utf-8-sig")) == ["a", "\ufeffb"] * 2
    assert lp.TextLines(paths)[0] == "\ufeffa"


# ---- the index ----


def test_the_index_takes_4_bytes_a_line_and_leaves_the_pickle_as_a_buffer(tmp_path: Path) -> None:
    source = lp.TextLines(write(tmp_path / "x.txt", "ab\n" * 100_000))
    assert source._index.starts.nbytes == 4 * 100_001
    for pickler in (pickle, cloudpickle):
        buffers: list[pickle.PickleBuffer] = []
        stream = pickler.dumps(as_source(source), protocol=5, buffer_callback=buffers.append)
        assert len(stream) < 2000
        assert np.shares_memory(np.frombuffer(buffers[0].raw(), np.uint32), source._index.starts)
        there = pickle.loads(stream, buffers=buffers)
        assert there[99_999] == "ab" and len(there) == 100_000


def test_files_that_are_large_together_have_an_index_of_8_bytes_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / name, "ab\ncd\n") for name in "xyz"]
    assert lp.TextLines(paths)._index.starts.dtype == np.uint32
    monkeypatch.setattr(record_index, "_SHORT_OFFSETS", 18)
    source = lp.TextLines(paths)
    assert source._index.starts.dtype == np.int64
    assert list(source) == ["ab", "cd"] * 3
    reached: list[int] = []
    with open(paths[0], "rb", buffering=0) as file:
        far = record_index.FileScan(str(paths[0]), file, 6, 1 << 40, np.int64, reached.append)
        line_index.scan_lines(far, np.empty(4, np.uint8))
    assert reached == [4, 6]  # how far it is, for who waits
    assert np.concatenate(far.pieces).tolist() == [1 << 40, (1 << 40) + 3]


def test_a_file_that_is_written_to_while_it_is_indexed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.txt", "ab\ncd\n")
    scan = line_index.scan_lines
    monkeypatch.setattr(line_index, "scan_lines", lambda *a: (append(path), scan(*a)))
    with pytest.raises(lp.SourceError, match=r"x\.txt became longer"):
        lp.TextLines(path)


# ---- where it is read ----


def test_another_working_directory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.txt", "a\nb\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    source = lp.TextLines("x.txt")
    monkeypatch.chdir(tmp_path / "below")
    assert list(source) == ["a", "b"]
    assert list(pickle.loads(pickle.dumps(source))) == ["a", "b"]


def test_files_are_opened_when_first_read_and_closed_with_the_source(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "a\nb\n")
    source = lp.TextLines(path)
    assert descriptors_of(path) == 0
    assert source[1] == "b"
    assert descriptors_of(path) == 1
    copy = pickle.loads(pickle.dumps(source))
    assert descriptors_of(path) == 1
    assert copy[0] == "a"
    del source, copy
    gc.collect()
    assert descriptors_of(path) == 0


def test_few_of_many_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files._open, "_most", 3)
    paths = [write(tmp_path / f"{number:02}", f"{number}\n") for number in range(20)]
    source = lp.TextLines(paths)
    assert list(source) == list(source) == [str(number) for number in range(20)]
    assert sum(map(descriptors_of, paths)) == 3


def test_few_are_open_where_a_process_may_have_few(tmp_path: Path) -> None:
    """All descriptors in use would fail whatever else needs one, an import even."""
    for number in range(100):
        write(tmp_path / f"{number:02}", f"{number}\n")

    def read() -> None:
        import pathlib
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        import loaderpool as lp

        paths = sorted(pathlib.Path().iterdir())
        source = lp.TextLines(paths)
        assert len(list(source)) == 100
        import wave  # noqa: F401

        with lp.Loader(source, len, batch_size=50, workers=0) as loader:
            assert [batch.shape for batch in loader] == [(50,), (50,)]

    run_child(read, cwd=tmp_path).check()


def test_a_fork_opens_files_of_its_own_and_leaves_the_others_alone() -> None:
    def fork() -> None:
        import gc
        import os
        from pathlib import Path

        import loaderpool as lp
        from loaderpool.sources import open_files

        Path("x.txt").write_text("a\nb\n")
        source = lp.TextLines("x.txt")
        assert source[0] == "a"
        (number,) = (each.number for each in open_files._open._kept.things.values())
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert source[1] == "b"
            return
        # What a worker may do: it closes what it does not know, and another file gets the number.
        os.close(number)
        assert os.open("other", os.O_RDWR | os.O_CREAT) == number
        assert source[1] == "b"
        del source
        gc.collect()
        os.fstat(number)

    run_child(fork).check()


def test_threads_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files._open, "_most", 2)
    paths = [write(tmp_path / str(number), f"{number} a\n{number} b\n") for number in range(6)]
    source = lp.TextLines(paths)
    expected = list(source)
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.extend(list(source) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 200


# ---- files that are not as they were ----


@pytest.mark.parametrize("was_read", [False, True], ids=["not yet open", "open"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 3), r"became shorter since it was indexed \(8 bytes then, 3 now\)"),
        (append, r"became longer .*\(8 bytes then, 13 now\)"),
        (lambda path: os.utime(path, ns=(1, 1)), "was written to since it was indexed"),
    ],
    ids=["shorter", "longer", "touched"],
)
def test_a_file_that_changed_is_refused(tmp_path: Path, change: Any, message: str, was_read: bool) -> None:
    path = write(tmp_path / "x.txt", "ab\ncd\ne\n")
    source = lp.TextLines(path)
    if was_read:
        assert source[0] == "ab"
    change(path)
    gc.collect()
    with pytest.raises(lp.SourceError, match=message) as caught:
        source[0]
    assert str(path) in str(caught.value)


def test_a_file_that_was_deleted_is_refused_where_it_was_not_open(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "ab\ncd\n")
    opened, fresh = lp.TextLines(path), lp.TextLines(path)
    assert opened[0] == "ab"
    path.unlink()
    assert opened[1] == "cd"
    with pytest.raises(lp.SourceError, match=r"x\.txt was there when it was indexed, and now: .*No such file"):
        fresh[0]


def test_a_file_that_is_replaced_is_the_old_one_where_it_was_open_and_refused_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "ab\ncd\n")
    opened = lp.TextLines(path)
    assert opened[0] == "ab"
    os.replace(write(tmp_path / "new", "something else\n"), path)
    assert opened[1] == "cd"
    with pytest.raises(lp.SourceError, match="became longer"):
        pickle.loads(pickle.dumps(opened))[0]


def test_what_cannot_be_decoded_is_named_by_file_and_line(tmp_path: Path) -> None:
    paths = [write(tmp_path / "good.txt", "a\nb\n"), write(tmp_path / "bad.txt", b"ok\n\xff\xfe\nok\n")]
    source = lp.TextLines(paths)
    assert source[2] == source[4] == "ok"
    with pytest.raises(lp.SourceError, match=r"line 2 of .*bad\.txt cannot be decoded: 'utf-8' codec"):
        source[3]
    assert lp.TextLines(paths, errors="replace")[3] == "\ufffd\ufffd"


# ---- refused ----


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", "a\n"), write(tmp_path / "nothing.txt", "")]
    with pytest.raises(lp.ArgumentError, match=r"nothing\.txt is empty, so it has no line"):
        lp.TextLines(paths)


@pytest.mark.parametrize(
    ("pack", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")], ids=["gz", "bz2", "xz"]
)
def test_compressed_files_are_refused_with_what_to_do(tmp_path: Path, pack: Any, kind: str) -> None:
    path = write(tmp_path / "x.txt.packed", pack(b"a\nb\n"))
    with pytest.raises(lp.ArgumentError, match=rf"x\.txt\.packed is compressed \({kind}\).*unpack it first \("):
        lp.TextLines(path)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), lp.ArgumentError, "paths is empty"),
        ((3,), lp.ArgumentTypeError, "paths must be a path or a list of paths, got 3 of type int"),
        ((["a", None],), lp.ArgumentTypeError, "got None of type NoneType"),
        (("x", "utf-16"), lp.ArgumentError, "'utf-16' is not: convert the file, as with iconv -f utf-16 -t utf-8"),
        (("x", "no-such"), lp.ArgumentError, "encoding: unknown encoding: no-such"),
        (("x", "hex"), lp.ArgumentError, "encoding: 'hex' is not a text encoding"),
        (("x", None), lp.ArgumentTypeError, "encoding must be a str, got None"),
        (("x", "utf-8", "yes"), lp.ArgumentTypeError, "strip must be True or False, got 'yes'"),
        (("x", "utf-8", True, "wrong"), lp.ArgumentError, "errors: unknown error handler name 'wrong'"),
        (("no/such/file.txt",), FileNotFoundError, "no/such/file.txt"),
        (("a\0b",), lp.ArgumentError, r"paths: 'a\\x00b' has a NUL character, which no file name has"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lp.TextLines(*arguments)


@pytest.mark.parametrize(
    "read",
    [
        lp.TextLines,
        lp.JsonLines,
        lp.Csv,
        lp.TarSamples,
        lp.TFRecords,
        lp.ParquetRows,
        functools.partial(lp.HDF5, keys="x"),
    ],
)
def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path, read: Any) -> None:
    """A pipe nobody writes to would be waited for without end, and a device may have no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("link", "a device")):
        with pytest.raises(lp.ArgumentError, match=rf"paths: .*/{name} is {kind}, and no plain file .* write"):
            read(tmp_path / name)
