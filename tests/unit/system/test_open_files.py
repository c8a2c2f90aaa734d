"""Files of this process that have a position, and their descriptors after they were opened
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.system import open_files
from tests.support.processes import status_of_fork


class Opener:
    """Opens files, and finds them as `open_files` does."""

    def __init__(self) -> None:
        self._opened: list[int] = []

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        return self.keep(os.open(path, flags))

    def keep(self, descriptor: int) -> int:
        self._opened.append(descriptor)
        return descriptor

    def find(self) -> list[open_files.OpenFile]:
        return [file for file in open_files.find(self._opened) if file.descriptor in self._opened]

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


@pytest.fixture
def opener() -> Iterator[Opener]:
    with contextlib.closing(Opener()) as opener:
        yield opener


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    return path


@pytest.mark.parametrize("seed", range(5))
def test_descriptors_of_one_description_are_found_and_unchanged(
    opener: Opener, path: Path, seed: int
) -> None:
    draws = random.Random(seed)
    firsts = {}
    for _ in range(40):
        if firsts and draws.random() < 0.6:
            copied = draws.choice([*firsts])
            firsts[opener.keep(os.dup(copied))] = firsts[copied]
        else:
            descriptor = opener.open(
                path, draws.choice([os.O_RDONLY, os.O_RDONLY | os.O_NONBLOCK, os.O_RDWR])
            )
            os.lseek(descriptor, draws.choice([0, 7]), os.SEEK_SET)
            firsts[descriptor] = descriptor
    before = [(fcntl.fcntl(each, fcntl.F_GETFL), os.lseek(each, 0, os.SEEK_CUR)) for each in firsts]
    assert {file.descriptor: file.first for file in opener.find()} == firsts
    assert before == [
        (fcntl.fcntl(each, fcntl.F_GETFL), os.lseek(each, 0, os.SEEK_CUR)) for each in firsts
    ]


def test_a_reopened_file_has_its_position_and_no_longer_moves_others(
    opener: Opener, path: Path
) -> None:
    original = opener.open(path)
    os.lseek(original, 10, os.SEEK_SET)
    copies = [opener.keep(os.dup(original)), opener.keep(os.dup(original))]
    open_files.reopen(
        file._replace(first=copies[0]) for file in opener.find() if file.descriptor != original
    )
    assert [os.read(each, 1)[0] for each in (copies[0], copies[1], original)] == [10, 11, 10]


def test_flags_and_inheritance_are_kept(opener: Opener, path: Path) -> None:
    appended, inherited = (
        opener.open(path, os.O_RDWR | os.O_APPEND),
        opener.open(path, os.O_RDONLY | os.O_NONBLOCK),
    )
    os.set_inheritable(inherited, True)
    before = [
        (fcntl.fcntl(each, fcntl.F_GETFL), os.get_inheritable(each))
        for each in (appended, inherited)
    ]
    open_files.reopen(opener.find())
    assert before == [
        (fcntl.fcntl(each, fcntl.F_GETFL), os.get_inheritable(each))
        for each in (appended, inherited)
    ]


def test_flags_of_the_first_opening_hinder_no_second_one(opener: Opener, path: Path) -> None:
    opener.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    temporary = opener.open(path.parent, os.O_RDWR | os.O_TMPFILE)
    os.write(temporary, b"abc")
    os.lseek(temporary, 1, os.SEEK_SET)
    files = opener.find()
    assert [open_files.can_be_reopened(file) for file in files] == [True, True]
    open_files.reopen(files)
    assert os.read(temporary, 9) == b"bc"


def test_only_what_has_a_position_is_found(opener: Opener, path: Path) -> None:
    opener.open(Path("/dev/urandom"))
    opener.open(path, os.O_PATH)
    for end in os.pipe():
        opener.keep(end)
    opener.keep(os.memfd_create("loaderpool-slots"))
    found = [
        opener.open(path),
        opener.open(path.parent),
        opener.keep(os.memfd_create("of-another")),
    ]
    assert [file.descriptor for file in opener.find()] == found


def test_the_check_drops_no_lock_of_this_process(opener: Opener, path: Path) -> None:
    fcntl.lockf(opener.open(path, os.O_RDWR), fcntl.LOCK_EX)
    (file,) = opener.find()
    assert open_files.can_be_reopened(file)

    def lock() -> None:
        with open(path, "r+b") as other, pytest.raises(BlockingIOError):
            fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert status_of_fork(lock) == 0


def test_without_proc_files_are_found_and_named_but_not_reopened(
    opener: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "_LINKS", str(path.parent / "no-proc"))
    memory = opener.keep(os.memfd_create("loaderpool-slots"))
    unnamed = opener.open(path)
    with open(path, "rb") as file:
        assert {unnamed, memory, file.fileno()} <= {*open_files.descriptors(())}
        found = open_files.find([unnamed, memory, file.fileno()])
        assert [each.descriptor for each in found] == [unnamed, file.fileno()]
        assert not any(map(open_files.can_be_reopened, found))
        names = [open_files.path_of(each.descriptor) for each in found]
    assert names == [f"of descriptor {unnamed}", str(path)]
