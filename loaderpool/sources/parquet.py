"""Rows of Parquet files."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loaderpool.element.structure import listed
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only
from loaderpool.sources.decoded import KeptBlocks
from loaderpool.sources.files import BlockFileSource, Paths, Record, Stamp

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


class _FileState(NamedTuple):
    """Stamp and metadata of a file. The file is opened again for each row group."""

    stamp: Stamp
    metadata: pq.FileMetaData
    ends: list[int]  # end of each row group


class ParquetRows(BlockFileSource):
    """Source of rows of Parquet files, as dicts by column. Needs the extra `files`.

    Parquet decompresses whole row groups. `shuffle=True` decompresses one for almost each row; use
    `order=Blocks()` instead (docs/guide/data/tables.md). Numbers are NumPy scalars, lists of
    numbers are arrays, and other values are converted by pyarrow's `as_py()`.

    Args:
        paths: As in `FileSource`.
        columns: Names of the columns to read. Default: all columns of the first file.

    Raises:
        ArgumentError: If a column is missing.
        SourceError: If a file is cut, damaged or not a Parquet file.
    """

    kind, unit = "Parquet", "row"
    _library = "pyarrow.parquet"

    @known_names_only
    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else _checked_columns(columns)
        self._kept = KeptBlocks()
        super().__init__(paths, makes=self._columns)
        from pyarrow import parquet

        # Workers read a column as its storage, unless its type is registered there, too.
        self._extensions = [*_extensions_of(parquet.read_schema(self.paths[0]))]

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

    def open(self, path: str) -> _FileState:
        """Return the stamp, the metadata and the row groups of a file."""
        import pyarrow as pa
        from pyarrow import parquet

        for extension in self._extensions:
            with contextlib.suppress(pa.ArrowKeyError):  # it is registered already
                pa.register_extension_type(extension)
        stamp, metadata = Stamp.of(path), parquet.read_metadata(path)
        counts = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        return _FileState(stamp, metadata, list(itertools.accumulate(counts)))

    def blocks_of(self, path: str) -> list[int]:
        """Return the first row of each row group of a file."""
        return [0, *self.open(path).ends[:-1]]

    def read(self, handle: _FileState, record: Record) -> dict[str, Any]:
        """Return one row as a dict."""
        return self.rows_of(handle, record.path, [record.number])[0]

    def rows_of(self, handle: _FileState, path: str, rows: list[int]) -> list[dict[str, Any]]:
        """Return several rows as dicts."""
        by_group: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_group.setdefault(bisect.bisect_right(handle.ends, row), []).append(place)
        found: list[dict[str, Any]] = [{}] * len(rows)
        for number, places in sorted(by_group.items()):
            decode = functools.partial(self._group, handle, path, number)
            columns = self._kept.get((path, number), decode)
            first = handle.ends[number - 1] if number else 0
            wanted = [rows[place] - first for place in places]
            values = [get(wanted) for get in columns]
            for place, row_values in zip(places, zip(*values, strict=True), strict=True):
                found[place] = dict(zip(self._columns or (), row_values, strict=True))
        return found

    def _group(
        self, handle: _FileState, path: str, number: int
    ) -> tuple[list[Callable[[list[int]], Iterable[Any]]], int, int]:
        """Decompress a row group.

        Returns:
            A function for each column, which returns the column's values in given rows; the number
            of rows in the group; and its size in bytes.
        """
        from pyarrow import parquet

        handle.stamp.check(path)
        names = list(self._columns or ())
        with parquet.ParquetFile(
            path, metadata=handle.metadata, page_checksum_verification=True
        ) as file:
            # Use one thread, because a pool has about as many processes as there are CPUs.
            table = file.read_row_group(number, columns=names, use_threads=False)
        getters = [_getter(table.column(name)) for name in names]
        return getters, table.num_rows, table.nbytes


def _extensions_of(fields: Iterable[pa.Field]) -> Iterator[pa.ExtensionType]:
    """Return the extension types that the program has registered, also inside of other types."""
    import pyarrow as pa

    for field in fields:
        kind = field.type
        if isinstance(kind, pa.ExtensionType) and not isinstance(kind, pa.UnknownExtensionType):
            yield kind
        yield from _extensions_of(kind.field(at) for at in range(kind.num_fields))


def _getter(column: pa.ChunkedArray) -> Callable[[list[int]], Iterable[Any]]:
    """Return a function that returns a column's values in given rows."""
    import pyarrow as pa

    types, array = pa.types, column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # the column is too large for one array
        return lambda rows: [array[row].as_py() for row in rows]
    kind = array.type
    is_whole = types.is_integer(kind) or types.is_boolean(kind)
    if is_whole or types.is_floating(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        missing_at = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        # With nulls, `to_numpy` would convert integers to floats, and booleans to objects.
        if is_whole and array.null_count:
            array = array.fill_null(False if types.is_boolean(kind) else 0)
        values = array.to_numpy(zero_copy_only=False)
        if missing_at is None:
            return lambda rows: values[rows]
        return lambda rows: [None if missing_at[row] else values[row] for row in rows]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and types.is_primitive(kind.value_type) and not array.flatten().null_count:
        # A copy, so that an item neither keeps the row group in memory nor is read-only.
        return lambda rows: [
            None if (values := array[row].values) is None else np.array(values) for row in rows
        ]
    return lambda rows: [array[row].as_py() for row in rows]


def _checked_columns(columns: Sequence[str]) -> tuple[str, ...]:
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not all(isinstance(n, str) for n in columns)
    ):
        raise ArgumentError(f"columns must be a list of names, got {brief(columns)}")
    return tuple(columns)
