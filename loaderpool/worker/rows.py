"""Writes what the user's function returned into rows of a fixed slot, refusing whatever is not as the spec says."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig
from loaderpool.element.leaf import can_write, convert_leaf
from loaderpool.element.spec import ArraySpec, ElementSpec, Origin, mismatch, padding_of, widening_code
from loaderpool.element.structure import Structure
from loaderpool.errors import SpecMismatchError
from loaderpool.plan.generator_positions import item_name

# What a Python number may stand in for without loss, as NumPy's weak promotion has it.
_WEAK_KINDS: dict[type, str] = {bool: "b", int: "iuf", float: "f"}
# Leaves that cannot be changed under us while they wait for their block to be full.
_IMMUTABLE = (bool, int, float, complex, np.generic)
# Python scalars that are a dtype's own values.
_SCALAR_DTYPES = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
# Blocks are checked by calls that loop in C: a loop of Python over the rows costs as much as writing them.
_SHAPE, _BASE = operator.attrgetter("shape"), operator.attrgetter("base")
_ONLY_ARRAYS, _ONLY_NONE = {np.ndarray}, {type(None)}


class ReusedBuffer(Exception):
    """Results held together may be one buffer, or one dict, that the function fills again and again."""


class Converter:
    """Turns leaves into arrays of the components' dtypes and shapes.

    Args:
        spec: of a batch.
        is_given: the user gave the spec, so a `same_kind` cast is wanted; an inferred one allows no cast of arrays.
        has_batch_axis: leaves are whole batches (axis 0 of the spec is theirs); of an inferred spec their axes may have
            any length.
        config: the loader's settings; of these `pad` and `ragged` matter, for what an error advises.
        padding: what fills up each component, as `BatchForm` has it.
    """

    def __init__(
        self,
        spec: ElementSpec,
        *,
        is_given: bool,
        has_batch_axis: bool,
        config: LoaderConfig | None = None,
        padding: Sequence[Any] = (),
    ) -> None:
        self._is_given, self._spec = is_given, spec
        self.flatten = spec.structure.flatten
        self.structure = spec.structure
        self.paths = spec.structure.paths
        drop = 0 if has_batch_axis else 1
        self.expected = tuple(ArraySpec(c.shape[drop:], c.dtype, c.text) for c in spec.components)
        self._origins = tuple(_origins(spec, is_given, has_batch_axis, config, padding))
        if has_batch_axis and not is_given:
            self.expected = tuple(ArraySpec((None,) * len(c.shape), c.dtype, c.text) for c in spec.components)

    def row(self, result: Any, index: int) -> list[npt.NDArray[Any]]:
        """Return all components of what one call returned, converted and checked.

        Raises:
            SpecMismatchError: naming path, index, expected and actual.
        """
        try:
            leaves = self.flatten(result)
        except SpecMismatchError as error:
            raise self.built_differently(error, index) from None
        return [self.leaf(leaf, component, index) for component, leaf in enumerate(leaves)]

    def built_differently(self, error: SpecMismatchError, index: int) -> SpecMismatchError:
        """Return the error for an item whose structure is another one, as `flatten` raised it."""
        return SpecMismatchError(f"{error}{', given by element_spec=' * self._is_given} ({item_name(index)})")

    def leaf(self, value: Any, component: int, index: int) -> npt.NDArray[Any]:
        """Return one component of what one call returned."""
        expected, path = self.expected[component], self.paths[component]
        try:
            array = convert_leaf(value, path)
        except SpecMismatchError as error:
            raise SpecMismatchError(f"{error} ({item_name(index)})") from None
        if not _fits(array.shape, expected.shape, self._origins[component] == "length"):
            raise self._mismatch(component, index, array)
        if expected.text is not None:
            if array.dtype != object:
                raise self._mismatch(component, index, array)
            return array
        if array.dtype == expected.dtype:
            return array
        if array.dtype == object or not self._may_cast(value, array.dtype, expected.dtype):
            raise self._mismatch(component, index, array)
        with np.errstate(over="raise"):
            try:
                cast = array.astype(expected.dtype)
            except FloatingPointError:
                raise self._mismatch(component, index, array) from None
        if array.dtype.kind in "iu" and expected.dtype.kind in "iu" and not np.array_equal(cast, array):
            raise SpecMismatchError(
                f"component {path or '(whole element)'} of {item_name(index)} has values from {array.min()} to "
                f"{array.max()} ({array.dtype}), which do not fit {expected.dtype}"
            )
        return cast

    def _mismatch(self, component: int, index: int, array: npt.NDArray[Any]) -> SpecMismatchError:
        expected, cure = self.expected[component], ""
        if self._origins[component] in ("seen", "ragged") and array.ndim == len(expected.shape):
            rows = self._spec.components[component].shape[0]
            cure = widening_code(self._spec, component, (rows, *array.shape))
        path, origin = self.paths[component], self._origins[component]
        return mismatch(path, index, expected, array.shape, array.dtype, origin, cure)

    def _may_cast(self, value: Any, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
        if self._is_given:
            return can_write(source, target)
        return target.kind in _WEAK_KINDS.get(type(value), "") and type(value) is not bool


class RowWriter:
    """Writes rows into the arrays of a fixed slot."""

    def __init__(self, converter: Converter) -> None:
        self._converter = converter
        self._is_single = converter.paths == ("",)
        self._dtypes = [expected.dtype for expected in converter.expected]
        self._shapes: list[tuple[int, ...]] = [
            tuple(int(n) for n in expected.shape if n is not None) for expected in converter.expected
        ]
        self._dicts = list(_dicts_in(converter.structure))

    def write(
        self, arrays: Sequence[npt.NDArray[Any]], row: int, results: Sequence[Any], indices: Sequence[int]
    ) -> None:
        """Write `results` (one per row) into rows `row`, `row + 1`, ... of `arrays`.

        Args:
            arrays: the components' arrays over the slot.
            row: the first row.
            results: what the function returned for each.
            indices: source index of each, for errors.

        Raises:
            SpecMismatchError: a result is not as the spec says.
            ReusedBuffer: several results share memory, or may; make and write them one by one.
        """
        try:
            if not self._is_single:
                self._write_columns(arrays, row, results, indices)
            elif self._write_column(0, arrays[0], row, results, indices) and _come_again([results]):
                raise ReusedBuffer
        except SpecMismatchError:
            # A dict that was filled again shows its last filling in all rows: the row that is named may be a good one.
            if len(results) > 1 and _share_dicts(results):
                raise ReusedBuffer from None
            raise

    def _write_columns(
        self, arrays: Sequence[npt.NDArray[Any]], row: int, results: Sequence[Any], indices: Sequence[int]
    ) -> None:
        flatten = self._converter.flatten
        try:
            flat = [flatten(result) for result in results]
        except SpecMismatchError as error:
            bad = next(index for result, index in zip(results, indices, strict=True) if not self._flattens(result))
            raise self._converter.built_differently(error, bad) from None
        if len(flat) == 1:
            for component, leaf in enumerate(flat[0]):
                self._write_column(component, arrays[component], row, (leaf,), indices)
            return
        columns = list(zip(*flat, strict=True))
        are_arrays = [
            self._write_column(component, arrays[component], row, column, indices)
            for component, column in enumerate(columns)
        ]
        changeable: list[Sequence[Any]] = list(itertools.compress(columns, are_arrays))
        for steps, start, stop in self._dicts:
            if not any(are_arrays[start:stop]):  # else its arrays tell whether it comes again
                changeable.append(_reach(results, steps))
        if changeable and _come_again(changeable):
            raise ReusedBuffer

    def _flattens(self, result: Any) -> bool:
        try:
            self._converter.flatten(result)
        except SpecMismatchError:
            return False
        return True

    def _write_column(
        self, component: int, array: npt.NDArray[Any], row: int, values: Sequence[Any], indices: Sequence[int]
    ) -> bool:
        """Write one component of all rows; True where they are several arrays, each still to be shown to be one."""
        dtype, shape = self._dtypes[component], self._shapes[component]
        if len(values) == 1:
            value = values[0]
            if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
                array[row] = value
            else:
                array[row] = self._converter.leaf(value, component, indices[0])
            return False
        if set(map(type, values)) == _ONLY_ARRAYS and self._join(array, row, values, shape):
            return True
        self._write_converted(component, array, row, values, indices)
        return False

    @staticmethod
    def _join(array: npt.NDArray[Any], row: int, values: Sequence[npt.NDArray[Any]], shape: tuple[int, ...]) -> bool:
        """Write arrays of this shape by one call in C; False: they are not, or of another dtype."""
        try:
            # Of a single axis its length will do, which is told faster: what has more axes is not concatenated.
            alike = set(map(len, values)) == set(shape) if len(shape) == 1 else set(map(_SHAPE, values)) == {shape}
            if not alike:
                return False
            # Results that look at no memory but their own can wait for their block.
            if set(map(type, map(_BASE, values))) != _ONLY_NONE:
                raise ReusedBuffer
            if not shape:
                return False
            count = len(values)
            joined = array[row : row + count].reshape(count * shape[0], *shape[1:])
            np.concatenate(values, out=joined, casting="equiv")
        except (TypeError, ValueError):  # another dtype: not "equiv"; other dimensions, or none
            return False
        return True

    def _write_converted(
        self, component: int, array: npt.NDArray[Any], row: int, values: Sequence[Any], indices: Sequence[int]
    ) -> None:
        dtype = self._dtypes[component]
        types = set(map(type, values))
        if array.ndim == 1 and len(types) == 1:  # the usual labels
            kind = next(iter(types))
            if _SCALAR_DTYPES.get(kind) == dtype or (issubclass(kind, np.generic) and np.dtype(kind) == dtype):
                try:
                    array[row : row + len(values)] = values
                    return
                except OverflowError:  # a Python int too large: named below
                    pass
        if not all(isinstance(value, _IMMUTABLE) for value in values):
            raise ReusedBuffer
        leaf = self._converter.leaf
        for value, index in zip(values, indices, strict=True):
            array[row] = leaf(value, component, index)
            row += 1


def _origins(
    spec: ElementSpec, is_given: bool, has_batch_axis: bool, config: LoaderConfig | None, padding: Sequence[Any]
) -> Iterator[Origin]:
    """Return for each component where its expected shape comes from."""
    is_padding = config is not None and config.pad is not False
    says_false = [False] * len(spec.components)
    if config is not None and is_padding:
        says_false = [pad is False for pad in padding_of(config.pad, spec.structure)]
    for number, component in enumerate(spec.components):
        if has_batch_axis:
            yield "whole"
        elif component.ragged or (config is not None and config.ragged and not is_given):
            yield "ragged"
        elif is_given:
            yield "length" if padding and padding[number] is not False else "given"
        elif is_padding:
            yield "unpadded" if says_false[number] else "seen"
        else:
            yield "first"


def _fits(actual: tuple[int, ...], expected: tuple[int | None, ...], may_be_shorter: bool = False) -> bool:
    if actual == expected:
        return True
    return len(actual) == len(expected) and all(
        static is None or static == size or (may_be_shorter and size < static)
        for static, size in zip(expected, actual, strict=True)
    )


def _come_again(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether an object stands in more than one row. A row may hold one object several times: `return x, x`."""
    values = columns[0] if len(columns) == 1 else itertools.chain.from_iterable(columns)
    distinct = len(set(map(id, values)))
    if distinct == len(columns) * len(columns[0]):
        return False
    return distinct < sum(map(len, map(set, zip(*(map(id, column) for column in columns), strict=True))))


def _dicts_in(structure: Structure, steps: tuple[Any, ...] = (), start: int = 0) -> Iterator[tuple[Any, int, int]]:
    """Return for each dict of the structure the keys that lead to it, its first leaf, and the one after its last."""
    if structure.kind == "dict":
        yield steps, start, start + structure.num_leaves
    for number, child in enumerate(structure.children):
        step = structure.keys[number] if structure.kind == "dict" else number
        yield from _dicts_in(child, (*steps, step), start)
        start += child.num_leaves


def _reach(values: Sequence[Any], steps: Sequence[Any]) -> Sequence[Any]:
    for step in steps:
        values = list(map(operator.itemgetter(step), values))
    return values


def _share_dicts(results: Sequence[Any]) -> bool:
    """Whether dicts stand twice in results that may be built in any way; slow, for the way to an error."""
    rows = [set(_dict_ids(result)) for result in results]
    return len(set().union(*rows)) < sum(map(len, rows))


def _dict_ids(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        yield id(value)
    if isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _dict_ids(part)
