"""The lines of text files by index, however large the files are."""

from __future__ import annotations

import bisect
import codecs
import os
from typing import Any, SupportsIndex

from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError
from loaderpool.sources.line_index import LineIndex, index_lines
from loaderpool.sources.open_files import Files
from loaderpool.sources.parts import position_of

__all__ = ["TextLines"]


class TextLines:
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

    __slots__ = ("_encoding", "_errors", "_files", "_has_mark", "_index", "_paths", "_strip")

    def __init__(
        self,
        paths: str | os.PathLike[str] | list[str | os.PathLike[str]] | tuple[str | os.PathLike[str], ...],
        encoding: str = "utf-8",
        strip: bool = True,
        errors: str = "strict",
    ) -> None:
        if not isinstance(strip, bool):
            raise ArgumentTypeError(f"strip must be True or False, got {strip!r}")
        settings = (*_checked_encoding(encoding, errors), strip)
        absolute = _checked_paths(paths)
        self._set(absolute, settings, index_lines(absolute))

    def _set(self, paths: tuple[str, ...], settings: tuple[str, str, bool], index: LineIndex) -> None:
        self._paths = paths
        self._index = index
        self._encoding, self._errors, self._strip = settings
        self._has_mark = codecs.lookup(self._encoding).name == "utf-8-sig"
        self._files = Files(paths, index.stamps)

    def __len__(self) -> int:
        return len(self._index.starts) - 1

    def __getitem__(self, index: SupportsIndex) -> str:
        line = position_of(index, len(self))
        start, stop = int(self._index.starts[line]), int(self._index.starts[line + 1])
        file = bisect.bisect_right(self._index.first_lines, line) - 1
        data = self._files.read(file, start - self._index.first_bytes[file], stop - start)
        if self._strip and data.endswith(b"\n"):
            data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
        number = line - self._index.first_lines[file]
        # The mark is at the start of a file only; elsewhere the same three bytes are a character.
        encoding = "utf-8" if self._has_mark and number else self._encoding
        try:
            return data.decode(encoding, self._errors)
        except UnicodeError as error:
            raise SourceError(
                f"line {number + 1} of {self._paths[file]} cannot be decoded: {error}. Is encoding={self._encoding!r} "
                'right? errors="replace" puts a mark in place of such bytes'
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._paths, (self._encoding, self._errors, self._strip), self._index)

    def __repr__(self) -> str:
        first = self._paths[0] if len(self._paths) == 1 else f"{len(self._paths)} files from {self._paths[0]} on"
        return f"<{len(self)} lines of {first}>"


def _restored(paths: tuple[str, ...], settings: tuple[str, str, bool], index: LineIndex) -> TextLines:
    lines = TextLines.__new__(TextLines)  # not by its constructor, which would read all files again
    lines._set(paths, settings, index)
    return lines


def _checked_paths(paths: Any) -> tuple[str, ...]:
    given = paths if isinstance(paths, (list, tuple)) else [paths]
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"paths must be a path or a list of paths, got {path!r} of type {type(path).__name__}"
            )
    if not given:
        raise ArgumentError("paths is empty: give at least one text file; is a glob pattern before it wrong?")
    return tuple(os.path.abspath(os.fsdecode(path)) for path in given)


def _checked_encoding(encoding: Any, errors: Any) -> tuple[str, str]:
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
