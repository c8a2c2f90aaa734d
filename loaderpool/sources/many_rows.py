"""Sources that read many rows with one call, by PyTorch's protocol `__getitems__`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loaderpool.errors import SourceError, counted
from loaderpool.sources.arrays import is_of
from loaderpool.sources.indexing import Sized
from loaderpool.sources.tables import is_array

# Most rows of one call. A larger batch is read by several calls, which always begin at multiples
# of this number, whatever the number of workers. Smaller: a call's fixed cost, up to a few
# milliseconds, counts more for each row. Larger: fewer workers can share a slow batch, and one
# call holds more rows in memory.
MOST_ROWS = 256
# Formats of Hugging Face datasets whose rows are tables, which `__getitems__` cannot return.
_TABLE_FORMATS = ("arrow", "pandas", "polars")

Many = Callable[[list[int]], object]
"""Returns the items of these indices."""


def many_rows(source: object) -> Many | None:
    """Return the method that reads many rows of a source with one call.

    None if the source has none, or if its `__getitem__` was overridden after it. Attributes of the
    object do not count, because a wrapper may pass all of its attributes on.
    """
    if isinstance(source, Sized):
        source = source.items
    for cls in type(source).__mro__:
        if "__getitems__" in vars(cls):
            method: Many | None = getattr(source, "__getitems__", None)
            return method if callable(method) and _is_useful(source) else None
        if "__getitem__" in vars(cls):
            break
    return None


def _is_useful(source: Any) -> bool:
    """Return True if `__getitems__` does more than to call `__getitem__` of another dataset."""
    if is_of(source, "torch", "Subset"):
        return many_rows(source.dataset) is not None
    if is_of(source, "torch", "StackDataset"):
        return any(many_rows(each) is not None for each in _parts(source.datasets))
    if is_of(source, "datasets", "Dataset"):
        return source.format["type"] not in _TABLE_FORMATS
    return True


def _parts(datasets: Any) -> Iterator[object]:
    return iter(datasets.values() if isinstance(datasets, Mapping) else datasets)


def checked_rows(rows: object, count: int) -> list[object]:
    """Return the items that `__getitems__` has returned for this number of indices, as a list.

    Raises:
        SourceError: They are no list, or not as many as the indices.
    """
    got = f"a {type(rows).__name__}"
    if isinstance(rows, (list, tuple)) or is_array(rows):
        if len(rows) == count:
            return [rows[at] for at in range(count)]
        got = counted(len(rows), "item")
    raise SourceError(
        "source.__getitems__ must return a list with one item for each index, but it returned "
        f"{got} for {counted(count, 'row')}. Correct it, or read the rows one by one: pass "
        "range(len(source)) as the source, and use source[index] in fn"
    )
