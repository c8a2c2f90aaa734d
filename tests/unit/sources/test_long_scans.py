"""Whoever waits until the records of large files are found is told how far that is, in bytes of all files."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.sources import csv_rows, line_index, record_index, tfrecords
from loaderpool.system.long_work import LongWork


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(300):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))


def write_tfrecords(path: Path) -> None:
    record = struct.pack("<QI", 100, 0) + bytes(104)
    path.write_bytes(record * 300)


FORMATS: dict[str, tuple[Callable[[list[Path]], Any], Callable[[Path], object]]] = {
    "text": (lp.TextLines, lambda path: path.write_text("a line\n" * 3000)),
    "json": (lp.JsonLines, lambda path: path.write_text((json.dumps({"a": 1}) + "\n") * 3000)),
    "csv": (lp.Csv, lambda path: path.write_text("a,b\n" + "1,2\n" * 3000)),
    "csv with quotes": (lp.Csv, lambda path: path.write_text("a,b\n" + '1,"2"\n' * 3000)),
    "tar": (lp.TarSamples, write_tar),
    "tfrecords": (lambda paths: lp.TFRecords(paths, check_crc=False), write_tfrecords),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_scan_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, write = FORMATS[name]
    paths = [tmp_path / "1", tmp_path / "2"]
    for path in paths:
        write(path)
    totals: list[int | None] = []
    reached: list[int] = []

    class Noted(LongWork):
        def __init__(self, what: str, total: int | None, unit: str) -> None:
            assert what == "loaderpool: finding the records of 2 files" and unit == "bytes"
            totals.append(total)
            super().__init__(what, total, unit)

        def reach(self, done: int) -> None:
            reached.append(done)

    monkeypatch.setattr(record_index, "LongWork", Noted)
    monkeypatch.setattr(line_index, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(csv_rows, "_TOLD_LINES", 500)
    monkeypatch.setattr(tfrecords, "_TOLD_BYTES", 4096)
    make(paths)
    size = paths[0].stat().st_size
    assert totals == [2 * size]
    of_second = [done for done in reached if done > size]
    assert len(of_second) > 2 and of_second == sorted(of_second)
    assert reached[-1] == 2 * size and max(reached) == 2 * size
