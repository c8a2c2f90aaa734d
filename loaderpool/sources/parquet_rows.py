"""Rows of Parquet files by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError
from loaderpool.sources.extras import import_extra
from loaderpool.sources.indexed_files import IndexedFiles
from loaderpool.sources.paths import described_paths


class ParquetRows(IndexedFiles):
    """Rows of Parquet files, of several one after the other, as dicts of column name to value.

    A Parquet file is read by row group: the one that a row is in is decompressed whole, and each process keeps the last
    few. So rows in their order, or nearly so, are fast; rows in random order are not, unless row groups are small or
    few (docs/how-to/tables.md). The files must stay as they are.

    Numbers, truth values and times are NumPy scalars of the column's type, a list of numbers is an array, text is str,
    binary is bytes, and everything else is what pyarrow's `as_py()` gives; a missing value is None.

    Needs the extra `parquet` (pyarrow).

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        columns: names of the columns to read; None: all of the first file, which the others must have, too.
        row_groups_kept: decompressed row groups that a process keeps of this source, at least 1.

    Raises:
        ArgumentError: a column is not there, there is no row or no path, or a wrong value.
        ArgumentTypeError: an argument is of a wrong type.
        SourceError: a file is damaged, cut or no Parquet file. When a row is read: its row group is damaged, or the
            file has changed.
        ImportError: the extra is not installed.
        OSError: a file is not there.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        row_groups_kept: int = 2,
    ) -> None:
        names = None if columns is None else _checked_columns(columns)
        if isinstance(row_groups_kept, bool) or not isinstance(row_groups_kept, int):
            raise ArgumentTypeError(f"row_groups_kept must be a whole number, got {row_groups_kept!r}")
        if row_groups_kept < 1:
            raise ArgumentError(f"row_groups_kept must be at least 1, got {row_groups_kept}")
        self._columns = names
        super().__init__(paths, kind="Parquet", makes=names, keep=row_groups_kept)

    def look_into(self, path: str) -> list[int]:
        """How many rows each row group has."""
        in_file, counts = _look_into(path)
        if self._columns is None:
            self._columns = self._makes = in_file
        lacking = [name for name in self._columns if name not in in_file]
        if lacking:
            raise ArgumentError(
                f"columns: there is no {', '.join(map(repr, lacking))} in {path}; it has "
                f"{', '.join(map(repr, in_file))}"
            )
        return counts

    def open(self, path: str, part: int) -> _RowGroup:
        """A row group, decompressed."""
        assert self._columns is not None
        return _RowGroup(path, part, self._columns)

    def item(self, opened: _RowGroup, row: int) -> dict[str, Any]:
        """A row, by column."""
        if opened.damage:
            raise SourceError(f"row {row} of {opened.damage}")
        return {name: get(row) for name, get in opened.columns}

    def load_library(self) -> None:
        """Import pyarrow."""
        _import_parquet()

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {described_paths(self.paths)} in {len(self._parts)} row groups>"


def _import_parquet() -> Any:
    return import_extra("pyarrow.parquet", what="ParquetRows", extra="parquet")


class _RowGroup:
    """A row group, decompressed.

    Attributes:
        columns: names, and what gives the value in a row.
        damage: why there are none, "" where all is well. Kept too, else it would be decompressed again for each row.
    """

    def __init__(self, path: str, group: int, columns: tuple[str, ...]) -> None:
        self.columns: list[tuple[str, Callable[[int], Any]]] = []
        self.damage = ""
        try:
            with _import_parquet().ParquetFile(path, page_checksum_verification=True) as file:
                # The pool's processes are as many as there are CPUs, so each has one thread.
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
        except FileNotFoundError:
            raise
        except Exception as error:
            self.damage = f"row group {group} of {path} cannot be read: {type(error).__name__}: {error}"
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


def _look_into(path: str) -> tuple[tuple[str, ...], list[int]]:
    """Names of a file's columns, and how many rows each row group has."""
    import pyarrow as pa

    try:
        with _import_parquet().ParquetFile(path) as file:
            facts = file.metadata
            return tuple(file.schema_arrow.names), [facts.row_group(at).num_rows for at in range(facts.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path} cannot be opened as Parquet ({error}): it is cut, damaged, or no Parquet file. Nothing of a file "
            "that was cut can be read, for its directory is at its end"
        ) from error


def _checked_columns(columns: Any) -> tuple[str, ...]:
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(n, str) for n in columns):
        raise ArgumentTypeError(f"columns must be a list of names, got {columns!r}")
    if not columns:
        raise ArgumentError("columns is empty: give at least one name, or None for all")
    twice = sorted({repr(name) for name in columns if list(columns).count(name) > 1})
    if twice:
        raise ArgumentError(f"columns has {', '.join(twice)} twice")
    return tuple(columns)
