"""The lines of text files by index, however large the files are."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError
from loaderpool.sources.file_records import FileRecords
from loaderpool.sources.line_index import index_lines
from loaderpool.sources.paths import checked_paths


class TextLines(FileRecords):
    r"""Lines of a text file, or of several one after the other, as str; any of them is read at once.

    The files are read once, when this is made, and where lines begin is kept: 4 bytes a line, 8 where the files have
    4 GiB or more together. Workers share that, and each opens the files for itself; they must stay as they are.

    A line ends with "\n" or "\r\n"; the last one may have no end. Empty lines are items too.

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        encoding: as of `open`, but none in which a line end is not the byte 10, such as UTF-16.
        strip: whether the line end is left out. Other blanks stay.
        errors: as of `open`: what to do with bytes that cannot be decoded, such as "replace".

    Raises:
        ArgumentError: a file is empty or compressed, there is no path, or `encoding` cannot be used.
        ArgumentTypeError: an argument is of a wrong type.
        SourceError: a file is written to meanwhile. When a line is read: the file is not as it was, or the line cannot
            be decoded.
        OSError: a file cannot be opened.
    """

    __slots__ = ("_encoding", "_errors", "_has_mark", "_strip")

    _records = "lines"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        encoding: str = "utf-8",
        strip: bool = True,
        errors: str = "strict",
    ) -> None:
        if not isinstance(strip, bool):
            raise ArgumentTypeError(f"strip must be True or False, got {strip!r}")
        settings = (*checked_encoding(encoding, errors), strip)
        absolute = checked_paths(paths, "text")
        super().__init__(absolute, index_lines(absolute), settings)

    def _settle(self) -> None:
        self._encoding, self._errors, self._strip = self._settings
        self._has_mark = codecs.lookup(self._encoding).name == "utf-8-sig"

    def _item(self, data: bytes, file: int, number: int, offset: int) -> str:
        if self._strip and data.endswith(b"\n"):
            data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
        # The mark is at the start of a file only; elsewhere the same three bytes are a character.
        encoding = "utf-8" if self._has_mark and number else self._encoding
        try:
            return data.decode(encoding, self._errors)
        except UnicodeError as error:
            raise SourceError(
                f"line {number + 1} of {self._paths[file]} cannot be decoded: {error}. Is encoding={self._encoding!r} "
                'right? errors="replace" puts a mark in place of such bytes'
            ) from error


def checked_encoding(encoding: Any, errors: Any = "strict") -> tuple[str, str]:
    """Both, if they are those of `open` and lines end with the byte 10.

    Raises:
        ArgumentError: they are not.
        ArgumentTypeError: one is no str.
    """
    for name, value in (("encoding", encoding), ("errors", errors)):
        if not isinstance(value, str):
            raise ArgumentTypeError(f"{name} must be a str, got {value!r}")
    try:
        encoded = "\n".encode(encoding)
    except (LookupError, ValueError) as error:  # also of what is no text encoding, such as "hex"
        raise ArgumentError(f"encoding: {error}") from None
    try:
        codecs.lookup_error(errors)
    except LookupError as error:
        raise ArgumentError(f"errors: {error}") from None
    if encoded.removeprefix(codecs.BOM_UTF8) != b"\n":
        raise ArgumentError(
            f"encoding must be one in which a line end is the byte 10, and {encoding!r} is not: convert the file, as "
            f"with iconv -f {encoding} -t utf-8"
        )
    return encoding, errors
