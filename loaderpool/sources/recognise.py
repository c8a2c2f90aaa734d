"""From what the user passed as a source to something that is read by index, without a copy; or what to pass instead."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Mapping, MappingView
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, SupportsIndex

import numpy as np

from loaderpool.element.structure import Structure, dense_of
from loaderpool.errors import ArgumentError, SourceError, SpecMismatchError, brief
from loaderpool.sources.sequence import BatchSequence, ImageFlow
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.sources.tables import Columns, is_array, is_table, table_columns, unequal

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

    __slots__ = ("_size", "items")

    def __init__(self, items: Any, size: int) -> None:
        self.items, self._size = items, size

    def __len__(self) -> int:
        return self._size

    # A property gives the object's own bound method, so an item costs no call of ours on top of it.
    @property
    def __getitem__(self) -> Callable[[int], Any]:
        get: Callable[[int], Any] = self.items.__getitem__
        return get


def as_source(obj: Any) -> Source | StreamSource | ReplicatedSource:
    """Return what the loader reads by index, or a stream; holds `obj` itself and copies none of its data.

    A list, range, tuple or array comes back as it is. A tuple or dict of columns (arrays or lists, nested at will) is
    zipped as `tf.data.Dataset.from_tensor_slices` does; a table of pandas, polars or pyarrow gives a dict for each row,
    a column of one its elements. Of any other object, `len` is called once and items are read by its `__getitem__`.
    What can only be iterated is a stream.

    Raises:
        SourceError: it cannot be read by index; says what to pass instead.
        ArgumentError: it is empty, or its columns are of different lengths.
    """
    if isinstance(obj, ReplicatedSource):
        return obj
    if isinstance(obj, BatchSequence) and obj.is_endless:
        return obj
    reason = _refusal(obj)
    if reason == _STREAM:
        return StreamSource(obj)
    if reason:
        raise SourceError(f"source {reason}")
    source: Any
    if is_table(obj):
        source = table_columns(obj, "source")
    elif isinstance(obj, dict) and type(obj).__getitem__ is dict.__getitem__:
        source = _zipped(obj) if obj else obj
    elif isinstance(obj, tuple) and obj and _are_columns(obj):
        source = _zipped(obj)
    else:
        source = obj
    size = length_of(source)
    if size == 0:
        raise ArgumentError(f"source is empty: {_describe(obj)} of length 0. Check the path or filter it comes from.")
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


def _zipped(columns: Any) -> Columns:
    """Return a tuple or dict of columns, nested at will, by row."""
    try:
        structure = Structure.of(columns, origin="source has")
    except SpecMismatchError as error:
        raise SourceError(str(error)) from None
    leaves = [_column(leaf, path) for leaf, path in zip(structure.flatten(columns), structure.paths, strict=True)]
    lengths = [length_of(leaf, f"source{path}") for leaf, path in zip(leaves, structure.paths, strict=True)]
    if has := unequal(structure.paths, lengths):
        hint = "; if each is one item, pass list(source)" * isinstance(columns, tuple)
        raise ArgumentError(
            f"source is a {type(columns).__name__} of columns, which must have the same length, but {has}{hint}"
        )
    return Columns(structure, leaves, lengths[0])


def _column(leaf: Any, path: str) -> Any:
    if is_table(leaf):
        return table_columns(leaf, f"source{path}")
    is_number = isinstance(leaf, numbers.Number)  # range(number), the advice for a whole source, is none here
    reason = f"is the number {brief(leaf)}" if is_number else _refusal(leaf)
    if reason == _STREAM or not (reason or isinstance(leaf, list) or is_array(leaf)):
        reason = f"is a {type(leaf).__name__}, not an array or list (zip_sources takes sources of any kind)"
    if reason:
        raise SourceError(
            f"source{path} {reason}. A dict is read as columns: an item is one row of each array or list. To read its "
            "entries one by one, pass list(source.items())."
        )
    return leaf


def length_of(source: Any, name: str = "source") -> int:
    """Return how many items it has; raises SourceError where it cannot say."""
    try:
        return len(source)
    except SourceError:
        raise
    except Exception as error:
        # Also NumPy's "unsized object", SciPy's "length is ambiguous" and a negative __len__, which Python refuses.
        raise SourceError(
            f"{name} has no usable length: len() of {_describe(source)} raised {type(error).__name__}: {error}"
        ) from error


def _describe(obj: Any) -> str:
    if isinstance(obj, BatchSequence):
        return f"a {type(obj.target).__name__}"
    if isinstance(obj, np.ndarray):
        return f"an array of shape {obj.shape}"
    return f"a {type(obj).__name__}"


def position_of(index: SupportsIndex, size: int) -> int:
    """Return the position that an index means; IndexError: there is none; TypeError: it is no integer."""
    position = operator.index(index)
    if position < 0:
        position += size
    if not 0 <= position < size:
        raise IndexError(f"index {operator.index(index)} is out of range for a source of {size} items")
    return position


# ---- what cannot be read by index, and what to pass instead ----

_INSTEAD = "pass a sequence, arrays, or range(n) if fn needs only the index"
_STREAM = "can only be iterated"


def _has(obj: Any, *methods: str) -> bool:
    return all(hasattr(type(obj), method) for method in methods)


def _is_of(obj: Any, package: str, *names: str) -> bool:
    """Whether an object is of a class of a package, found without an import; without names, of any of its classes."""
    homes = ((base.__module__.partition(".")[0], base.__name__) for base in type(obj).__mro__)
    return any(home == package and (not names or name in names) for home, name in homes)


# The first that holds for an object, and what follows "source" in the error; "": it can be read. Only types and
# attributes are asked for: nothing of the object is called, iterated or indexed.
_KINDS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda obj: obj is None, f"is None: {_INSTEAD}"),
    (lambda obj: isinstance(obj, type), "is the class {name}, not an instance: pass {name}(...)"),
    (lambda obj: isinstance(obj, (str, bytes, bytearray, os.PathLike)),
     "is one {kind}, {value}: pass a list of paths, such as sorted(glob.glob('*/*.png'))"),
    (lambda obj: isinstance(obj, numbers.Integral) and not isinstance(obj, bool),
     "is a number: did you mean range({value})?"),
    (lambda obj: isinstance(obj, numbers.Number), f"is {{value}}, a {{kind}}: {_INSTEAD}"),
    (lambda obj: dense_of(type(obj)),
     "is a sparse {kind}: pass {dense}, or range(n) and a function that reads one row"),
    (lambda obj: _is_of(obj, "tensorflow", "DatasetV2"),
     "is a tf.data.Dataset: pass the data it was made from, or ds.as_numpy_iterator(), which can be read only once"),
    (lambda obj: _is_of(obj, "tensorflow", "Tensor") or (_is_of(obj, "tensorflow") and hasattr(obj, "numpy")),
     "is a TensorFlow {kind}: pass its .numpy(), because workers run without TensorFlow"),
    (lambda obj: _is_of(obj, "h5py", "Group"),
     "is an open HDF5 {kind}: pass loaderpool.HDF5(path, keys), which each worker opens itself"),
    (lambda obj: _is_of(obj, "polars", "LazyFrame"), "is a polars LazyFrame, not computed yet: pass its .collect()"),
    (lambda obj: isinstance(obj, (AbstractSet, MappingView)) and not _has(obj, "__getitem__"),
     "is a {kind}, which cannot be indexed: pass sorted(source), or list(source) if its order is fixed"),
    (lambda obj: isinstance(obj, Mapping) and type(obj).__getitem__ is not dict.__getitem__,
     "is a mapping ({kind}), which is read by key: pass dict(source) to read columns, or list(source.items())"),
    (lambda obj: isinstance(obj, Iterator) or (_has(obj, "__iter__") and not _has(obj, "__getitem__")), _STREAM),
    (lambda obj: _is_of(obj, "datasets", "IterableDataset"),  # before torch's, which it may be as well
     ("is a Hugging Face IterableDataset, which cannot be read by index. Choose one:\n"
      "    lp.Loader.from_generator(lambda shard: iter(stream.shard(stream.num_shards, shard)), "
      "shards=range(stream.num_shards)): read the shards in the workers\n"
      "    lp.Loader(iter(stream)): read it for one epoch, in the main process")),
    (lambda obj: _is_of(obj, "torch", "IterableDataset"),
     "is a PyTorch IterableDataset: use Loader.from_generator(lambda: iter(dataset))"),
    (lambda obj: _has(obj, "__len__", "__getitem__"), ""),
    (inspect.isgeneratorfunction,
     "is a generator function: use Loader.from_generator({name}), or pass {name}() for one epoch"),
    (lambda obj: callable(obj) and not _has(obj, "__getitem__"),
     "is a function: pass the items as the source and the function as fn, as in Loader(items, {name})"),
    (lambda obj: _has(obj, "__getitem__"),
     "is a {kind} without a length: give it a __len__, or pass range(n) and index it in fn"),
    (lambda obj: True, f"is a {{kind}}, which has neither length nor items: {_INSTEAD}"),
)  # fmt: skip


def _refusal(obj: Any) -> str:
    """Return what follows "source" where an object cannot be read by index; "" where it can, `_STREAM` of a stream."""
    text = next(text for holds, text in _KINDS if holds(obj))
    if text in ("", _STREAM):
        return text
    name = getattr(obj, "__name__", "fn")
    return text.format(
        kind=type(obj).__name__,
        name=name if str(name).isidentifier() else "fn",  # a lambda's is "<lambda>"
        value=brief(obj.item() if isinstance(obj, np.generic) else obj, 60),
        dense=dense_of(type(obj)),
    )


def whole_batches(obj: Any) -> str | None:
    """Return what follows "source" where an object's items are batches already, of which more batches would be made."""
    if not _is_of(obj, "keras", "PyDataset", "Sequence"):
        return None
    return (
        f"is a {type(obj).__name__}, whose items are batches: use Loader.from_sequence(...), or batch_size=None to "
        "use each item as a batch"
    )
