"""Where the lines of text files begin, found in one pass over them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.sources.record_index import FileScan, RecordIndex, head_of, index_records, refuse_compressed

_CHUNK_BYTES = 8 << 20
"""Read at a time. Smaller: more calls for each gigabyte. Larger: more than a processor's cache, and slower."""

_NEWLINE, _RETURN = b"\n\r"


def index_lines(paths: tuple[str, ...]) -> RecordIndex:
    r"""Read the files once, some megabytes at a time, and note where lines begin.

    Blocks: until all of them are read.

    Args:
        paths: absolute; lines end with "\n", and the last one of a file with the file.

    Raises:
        ArgumentError: a file is empty, or compressed.
        SourceError: a file is written to meanwhile.
        OSError: a file cannot be opened or read.
    """
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    return index_records(paths, functools.partial(_scan_text, buffer=buffer))


def _scan_text(scan: FileScan, buffer: npt.NDArray[np.uint8]) -> int:
    if not scan.size:
        raise ArgumentError(f"paths: {scan.path} is empty, so it has no line")
    refuse_compressed(scan.path, head_of(scan.file), "a line", "the text file")
    scan_lines(scan, buffer)
    return scan.size


def scan_lines(
    scan: FileScan,
    buffer: npt.NDArray[np.uint8] | None = None,
    *,
    skip_blank: bool = False,
    begin: int = 0,
    until: int | None = None,
) -> bool:
    r"""Note where the lines of a file begin; a blank one that is skipped belongs to the line before it.

    Args:
        scan: the file.
        buffer: what to read into.
        skip_blank: whether "\n" and "\r\n" are no lines.
        begin: where the first line begins.
        until: give up where a byte of this value is met.

    Returns:
        Whether the file was read to its end.
    """
    if buffer is None:
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
    scan.file.seek(begin)
    at, before = (
        begin,
        0,
    )  # bytes read so far, and the last of them; `begin` is where the line begins that has no end yet
    while size := scan.file.readinto(buffer.data):
        chunk = buffer[:size]
        if until is not None and (chunk == until).any():
            return False
        newlines = np.flatnonzero(chunk == _NEWLINE)
        ends = newlines + (1 + at)
        if ends.size:
            starts = np.concatenate(([begin], ends[:-1]))
            begin = int(ends[-1])
            if skip_blank:
                ahead = np.where(newlines, chunk[newlines - 1], before)
                starts = starts[~_is_blank(ends - starts, ahead)]
            scan.add(starts)
        at += size
        before = int(chunk[-1])
        scan.reached(at)
    if begin < at:
        scan.add(np.array([begin]))
    return True


def _is_blank(lengths: npt.NDArray[np.int64], ahead: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Of lines of these lengths, line end included, with these bytes ahead of it."""
    blank: npt.NDArray[np.bool_] = (lengths == 1) | ((lengths == 2) & (ahead == _RETURN))
    return blank
