"""Conversion of the user's results to arrays of the spec: rows of a slot, or blocks of a batch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import UnitKind
from loaderpool.element.spec import (
    ArraySpec,
    Origin,
    code_to_allow,
    fill_value,
    mismatch,
    padding_of,
)
from loaderpool.element.structure import (
    can_write,
    convert_leaf,
    has_only_leaves,
    named,
    none_refusal,
)
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm, Block
from loaderpool.plan.item_names import item_name
from loaderpool.sources.indexing import Keys
from loaderpool.sources.many_rows import array_of
from loaderpool.system.interrupts import is_of_a_handler

# Kinds of dtype that accept a Python number of this type (NumPy's weak promotion).
_WEAK_KINDS: dict[type, str] = {int: "iuf", float: "f"}
# Immutable leaves: they cannot change while they wait for their block to be full.
_IMMUTABLE = (bool, int, float, complex, np.generic)
# Dtypes of scalars whose values an array of the same dtype stores as they are.
_DTYPES_OF_SCALARS: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    **{np.dtype(code).type: np.dtype(code) for code in "?bBhHiIlLqQefdFD"},
}
_SHAPE, _BASE, _DTYPE = attrgetter("shape"), attrgetter("base"), attrgetter("dtype")
_ONLY_ARRAYS = {np.ndarray}
# Types of an array's `base` if the array owns its memory, or if the memory is immutable.
_UNCHANGING = {type(None), bytes}
# Containers that a function may refill. A store that is a mapping is none of them.
_NESTED = (dict, list, tuple, UserDict)
_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


class Converter:
    """Converts leaves to arrays of the components' dtypes and shapes.

    Args:
        form: form of the batches. With an inferred spec, whole batches may have axes of any length.
        is_given: True if the user gave the spec. It allows `same_kind` casts; an inferred spec
            allows no cast of arrays.
        pad, is_ragged: as in `LoaderConfig`, for the advice in errors.
        origin: start of a message about a result, as in `Chain`.
        size: number of the source's items. 0: it gives no samples by index.
    """

    def __init__(
        self,
        form: BatchForm,
        is_given: bool,
        pad: object = False,
        is_ragged: bool = False,
        origin: str = "fn returned",
        size: int = 0,
    ) -> None:
        self._size = size
        self.watched: list[Any] = []  # tensors whose changes are noticed
        self._versions: list[int] = []  # their counts of changes when the calls of a block began
        self._is_given, self._pad, self._unit, self._origin = is_given, pad, form.unit, origin
        spec = self._spec = form.item_spec or form.spec
        self._flatten = spec.structure.flatten
        self.paths = spec.structure.paths
        # The leaves of such a result are its elements.
        self._is_tuple = spec.structure.kind == "tuple" and has_only_leaves(spec.structure)
        # Called with each result of a block as soon as it is there, because the function may refill
        # a dict for the next result.
        self.take = None if self._is_tuple or self.paths == ("",) else self._flatten
        drop = 1 if form.unit == "sample" else 0
        self.expected = tuple(ArraySpec(c.shape[drop:], c.dtype, c.text) for c in spec.components)
        self._scalars = [_kinds_of(component.dtype) for component in self.expected]
        first = self.expected[0]
        # dtype and shape of an array that needs no check
        self._plain = None if first.text is not None else (first.dtype, first.shape)
        self._origins = tuple(_origins(form, is_given, pad, is_ragged))
        if form.unit != "sample" and not is_given:
            self.expected = tuple(
                ArraySpec((None,) * len(c.shape), c.dtype, c.text) for c in spec.components
            )

    def row(self, result: object, index: int) -> list[npt.NDArray[Any]]:
        """Return all components of the result of one call, converted and checked."""
        try:
            leaves = self._flatten(result)
        except SpecMismatchError as error:
            if result is None:
                raise none_for(self._origin, self._unit, index) from None
            given = ", given by element_spec=" * self._is_given
            raise SpecMismatchError(f"{error}{given} ({item_name(index)})") from None
        return [self.leaf(leaf, component, index) for component, leaf in enumerate(leaves)]

    def check_length(self, leaves: Sequence[npt.NDArray[Any]], length: int, index: int) -> None:
        """Raise `SpecMismatchError` if a component has another length than `Packed` expects."""
        for leaf, path in zip(leaves, self.paths, strict=True):
            if len(leaf) != length:
                raise SpecMismatchError(
                    f"{named(path)} of {item_name(index)} has the length {len(leaf)}, but "
                    f"order=Packed(...) has the length {length} for it. Correct lengths=, or "
                    "return as many values"
                )

    def leaf(self, value: object, component: int, index: int) -> npt.NDArray[Any]:
        """Return one component, converted and checked.

        Raises:
            SpecMismatchError: names path, index, expected and actual value.
        """
        expected, path = self.expected[component], self.paths[component]
        is_text = expected.text is not None
        if (
            type(value) is np.ndarray
            and not is_text
            and (value.dtype, value.shape) == (expected.dtype, expected.shape)
        ):
            return value
        try:
            array = convert_leaf(value, path)
        except SpecMismatchError as error:
            if value is None and not path:
                raise none_for(self._origin, self._unit, index) from None
            raise SpecMismatchError(f"{error} ({item_name(index)})") from None
        fits = _fits(array.shape, expected.shape, self._origins[component] == "length")
        if not fits or is_text != (array.dtype == object):
            raise self._mismatch(component, index, array)
        if is_text or array.dtype == expected.dtype:
            return array
        source, target = array.dtype, expected.dtype
        is_weak = target.kind in _WEAK_KINDS.get(type(value), "")
        if not (can_write(source, target) if self._is_given else is_weak):
            raise self._mismatch(component, index, array)
        with np.errstate(over="raise"):
            try:
                cast = array.astype(target)
            except FloatingPointError:
                raise self._mismatch(component, index, array) from None
        if source.kind in "iu" and target.kind in "iu" and not np.array_equal(cast, array):
            raise SpecMismatchError(
                f"component {path or '(whole element)'} of {item_name(index)} has values from "
                f"{array.min()} to {array.max()} ({source}), which do not fit {target}"
            )
        return cast

    def _mismatch(self, component: int, index: int, array: npt.NDArray[Any]) -> SpecMismatchError:
        expected, path, origin = (
            self.expected[component],
            self.paths[component],
            self._origins[component],
        )
        is_padded = self._pad is not False and origin not in ("length", "packed")
        if is_padded and padding_of(self._pad, self._spec.structure)[component] is False:
            origin = "unpadded"
        whole = self._spec.components[component].shape
        cure = code_to_allow(
            self._spec, component, (*whole[: len(whole) - len(expected.shape)], *array.shape)
        )
        return mismatch(path, index, expected, array.shape, array.dtype, origin, cure)

    # ---- rows of a fixed slot ----

    def writer(self, arrays: Sequence[npt.NDArray[Any]], row: int) -> Callable[[object], object]:
        """Return a function that writes one result after the other into the rows from `row` on.

        It copies a result before the next call can change it, and does not keep it. It raises
        `SpecMismatchError` without the name of the item, so the caller repeats single calls.
        """
        rows, flatten = itertools.count(row), self._flatten
        puts = [
            (self._putter if array.ndim > 1 else self._scalar_putter)(component, array)
            for component, array in enumerate(arrays)
        ]
        flat = tuple if self._is_tuple else None  # the functions in `puts` check the elements

        def write(result: Any) -> None:
            at = next(rows)
            try:
                leaves = result if type(result) is flat else flatten(result)
                for put, leaf in zip(puts, leaves, strict=True):
                    put(at, leaf)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                if is_of_a_handler(error):
                    raise
                raise SpecMismatchError from None

        return write

    def _putter(self, component: int, array: npt.NDArray[Any]) -> Callable[[int, object], None]:
        """Return a function that writes a leaf with axes into a row of an array."""
        dtype, shape, tensor, convert = array.dtype, array.shape[1:], _tensor_type(), self.leaf

        def put(at: int, leaf: Any) -> None:
            value = leaf.numpy() if type(leaf) is tensor else leaf
            if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
                array[at] = value
            else:
                array[at] = convert(leaf, component, 0)

        return put

    def _scalar_putter(
        self, component: int, array: npt.NDArray[Any]
    ) -> Callable[[int, object], None]:
        """Return a function that writes a scalar into a row of an array."""
        dtype, tensor, put_array = array.dtype, _tensor_type(), self._putter(component, array)
        kinds = self._scalars[component]
        of_torch = None
        if tensor is not None and dtype.kind in "biu":  # a number of Python has all their values
            with contextlib.suppress(TypeError):  # PyTorch lacks the dtype
                of_torch = sys.modules["torch"].from_numpy(array).dtype

        def put(at: int, leaf: Any) -> None:
            if type(leaf) in kinds:
                array[at] = leaf
            elif type(leaf) is tensor and leaf.dtype is of_torch and not leaf.ndim and leaf.is_cpu:
                array[at] = leaf.item()  # takes a fifth of the time of `numpy`
            else:
                put_array(at, leaf)

        return put

    def write_row(
        self, arrays: Sequence[npt.NDArray[Any]], row: int, result: object, index: int
    ) -> None:
        """Write the result of one call into a row of each array.

        Raises:
            SpecMismatchError: the result differs from the spec.
        """
        if self.paths == ("",):
            is_plain = type(result) is np.ndarray and (result.dtype, result.shape) == self._plain
            arrays[0][row] = result if is_plain else self.leaf(result, 0, index)
            return
        for array, leaf in zip(arrays, self.row(result, index), strict=True):
            array[row] = leaf

    def write_block(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        row: int,
        results: Sequence[Any],
        are_items: bool = False,
        indices: Keys = (),
    ) -> bool:
        """Write several results of `take` into the rows from `row` on.

        Returns False if the rows must be made one by one instead. One reason is that a result
        differs from the spec: its own call then reports the error. The other is that a result may
        have changed: a function that refills one buffer has overwritten the first results.

        Args:
            arrays: the arrays of the slot.
            row: first row to write.
            results: the results.
            are_items: True if the results are items that one call of the source returned. They
                cannot have changed.
            indices: index of each row's item.
        """
        columns: Iterable[Sequence[Any]] = [results]
        if self.take is not None and not are_items:
            columns = zip(*results, strict=True)
        elif self.paths != ("",):
            columns = self._spec.structure.columns(results)
        waiting: set[int] = set()
        count, tensor = 0, _tensor_type()
        try:
            for component, (array, column) in enumerate(zip(arrays, columns, strict=True)):
                kinds = set(map(type, column))
                if array.ndim == 1 and kinds <= self._scalars[component]:
                    # Common case: scalars such as labels.
                    array[row : row + len(column)] = column
                elif kinds == {tensor}:
                    rows = array[row : row + len(column)]
                    is_written = (
                        _stack_tensors(rows, column)
                        if are_items
                        else self._is_unchanged(column[0]._base)
                        and _write_parts(rows, column, indices, self._size)
                    )
                    if not is_written:
                        return False
                elif kinds == _ONLY_ARRAYS:
                    if not _join(array, row, column, are_items):
                        return False
                    if not are_items:
                        waiting.update(map(id, column))
                        count += len(column)
                elif not all(issubclass(kind, _IMMUTABLE) for kind in kinds):
                    return False
                else:
                    for at, value in enumerate(column, row):
                        # the caller repeats single calls to find the row of a wrong value
                        array[at] = self.leaf(value, component, 0)
        except (TypeError, ValueError, OverflowError) as error:
            if is_of_a_handler(error):
                raise
            return False  # another dtype or number of axes, or a value that is too large
        return len(waiting) == count

    def watch(self, result: object) -> None:
        """Watch the tensors of which the leaves of a result are views."""
        tensor = _tensor_type()
        bases = [leaf._base for leaf in self._flatten(result) if type(leaf) is tensor]
        self.watched = [
            base for base in bases if base is not None and 0 < self._size <= base.numel()
        ]

    def begin_block(self) -> None:
        """Note that the calls begin whose results `write_block` writes."""
        # Counts of changes by PyTorch's functions, also of changes by views.
        self._versions = [base._version for base in self.watched]

    def _is_unchanged(self, base: Any) -> bool:
        """Return True if a watched tensor has not changed since `begin_block`."""
        return any(
            base is each and base._version == version
            for each, version in zip(self.watched, self._versions, strict=True)
        )


def none_for(origin: str, unit: UnitKind, index: int) -> SpecMismatchError:
    """Return the error for a call that returned None. `index` belongs to the call's first item."""
    batch = "the batch that begins with " * (unit == "batch")
    return none_refusal(origin, f" for {batch}{item_name(index)}")


def _join(
    array: npt.NDArray[Any], row: int, column: Sequence[npt.NDArray[Any]], may_be_views: bool
) -> bool:
    """Write arrays, by calls that loop in C.

    Returns False, or raises, if an array has another shape or dtype, or may be a view of memory
    that changes. Views are allowed with `may_be_views`.
    """
    shape = array.shape[1:]
    # For a single axis, comparing lengths is enough and faster. Arrays with more axes would fail to
    # concatenate.
    alike = (
        set(map(len, column)) == set(shape)
        if len(shape) == 1
        else set(map(_SHAPE, column)) == {shape}
    )
    if not shape or not alike:
        return False
    if not (may_be_views or set(map(type, map(_BASE, column))) <= _UNCHANGING):
        return False
    joined = array[row : row + len(column)].reshape(len(column) * shape[0], *shape[1:])
    np.concatenate(column, out=joined, casting="equiv")
    return True


def _kinds_of(dtype: np.dtype[Any]) -> set[type]:
    """Return the types of scalars whose values an array of this dtype stores as they are."""
    return {dtype.type, *(kind for kind, each in _DTYPES_OF_SCALARS.items() if each == dtype)}


def _tensor_type() -> object:
    """Return the class of PyTorch's tensors; None if PyTorch is not imported."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _write_parts(rows: npt.NDArray[Any], tensors: Sequence[Any], indices: Keys, size: int) -> bool:
    """Write views of one tensor that has equal parts for all items of the source.

    The caller knows that no function of PyTorch has changed the tensor since the calls began. So
    the views have their results, unless other code, such as NumPy, writes to parts of other items.

    Args:
        rows: rows to write.
        tensors: a tensor for each row.
        indices: index of each row's item.
        size: number of the source's items.

    Returns:
        False if a tensor is not its item's part.
    """
    base, of, count = tensors[0]._base, type(tensors[0]), len(tensors)
    if not 0 < base.numel() == size * math.prod(rows.shape[1:]):
        return False
    memory = array_of(base)
    if memory is None:
        return False
    start, step = base.data_ptr(), memory.nbytes // size
    are_parts = (
        memory.dtype == rows.dtype
        and memory.dtype.kind != "c"  # views may be conjugates
        and memory.flags.c_contiguous
        and [*map(of.data_ptr, tensors)] == [start + step * index for index in indices]
        and [*map(_DTYPE, tensors)].count(base.dtype) == count
        and (
            not any(map(of.dim, tensors))  # takes half the time, and is enough for scalars
            if rows.ndim == 1
            else [*map(of.size, tensors)].count(rows.shape[1:]) == count
            and all(map(of.is_contiguous, tensors))
        )
        and len({*indices}) == count
    )
    if are_parts:
        parts = memory.reshape(size, *rows.shape[1:])
        np.take(parts, indices, axis=0, out=rows, mode="clip")
    return are_parts


def _stack_tensors(rows: npt.NDArray[Any], tensors: Sequence[Any]) -> bool:
    """Write tensors that cannot change, by one call. Return False if they do not fit the rows."""
    torch, first = sys.modules["torch"], tensors[0]
    try:
        out = torch.from_numpy(rows)
        # `torch.stack` compares the other shapes with the first one. It would cast other dtypes.
        if first.shape != out.shape[1:] or set(map(_DTYPE, tensors)) != {out.dtype}:
            return False
        torch.stack(tensors, out=out)
    except RuntimeError as error:  # tensors of unequal shapes, on another device, or with gradients
        if is_of_a_handler(error):
            raise
        return False
    return True


def _origins(form: BatchForm, is_given: bool, pad: object, is_ragged: bool) -> Iterator[Origin]:
    """Yield the origin of each component's expected shape."""
    if form.item_spec is not None:
        for _ in form.item_spec.components:
            yield "packed"
        return
    whole = form.unit != "sample"
    padding = padding_of(False if whole else pad, form.spec.structure)
    for component, padded_with in zip(form.spec.components, padding, strict=True):
        is_padded = padded_with is not False
        if whole:
            yield "spec"
        elif component.ragged or (is_ragged and not is_given):
            yield "ragged"
        elif is_given:
            yield "length" if is_padded else "given"
        else:
            yield "spec" if is_padded else "rows"


def _fits(actual: tuple[int, ...], expected: tuple[int | None, ...], may_be_shorter: bool) -> bool:
    return len(actual) == len(expected) and all(
        static is None or static == size or (may_be_shorter and size < static)
        for static, size in zip(expected, actual, strict=True)
    )


# ---- samples into blocks of a varying batch: stacked, padded, ragged or text ----


def collate(
    values: Sequence[npt.NDArray[Any]],
    component: ArraySpec,
    path: str,
    indices: Sequence[int],
    pad: object,
) -> list[Block]:
    """Return the blocks of one component of a batch of samples.

    Args:
        values: one array per row, already of the component's dtype (text: object arrays) and shape.
        component: its spec, batch axis included.
        path: its path in the element, for errors.
        indices: source index of each row, for errors.
        pad: value that fills rows up to the smallest shape that holds all, or to the lengths in the
            spec. None: the default value. False: all rows have one shape.

    Raises:
        SpecMismatchError: the shapes of the rows do not fit together.
    """
    if component.ragged:
        return _ragged(values, component, path, indices)
    lengths = component.shape[1:]
    if pad is False:
        shape = values[0].shape if values else tuple(n or 0 for n in lengths)
        for value, index in zip(values, indices, strict=True):
            if value.shape != shape:
                expected = ArraySpec(shape, component.dtype, component.text)
                raise mismatch(path, index, expected, value.shape, value.dtype, "rows")
    else:
        shape = tuple(
            max((value.shape[axis] for value in values), default=0) if length is None else length
            for axis, length in enumerate(lengths)
        )
    unpadded, batch = sum(value.size for value in values), (len(values), *shape)
    is_full = unpadded == math.prod(batch)
    if component.text is not None and is_full:
        return _text_blocks(_pieces(values), batch)
    filler = None if is_full else fill_value(pad, component, path)

    def fill(out: npt.NDArray[Any]) -> None:
        if not is_full:
            out[...] = filler
        for row, value in enumerate(values):
            corner: int | tuple[int | slice, ...] = (
                row if pad is False else (row, *map(slice, value.shape))
            )
            out[corner] = value

    if component.text is not None:
        texts = np.empty(batch, object)
        fill(texts)
        return _text_blocks(_pieces([texts]), batch)
    return [Block(batch, component.dtype, fill, None if pad is False else unpadded)]


def blocks_of_array(value: npt.NDArray[Any], component: ArraySpec) -> list[Block]:
    """Return the blocks of a component that the function returned as a whole batch."""
    if component.text is not None:
        return _text_blocks(_pieces([value]), value.shape)

    def copy(out: npt.NDArray[Any]) -> None:
        out[...] = value

    return [Block(value.shape, component.dtype, copy)]


def _ragged(
    values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int]
) -> list[Block]:
    """Return the blocks of ragged rows: their inner rows, concatenated, and the offset of
    each row.
    """
    inner = values[0].shape[1:] if values else tuple(n or 0 for n in component.shape[2:])
    for value, index in zip(values, indices, strict=True):
        if value.ndim == 0 or value.shape[1:] != inner:
            expected = ArraySpec((None, *inner), component.dtype, component.text)
            raise mismatch(path, index, expected, value.shape, value.dtype, "ragged")
    lengths = [len(value) for value in values]
    shape = (sum(lengths), *inner)

    def splits(out: npt.NDArray[Any]) -> None:
        out[0] = 0
        np.cumsum(lengths, out=out[1:])

    def join(out: npt.NDArray[Any]) -> None:
        if values:
            np.concatenate(values, out=out)

    is_text = component.text is not None
    joined = (
        _text_blocks(_pieces(values), shape) if is_text else [Block(shape, component.dtype, join)]
    )
    return [*joined, Block((len(values) + 1,), _INT64, splits)]


def _pieces(values: Sequence[npt.NDArray[Any]]) -> list[Any]:
    return [piece for value in values for piece in value.ravel().tolist()]


def _text_blocks(texts: list[Any], shape: tuple[int, ...]) -> list[Block]:
    pieces = [
        piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogateescape")
        for piece in texts
    ]
    blob = b"".join(pieces)
    lengths = [len(piece) for piece in pieces]

    def fill_lengths(out: npt.NDArray[Any]) -> None:
        out.reshape(-1)[:] = lengths

    def fill_blob(out: npt.NDArray[Any]) -> None:
        out[:] = np.frombuffer(blob, np.uint8)

    return [Block(shape, _INT64, fill_lengths), Block((len(blob),), _BYTE, fill_blob)]


# ---- results that are kept together ----


def share_memory(results: Iterable[object], but: Iterable[object] = ()) -> bool:
    """Return True if several results contain the same writable array, list or dict.

    An array counts even if it is only the base of a view. Arrays in `but` may be shared.
    """
    seen: set[int] = set()
    allowed = {root for array in but for root in _roots(array)}
    for result in results:
        roots = set(_roots(result)) - allowed
        if not seen.isdisjoint(roots):
            return True
        seen |= roots
    return False


def _roots(value: object) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.flags.writeable:
            base = value.base.obj if isinstance(value.base, memoryview) else value.base
            yield id(value if base is None else base)
    elif isinstance(value, _NESTED):
        if not isinstance(value, tuple):
            yield id(value)
        for part in value.values() if isinstance(value, (dict, UserDict)) else value:
            if isinstance(part, (np.ndarray, *_NESTED)):
                yield from _roots(part)


def copy_of(item: object) -> object:
    """Return a copy of an item. Copies arrays, tensors of torch, lists and dicts in it."""
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, getattr(sys.modules.get("torch"), "Tensor", ())):
        return item.clone()  # type: ignore[attr-defined]
    if isinstance(item, (dict, UserDict)):
        copied = copy.copy(item)  # a copy by the item's class keeps the type
        for key, value in item.items():
            copied[key] = copy_of(value)
        return copied
    if type(item) is list or type(item) is tuple:
        return type(item)(map(copy_of, item))
    return (
        item._make(map(copy_of, item))
        if isinstance(item, tuple) and hasattr(item, "_make")
        else item
    )
