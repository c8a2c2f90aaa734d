"""Ranks of one job on a machine index the files of a source once, and share the index in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interpreters import Ranks, ranks_of
from tests.support.record_files import numbered_members, numbered_records, tar_bytes, tfrecord_bytes

SCRIPT = """
import os, sys
import loaderpool as lp

FOLDER = sys.argv[1]
KINDS = {"lines": lp.TextLines, "records": lp.TFRecords, "samples": lp.TarSamples}

for kind in KINDS.values():
    def index(self, path, index=kind.index):
        with open(f"{FOLDER}/calls", "ab") as file:
            file.write(b"x")
        return index(self, path)
    kind.index = index

class Own(lp.TextLines):
    pass

def make(kind, *names, **options):
    global source
    source = KINDS.get(kind, Own)([f"{FOLDER}/{name}" for name in names], **options)
    return len(source)

def lengths(workers):
    with lp.Loader(source, len, batch_size=100, workers=workers) as loader:
        return [batch.tolist() for batch in loader]
"""
RECORDS = 400


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ranks_of(tmp_path, SCRIPT, 2) as start:
        yield start


def calls(folder: Path) -> int:
    return (folder / "calls").stat().st_size


def write(folder: Path, kind: str, names: tuple[str, ...] = ("a", "b")) -> None:
    for name in names:
        content = {
            "records": lambda: tfrecord_bytes(numbered_records(0, RECORDS)),
            "samples": lambda: tar_bytes(numbered_members(0, RECORDS)),
        }.get(kind, lambda: "".join(f"line {i}\n" for i in range(RECORDS)).encode())()
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("kind", ["lines", "records", "samples"])
def test_files_are_indexed_once(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    several = ranks()
    line = f"make({kind!r}, 'a', 'b')"
    for rank in several:
        rank.begin(line)
    assert [rank.answer() for rank in several] == [str(2 * RECORDS)] * 2
    assert calls(tmp_path) == 2  # one for each file
    assert (
        several[0].run("lengths(1)") == several[1].run("lengths(1)") == several[0].run("lengths(0)")
    )


def test_a_changed_file_is_indexed_again(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, "lines")
    first, second = ranks()
    assert first.run("make('lines', 'a')") == str(RECORDS)
    (tmp_path / "a").write_text("one\ntwo\n")
    assert second.run("make('lines', 'a')") == "2"
    assert second.run("source[1]") == "'two'"


@pytest.mark.parametrize("how", ["renamed", "written in place"])
def test_a_file_with_an_equal_stamp_is_indexed_again(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("one\ntwo\n")
    first, second = ranks()
    assert first.run("make('lines', 'a')") == "2"
    before = path.stat()
    changed = other if how == "renamed" else path
    changed.write_text("seven\n8\n")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed.rename(path)
    assert second.run("make('lines', 'a')") == "2"
    assert second.run("source[1]") == "'8'"


def test_settings_that_differ_are_indexed_apart(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, "lines")
    first, second = ranks()
    assert first.run("make('lines', 'a')") == second.run("make('lines', 'a', strip=False)")
    assert calls(tmp_path) == 2


@pytest.mark.parametrize(("kind", "local"), [("own", 2), ("lines", 1)])
def test_other_sources_are_indexed_by_each_process(
    ranks: Ranks, tmp_path: Path, kind: str, local: int
) -> None:
    write(tmp_path, "lines")
    first, second = ranks(local=local)
    line = f"make({kind!r}, 'a')"
    assert first.run(line) == second.run(line) == str(RECORDS)
    assert calls(tmp_path) == 2


def test_a_damaged_file_is_an_error_in_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, "records")
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[:-7])
    several = ranks()
    answers = [rank.run("make('records', 'a')") for rank in several]
    assert all(each.startswith("SourceError") for each in answers) and answers[0] == answers[1]


def test_a_rank_that_dies_leaves_the_index_to_others(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, "lines")
    first, second = ranks()
    assert first.run("make('lines', 'a', 'b')") == second.run("make('lines', 'a', 'b')")
    first.end()
    (third,) = ranks(1)
    assert third.run("make('lines', 'a', 'b')") == str(2 * RECORDS)
    assert calls(tmp_path) == 2 and os.path.exists(f"/proc/{second.pid}")
