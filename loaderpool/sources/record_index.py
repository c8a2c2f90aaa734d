"""Where the records of files begin, whatever their format: found in one pass, 4 or 8 bytes for each."""

from __future__ import annotations

import bisect
import functools
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.open_files import Stamp, changed
from loaderpool.system.long_work import LongWork
from loaderpool.system.readable import counted
from loaderpool.system.reading import read_at

_SHORT_OFFSETS = 1 << 32
"""Bytes from which on offsets need more than 32 bits."""

# Of files of which no record can be read without all that is before it: how they begin, and what unpacks them. No text
# begins so; file names are not looked at, for a file may be called anything.
_COMPRESSED = {
    rb"\x1f\x8b": ("gzip", "gunzip --keep"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "bunzip2 --keep"),
    rb"\xfd7zXZ\0": ("xz", "unxz --keep"),
    rb"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    rb"PK\x03\x04": ("zip", "unzip"),
}


@dataclass(frozen=True)
class RecordIndex:
    """The files' records laid end to end: record i is bytes `starts[i]` to `starts[i + 1]`."""

    starts: npt.NDArray[Any]
    """uint32[records + 1], or int64 where the files have 4 GiB or more together."""
    first_records: tuple[int, ...]
    """Of each file the number of its first record, ascending."""
    first_bytes: tuple[int, ...]
    """Of each file where its byte 0 would lie."""
    stamps: tuple[Stamp, ...]
    """Of each file, taken before it was read and the same after."""

    def place(self, record: int) -> tuple[int, int, int, int]:
        """Return a record's file number, its own number in that file, its first byte there, and its length."""
        start, stop = int(self.starts[record]), int(self.starts[record + 1])
        file = bisect.bisect_right(self.first_records, record) - 1  # of files without records, the one behind them
        return file, record - self.first_records[file], start - self.first_bytes[file], stop - start


class FileScan:
    """One file that is being indexed, as its format's scanner sees it.

    Attributes:
        path: of the file.
        file: it, open for reading, unbuffered. Read, never mapped: to touch a mapped page of a file that was cut ends
            the process.
        size: bytes.
        pieces: the records' starts so far, as `RecordIndex` has them.
        first_byte: as `RecordIndex` has it.
        reached: to be told now and then up to which byte the file is scanned.
    """

    def __init__(
        self, path: str, file: io.FileIO, size: int, begin: int, dtype: Any, reached: Callable[[int], None]
    ) -> None:
        self.path, self.file, self.size = path, file, size
        self.pieces: list[npt.NDArray[Any]] = []
        self.first_byte = begin
        self._begin, self._dtype, self.reached = begin, dtype, reached

    def add(self, starts: npt.NDArray[np.int64]) -> None:
        """Note where records begin, in this file's bytes, ascending. What is before the first is no record's."""
        if not len(starts):
            return
        if not self.pieces:
            self.first_byte = self._begin - int(starts[0])
        self.pieces.append((starts + self.first_byte).astype(self._dtype))


def index_records(paths: tuple[str, ...], scan: Callable[[FileScan], int]) -> RecordIndex:
    """Have all files scanned, one after the other.

    Blocks: until all of them are read.

    Args:
        paths: absolute.
        scan: notes a file's records; returns where the last one ends.

    Raises:
        SourceError: a file is written to meanwhile.
        OSError: a file cannot be opened or read.
        BaseException: what `scan` raises.
    """
    stamps = [Stamp.of(path) for path in paths]
    dtype = np.uint32 if sum(stamp.size for stamp in stamps) < _SHORT_OFFSETS else np.int64
    pieces: list[npt.NDArray[Any]] = []
    first_records, first_bytes = [], []
    records = begin = before = 0
    what = f"loaderpool: finding the records of {counted(len(paths), 'file')}"
    with LongWork(what, sum(stamp.size for stamp in stamps), "bytes") as work:
        for path, stamp in zip(paths, stamps, strict=True):
            with open(path, "rb", buffering=0) as file:
                _check(path, stamp, file)
                reached = functools.partial(_reached, work, before)
                each = FileScan(path, file, stamp.size, begin, dtype, reached)
                end = scan(each)
                _check(path, stamp, file)
            first_records.append(records)
            first_bytes.append(each.first_byte)
            records += sum(map(len, each.pieces))
            pieces += each.pieces
            if each.pieces:
                begin = each.first_byte + end
            before += stamp.size
            work.reach(before)
    starts = np.empty(records + 1, dtype)
    starts[records] = begin
    while pieces:  # from the end, each freed when copied: the allocator gives back what was made last
        piece = pieces.pop()
        records -= len(piece)
        starts[records : records + len(piece)] = piece
        del piece
    starts.flags.writeable = False
    return RecordIndex(starts, tuple(first_records), tuple(first_bytes), tuple(stamps))


def _reached(work: LongWork, before: int, byte: int) -> None:
    work.reach(before + byte)


def _check(path: str, then: Stamp, file: io.FileIO) -> None:
    now = Stamp.of(file.fileno())
    if now != then:
        raise SourceError(changed(path, then, now))


def refuse_compressed(path: str, head: bytes, what: str, result: str) -> None:
    """Raise ArgumentError where a file that begins so is a compressed one.

    Args:
        path: of the file.
        head: its first 16 bytes.
        what: of what none can be read alone, such as "a line".
        result: what unpacking it gives, such as "the text file".
    """
    for beginning, (kind, command) in _COMPRESSED.items():
        if re.match(beginning, head):
            raise ArgumentError(
                f"paths: {path} is compressed ({kind}), and {what} in it cannot be read without all before it: "
                f"unpack it first ({command}) and pass {result}"
            )


def head_of(file: io.FileIO) -> bytes:
    """Return a file's first 16 bytes; where it is read next stays as it is."""
    return read_at(file.fileno(), 16, 0)
