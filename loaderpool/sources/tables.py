"""Columns of equal length, and tables, read by row: an item is in the structure that the columns came in."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, brief
from loaderpool.sources.arrays import has_rows
from loaderpool.system.interrupts import FailuresIgnored

_MOST_NAMED = 6
"""Datasets of an open file that a message lists."""


class Columns:
    """Row i of each column, in the structure of which they are the leaves; of the columns' own data."""

    __slots__ = ("_columns", "_getters", "_size", "_structure", "_unflatten")
    part = "column"  # as messages call one

    def __init__(self, structure: Structure, columns: list[Any], size: int) -> None:
        self._structure, self._columns, self._size = structure, columns, size
        # Looked up once, not for each row.
        self._getters = [column.__getitem__ for column in columns]
        self._unflatten = structure.unflatten

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._unflatten([get(index) for get in self._getters])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._structure, self._columns, self._size)

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the columns with their paths, for messages (`walk.parts_of`)."""
        return [
            (f"{self.part} {path}", each)
            for path, each in zip(self._structure.paths, self._columns, strict=True)
        ]

    @property
    def present_size(self) -> int:
        """The present number of rows that all columns have."""
        return min(map(len, self._columns), default=self._size)

    def map(self, function: Callable[[Any, str], Any]) -> Columns:
        """Other columns of as many rows: the function's results for each, which it gets with its path."""
        columns = [
            function(column, path)
            for column, path in zip(self._columns, self._structure.paths, strict=True)
        ]
        return Columns(self._structure, columns, self._size)


def is_array(value: Any) -> bool:
    """Whether a value has rows as an array has: NumPy's, HDF5's, PyTorch's."""
    return has_rows(value) and hasattr(value, "dtype")


# Names shown in a message: fewer hide the odd one, more bury it.
_SHOWN = 8


def unequal(names: Iterable[str], lengths: Sequence[int]) -> str:
    """Return "a has 3, b has 4" where lengths differ, of the first few; "" where they are equal."""
    if len(set(lengths)) < 2:
        return ""
    shown = [f"{name} has {length}" for name, length in zip(names, lengths, strict=True)]
    return ", ".join(shown[:_SHOWN]) + ", ..." * (len(shown) > _SHOWN)


def import_extra(module: str, needed_by: str, extra: str = "files") -> Any:
    """Import a package that only some sources need; where it is not installed, the error says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and misses another one
        raise ImportError(
            f"{needed_by} needs {error.name}, which is not installed: pip install 'loaderpool[{extra}]'",
            name=error.name,
        ) from None


# ---- tables, recognised by name: importing a library for it would cost more than all of loaderpool ----

_TABLES = {
    ("pandas", "DataFrame"),
    ("polars", "DataFrame"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
}
_COLUMNS = {
    ("pandas", "Series"), ("pandas", "Index"), ("polars", "Series"), ("pyarrow", "ChunkedArray"), ("pyarrow", "Array"),
}  # fmt: skip
_EXACT_IN_FLOAT64 = 1 << 53
_PIECES = {"string": "text", "binary": "bytes"}  # of kinds that are large ones or views, too
_MAKE_ROW: dict[str, Callable[[Any], Any]] = {
    "text": functools.partial(str, encoding="utf-8"),
    "bytes": bytes,
    "numbers": np.array,  # a copy, which may be written to
}


def is_table(value: Any) -> bool:
    """Whether a value is a table or a column of pandas, polars or pyarrow."""
    return _kind_of(value) != ("", "")


def _kind_of(value: Any) -> tuple[str, str]:
    """Library and name of the table or column that it is; empty where it is none."""
    homes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return next((home for home in homes if home in _TABLES or home in _COLUMNS), ("", ""))


def table_columns(table: Any, name: str) -> Any:
    """Return a table by row as dicts of column name to value; a single column as its values. By position, not by label.

    The libraries' own row access is slow, and pandas' makes one dtype of all values of a row; an array for each column
    keeps theirs. Workers need none of the libraries to read them. With two columns of one name, it is refused.
    """
    library, kind = _kind_of(table)
    if (library, kind) in _COLUMNS:
        return table.to_numpy() if library == "pandas" else _arrow_rows(table, name)
    labels: list[Hashable] = list(table.schema.names if library == "pyarrow" else table.columns)
    if len(set(labels)) < len(labels):
        raise ArgumentError(
            f"{name} is a {kind} with several columns of one name: rename them, got {brief(labels)}"
        )
    if library == "pandas":
        columns = [table.iloc[:, position].to_numpy() for position in range(len(labels))]
    else:
        column_at = table.column if library == "pyarrow" else table.to_series
        columns = [
            _arrow_rows(column_at(at), f"{name}[{brief(label)}]") for at, label in enumerate(labels)
        ]
    return Columns(
        Structure("dict", tuple(labels), (Structure("leaf"),) * len(labels)), columns, len(table)
    )


# ---- columns of polars and pyarrow: by the trainer's pyarrow into arrays, from which workers make rows ----


class PiecesColumn:
    """Texts, bytes or lists of numbers, one after the other in one array; a row is made when it is read.

    Args:
        kind: what a row is: "text", "bytes" or "numbers".
        offsets: `int64[rows + 1]`, where each begins; the last is where all end.
        values: `uint8[bytes]`, or the numbers of all.
        missing: `bool[rows]`, or None where none is.
    """

    __slots__ = ("_make", "_missing", "_offsets", "_state", "_values")

    def __init__(
        self, kind: str, offsets: npt.NDArray[Any], values: npt.NDArray[Any], missing: Any
    ) -> None:
        self._state = (kind, offsets, values, missing)
        self._make = _MAKE_ROW[kind]
        # Of a memoryview a number is a Python int, which takes a third of the time.
        self._offsets = offsets.data
        self._values: Any = values if kind == "numbers" else values.data
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Any:
        if self._missing is not None and self._missing[row]:
            return None
        return self._make(self._values[self._offsets[row] : self._offsets[row + 1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return PiecesColumn, self._state


def _arrow_rows(column: Any, name: str) -> Any:
    """Return a column by row: as `_rows_of`, or a list of the library's own Python objects."""
    pa = import_extra("pyarrow", f"{name} from polars")
    if hasattr(column, "to_pylist"):
        rows = _rows_of(pa, column, name)
        return column.to_pylist() if rows is None else rows
    try:
        rows = None if str(column.dtype) == "Object" else _rows_of(pa, column.to_arrow(), name)
    except pa.ArrowInvalid:  # a type that only polars has
        rows = None
    return column.to_list() if rows is None else rows


def _rows_of(pa: Any, column: Any, name: str) -> Any:
    """Return a column of pyarrow as an array or as `PiecesColumn`; None where its type is for neither.

    Numbers and times are looked at in the column's own memory where they stand in one chunk and none is null. A null
    among numbers is NaN (and the numbers are floats), among times NaT, else None.

    Raises:
        ArgumentError: it has nulls beside integers that no float64 can hold.
    """
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        return _rows_of(pa, column.cast(kind.value_type), name)
    pieces = _PIECES.get(str(kind).removeprefix("large_").removesuffix("_view"))
    if pieces:
        column = column.cast(pa.large_string() if pieces == "text" else pa.large_binary())
    elif (types.is_list(kind) or types.is_large_list(kind)) and _is_number(types, kind.value_type):
        pieces, column = "numbers", column.cast(pa.large_list(kind.value_field))
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pieces:
        return _pieces_of(column, pieces)
    if types.is_fixed_size_list(kind) and not column.null_count:
        values = _rows_of(pa, column.flatten(), name)
        is_numeric = isinstance(values, np.ndarray) and values.dtype.kind in "iufb"
        return (
            values.reshape(len(column), kind.list_size, *values.shape[1:]) if is_numeric else None
        )
    if not (_is_number(types, kind) or types.is_boolean(kind) or types.is_timestamp(kind)):
        return None
    if column.null_count and types.is_integer(kind):
        there = column.drop_null().to_numpy()
        if len(there) and max(abs(int(there.min())), abs(int(there.max()))) > _EXACT_IN_FLOAT64:
            raise ArgumentError(
                f"{name} has nulls, which are read as NaN, and integers beyond 2**53, which float64 cannot hold. "
                "Fill its nulls first, or convert the column to strings."
            )
    return column.to_numpy(zero_copy_only=False)


def _is_number(types: Any, kind: Any) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (types.is_integer, types.is_floating, types.is_date, types.is_duration)
    )


def _pieces_of(column: Any, kind: str) -> PiecesColumn | None:
    """Return texts, bytes or lists; None where there are nulls within the lists."""
    rows = len(column)
    offsets = np.frombuffer(column.buffers()[1], np.int64, rows + 1, 8 * column.offset)
    first, last = int(offsets[0]), int(offsets[-1])
    if kind == "numbers":
        inner = column.values.slice(first, last - first)
        if inner.null_count:
            return None
        values = inner.to_numpy(zero_copy_only=False)
    else:
        values = np.zeros(0, np.uint8)
        if last > first:
            values = np.frombuffer(column.buffers()[2], np.uint8, last - first, first)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return PiecesColumn(kind, offsets - first if first else offsets, values, missing)


def hdf5_arguments(opened: Any) -> str:
    """Return the arguments of `HDF5` that read an open object of h5py, as Python.

    Of a file or group, all datasets directly in it are named, unless there are many. "path, key": it is closed.
    """
    path, keys = "path", "key"
    with FailuresIgnored():  # it is closed
        path = repr(opened.file.filename)
        datasets = [opened]
        if not hasattr(opened, "shape"):
            children = (opened.get(name) for name in itertools.islice(opened, _MOST_NAMED + 1))
            datasets = [child for child in children if hasattr(child, "shape")]
        names = [dataset.name.lstrip("/") for dataset in datasets]
        if len(names) == 1:
            keys = repr(names[0])
        elif 1 < len(names) <= _MOST_NAMED:
            keys = repr({name.rpartition("/")[2]: name for name in names})
    return f"{path}, {keys}"
