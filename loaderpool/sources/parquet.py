"""Rows of Parquet files."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.checks import whole_number
from loaderpool.element.structure import listed
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only
from loaderpool.sources.files import FileSource, Paths, Record, Stamp

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetRows(FileSource):
    """Source of rows of Parquet files, as dicts by column. Needs the extra `files`.

    Whole row groups are decompressed, so reading in random order is slow
    (docs/guide/data/tables.md). Numbers are NumPy scalars, lists of numbers are arrays, and other
    values are converted by pyarrow's `as_py()`.

    Args:
        paths: As in `FileSource`.
        columns: Names of the columns to read. Default: all columns of the first file.
        row_groups_kept: Number of decompressed row groups that each process keeps, at least 1.
            Default: 2.

    Raises:
        ArgumentError: If a column is missing.
        SourceError: If a file is cut, damaged or not a Parquet file.
    """

    kind, unit = "Parquet", "row"
    _library = "pyarrow.parquet"

    @known_names_only
    def __init__(
        self, paths: Paths, columns: Sequence[str] | None = None, row_groups_kept: int = 2
    ) -> None:
        self._columns = None if columns is None else _checked_columns(columns)
        self._kept = whole_number("row_groups_kept", row_groups_kept, at_least=1)
        self._group_of = functools.lru_cache(self._kept)(_row_group)
        super().__init__(paths, makes=self._columns)

    def index(self, path: str) -> int:
        """Return the number of rows in a file."""
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            in_file, rows = tuple(file.schema_arrow.names), file.metadata.num_rows
        if self._columns is None:
            self._columns = self._makes = in_file
        lacking = [name for name in self._columns if name not in in_file]
        if lacking:
            raise ArgumentError(
                f"columns: {path} lacks {listed(lacking)}; it has {listed(in_file)}"
            )
        return int(rows)

    def open(self, path: str) -> tuple[Stamp, list[int]]:
        """Return the state of a file, and the end of each row group.

        Each row group is opened when it is read.
        """
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            counts = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        return Stamp.of(path), list(itertools.accumulate(counts))

    def blocks_of(self, path: str) -> list[int]:
        """Return the first row of each row group of a file."""
        return [0, *self.open(path)[1][:-1]]

    def read(self, handle: tuple[Stamp, list[int]], record: Record) -> dict[str, Any]:
        """Return one row as a dict."""
        stamp, ends = handle
        number = bisect.bisect_right(ends, record.number)
        columns = self._group_of(record.path, stamp, number, self._columns)
        row = record.number - (ends[number - 1] if number else 0)
        return {name: get(row) for name, get in columns}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_group_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group_of = functools.lru_cache(self._kept)(_row_group)


def _row_group(
    path: str, stamp: Stamp, number: int, columns: tuple[str, ...]
) -> list[tuple[str, Callable[[int], Any]]]:
    """Decompress a row group.

    Returns:
        For each column its name, and a function that returns the column's value in a row.
    """
    from pyarrow import parquet

    stamp.check(path)
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        # One thread for each process, because a pool has about as many processes as there are CPUs.
        table = file.read_row_group(number, columns=list(columns), use_threads=False)
    return [(name, _getter(table.column(name))) for name in columns]


def _getter(column: pa.ChunkedArray) -> Callable[[int], Any]:
    """Return a function that returns a column's value in a row."""
    import pyarrow as pa

    types, array = pa.types, column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # the column is too large for one array
        return lambda row: array[row].as_py()
    kind = array.type
    is_whole = types.is_integer(kind) or types.is_boolean(kind)
    if is_whole or types.is_floating(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        missing_at = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        # With nulls, `to_numpy` would convert integers to floats, and booleans to objects.
        if is_whole and array.null_count:
            array = array.fill_null(False if types.is_boolean(kind) else 0)
        values = array.to_numpy(zero_copy_only=False)
        get: Callable[[int], Any] = values.__getitem__
        return get if missing_at is None else lambda row: None if missing_at[row] else values[row]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_primitive(kind.value_type) and not array.flatten().null_count:
        # A copy, so that an item neither keeps the row group in memory nor is read-only.
        return lambda row: None if (values := array[row].values) is None else np.array(values)
    return lambda row: array[row].as_py()


def _checked_columns(columns: Sequence[str]) -> tuple[str, ...]:
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not all(isinstance(n, str) for n in columns)
    ):
        raise ArgumentError(f"columns must be a list of names, got {brief(columns)}")
    return tuple(columns)
