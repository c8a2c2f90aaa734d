"""Columns of equal length read together: one item is one row of each, in the structure the columns came in."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from loaderpool.errors import ArgumentError, SourceError, SpecMismatchError
from loaderpool.sources.advice import refusal
from loaderpool.structure import Structure

__all__ = ["Columns", "is_array", "is_table", "table_columns", "zip_columns"]

# Columns shown in a message: fewer hide the odd one, more bury it.
_SHOWN = 8


class Columns:
    """Row i of each column, packed; read-only, and of the columns' own data.

    Args:
        structure: how an item is built.
        columns: one for each of its leaves, all of `size` rows.
        size: rows.
    """

    __slots__ = ("_columns", "_getters", "_pack", "_size", "_structure")

    def __init__(self, structure: Structure, columns: list[Any], size: int) -> None:
        self._structure = structure
        self._columns = columns
        self._size = size
        # Looked up once, not for each row.
        self._getters = [column.__getitem__ for column in columns]
        self._pack = structure.pack

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._pack([get(index) for get in self._getters])

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self._structure, self._columns, self._size)

    def map(self, function: Callable[[Any, str], Any]) -> Columns:
        """Other columns of as many rows: the function's results for each, which it gets with its path."""
        columns = [function(column, path) for column, path in zip(self._columns, self._structure.paths, strict=True)]
        return Columns(self._structure, columns, self._size)

    def __repr__(self) -> str:
        return f"<{self._size} rows of {self._structure}>"


def zip_columns(columns: Any) -> Columns:
    """A tuple or dict of columns, nested at will, by row.

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


# ---- pandas, recognised by name: importing it would cost more than all of loaderpool ----


def is_table(value: Any) -> bool:
    """Whether a value is a pandas DataFrame, Series or Index."""
    return not _pandas_kinds(value).isdisjoint({"DataFrame", "Series", "Index"})


def _pandas_kinds(value: Any) -> set[str]:
    return {cls.__name__ for cls in type(value).__mro__ if cls.__module__.partition(".")[0] == "pandas"}


def table_columns(table: Any, name: str) -> Any:
    """A DataFrame by row as dicts of column name to value; a Series or Index as its array. By position, not by label.

    pandas' own row access is slow and makes one dtype of all values of a row; an array for each column keeps theirs.

    Raises:
        ArgumentError: no columns, or two of one name.
    """
    if "DataFrame" not in _pandas_kinds(table):
        return table.to_numpy()
    labels: list[Hashable] = list(table.columns)
    if not labels:
        raise ArgumentError(f"{name} is a DataFrame of no columns")
    twice = sorted({repr(label) for label in labels if labels.count(label) > 1})
    if twice:
        raise ArgumentError(f"{name} is a DataFrame with several columns of the name {', '.join(twice)}; rename them")
    columns = [table.iloc[:, position].to_numpy() for position in range(len(labels))]
    return Columns(Structure("dict", tuple(labels), (Structure("leaf"),) * len(labels)), columns, len(table))
