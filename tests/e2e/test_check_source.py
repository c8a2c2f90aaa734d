"""`check_source`: sources that keep the rules pass, and one that breaks a rule is told which, and what to do."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

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


class OpensAtOnce(OpensAtFirst):
    """Opens its file when it is made, a copy of it too: the supervisor then has what all workers read by."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, os.open(path, os.O_RDONLY)

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["path"])  # type: ignore[misc]


class OpensAtOnceWithABuffer(Numbers):
    """All of a small file is in the buffer of this process once it was read here."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open(path, "rb")  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()

    def __getstate__(self) -> Any:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.file.seek(index)
        return self.file.read(1)


class LongerCopy(Numbers):
    def __getstate__(self) -> Any:
        return "nothing"

    def __setstate__(self, state: Any) -> None:
        self.size = 45


class NoneBelowZero(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index < 0:
            raise ValueError("negative")
        return super().__getitem__(index)


class ForgetsItsScale(Numbers):
    scale: int

    def __init__(self) -> None:
        self.scale = 2

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["x"] * self.scale


class MadeOfTwo(Numbers):
    def __reduce__(self) -> Any:
        return MadeOfTwo, (1, 2)


class TornPage(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == self.size // 2:
            raise RuntimeError("torn page")
        return super().__getitem__(index)


class TornInWorkers(Numbers):
    def __init__(self) -> None:
        self.family = (os.getpid(), os.getppid())

    def __getitem__(self, index: int) -> Any:
        if index == self.size - 1 and os.getpid() not in self.family and os.getppid() not in self.family:
            raise RuntimeError("not here")
        return super().__getitem__(index)


class Generators(Numbers):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return (n for n in range(3))


class Slotted:
    __slots__ = ("key", "value")

    def __init__(self, key: str, value: Any) -> None:
        self.key, self.value = key, value


class Objects(Numbers):
    """Items that are equal after a journey, though not the same objects inside."""

    def __init__(self) -> None:
        self.key = "key"

    def __getitem__(self, index: int) -> Any:
        number = super().__getitem__(index)["x"][0]
        picture = Image.fromarray(np.full((4, 5, 3), number, np.uint8))
        loop: list[Any] = [number]
        loop.append(loop)
        return (
            Slotted(self.key, "key"),
            picture,
            memoryview(bytes([number])),
            io.BytesIO(b"x"),
            loop,
            Path("a/b/a"),
            len,
        )


class Mapped(lp.IndexedFiles):
    def look_into(self, path: str) -> Any:
        return [10]

    def open(self, path: str, part: int) -> Any:
        return np.memmap(path, mode="r")

    def item(self, opened: Any, row: int) -> Any:
        return {"row": opened[row : row + 3].view(np.ndarray)}


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
    (OpensAtOnce, r"reads OpensAtOnce by a descriptor \(\d+\) that was opened before it was forked.*os\.pread"),
    (
        OpensAtOnceWithABuffer,
        r"reads OpensAtOnceWithABuffer by a descriptor \(\d+\) that was opened before it was forked",
    ),
    (lambda file: LongerCopy(), "LongerCopy has 45 items in a copy of it, and 40 before: its length must travel"),
    (lambda file: NoneBelowZero(), r"NoneBelowZero\[-1\] raises ValueError: count from the end, or raise IndexError"),
    (
        lambda file: ForgetsItsScale(),
        r"ForgetsItsScale\[0\] cannot be read in a copy of it: AttributeError: .* 'scale'",
    ),
    (lambda file: MadeOfTwo(), r"MadeOfTwo cannot be made again from its pickle \(TypeError: .*takes no arguments\)"),
    (lambda file: TornPage(), r"TornPage\[20\] cannot be read: RuntimeError: torn page"),
    (
        lambda file: TornInWorkers(),
        r"TornInWorkers\[39\] cannot be read in a worker, to which it has travelled: Runt.*not here",
    ),
    (lambda file: Generators(), r"what Generators\[0\] gives cannot be compared \(TypeError: cannot pickle 'gen"),
    (
        lambda file: Mapped(file, kind="mapped"),
        r"what Mapped\[0\] gave looks into its file.*give a copy, as by np\.array",
    ),
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
    assert "\n" not in str(raised.value).partition("\n\nTraceback")[0]


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
            Objects(),
            np.memmap(tmp_path / "lines.txt", mode="r"),
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
