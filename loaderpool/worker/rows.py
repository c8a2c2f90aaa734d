"""Turns what the user's function returned into arrays as the spec says, and writes them into rows of a slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig
from loaderpool.element.leaf import can_write, convert_leaf
from loaderpool.element.spec import ArraySpec, ElementSpec, Origin, mismatch, padding_of, widening_code
from loaderpool.errors import SpecMismatchError
from loaderpool.plan.base import item_name

# What a Python number may stand in for without loss, as NumPy's weak promotion has it.
_WEAK_KINDS: dict[type, str] = {bool: "b", int: "iuf", float: "f"}
# Leaves that cannot be changed under us while they wait for their block to be full.
_IMMUTABLE = (bool, int, float, complex, np.generic)
# Python scalars that are a dtype's own values.
_SCALAR_DTYPES = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_SHAPE, _BASE = attrgetter("shape"), attrgetter("base")
_ONLY_ARRAYS, _ONLY_NONE = {np.ndarray}, {type(None)}


class Converter:
    """Turns leaves into arrays of the components' dtypes and shapes.

    Args:
        spec: of a batch.
        is_given: the user gave the spec, so a `same_kind` cast is wanted; an inferred one allows no cast of arrays.
        has_batch_axis: leaves are whole batches, whose axes may have any length under an inferred spec.
        config: for what an error advises.
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
        self._flatten = spec.structure.flatten
        self.paths = spec.structure.paths
        # What is done with each result of a block as soon as it is there: a dict may be filled again for the next.
        self.take = None if self.paths == ("",) else self._flatten
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
            leaves = self._flatten(result)
        except SpecMismatchError as error:
            given = ", given by element_spec=" * self._is_given
            raise SpecMismatchError(f"{error}{given} ({item_name(index)})") from None
        return [self.leaf(leaf, component, index) for component, leaf in enumerate(leaves)]

    def leaf(self, value: Any, component: int, index: int) -> npt.NDArray[Any]:
        """Return one component of what one call returned."""
        expected, path = self.expected[component], self.paths[component]
        is_text = expected.text is not None
        if (
            type(value) is np.ndarray
            and value.dtype == expected.dtype
            and value.shape == expected.shape
            and not is_text
        ):
            return value
        try:
            array = convert_leaf(value, path)
        except SpecMismatchError as error:
            raise SpecMismatchError(f"{error} ({item_name(index)})") from None
        if not _fits(array.shape, expected.shape, self._origins[component] == "length"):
            raise self._mismatch(component, index, array)
        if is_text and array.dtype != object:
            raise self._mismatch(component, index, array)
        if is_text or array.dtype == expected.dtype:
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
        path, origin = self.paths[component], self._origins[component]
        if origin in ("seen", "ragged") and array.ndim == len(expected.shape):
            rows = self._spec.components[component].shape[0]
            cure = widening_code(self._spec, component, (rows, *array.shape))
        return mismatch(path, index, expected, array.shape, array.dtype, origin, cure)

    def _may_cast(self, value: Any, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
        if self._is_given:
            return can_write(source, target)
        return target.kind in _WEAK_KINDS.get(type(value), "") and type(value) is not bool

    # ---- rows of a fixed slot ----

    def write_row(self, arrays: Sequence[npt.NDArray[Any]], row: int, result: Any, index: int) -> None:
        """Write what one call returned into a row of each array.

        Raises:
            SpecMismatchError: it is not as the spec says.
        """
        if self.take is None:
            arrays[0][row] = self.leaf(result, 0, index)
            return
        for array, leaf in zip(arrays, self.row(result, index), strict=True):
            array[row] = leaf

    def write_block(
        self, arrays: Sequence[npt.NDArray[Any]], row: int, results: Sequence[Any], indices: Sequence[int]
    ) -> bool:
        """Write several results, as `take` left them, into the rows from `row` on; False: make them one by one.

        That is so if a result is not as the spec says, which its own call will tell, or if it may have changed since:
        a function that fills one buffer again and again has overwritten the first results by now.
        """
        columns = [results] if self.take is None else zip(*results, strict=True)
        waiting: set[int] = set()
        count = 0
        try:
            for component, (array, column) in enumerate(zip(arrays, columns, strict=True)):
                kinds = set(map(type, column))
                if kinds == _ONLY_ARRAYS:
                    if not _join(array, row, column):
                        return False
                    waiting.update(map(id, column))
                    count += len(column)
                elif not self._write_scalars(component, array, row, column, kinds, indices):
                    return False
        except (TypeError, ValueError, OverflowError):  # of another dtype, or number of axes; or too large
            return False
        return len(waiting) == count

    def _write_scalars(
        self,
        component: int,
        array: npt.NDArray[Any],
        row: int,
        column: Sequence[Any],
        kinds: set[type],
        indices: Sequence[int],
    ) -> bool:
        kind = next(iter(kinds))
        if len(kinds) == array.ndim == 1 and (
            _SCALAR_DTYPES.get(kind) == array.dtype or (issubclass(kind, np.generic) and np.dtype(kind) == array.dtype)
        ):  # the usual labels
            array[row : row + len(column)] = column
            return True
        if not all(issubclass(kind, _IMMUTABLE) for kind in kinds):
            return False
        for at, value in enumerate(column):
            array[row + at] = self.leaf(value, component, indices[at])
        return True


def _join(array: npt.NDArray[Any], row: int, column: Sequence[npt.NDArray[Any]]) -> bool:
    """Write arrays that have memory of their own by calls that loop in C; False: they are no such arrays.

    Raises:
        TypeError, ValueError: they have another dtype, or number of axes.
    """
    shape = array.shape[1:]
    # Of a single axis its length will do, which is told faster: what has more axes is not concatenated.
    alike = set(map(len, column)) == set(shape) if len(shape) == 1 else set(map(_SHAPE, column)) == {shape}
    if not shape or not alike or set(map(type, map(_BASE, column))) != _ONLY_NONE:
        return False
    joined = array[row : row + len(column)].reshape(len(column) * shape[0], *shape[1:])
    np.concatenate(column, out=joined, casting="equiv")
    return True


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


def _fits(actual: tuple[int, ...], expected: tuple[int | None, ...], may_be_shorter: bool) -> bool:
    return len(actual) == len(expected) and all(
        static is None or static == size or (may_be_shorter and size < static)
        for static, size in zip(expected, actual, strict=True)
    )


# ---- results that wait together ----


def share_memory(results: Iterable[Any], but: Iterable[Any] = ()) -> bool:
    """Whether a writable array, a list or a dict is in more than one of the results, itself or under a view.

    Args:
        results: what several calls gave.
        but: arrays whose memory may be shared.
    """
    seen: set[int] = set()
    allowed = {root for array in but for root in _roots(array)}
    for result in results:
        roots = set(_roots(result)) - allowed
        if not seen.isdisjoint(roots):
            return True
        seen |= roots
    return False


def _roots(value: Any) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.flags.writeable:
            yield id(value if value.base is None else value.base)
    elif isinstance(value, (dict, list, tuple)):
        if not isinstance(value, tuple):
            yield id(value)
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, (np.ndarray, dict, list, tuple)):
                yield from _roots(part)


def copy_of(item: Any) -> Any:
    """Return the item, with arrays, lists and dicts of its own."""
    if isinstance(item, np.ndarray):
        return item.copy()
    kind = type(item)
    if kind is dict:
        return {key: copy_of(value) for key, value in item.items()}
    if kind is list or kind is tuple:
        return kind(map(copy_of, item))
    return item._make(map(copy_of, item)) if isinstance(item, tuple) and hasattr(item, "_make") else item
