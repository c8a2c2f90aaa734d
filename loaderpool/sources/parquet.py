"""Rows of Parquet files."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.sources.files import FileSource, Record, Stamp
from loaderpool.sources.tables import import_extra, repeated


class ParquetRows(FileSource):
    """Rows of Parquet files as dicts by column: a `FileSource`. Needs the extra `files`.

    Row groups are decompressed whole, so rows in random order are slow (docs/how-to/tables.md). Numbers are NumPy
    scalars, lists of them arrays, and the rest is what pyarrow's `as_py()` gives.

    Args:
        paths: as in `FileSource`.
        columns: names of the columns to read; None: all of the first file.
        row_groups_kept: decompressed row groups that a process keeps, at least 1.

    Raises:
        ArgumentError: a column is not there.
        SourceError: a file is damaged, cut or no Parquet file.
    """

    kind, unit = "Parquet", "row"
    _library = "pyarrow.parquet"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        row_groups_kept: int = 2,
    ) -> None:
        self._columns = None if columns is None else _checked_columns(columns)
        if isinstance(row_groups_kept, bool) or not isinstance(row_groups_kept, int):
            raise ArgumentError(f"row_groups_kept must be a whole number, got {brief(row_groups_kept)}")
        if row_groups_kept < 1:
            raise ArgumentError(f"row_groups_kept must be at least 1, got {brief(row_groups_kept)}")
        self._kept = row_groups_kept
        self._group_of = functools.lru_cache(row_groups_kept)(_RowGroup)
        super().__init__(paths, makes=self._columns)

    def index(self, path: str) -> int:
        """How many rows it has."""
        with _parquet().ParquetFile(path) as file:
            in_file, rows = tuple(file.schema_arrow.names), file.metadata.num_rows
        if self._columns is None:
            self._columns = self._makes = in_file
        lacking = [name for name in self._columns if name not in in_file]
        if lacking:
            raise ArgumentError(
                f"columns: there is no {', '.join(map(repr, lacking))} in {path}; it has "
                f"{', '.join(map(repr, in_file))}"
            )
        return int(rows)

    def open(self, path: str) -> _Groups:
        """Where its row groups end. The file itself is opened for each row group that is read."""
        with _parquet().ParquetFile(path) as file:
            counts = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        return _Groups(Stamp.of(path), list(itertools.accumulate(counts)))

    def read(self, handle: _Groups, record: Record) -> dict[str, Any]:
        """A row, by column."""
        number = bisect.bisect_right(handle.ends, record.number)
        group = self._group_of(record.path, handle.stamp, number, self._columns)
        if group.damage:
            raise SourceError(f"{self.where(record)}: row group {number} cannot be read: {group.damage}")
        row = record.number - (handle.ends[number - 1] if number else 0)
        return {name: get(row) for name, get in group.columns}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_group_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group_of = functools.lru_cache(self._kept)(_RowGroup)


def _parquet() -> Any:
    return import_extra("pyarrow.parquet", "ParquetRows")


class _Groups(NamedTuple):
    """Of a file its stamp, and how many rows there are up to the end of each row group."""

    stamp: Stamp
    ends: list[int]


class _RowGroup:
    """A row group, decompressed.

    Attributes:
        columns: names, and what gives the value in a row.
        damage: why there are none, "" where all is well. Kept too, else it would be decompressed again for each row.
    """

    def __init__(self, path: str, stamp: Stamp, number: int, columns: tuple[str, ...]) -> None:
        stamp.check(path)
        self.columns: list[tuple[str, Callable[[int], Any]]] = []
        self.damage = ""
        try:
            with _parquet().ParquetFile(path, page_checksum_verification=True) as file:
                # The pool's processes are as many as there are CPUs, so each has one thread.
                table = file.read_row_group(number, columns=list(columns), use_threads=False)
        except Exception as error:
            self.damage = f"{type(error).__name__}: {error}"
            return
        self.columns = [(name, _getter(table.column(name))) for name in columns]


def _getter(column: Any) -> Callable[[int], Any]:
    """What gives a column's value in a row."""
    import pyarrow as pa
    from pyarrow import types

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # what is left chunked is too large for one array
        return lambda row: array[row].as_py()
    kind = array.type
    if types.is_integer(kind) or types.is_boolean(kind):
        missing_at = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        filled = array.fill_null(False if types.is_boolean(kind) else 0) if array.null_count else array
        return _of_array(filled.to_numpy(zero_copy_only=False), missing_at)
    if types.is_floating(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        missing_at = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        return _of_array(array.to_numpy(zero_copy_only=False), missing_at)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_primitive(kind.value_type) and not array.flatten().null_count:
        # A copy, so that an item neither keeps the row group in memory nor is read-only.
        return lambda row: None if (values := array[row].values) is None else np.array(values)
    return lambda row: array[row].as_py()


def _of_array(values: Any, missing_at: Any) -> Callable[[int], Any]:
    if missing_at is None:
        get: Callable[[int], Any] = values.__getitem__
        return get
    return lambda row: None if missing_at[row] else values[row]


def _checked_columns(columns: Any) -> tuple[str, ...]:
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(n, str) for n in columns):
        raise ArgumentError(f"columns must be a list of names, got {brief(columns)}")
    if not columns:
        raise ArgumentError("columns is empty: give at least one name, or None for all")
    if twice := repeated(columns):
        raise ArgumentError(f"columns has {twice} twice")
    return tuple(columns)
