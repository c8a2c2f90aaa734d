"""Conversion of the user's source to a source that is read by index, without a copy of its data.

For objects that cannot be read by index, the errors name what to pass instead.
"""

from __future__ import annotations

import inspect
import io
import itertools
import math
import numbers
import os
from collections.abc import Iterable, Mapping, MappingView
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeGuard

import numpy as np

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, SourceError, SpecMismatchError, brief, counted, warn
from loaderpool.sources.arrays import (
    Array,
    ArrayRows,
    SparseRows,
    has_rows,
    is_chunked,
    is_of,
    is_sparse,
    read_rows,
)
from loaderpool.sources.indexing import Indexed, Sized
from loaderpool.sources.mixed import Mix
from loaderpool.sources.sequence import BatchSequence
from loaderpool.sources.stream import (
    IS_ASYNC,
    ReplicatedSource,
    StreamSource,
    is_iterator,
    kind_of_iterable_dataset,
    replicated,
)
from loaderpool.sources.tables import (
    Columns,
    hdf5_arguments,
    is_array,
    is_table,
    table_columns,
    unequal,
)
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler

# Types that need no `Sized`, because their length is cheap and does not change. `BatchSequence` is
# here because hooks find the user's object through it.
_READY = (list, range, Columns, BatchSequence, SparseRows, Mix)
_ALSO_READY = (tuple, np.ndarray, ArrayRows)  # types that need no `Sized`, with subclasses


def as_source(obj: object) -> Indexed | StreamSource | ReplicatedSource:
    """Return the source that a loader reads by index, or a stream. Copies no data of `obj`.

    - A list, range, tuple or NumPy array is returned unchanged.
    - A tuple or mapping of columns is zipped, as `tf.data.Dataset.from_tensor_slices` does. Columns
      are arrays, tables or lists, and may be nested.
    - A table of pandas, polars or pyarrow has a dict for each row. A column of such a table has its
      elements.
    - An array of another library has its rows.
    - An object that can only be iterated is a stream.
    - For any other object, `len` is called once, and items are read by `__getitem__`.

    Raises:
        SourceError: `obj` cannot be read by index; the text names what to pass instead.
        ArgumentError: `obj` is empty, or its columns have different lengths.
    """
    if (generators := replicated(obj)) is not None:
        return generators
    if isinstance(obj, BatchSequence) and obj.is_endless:
        return obj
    reason = _refusal(obj)
    if reason == _STREAM and isinstance(obj, Iterable):
        return StreamSource(obj)
    if reason:
        raise SourceError(f"source {reason}")
    if isinstance(obj, tuple):
        for number, part in enumerate(obj):
            if is_of(part, "zarr", "Group") and (reason := _container(part)):
                raise SourceError(f"source[{number}] {reason}")
    source: Indexed
    if is_table(obj):
        source = table_columns(obj, "source")
    elif isinstance(obj, Mapping) and _has_columns(obj):
        source = _zipped(obj) if obj else obj
    elif isinstance(obj, tuple) and obj and _are_columns(obj):
        source = _zipped(obj)
    elif has_rows(obj):
        source = _rows_of(obj)
    else:
        assert _is_indexed(obj)  # otherwise there is a reason for refusing it
        source = obj
    size = len(source)
    if size == 0:
        kind = type(obj.target if isinstance(obj, BatchSequence) else obj).__name__
        raise ArgumentError(
            f"source is empty: a {kind} of length 0. Check the path or filter it comes from."
        )
    is_ready = type(source) in _READY or isinstance(source, _ALSO_READY)
    return source if is_ready else Sized(source, size)


def warn_of_columns(obj: list[Any], has_function: bool) -> None:
    """Warn if a list was probably meant as columns, such as `[x, y]` for `(x, y)`.

    Such a list has 2 to 4 arrays with equal, large numbers of rows. Arrays of one shape may also be
    samples, such as images, volumes or recordings. So warn only if the arrays differ in their
    number of axes, or if one has more rows than numbers in a row.

    Args:
        obj: the user's source.
        has_function: True if the user's function gets the items.

    Raises:
        LoaderpoolWarning: a filter turns the warning into an error.
    """
    if len(obj) not in _FEW_ARRAYS or not all(map(is_array, obj)):
        return
    shapes = [each.shape for each in obj]
    rows, kinds = shapes[0][0], {(each.shape, each.dtype) for each in obj}
    is_table = len({*map(len, shapes)}) > 1 or any(math.prod(each[1:]) < rows for each in shapes)
    if (
        {shape[0] for shape in shapes} == {rows}
        and rows >= _MANY_ROWS
        and is_table
        and not (has_function and len(kinds) == 1)
    ):
        warn(
            f"source is a list of {len(obj)} arrays of {rows:,} rows, so it has {len(obj)} items. "
            "For rows, pass tuple(source), such as (X, y)"
        )


def length_of(source: Indexed) -> int:
    """Return the present number of items of a source that `as_source` returned."""
    if isinstance(source, Columns):
        return source.present_size
    return len(source.items if isinstance(source, Sized) else source)


def check_length(source: Indexed, items: int | None) -> None:
    """Check that a source still has all items of the loader's plan. Warns if it has more.

    Args:
        source: source that `as_source` returned; it may have changed since.
        items: number of its items when the loader was made; None: it has no length.

    Raises:
        SourceError: the source has fewer items.
        LoaderpoolWarning: the source has more items, and a filter turns the warning into an error.
    """
    if items is None:
        return
    now = length_of(source)
    if now < items:
        raise SourceError(
            f"source had {counted(items, 'item')} when the loader was created, and has {now:,} "
            "now. Create a new loader for another length: loader = loader.replace()"
        )
    if now > items:
        warn(
            f"source had {counted(items, 'item')} when the loader was created, and has {now:,} "
            f"now. The loader reads the first {items:,}. To read all: loader = loader.replace()"
        )


def _has_columns(obj: Mapping[Any, Any]) -> bool:
    """True if a mapping is read as columns.

    Dicts are. Other mappings are not if their first key is an integer, because their keys may be
    indices.
    """
    if type(obj).__getitem__ is dict.__getitem__:
        return True
    # Some sparse arrays are mappings from a place to its value.
    return not is_sparse(obj) and not isinstance(next(iter(obj), None), numbers.Integral)


def _are_columns(values: tuple[Any, ...]) -> bool:
    """True if a tuple is zipped, because it has only arrays, tables and lists, possibly nested.

    A tuple of other objects is a plain sequence.
    """
    return all(
        isinstance(value, list)
        or is_array(value)
        or is_table(value)
        or (isinstance(value, tuple) and bool(value) and _are_columns(value))
        or (isinstance(value, Mapping) and bool(value) and _are_columns(tuple(value.values())))
        for value in values
    )


def _read_once(columns: object) -> object:
    """Return columns with each mapping as a dict, so that each column is read only once.

    A mapping may be an .npz file, which reads an array again at each access.
    """
    if isinstance(columns, Mapping):
        return {key: _read_once(columns[key]) for key in columns}
    if isinstance(columns, tuple):
        parts = map(_read_once, columns)
        return columns._make(parts) if hasattr(columns, "_make") else tuple(parts)
    return columns


def _zipped(columns: object) -> Columns:
    """Return the rows of a tuple or mapping of columns, which may be nested."""
    columns = _read_once(columns)
    try:
        structure = Structure.of(columns, origin="source has")
    except SpecMismatchError as error:
        raise SourceError(str(error)) from None
    leaves = [
        _column(leaf, path)
        for leaf, path in zip(structure.flatten(columns), structure.paths, strict=True)
    ]
    lengths = list(map(len, leaves))
    if has := unequal(structure.paths, lengths):
        hint = "; if each is one item, pass list(source)" * isinstance(columns, tuple)
        shapes = [
            getattr(leaf, "shape", (length,)) for leaf, length in zip(leaves, lengths, strict=True)
        ]
        if any(len(shape) > 1 for shape in shapes):
            named = [f"{path} {shape}" for path, shape in zip(structure.paths, shapes, strict=True)]
            hint += f". Shapes: {', '.join(named[:_SHOWN_ARRAYS])}; rows are axis 0"
        raise ArgumentError(
            f"source is a {type(columns).__name__} of columns, which must have the same length, "
            f"but {has}{hint}"
        )
    return Columns(structure, leaves, lengths[0])


def _column(leaf: object, path: str) -> Indexed:
    if is_table(leaf):
        return table_columns(leaf, f"source{path}")
    if isinstance(leaf, list):
        return leaf
    if isinstance(leaf, np.ndarray) and not leaf.ndim:
        raise SourceError(f"source{path} is an array of shape (), which has no rows: leave it out")
    if is_of(leaf, "zarr", "Group"):
        raise SourceError(f"source{path} {_container(leaf)}")
    if is_of(leaf, "tensorflow") or not is_array(leaf):
        raise SourceError(
            f"source{path} is a {type(leaf).__name__}, not an array or list. A dict is read as "
            "columns: an item is one row of each array or list (zip_sources takes sources of any "
            "kind). To read its entries one by one, pass list(source.items())."
        )
    return _rows_of(leaf)


def _rows_of(array: Array) -> Indexed:
    """Return an array as a sequence of its rows."""
    if is_chunked(array):
        # Imported here, because few sources need it.
        from loaderpool.sources.decoded import ChunkedRows

        return ChunkedRows(array)
    return read_rows(array)


# ---- objects that cannot be read by index ----

# Errors of objects that refuse to be indexed, or that have no length. Other errors may be
# temporary, or may concern only one item.
_REFUSALS = (TypeError, NotImplementedError, LookupError, io.UnsupportedOperation)

_STREAM = "can only be iterated"
# A list was probably meant as columns if it has one of these numbers of arrays, and each array has
# at least this many rows. With more arrays, or fewer rows, lists of samples would cause a warning.
_FEW_ARRAYS, _MANY_ROWS = range(2, 5), 100
_SHOWN_ARRAYS = 4  # names of a group's arrays in a message


def _has(obj: object, *methods: str) -> bool:
    return all(hasattr(type(obj), method) for method in methods)


def _is_indexed(obj: object) -> TypeGuard[Indexed]:
    return _has(obj, "__len__", "__getitem__") and not isinstance(obj, type)


def _refusal(obj: object) -> str:
    """Return the reason why an object cannot be read by index, as a text that follows "source".

    Inspects types and attributes only. The exception is an iterator that has items by index
    (`_has_items`).

    Returns:
        The reason; "": the object can be read by index; `_STREAM`: it is a stream.
    """
    kind = type(obj).__name__
    if isinstance(obj, (str, os.PathLike)) and str(obj).rstrip("/").endswith(".zarr"):
        return (
            f"is the path of a zarr store: open it, and pass an array of it, such as "
            f'zarr.open_group({brief(str(obj), 60)}, mode="r")["name"]'
        )
    if isinstance(obj, (str, bytes, bytearray, os.PathLike)):
        return (
            f"is one {kind}, {brief(obj, 60)}: pass a list of paths, such as "
            "sorted(glob.glob('*/*.png'))"
        )
    if isinstance(obj, numbers.Integral):
        return f"is a number: did you mean range({brief(int(obj), 60)})?"
    if is_of(obj, "tensorflow", "TFRecordDatasetV2", "TFRecordDatasetV1"):
        return f"is a {kind} of tf.data: pass lp.TFRecords(paths), which reads the same records"
    if is_of(obj, "tensorflow", "DatasetV2"):
        return (
            "is a tf.data.Dataset: pass the data it was made from, or ds.as_numpy_iterator(), "
            "read only once"
        )
    if is_of(obj, "tensorflow") and hasattr(obj, "numpy"):
        return f"is a TensorFlow {kind}: pass its .numpy(), because workers run without TensorFlow"
    if any(is_of(obj, home, "DataLoader", "StatefulDataLoader") for home in ("torch", "torchdata")):
        loader: Any = obj
        is_own = loader.collate_fn and "default_" not in getattr(loader.collate_fn, "__name__", "")
        own = ", batch_fn=loader.collate_fn" if is_own else ""
        return (
            f"is a {kind}, whose items are batches: pass its dataset, Loader(loader.dataset, "
            f"batch_size={loader.batch_size or 'n'}{own})"
        )
    if isinstance(obj, (AbstractSet, MappingView)) and not _has(obj, "__getitem__"):
        return (
            f"is a {kind}, which cannot be indexed: pass sorted(source), or list(source) if its "
            "order is fixed"
        )
    if reason := _container(obj):
        return reason
    iterable_dataset = kind_of_iterable_dataset(obj)
    if (is_iterator(obj) or iterable_dataset) and _has_items(obj):
        return ""
    if is_iterator(obj) or (
        _has(obj, "__iter__") and not _has(obj, "__getitem__") and not has_rows(obj)
    ):
        return _STREAM
    if iterable_dataset:
        return (
            f"is a {kind}, {iterable_dataset}, which can only be iterated: use "
            "Loader.from_generator(source.__iter__, copies=1), or pass iter(source), which is read "
            "for one epoch"
        )
    if _is_indexed(obj) or has_rows(obj):
        return ""
    if _has(obj, "__aiter__") or inspect.isasyncgenfunction(obj):
        return f"is a {kind}, {IS_ASYNC}"
    if inspect.isgeneratorfunction(obj):
        return (
            f"is a generator function: use Loader.from_generator({obj.__name__}, shards=[...]), "
            "which calls it in a worker for each shard, such as a file"
        )
    what = "None" if obj is None else f"a {kind}, which has no length, or no items by index"
    return (
        f"is {what}: pass a sequence, arrays, or range(n) if fn needs only the index. A generator "
        "function goes to Loader.from_generator"
    )


def _container(obj: object) -> str:
    """Return the reason for refusing a library's container of arrays, as a text after "source".

    A container does not define what a row is. "": the object is no such container.
    """
    kind = type(obj).__name__
    if is_of(obj, "xarray", "Dataset"):
        names = [*obj.data_vars]
        return (
            f"is an xarray {kind}: pass the variables to read as columns, such as "
            f"{{name: source[name] for name in {brief(names)}}}. The first dimension of each "
            "counts the rows: move it there with .transpose(dim, ...)"
        )
    if is_of(obj, "zarr", "Group"):
        names = _arrays_of(obj)
        columns = ", ".join(f'"{name}": group["{name}"]' for name in names)
        return f"is a zarr {kind}: pass its arrays as columns, such as {{{columns}}}"
    if is_of(obj, "h5py", "Group"):
        return (
            f"is an open HDF5 {kind}: pass lp.HDF5({hdf5_arguments(obj)}), which each worker opens "
            "itself"
        )
    if is_of(obj, "dask", "DataFrame", "Series"):
        return (
            f"is a dask {kind}: pass source.compute() if it fits in memory, or its files as "
            "lp.ParquetRows(paths)"
        )
    return ""


class _ZarrGroup(Protocol):
    """A group of arrays in a zarr store."""

    def array_keys(self) -> Iterable[str]: ...


def _arrays_of(group: _ZarrGroup) -> list[str]:
    """Return the names of the first arrays of a zarr group; examples if it has none."""
    names: list[str] = []
    with FailuresIgnored():  # the store may be at a server
        names = sorted(map(str, itertools.islice(group.array_keys(), _SHOWN_ARRAYS)))
    return names or ["x", "y"]


def _has_items(obj: object) -> bool:
    """Return True if an iterator or IterableDataset can be read by index as well.

    Reads its length and its first item, because its methods may be inherited ones that refuse.
    """
    if not _is_indexed(obj):
        return False
    try:
        if len(obj):
            obj[0]
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return not isinstance(error, _REFUSALS)
    return True


def whole_batches(obj: object) -> str | None:
    """Return the reason for refusing an object whose items are batches, as a text after "source".

    A loader with a `batch_size` would make batches of batches. None: the items are not batches.
    """
    if not is_of(obj, "keras", "PyDataset", "Sequence"):
        return None
    return (
        f"is a {type(obj).__name__}, whose items are batches: use Loader.from_sequence(...), or "
        "batch_size=None to use each item as a batch"
    )
