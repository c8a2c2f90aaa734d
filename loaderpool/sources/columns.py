"""Columns of equal length read together: one item is one row of each, in the structure the columns came in."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, SourceError, SpecMismatchError
from loaderpool.sources.advice import refusal

# Columns shown in a message: fewer hide the odd one, more bury it.
_SHOWN = 8


class Columns:
    """Row i of each column, in the structure of the columns; read-only, and of the columns' own data.

    Args:
        structure: how an item is built.
        columns: one for each of its leaves, all of `size` rows.
        size: rows.
    """

    __slots__ = ("_columns", "_getters", "_size", "_structure", "_unflatten")

    def __init__(self, structure: Structure, columns: list[Any], size: int) -> None:
        self._structure = structure
        self._columns = columns
        self._size = size
        # Looked up once, not for each row.
        self._getters = [column.__getitem__ for column in columns]
        self._unflatten = structure.unflatten

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._unflatten([get(index) for get in self._getters])

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self._structure, self._columns, self._size)

    def map(self, function: Callable[[Any, str], Any]) -> Columns:
        """Other columns of as many rows: the function's results for each, which it gets with its path."""
        columns = [function(column, path) for column, path in zip(self._columns, self._structure.paths, strict=True)]
        return Columns(self._structure, columns, self._size)

    def __repr__(self) -> str:
        return f"<{self._size} rows of {self._structure}>"


def zip_columns(columns: Any) -> Columns:
    """Return a tuple or dict of columns, nested at will, by row.

    Raises:
        SourceError: a leaf is no column.
        ArgumentError: lengths differ.
    """
    try:
        structure = Structure.of(columns, origin="source has")
    except SpecMismatchError as error:
        raise SourceError(str(error)) from None
    leaves = [_column(leaf, path) for leaf, path in zip(structure.flatten(columns), structure.paths, strict=True)]
    lengths = [_column_length(leaf, path) for leaf, path in zip(leaves, structure.paths, strict=True)]
    if len(set(lengths)) > 1:
        shown = [f"{path} has {length}" for path, length in zip(structure.paths, lengths, strict=True)][:_SHOWN]
        more = ", ..." * (len(lengths) > _SHOWN)
        hint = "; if each is one item, pass list(source)" * isinstance(columns, tuple)
        raise ArgumentError(
            f"source is a {type(columns).__name__} of columns, read row by row, and their lengths differ: "
            f"{', '.join(shown)}{more}{hint}"
        )
    return Columns(structure, leaves, lengths[0])


def _column(leaf: Any, path: str) -> Any:
    if is_table(leaf):
        return table_columns(leaf, f"source{path}")
    is_number = isinstance(leaf, numbers.Number)  # range(number), the advice for a whole source, is none here
    reason = f"is the number {leaf!r}" if is_number else refusal(leaf)
    if reason is None and not isinstance(leaf, list) and not is_array(leaf):
        reason = f"is a {type(leaf).__name__}, not an array or list (zip_sources takes sources of any kind)"
    if reason is not None:
        raise SourceError(
            f"source{path} {reason}. A dict is read as columns, one row of each array or list being an item; to read a "
            "dict's entries one by one, pass list(source.items())"
        )
    return leaf


def _column_length(column: Any, path: str) -> int:
    try:
        return len(column)
    except Exception as error:
        raise SourceError(f"source{path} has no rows: len() raised {type(error).__name__}: {error}") from error


def is_array(value: Any) -> bool:
    """Whether a value has rows as an array has: NumPy's, HDF5's, PyTorch's."""
    if isinstance(value, np.ndarray):
        return True
    kind = type(value)
    has_rows = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    return has_rows and hasattr(value, "shape") and hasattr(value, "dtype")


# ---- tables, recognised by name: importing a library for it would cost more than all of loaderpool ----

_TABLES = {
    "pandas": {"DataFrame", "Series", "Index"},
    "polars": {"DataFrame", "Series"},
    "pyarrow": {"Table", "RecordBatch", "ChunkedArray", "Array"},
}


def is_table(value: Any) -> bool:
    """Whether a value is a table or a column of pandas, polars or pyarrow."""
    return bool(_table_kinds(value))


def _table_kinds(value: Any) -> set[tuple[str, str]]:
    """Library and name of the classes that it is of."""
    homes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return {(home, kind) for home, kind in homes if kind in _TABLES.get(home, ())}


def table_columns(table: Any, name: str) -> Any:
    """Return a table by row as dicts of column name to value; a single column as its values. By position, not by label.

    The libraries' own row access is slow, and pandas' makes one dtype of all values of a row; an array for each column
    keeps theirs. What comes of polars' and pyarrow's columns needs neither to be read.

    Raises:
        ArgumentError: no columns, two of one name, or values that cannot be read as they are.
    """
    kinds = _table_kinds(table)
    libraries = {home for home, _ in kinds}
    kind = type(table).__name__
    if not kinds & {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}:
        return table.to_numpy() if "pandas" in libraries else _arrow_values(table, name)
    labels: list[Hashable] = list(table.schema.names if "pyarrow" in libraries else table.columns)
    if not labels:
        raise ArgumentError(f"{name} is a {kind} of no columns")
    twice = sorted({repr(label) for label in labels if labels.count(label) > 1})
    if twice:
        raise ArgumentError(f"{name} is a {kind} with several columns of the name {', '.join(twice)}; rename them")
    if "pandas" in libraries:
        columns = [table.iloc[:, position].to_numpy() for position in range(len(labels))]
    else:
        column_at = table.column if "pyarrow" in libraries else table.to_series
        columns = [_arrow_values(column_at(at), f"{name}[{label!r}]") for at, label in enumerate(labels)]
    return Columns(Structure("dict", tuple(labels), (Structure("leaf"),) * len(labels)), columns, len(table))


def _arrow_values(column: Any, name: str) -> Any:
    """Return a column of polars or pyarrow; as Python objects where it is of no type that can be read from memory."""
    from loaderpool.sources.arrow import arrow_column  # which only such tables need

    values = arrow_column(column, name)
    if values is not None:
        return values
    return column.to_pylist() if hasattr(column, "to_pylist") else column.to_list()
