"""Columns of equal length, and tables, read by row. An item has the structure of the columns."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, brief
from loaderpool.sources.arrays import Array, has_rows
from loaderpool.sources.indexing import Indexed
from loaderpool.system.interrupts import FailuresIgnored

if TYPE_CHECKING:
    import h5py
    import pyarrow as pa

_MOST_NAMED = 6
"""Maximum number of datasets of an open file that a message lists."""


class Columns:
    """Columns read by row, without a copy of their data.

    Args:
        structure: structure of an item; its leaves are the columns.
        columns: the columns, in the order of the leaves.
        size: number of rows.

    Attributes:
        structure: structure of an item.
    """

    __slots__ = ("_columns", "_getters", "_size", "_unflatten", "structure")
    part = "column"  # name of a part in messages

    def __init__(self, structure: Structure, columns: Sequence[Indexed], size: int) -> None:
        self.structure, self._columns, self._size = structure, columns, size
        # Methods are looked up once, not for each row.
        self._getters = [column.__getitem__ for column in columns]
        self._unflatten = structure.unflatten

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the columns in an item, such as "['image']"."""
        return self.structure.paths

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> object:
        return self._unflatten([get(index) for get in self._getters])

    def join(
        self, readers: Sequence[Callable[[list[int]], Any] | None], rows: list[int]
    ) -> list[object]:
        """Return several rows. Each reader returns rows of one column; None: read it row by row."""
        columns = [
            map(get, rows) if read is None else read(rows)
            for get, read in zip(self._getters, readers, strict=True)
        ]
        return [self._unflatten(list(leaves)) for leaves in zip(*columns, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.structure, self._columns, self._size)

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the columns with their paths, for messages (`walk.parts_of`)."""
        return [
            (f"{self.part} {path}", each)
            for path, each in zip(self.structure.paths, self._columns, strict=True)
        ]

    @property
    def present_size(self) -> int:
        """Present number of rows of the shortest column."""
        return min(map(len, self._columns), default=self._size)

    def map(self, function: Callable[[Indexed, str], Any]) -> Columns:
        """Return `Columns` of `function(column, path)` for each column, with the same size."""
        columns = [
            function(column, path)
            for column, path in zip(self._columns, self.structure.paths, strict=True)
        ]
        return Columns(self.structure, columns, self._size)


def is_array(value: object) -> TypeGuard[Array]:
    """True if a value is an array with rows, such as one of NumPy, HDF5 or PyTorch."""
    return has_rows(value) and hasattr(value, "dtype")


# Maximum number of names in a message. Smaller: the odd one may be left out. Larger: it is hard to
# find.
_SHOWN = 8


def unequal(names: Iterable[str], lengths: Sequence[int]) -> str:
    """Return a text such as "a has 3, b has 4" if lengths differ, otherwise "".

    The text has the first few names only.
    """
    if len(set(lengths)) < 2:
        return ""
    shown = [f"{name} has {length}" for name, length in zip(names, lengths, strict=True)]
    return ", ".join(shown[:_SHOWN]) + ", ..." * (len(shown) > _SHOWN)


def import_extra(module: str, needed_by: str, extra: str = "files") -> ModuleType:
    """Import a package that only some sources need.

    Args:
        module: name of the module.
        needed_by: name of the user, for the message.
        extra: extra of loaderpool that installs the package.

    Raises:
        ImportError: the package is not installed; the text has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is installed, but one that it needs is not
        package = "protobuf" if error.name.partition(".")[0] == "google" else error.name
        raise ImportError(
            f"{needed_by} needs {package}, which is not installed: "
            f"pip install 'loaderpool[{extra}]'",
            name=error.name,
        ) from None


# ---- tables ----

# Classes are recognised by their names, because importing a library takes longer than importing all
# of loaderpool.

_TABLES = {
    ("pandas", "DataFrame"),
    ("polars", "DataFrame"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
}
_COLUMNS = {
    ("pandas", "Series"), ("pandas", "Index"), ("polars", "Series"), ("pyarrow", "ChunkedArray"),
    ("pyarrow", "Array"),
}  # fmt: skip
_EXACT_IN_FLOAT64 = 1 << 53
# Kinds of `PiecesColumn` by pyarrow's type, without "large_" and "_view".
_PIECES = {"string": "text", "binary": "bytes"}
_MAKE_ROW: dict[str, Callable[[Any], Any]] = {
    "text": functools.partial(str, encoding="utf-8"),
    "bytes": bytes,
    "numbers": np.array,  # returns a copy, which is writable
}


def is_table(value: object) -> bool:
    """True if a value is a table or a column of pandas, polars or pyarrow."""
    return _kind_of(value) != ("", "")


def _kind_of(value: object) -> tuple[str, str]:
    """Return library and class name of a table or column; two empty strings for other values."""
    homes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return next((home for home in homes if home in _TABLES or home in _COLUMNS), ("", ""))


def table_columns(table: Any, name: str) -> Indexed:
    """Return the rows of a table as dicts by column name, or the values of a single column.

    Rows are read by position, not by label. Each column becomes an array, because row access of the
    libraries is slow, and pandas converts all values of a row to one dtype. Workers need none of
    the libraries to read the rows.

    Raises:
        ArgumentError: two columns have the same name, or a column has nulls beside integers that
            float64 cannot represent.
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


# ---- columns of polars and pyarrow ----

# The main process converts them to arrays with pyarrow. Workers make rows of these arrays.


class PiecesColumn:
    """Column of texts, bytes or lists of numbers, joined in one array.

    Each read of a row makes a new object.

    Args:
        kind: type of a row: "text", "bytes" or "numbers".
        offsets: `int64[rows + 1]`, start of each row, and the end of the last one.
        values: data of all rows: `uint8[bytes]`, or an array of numbers.
        missing: `bool[rows]`, True for null; None: there are no nulls.
    """

    __slots__ = ("_make", "_missing", "_offsets", "_state", "_values")

    def __init__(
        self,
        kind: str,
        offsets: npt.NDArray[Any],
        values: npt.NDArray[Any],
        missing: npt.NDArray[np.bool_] | None,
    ) -> None:
        self._state = (kind, offsets, values, missing)
        self._make = _MAKE_ROW[kind]
        # An element of a memoryview is a Python int. Reading one takes a third of an array's time.
        self._offsets = offsets.data
        self._values = values if kind == "numbers" else values.data
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> object:
        if self._missing is not None and self._missing[row]:
            return None
        return self._make(self._values[self._offsets[row] : self._offsets[row + 1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return PiecesColumn, self._state


def _arrow_rows(column: Any, name: str) -> Indexed:
    """Return the rows of a column: the result of `_rows_of`, or a list of Python objects."""
    pa = import_extra("pyarrow", f"{name} from polars")
    if hasattr(column, "to_pylist"):
        rows = _rows_of(pa, column, name)
        return column.to_pylist() if rows is None else rows
    try:
        rows = None if str(column.dtype) == "Object" else _rows_of(pa, column.to_arrow(), name)
    except pa.ArrowInvalid:  # pyarrow lacks this type of polars
        rows = None
    return column.to_list() if rows is None else rows


def _rows_of(pa: ModuleType, column: pa.ChunkedArray | pa.Array, name: str) -> Indexed | None:
    """Return a pyarrow column as an array or a `PiecesColumn`, or None if its type fits neither.

    Numbers and times are not copied if they are in one chunk without nulls. A null is NaN among
    numbers (which become floats), NaT among times, and otherwise None.

    Raises:
        ArgumentError: the column has nulls beside integers that float64 cannot represent.
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
        if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
            return values.reshape(len(column), kind.list_size, *values.shape[1:])
        return None
    if not (_is_number(types, kind) or types.is_boolean(kind) or types.is_timestamp(kind)):
        return None
    if column.null_count and types.is_integer(kind):
        there = column.drop_null().to_numpy()
        if len(there) and max(abs(int(there.min())), abs(int(there.max()))) > _EXACT_IN_FLOAT64:
            raise ArgumentError(
                f"{name} has nulls, which are read as NaN, and integers beyond 2**53, which "
                "float64 cannot hold. Fill its nulls first, or convert the column to strings."
            )
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _is_number(types: ModuleType, kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (types.is_integer, types.is_floating, types.is_date, types.is_duration)
    )


def _pieces_of(column: pa.Array, kind: str) -> PiecesColumn | None:
    """Return a column of texts, bytes or lists, or None if there are nulls inside the lists."""
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


def hdf5_arguments(opened: h5py.Dataset | h5py.Group) -> str:
    """Return the arguments of `HDF5` that read an open object of h5py, as Python code.

    For a file or group, they name all datasets directly in it, unless there are many. For a closed
    object, the result is "path, key".
    """
    path, keys = "path", "key"
    with FailuresIgnored():  # the object may be closed
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
