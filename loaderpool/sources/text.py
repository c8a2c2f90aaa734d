"""Lines of text files, and values of JSON lines files."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from loaderpool.checks import flag
from loaderpool.errors import ArgumentError, SourceError, brief, shortened
from loaderpool.hints import known_names_only
from loaderpool.sources.files import FileSource, Paths, PositionedFile, Record
from loaderpool.sources.in_order import refuse_compressed

_CHUNK_BYTES = 8 << 20
"""Bytes per read. Smaller: more calls per gigabyte. Larger: slower, because a chunk does not fit
the CPU cache."""

_NEWLINE, _RETURN = b"\n\r"


class TextLines(FileSource):
    r"""Source of lines of uncompressed text files, as strings.

    Lines end with ``\n`` or ``\r\n``. Empty lines are items.

    Args:
        paths: As in `FileSource`.
        encoding: Encoding as in `open`, except UTF-16 and UTF-32. Default: `"utf-8"`.
        strip: Set to `False` to keep the line end. Default: `True`.
        errors: Handling of bytes that cannot be decoded, as in `open`. Default: `"strict"`, which
            raises `SourceError`.
    """

    kind, unit = "text", "line"

    @known_names_only
    def __init__(
        self, paths: Paths, encoding: str = "utf-8", strip: bool = True, errors: str = "strict"
    ) -> None:
        try:
            newline = "\n".encode(encoding)
            codecs.lookup_error(errors)
        except (LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"encoding and errors must be valid for open(): {shortened(str(error))}"
            ) from None
        if newline.removeprefix(codecs.BOM_UTF8) != b"\n":
            raise ArgumentError(
                f"encoding must write a line end as byte 10, got {brief(encoding)}. "
                f"Convert the file first: iconv -f {shortened(encoding)} -t utf-8"
            )
        self._encoding, self._errors, self._strip = encoding, errors, flag("strip", strip)
        super().__init__(paths, makes=(encoding, errors, strip))

    def index(self, path: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the lines in a file."""
        return np.concatenate(list(_line_starts(path)))

    def read(self, handle: PositionedFile, record: Record) -> str:
        """Return one line, decoded."""
        data = handle.read(record)
        if self._strip and data.endswith(b"\n"):
            data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
        try:
            return data.decode(self._encoding, self._errors)
        except UnicodeError as error:
            raise SourceError(
                f"{self.where(record)} cannot be decoded: {error}. Check "
                f"encoding={brief(self._encoding)}, or set "
                'errors="replace" to replace such bytes.'
            ) from error


class JsonLines(FileSource):
    """Source of the values in uncompressed JSON lines files in UTF-8, one per line.

    Empty lines are ignored.

    Args:
        paths: As in `FileSource`.

    Raises:
        SourceError: When an item is read, if it is not valid JSON.
    """

    kind, unit = "JSON lines", "JSON line"

    def index(self, path: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the lines in a file; a blank line belongs to the line before it."""
        return np.concatenate(list(_line_starts(path, skip_blank=True)))

    def read(self, handle: PositionedFile, record: Record) -> object:
        """Return the value of one line."""
        return json.loads(handle.read(record))


def _line_starts(path: str, skip_blank: bool = False) -> Iterator[npt.NDArray[np.int64]]:
    r"""Yield arrays of the offsets of lines; the last element is the end of the file.

    Args:
        path: path of the file.
        skip_blank: True to leave out blank lines, which are "\n" or "\r\n" alone.
    """
    refuse_compressed(path, "a line")
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    # Start of the unfinished line, number of bytes read so far, and the last byte read.
    begin = at = before = 0
    # The file is not mapped: if it becomes shorter meanwhile, access to a missing page ends the
    # process (SIGBUS).
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer.data):
            chunk = buffer[:size]
            newlines = np.flatnonzero(chunk == _NEWLINE)
            ends = newlines + (1 + at)
            if ends.size:
                starts = np.concatenate(([begin], ends[:-1]))
                begin = int(ends[-1])
                if skip_blank:
                    lengths, ahead = ends - starts, np.where(newlines, chunk[newlines - 1], before)
                    starts = starts[~((lengths == 1) | ((lengths == 2) & (ahead == _RETURN)))]
                yield starts
            at += size
            before = int(chunk[-1])
    yield np.array([begin, at] if begin < at else [at])
