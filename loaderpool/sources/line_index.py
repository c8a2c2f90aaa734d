"""Where the lines of text files begin, found in one pass over them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.open_files import Stamp, changed

__all__ = ["LineIndex", "index_lines"]

_CHUNK_BYTES = 8 << 20
"""Read at a time. Smaller: more calls for each gigabyte. Larger: more than a processor's cache, and slower."""

_NEWLINE = 10

_SHORT_OFFSETS = 1 << 32
"""Bytes from which on offsets need more than 32 bits."""

# Of files of which no line can be read without all that is before it: how they begin, and what unpacks them. No text
# begins so; file names are not looked at, for a text may be called anything.
_COMPRESSED = {
    rb"\x1f\x8b": ("gzip", "gunzip --keep"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "bunzip2 --keep"),
    rb"\xfd7zXZ\0": ("xz", "unxz --keep"),
    rb"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    rb"PK\x03\x04": ("zip", "unzip"),
}


@dataclass(frozen=True)
class LineIndex:
    """The files laid end to end: line i is bytes `starts[i]` to `starts[i + 1]`, its line end included."""

    starts: npt.NDArray[Any]
    """uint32[lines + 1], or int64 where the files have 4 GiB or more together."""
    first_lines: tuple[int, ...]
    """Of each file the number of its first line, ascending."""
    first_bytes: tuple[int, ...]
    """Of each file where it begins."""
    stamps: tuple[Stamp, ...]
    """Of each file, taken before it was read and the same after."""


def index_lines(paths: tuple[str, ...]) -> LineIndex:
    r"""Read the files once, some megabytes at a time, and note where lines begin.

    Blocks: until all of them are read.

    Args:
        paths: absolute; lines end with "\n", and the last one of a file with the file.

    Raises:
        ArgumentError: a file is empty, or compressed.
        SourceError: a file is written to meanwhile.
        OSError: a file cannot be opened or read.
    """
    total = sum(os.stat(path).st_size for path in paths)
    dtype = np.uint32 if total < _SHORT_OFFSETS else np.int64
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    pieces: list[npt.NDArray[Any]] = []
    first_lines, first_bytes, stamps = [], [], []
    lines = begin = 0
    for path in paths:
        first_lines.append(lines)
        first_bytes.append(begin)
        known = len(pieces)
        stamp = _index_file(path, begin, dtype, buffer, pieces)
        stamps.append(stamp)
        lines += sum(map(len, pieces[known:]))
        begin += stamp.size
    if begin != total:
        raise SourceError(f"{', '.join(paths[:3])}{', ...' * (len(paths) > 3)}: written to while being indexed")
    starts = np.empty(lines + 1, dtype)
    starts[lines] = begin
    while pieces:  # from the end, each freed when copied: the allocator gives back what was made last
        piece = pieces.pop()
        lines -= len(piece)
        starts[lines : lines + len(piece)] = piece
        del piece
    starts.flags.writeable = False
    return LineIndex(starts, tuple(first_lines), tuple(first_bytes), tuple(stamps))


def _index_file(
    path: str, begin: int, dtype: Any, buffer: npt.NDArray[np.uint8], pieces: list[npt.NDArray[Any]]
) -> Stamp:
    """Add to `pieces` where the file's lines begin, `begin` being its first byte."""
    # Read, not mapped: to touch a mapped page of a file that was cut ends the process.
    with open(path, "rb", buffering=0) as file:
        stamp = Stamp.of(file.fileno())
        if not stamp.size:
            raise ArgumentError(f"paths: {path} is empty, so it has no line")
        pieces.append(np.array([begin], dtype))
        at = 0
        while size := file.readinto(buffer.data):
            if not at:
                _refuse_compressed(path, buffer[: min(size, 16)].tobytes())
            after = np.flatnonzero(buffer[:size] == _NEWLINE) + (1 + at)
            at += size
            if after.size and after[-1] == stamp.size:  # what ends with a line end has no line behind it
                after = after[:-1]
            pieces.append((after + begin).astype(dtype))
        now = Stamp.of(file.fileno())
        if now != stamp or at != stamp.size:
            raise SourceError(changed(path, stamp, now))
    return stamp


def _refuse_compressed(path: str, head: bytes) -> None:
    for beginning, (kind, command) in _COMPRESSED.items():
        if re.match(beginning, head):
            raise ArgumentError(
                f"paths: {path} is compressed ({kind}), and a line in it cannot be read without all before it: "
                f"unpack it first ({command}) and pass the text file"
            )
