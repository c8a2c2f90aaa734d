"""The rows of CSV files by index."""

from __future__ import annotations

import array
import codecs
import csv
import functools
import io
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError
from loaderpool.sources.file_records import FileRecords
from loaderpool.sources.line_index import scan_lines
from loaderpool.sources.paths import checked_paths
from loaderpool.sources.record_index import FileScan, head_of, index_records, refuse_compressed
from loaderpool.sources.text_lines import checked_encoding
from loaderpool.system.reading import read_at

_BUFFER_BYTES = 1 << 20
_TOLD_LINES = 4096  # from one word about how far a scan is to the next
"""Read at a time where rows are parsed one by one. Smaller: more calls. Larger: no gain."""


class Csv(FileRecords):
    r"""Rows of CSV files, of several one after the other, as dicts of str; any is read at once.

    Rows are those of Python's `csv` module: a field in quotes may hold delimiters, doubled quotes and line ends. The
    files are read once, when this is made, and where rows begin is kept: 4 bytes a row, 8 where the files have 4 GiB
    or more together. Workers share that, and each opens the files for itself; they must stay as they are.

    Empty lines are no rows. A row is parsed when it is read, so one with a field too many or too few is an error of
    that item.

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        fieldnames: names of the fields, where files have no header. None: the first row of each file has them, and all
            files have the same.
        delimiter: one character, between fields.
        quotechar: one character, around fields; None: quotes mean nothing, and a row is a line.
        encoding: as of `open`, but none in which a line end is not the byte 10, such as UTF-16. Spreadsheets write
            "utf-8-sig".

    Raises:
        ArgumentError: there is no row, no path, or headers differ; a file is compressed; a wrong value.
        ArgumentTypeError: an argument is of a wrong type.
        SourceError: a file is written to meanwhile, or has a quote that is never closed. When a row is read: it has a
            field too many or too few, cannot be decoded, or the file has changed.
        OSError: a file cannot be opened.
    """

    __slots__ = ("_encoding", "_fieldnames", "_format", "_later_encoding")

    _records = "rows"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fieldnames: Sequence[str] | None = None,
        delimiter: str = ",",
        quotechar: str | None = '"',
        encoding: str = "utf-8",
    ) -> None:
        _check_character("delimiter", delimiter)
        if quotechar is not None:
            _check_character("quotechar", quotechar)
        if quotechar == delimiter:
            raise ArgumentError(f"quotechar must be another character than delimiter, got {quotechar!r} for both")
        checked_encoding(encoding)
        names = None if fieldnames is None else _checked_names(fieldnames, "fieldnames")
        absolute = checked_paths(paths, "CSV")
        scanner = _Scanner(_Format(delimiter, quotechar), encoding, names)
        index = index_records(absolute, scanner)
        super().__init__(absolute, index, (scanner.names, delimiter, quotechar, encoding, csv.field_size_limit()))
        if not len(self):
            raise ArgumentError(f"paths: there is no row in {self._described}" + " below the header" * (names is None))

    def _settle(self) -> None:
        self._fieldnames, delimiter, quotechar, self._encoding, limit = self._settings
        self._format = _Format(delimiter, quotechar)
        self._later_encoding = "utf-8" if codecs.lookup(self._encoding).name == "utf-8-sig" else self._encoding
        if csv.field_size_limit() < limit:  # set in the trainer; such settings do not travel by themselves
            csv.field_size_limit(limit)

    def _makes(self) -> tuple[Any, ...]:
        return self._settings[:-1]

    @property
    def fieldnames(self) -> tuple[str, ...]:
        """Names of the fields, in the order of the files."""
        names: tuple[str, ...] = self._fieldnames
        return names

    def _item(self, data: bytes, file: int, number: int, offset: int) -> dict[str, str]:
        where = functools.partial(self._where, file, number, offset)
        try:
            fields = self._format.row(data.decode(self._later_encoding if offset else self._encoding))
        except UnicodeError as error:
            raise SourceError(f"{where()} cannot be decoded: {error}. Is encoding={self._encoding!r} right?") from error
        except csv.Error as error:
            raise SourceError(f"{where()} is no row of CSV: {error}") from error
        if len(fields) != len(self._fieldnames):
            raise SourceError(
                f"{where()} has {len(fields)} fields, and there are {len(self._fieldnames)} names "
                f"({', '.join(self._fieldnames[:8])}{', ...' * (len(self._fieldnames) > 8)}). It begins {data[:60]!r}. "
                f"Is delimiter={self._format.delimiter!r} right, and is it quoted where it is part of a field?"
            )
        return dict(zip(self._fieldnames, fields, strict=True))


class _Format:
    """How fields are written."""

    def __init__(self, delimiter: str, quotechar: str | None) -> None:
        self.delimiter, self.quotechar = delimiter, quotechar
        self._options: dict[str, Any] = {"delimiter": delimiter, "quotechar": quotechar}
        if quotechar is None:
            self._options["quoting"] = csv.QUOTE_NONE

    def rows(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """Rows that begin on these lines; empty lists for empty lines."""
        return csv.reader(lines, **self._options)

    def row(self, text: str, *, strict: bool = False) -> list[str]:
        """Return the one row that begins in a text; blank lines may be behind it."""
        return next(csv.reader([text], strict=strict, **self._options))


class _Scanner:
    """Finds header and rows of one file after the other.

    Attributes:
        names: of the fields; None until a header was read.
    """

    def __init__(self, form: _Format, encoding: str, names: tuple[str, ...] | None) -> None:
        self.names = names
        self._form, self._encoding = form, encoding
        self._has_header = names is None
        self._header_of = ""

    def __call__(self, scan: FileScan) -> int:
        head = head_of(scan.file)
        refuse_compressed(scan.path, head, "a row", "the CSV file")
        if head.startswith(codecs.BOM_UTF8) and codecs.lookup(self._encoding).name == "utf-8":
            raise ArgumentError(f"paths: {scan.path} begins with a byte order mark: pass encoding='utf-8-sig'")
        begin = self._read_header(scan) if self._has_header else 0
        quote = self._form.quotechar
        if not scan_lines(scan, skip_blank=True, begin=begin, until=None if quote is None else ord(quote)):
            self._scan_by_rows(scan, begin)  # a quote may go on over a line's end: all before it must be parsed
        return scan.size

    def _read_header(self, scan: FileScan) -> int:
        rows = self._rows(scan, 0)
        try:
            fields, end = next(((row, end) for row, end in rows if row is None or row), (None, 0))
        finally:
            rows.close()
        if fields is None:
            raise ArgumentError(f"paths: {scan.path} has no header: give fieldnames= if it is to have none")
        names = _checked_names(fields, f"the header of {scan.path}")
        if self.names is None:
            self.names, self._header_of = names, scan.path
        elif self.names != names:
            raise ArgumentError(
                f"paths: the header of {scan.path} is {', '.join(names)}, and that of {self._header_of} is "
                f"{', '.join(self.names)}: read files of different fields as sources of their own"
            )
        return end

    def _scan_by_rows(self, scan: FileScan, begin: int) -> None:
        starts = array.array("q")
        start = begin
        for row, end in self._rows(scan, begin):
            if row is None or row:
                starts.append(start)
            start = end
        if starts:
            self._refuse_open_quote(scan, starts[-1])
        scan.pieces.clear()
        scan.add(np.array(starts, np.int64))

    def _rows(self, scan: FileScan, begin: int) -> Generator[tuple[list[str] | None, int], None, None]:
        """Each row and the byte behind it; None for a row that is none: it is said of it when it is read.

        What cannot be decoded is replaced here, for it moves no row's end.
        """
        at = begin

        def lines() -> Iterator[str]:
            nonlocal at
            before = -1
            while at > before:  # so that nothing is asked for each line
                before = at
                for line in itertools.islice(buffered, _TOLD_LINES):
                    at += len(line)
                    yield line.decode(self._encoding, "replace")
                scan.reached(at)

        buffered = io.BufferedReader(scan.file, _BUFFER_BYTES)
        try:
            buffered.seek(begin)
            rows = self._form.rows(lines())
            while True:
                start = at
                try:
                    row: list[str] | None = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    if at - start > csv.field_size_limit():
                        raise SourceError(
                            f"the row at byte {start} of {scan.path}: {error}. Is a quote before it never closed, or "
                            f"none (quotechar=None)? Else allow longer fields by csv.field_size_limit(n)"
                        ) from error
                    row = None
                yield row, at
        finally:
            buffered.detach()

    def _refuse_open_quote(self, scan: FileScan, start: int) -> None:
        text = read_at(scan.file.fileno(), scan.size - start, start).decode(self._encoding, "replace")
        try:
            self._form.row(text, strict=True)
        except csv.Error as error:
            if "end of data" in str(error):
                raise SourceError(
                    f"the row at byte {start} of {scan.path} has a quote that is never closed: the file is cut there "
                    "(keep what is before), or quotes mean nothing in it (quotechar=None)"
                ) from error


def _checked_names(names: Any, what: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"{what} must be a list of str, got {names!r}")
    twice = sorted({repr(name) for name in names if list(names).count(name) > 1})
    if twice:
        raise ArgumentError(f"{what} has several fields of the name {', '.join(twice)}")
    if not names:
        raise ArgumentError(f"{what} is empty")
    return tuple(names)


def _check_character(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be a str, got {value!r}")
    if len(value) != 1 or not value.isascii() or value in "\r\n":
        raise ArgumentError(f"{name} must be one ASCII character, and no line end, got {value!r}")
