"""From what the user passed as a source to something that is read by index, without copying it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.advice import is_stream, refusal
from loaderpool.sources.columns import Columns, is_array, is_table, table_columns, zip_columns
from loaderpool.sources.image_flow import ImageFlow
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.sources.sequence import BatchSequence
from loaderpool.sources.stream import StreamSource

# Whose length is at hand and stays; BatchSequence, because hooks reach the user's object through it.
_READY = (list, range, Columns, BatchSequence, ImageFlow)


class Source(Protocol):
    """Items by index from 0 on. It travels to the workers in one pickle with the function."""

    def __len__(self) -> int: ...

    @property
    def __getitem__(self) -> Callable[[int], Any]:
        """The item at an index; a property, for the loader's loop takes it out once and calls it."""


class Sized:
    """A user's object with the length it had when the loader was made: `len` of it may be a query, or change."""

    __slots__ = ("_items", "_size")

    def __init__(self, items: Any, size: int) -> None:
        self._items = items
        self._size = size

    @property
    def items(self) -> Any:
        """The user's object."""
        return self._items

    def __len__(self) -> int:
        return self._size

    # A property gives the object's own bound method, so an item costs no call of ours on top of it.
    @property
    def __getitem__(self) -> Callable[[int], Any]:
        get: Callable[[int], Any] = self._items.__getitem__
        return get

    def __reduce__(self) -> tuple[Any, ...]:
        return Sized, (self._items, self._size)

    def __repr__(self) -> str:
        return f"<source of {self._size} items: {type(self._items).__name__}>"


def as_source(obj: Any) -> Source | StreamSource | ReplicatedSource:
    """Return what the loader reads by index, or a stream; holds `obj` itself and copies none of its data.

    A list, range, tuple or array comes back as it is. A tuple or dict of columns (arrays or lists, nested at will) is
    zipped as `tf.data.Dataset.from_tensor_slices` does; a table of pandas, polars or pyarrow gives a dict for each row,
    a column of one its elements. Of any other object, `len` is called once and items are read by its `__getitem__`.
    What can only be iterated is a stream.

    Args:
        obj: the loader's `source`.

    Raises:
        SourceError: it cannot be read by index; says what to pass instead.
        ArgumentError: it is empty, or its columns are of different lengths.
    """
    if isinstance(obj, ReplicatedSource):
        return obj
    if isinstance(obj, BatchSequence) and obj.is_endless:
        return obj
    if is_stream(obj):
        return StreamSource(obj)
    reason = refusal(obj)
    if reason is not None:
        raise SourceError(f"source {reason}")
    source: Any
    if is_table(obj):
        source = table_columns(obj, "source")
    elif isinstance(obj, dict) and type(obj).__getitem__ is dict.__getitem__:
        source = zip_columns(obj) if obj else obj
    elif isinstance(obj, tuple) and obj and _are_columns(obj):
        source = zip_columns(obj)
    else:
        source = obj
    size = length_of(source)
    if size == 0:
        raise ArgumentError(f"source is empty: {_describe(obj)} of length 0; is a path or a filter before it wrong?")
    is_ready = type(source) in _READY or isinstance(source, (tuple, np.ndarray))
    return source if is_ready else Sized(source, size)


def _are_columns(values: tuple[Any, ...]) -> bool:
    """Whether a tuple is zipped: arrays, tables and lists all through. Of other things it is a plain sequence."""
    return all(
        isinstance(value, list)
        or is_array(value)
        or is_table(value)
        or (isinstance(value, tuple) and bool(value) and _are_columns(value))
        or (isinstance(value, dict) and bool(value) and _are_columns(tuple(value.values())))
        for value in values
    )


def length_of(source: Any) -> int:
    """Return how many items it has.

    Raises:
        SourceError: it cannot say.
    """
    try:
        return len(source)
    except SourceError:
        raise
    except Exception as error:
        # Also NumPy's "unsized object", SciPy's "length is ambiguous" and a negative __len__, which Python refuses.
        raise SourceError(
            f"source has no usable length: len() of {_describe(source)} raised {type(error).__name__}: {error}"
        ) from error


def _describe(obj: Any) -> str:
    if isinstance(obj, BatchSequence):
        return f"a {type(obj.target).__name__}"
    if isinstance(obj, np.ndarray):
        return f"an array of shape {obj.shape}"
    return f"a {type(obj).__name__}"
