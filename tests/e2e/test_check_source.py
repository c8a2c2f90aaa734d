"""`check_source`: sources that keep the rules pass, and one that breaks a rule is told which, and what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loaderpool as lp
from tests.support import leaks

pytestmark = pytest.mark.corner


class Numbers:
    """Keeps all rules; what breaks one is derived from it."""

    size = 40

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"x": np.arange(3) + index, "name": f"item {index}"}


class Counting(Numbers):
    """What it gives depends on how often it was asked."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return super().__getitem__(index)["x"] + (self.asked > 8)


class OneBuffer(Numbers):
    def __init__(self) -> None:
        self.row = np.zeros(3)

    def __getitem__(self, index: int) -> Any:
        self.row[:] = super().__getitem__(index)["x"]
        return self.row


class Endless(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index


class RaisesAnother(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index >= self.size:
            raise KeyError(index)
        return index


class WrongLast(Numbers):
    def __getitem__(self, index: int) -> Any:
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return abs(index)


class Wraps(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index >= self.size:
            raise IndexError(index)
        return index % self.size


class HoldsAFile(Numbers):
    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.file.seek(index)
        return self.file.read(1)


class OpensAtFirst(Numbers):
    """Opens its file when it is first read, and in a fork goes on with that."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, -1

    def __getstate__(self) -> Any:
        return {"path": self.path, "number": -1}

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if self.number < 0:
            self.number = os.open(self.path, os.O_RDONLY)
        os.lseek(self.number, index, os.SEEK_SET)
        return os.read(self.number, 1)


class TakesTheNumberAlong(OpensAtFirst):
    """A descriptor's number means nothing elsewhere."""

    def __getstate__(self) -> Any:
        return vars(self)


class KeepsItems(Numbers):
    """Its items travel with it."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.kept.setdefault(index, np.full(1000, index))


class OfThisProcess(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["x"] + os.getpid()


class Renamed(Numbers):
    """Describes itself by what it has read."""

    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return super().__getitem__(index)

    @property
    def _loaderpool_fingerprint(self) -> str:
        return str(self.read)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    return path


BREAKERS: list[tuple[Any, str]] = [
    (lambda file: Endless(), r"Endless\[40\] gives an item, and it has 40 items: raise IndexError"),
    (lambda file: RaisesAnother(), r"RaisesAnother\[40\] raises KeyError, and it has 40 items: raise IndexError"),
    (lambda file: WrongLast(), r"WrongLast\[-1\] is not its last item: count from the end, or raise IndexError below"),
    (lambda file: Wraps(), r"Wraps\[-41\] gives an item, and it has 40 items: raise IndexError"),
    (lambda file: OneBuffer(), r"what OneBuffer\[0\] gave was changed by reading other items.*give a copy"),
    (lambda file: Counting(), r"Counting\[\d+\] is another item when it is read again.*random belongs into fn"),
    (HoldsAFile, r"HoldsAFile cannot be pickled \(TypeError.*BufferedReader.*__getstate__ or __reduce__"),
    (OpensAtFirst, r"reads OpensAtFirst by a descriptor \(\d+\) that was opened before it was forked.*os\.pread"),
    (lambda file: KeepsItems(), r"what was read travels with KeepsItems: its pickle has \d+ bytes before.*Leave what"),
    (lambda file: OfThisProcess(), r"OfThisProcess\[0\] is another item in a forked process"),
    (lambda file: Renamed(), r"Renamed is described for saved states as .* after it was read, and as"),
    (lambda file: (n for n in range(3)), "it is a generator, which has no index to be checked"),
]


@pytest.mark.parametrize(("make", "told"), BREAKERS, ids=lambda value: value[:12] if isinstance(value, str) else "")
def test_what_breaks_a_rule_is_told_which(make: Any, told: str, file: Path) -> None:
    with leaks.guard(), pytest.raises(lp.SourceError, match=told) as raised:
        check = make(file)
        try:
            lp.check_source(check)
        finally:
            if isinstance(check, HoldsAFile):
                check.file.close()
            if isinstance(check, OpensAtFirst) and check.number >= 0:
                os.close(check.number)
    assert "\n" not in str(raised.value)


def test_a_descriptor_that_travels_by_its_number_is_found(file: Path) -> None:
    source = TakesTheNumberAlong(file)
    with pytest.raises(lp.LoaderpoolError):
        lp.check_source(source)
    os.close(source.number)


def test_sources_that_keep_the_rules(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(60).reshape(20, 3)
    pq.write_table(pa.table({"n": range(30), "text": [str(n) for n in range(30)]}), tmp_path / "x.parquet")
    (tmp_path / "lines.txt").write_text("\n".join(map(str, range(50))))
    with leaks.guard():
        for source in (
            Numbers(),
            list(range(10)),
            range(1),
            (np.arange(5), np.zeros((5, 2))),
            lp.HDF5(tmp_path / "x.h5", "x"),
            lp.ParquetRows(tmp_path / "x.parquet"),
            lp.TextLines(tmp_path / "lines.txt"),
            lp.zip_sources(Numbers(), range(40)),
        ):
            lp.check_source(source)
            del source
