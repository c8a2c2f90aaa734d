"""Sources that read many rows with one call: by PyTorch's `__getitems__`, or block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.structure import Structure
from loaderpool.errors import SourceError, counted
from loaderpool.sources.arrays import is_of
from loaderpool.sources.indexing import Sized
from loaderpool.sources.tables import Columns, PiecesColumn, is_array
from loaderpool.system.interrupts import FailuresIgnored

# Most rows of one call. A larger batch is read by several calls, which always begin at multiples
# of this number, for any number of workers. Smaller: a call's fixed cost, up to a few
# milliseconds, counts more for each row. Larger: fewer workers can share a slow batch, and one
# call holds more rows in memory.
MOST_ROWS = 1024
# Formats of Hugging Face datasets whose rows are tables, which `__getitems__` cannot return.
_TABLE_FORMATS = ("arrow", "pandas", "polars")

GetItems = Callable[[list[int]], object]
"""Method that returns one item for each of these indices."""


def getitems_of(source: object) -> GetItems | None:
    """Return the method `__getitems__` of a source, which reads many rows with one call.

    None if the source has none, if it saves no calls, or if a subclass overrides only
    `__getitem__`. The method must be in a class, because a wrapper may pass on all attributes of
    its object.
    """
    if isinstance(source, Sized):
        source = source.items
    for cls in type(source).__mro__:
        if "__getitems__" in vars(cls):
            method: GetItems | None = getattr(source, "__getitems__", None)
            return method if callable(method) and _saves_calls(source) else None
        if "__getitem__" in vars(cls):
            break
    return None


def _saves_calls(source: Any) -> bool:
    """Return True if `__getitems__` returns rows, and does more than call `__getitem__`."""
    if is_of(source, "torch", "Subset"):
        return getitems_of(source.dataset) is not None
    if is_of(source, "torch", "StackDataset"):
        return any(getitems_of(each) is not None for each in _parts(source.datasets))
    if is_of(source, "datasets", "Dataset"):
        return source.format["type"] not in _TABLE_FORMATS
    return True


def _parts(datasets: Any) -> Iterator[object]:
    return iter(datasets.values() if isinstance(datasets, Mapping) else datasets)


def blocks_reader_of(source: Any) -> GetItems | None:
    """Return a function that reads many rows of a source, and decodes each block once.

    A `TensorDataset` of PyTorch has no blocks, but one call for many of its rows is faster.

    The function returns the same items as `source[index]`, and uses no random generator. Return
    None if the source is not read in blocks, or contains objects of the user that may be random.
    """
    if isinstance(source, Sized):
        source = source.items
    if isinstance(source, Columns):
        columns = [column for _, column in source.user_parts()]
        readers = [blocks_reader_of(column) for column in columns]
        are_known = all(
            reader is not None or isinstance(column, _PLAIN)
            for reader, column in zip(readers, columns, strict=True)
        )
        return functools.partial(source.join, readers) if any(readers) and are_known else None
    if _has_plain_tensors(source):
        return functools.partial(_rows_of_tensors, source)
    reader: GetItems | None = None
    if type(source).__module__.startswith("loaderpool."):  # a user's class may read in another way
        reader = getattr(source, "read_rows", None)
    return reader


def _has_plain_tensors(source: Any) -> bool:
    """Return True for a `TensorDataset` of PyTorch, whose rows are those of its tensors."""
    name = f"{type(source).__module__}.{type(source).__name__}"  # a subclass may do more
    return name == "torch.utils.data.dataset.TensorDataset" and all(
        type(tensor).__name__ == "Tensor" and str(tensor.layout) == "torch.strided"
        for tensor in source.tensors
    )


def _rows_of_tensors(source: Any, rows: list[int]) -> list[object]:
    """Return several rows of a `TensorDataset`. They are copies, and not views of its tensors."""
    return [*zip(*(tensor[rows] for tensor in source.tensors), strict=True)]


# Types of columns whose rows are read without calling code of the user.
_PLAIN = (list, np.ndarray, PiecesColumn)
# Types of arrays in memory or in a mapped file.
_ARRAYS = (np.ndarray, np.memmap)


def arrays_of(source: Any, structure: Structure) -> list[npt.NDArray[Any]]:
    """Return the arrays whose rows are the leaves of a source's items, without copies of data.

    Args:
        source: The source.
        structure: Structure of the items. Its leaves are in the order of the returned arrays.

    Returns:
        Arrays `dtype[rows, ...]`. An empty list if the items are something else.
    """
    if isinstance(source, Sized):
        source = source.items
    columns: list[Any] = []
    if type(source) in _ARRAYS and structure.kind == "leaf":
        columns = [source]
    elif isinstance(source, Columns) and source.structure == structure:
        columns = [column for _, column in source.user_parts()]
    elif _has_plain_tensors(source) and structure.kind == "tuple":
        columns = [array_of(tensor) for tensor in source.tensors]
    are_arrays = all(type(column) in _ARRAYS for column in columns)
    return columns if are_arrays and len(columns) == structure.num_leaves else []


def array_of(tensor: Any) -> Any:
    """Return the memory of a PyTorch tensor as an array.

    None if NumPy refuses the tensor: it is on another device, or has gradients.
    """
    with FailuresIgnored():
        return tensor.numpy()
    return None


def checked_rows(rows: object, count: int) -> list[object]:
    """Return the result of `__getitems__` for `count` indices as a list.

    Raises:
        SourceError: The result is not a list, or has another length.
    """
    got = f"a {type(rows).__name__}"
    if isinstance(rows, (list, tuple)) or is_array(rows):
        if len(rows) == count:
            return rows[:] if type(rows) is list else [rows[at] for at in range(count)]
        got = counted(len(rows), "item")
    raise SourceError(
        "source.__getitems__ must return a list with one item for each index, but it returned "
        f"{got} for {counted(count, 'row')}. Correct it, or read the rows one by one: pass "
        "range(len(source)) as the source, and use source[index] in fn"
    )
