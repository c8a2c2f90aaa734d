"""`IndexedFiles`: what a subclass says in three methods, and what is done for it."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.epochs.fingerprint import describe_source


class Blocks(lp.IndexedFiles):
    """Bytes of files, in parts of ten."""

    def __init__(self, paths: Any, width: int = 1, keep: int | None = None) -> None:
        self.width = width
        self.looked: list[str] = []
        self.opened: list[tuple[str, int]] = []
        super().__init__(paths, kind="blocks", makes=width, keep=keep)

    def look_into(self, path: str) -> list[int]:
        self.looked.append(os.path.basename(path))
        size = os.path.getsize(path)
        return [10] * (size // 10) + ([size % 10] if size % 10 else [])

    def open(self, path: str, part: int) -> Any:
        self.opened.append((os.path.basename(path), part))
        with open(path, "rb") as file:
            file.seek(10 * part)
            return file.read(10)

    def item(self, opened: Any, row: int) -> Any:
        return opened[row] * self.width


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of 25, no and 10 bytes."""
    paths = [tmp_path / name for name in "abc"]
    for path, data in zip(paths, (range(25), (), range(100, 110)), strict=True):
        path.write_bytes(bytes(data))
    return paths


def test_what_a_subclass_says_wrongly_is_said_where_it_is_made(files: list[Path]) -> None:
    class Nothing(lp.IndexedFiles):
        def item(self, opened: Any, row: int) -> Any:
            return row

    with pytest.raises(lp.SourceError, match=r"^Nothing must define look_into\(path\) and open\(path, part\)$"):
        Nothing(files, kind="nothing")
    for found, told in (
        (25, r"gives 25: give a list, with a number for each part of the file: \[25\]"),
        (np.int64(25), r"gives 25: give a list, .*: \[25\]"),
        (None, "must be a list of whole numbers, got None of type NoneType"),
        ("25", "must be a list of whole numbers, got '25' of type str"),
        ([-1], r"\[0\] must be at least 0, got -1"),
        ([3, 2.0], r"\[1\] must be a whole number, got 2.0 of type float; did you mean 2?"),
    ):

        class Wrong(Blocks):
            def look_into(self, path: str, found: Any = found) -> Any:
                return found

        with pytest.raises(lp.LoaderpoolError, match=rf"^Wrong\.look_into {told}|^Wrong\.look_into{told}"):
            Wrong(files)
    for keep, told in ((2.0, "keep must be a whole number, got 2.0"), (-1, "keep must be at least 0, got -1")):
        with pytest.raises(lp.LoaderpoolError, match=told):
            Blocks(files, keep=keep)  # type: ignore[arg-type]


def test_parts_may_be_told_by_an_array(files: list[Path]) -> None:
    class Arrays(Blocks):
        def look_into(self, path: str) -> Any:
            return np.array(super().look_into(path), np.int32)

    assert list(Arrays(files)) == list(Blocks(files))


def test_items_of_all_parts_in_order(files: list[Path]) -> None:
    source = Blocks(files)
    assert (len(source), source.looked, source.opened) == (35, ["a", "b", "c"], [])
    assert list(source) == [*range(25), *range(100, 110)]
    assert [source[-1], source[-35]] == [109, 0]
    assert source.opened == [("a", 0), ("a", 1), ("a", 2), ("c", 0), ("a", 0)][:4]
    for index in (35, -36):
        with pytest.raises(IndexError):
            source[index]
    assert repr(source) == f"<35 rows of 3 files from {files[0]} on>"


def test_parts_that_were_used_last_are_kept(files: list[Path]) -> None:
    source = Blocks(files, keep=2)
    for index in (0, 10, 1, 20, 2, 11):
        source[index]
    assert source.opened == [("a", 0), ("a", 1), ("a", 2), ("a", 1)]


def test_attributes_travel_and_what_is_open_does_not(files: list[Path]) -> None:
    source = Blocks(files, width=3)
    assert source[24] == 72
    copy = pickle.loads(pickle.dumps(source))
    assert copy.width == 3 and copy.looked == ["a", "b", "c"]
    copy.opened.clear()
    assert copy[24] == 72
    assert copy.opened == [("a", 2)]


def test_what_was_opened_is_let_go_with_the_source(files: list[Path]) -> None:
    class Opened:
        alive = 0

        def __init__(self) -> None:
            Opened.alive += 1

        def __del__(self) -> None:
            Opened.alive -= 1

    class Source(Blocks):
        def open(self, path: str, part: int) -> Any:
            return Opened()

        def item(self, opened: Any, row: int) -> Any:
            return row

    source = Source(files)
    list(source)
    assert Opened.alive == 4
    del source
    gc.collect()
    assert Opened.alive == 0


def test_a_file_that_changed_is_refused(files: list[Path]) -> None:
    source = Blocks(files)
    assert source[0] == 0
    files[0].write_bytes(bytes(24))
    for index in (0, 24):  # open, and not yet
        with pytest.raises(lp.SourceError, match=r"a became shorter since it was indexed"):
            source[index]
    os.unlink(files[2])
    with pytest.raises(lp.SourceError, match=r"c was there when it was indexed, and now"):
        source[30]


def test_a_descriptor_that_is_open_is_looked_at_and_not_the_path(files: list[Path]) -> None:
    class Descriptor:
        def __init__(self, path: str) -> None:
            self.number = os.open(path, os.O_RDONLY)

        def fileno(self) -> int:
            return self.number

        def __del__(self) -> None:
            os.close(self.number)

    class Source(Blocks):
        def open(self, path: str, part: int) -> Any:
            return Descriptor(path)

        def item(self, opened: Any, row: int) -> Any:
            return os.pread(opened.fileno(), 1, row)

    source = Source(files)
    assert source[0] == b"\0"
    os.unlink(files[0])
    assert source[3] == b"\3", "it is open, and as it was"


def test_errors_of_a_subclass_name_the_file(files: list[Path]) -> None:
    class Source(Blocks):
        error: Exception

        def open(self, path: str, part: int) -> Any:
            raise self.error

    source = Source(files)
    source.error = KeyError("no header")
    with pytest.raises(lp.SourceError, match=r"a cannot be opened as blocks: KeyError: 'no header'"):
        source[0]
    source.error = lp.SourceError("as it is")
    with pytest.raises(lp.SourceError, match=r"^as it is$"):
        source[0]


def test_nothing_at_all_is_refused(files: list[Path]) -> None:
    with pytest.raises(lp.ArgumentError, match=r"there is no row in .*b"):
        Blocks(files[1])
    with pytest.raises(lp.ArgumentError, match=r"give at least one blocks file"):
        Blocks([])
    with pytest.raises(FileNotFoundError):
        Blocks(files[0].parent / "d")


def test_saved_states_know_it_by_what_it_makes_and_not_by_its_place(files: list[Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copies = [elsewhere / path.name for path in files]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    known = describe_source(Blocks(files))
    assert known == describe_source(Blocks(copies)) == describe_source(pickle.loads(pickle.dumps(Blocks(files))))
    others = [Blocks(files, width=2), Blocks(files[:2]), Blocks(files[::-1])]
    assert len({known, *map(describe_source, others)}) == 4
