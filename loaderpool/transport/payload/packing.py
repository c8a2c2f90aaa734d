"""Packing: items are pickled one by one into one block of bytes. Classes, functions and modules are
stored once, beside the block.

Used for the items of a source, and by `share` for lists and dicts in shared memory.
`sources.packed` reads them. Called in the main process.
"""

from __future__ import annotations

import array
import functools
import io
import itertools
import pickle
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from loaderpool.errors import UnpicklableError
from loaderpool.memory.adoption import share_array, shared_block
from loaderpool.memory.layout import aligned
from loaderpool.plan.generators import is_generator
from loaderpool.sources.packed import PackedDict, PackedList, part, parts_of, same
from loaderpool.sources.tables import Columns
from loaderpool.system import capacity
from loaderpool.system.annotations import Function
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.walk import LruCacheWrapper, is_global
from loaderpool.transport.payload.pickler import (
    LEAST_ITEMS,
    OUT_OF_BAND_BYTES,
    PayloadPickler,
)
from loaderpool.transport.pickling import out_of_band

# Lists of fewer bytes are not packed, and neither are lists of fewer items (`LEAST_ITEMS`).
_LEAST_BYTES = 1 << 20
# Number of items, evenly spaced, that are packed as a trial. Smaller: it is found later, or never,
# that items share a large object. Larger: slower start for lists that are not packed. The items may
# be large, so their bytes are limited, too.
_TRIED = 64
_MOST_TRIED_BYTES = 16 << 20
# If separate pickles of the items take more than this many times their joint pickle, the items
# share large objects, which packing would repeat in each. The ratio for dicts with the same keys is
# 1.5 to 3.
_MOST_REPEATED = 4
# Items up to this size are packed even if they share objects, because as objects they would take as
# much memory.
_SMALL_BYTES = 256


class ItemPacking:
    """Packs the parts of a payload that can be packed. One instance per pickling attempt.

    Attributes:
        met: ids of objects in the rest of the payload that are compared by identity. Items that
            hold one of them are not packed, because items and function would then have different
            objects.
        packed: number of packed items.
        sources: ids of the long lists in the source, packed or not.
    """

    def __init__(self, met: AbstractSet[int]) -> None:
        self.met, self.packed = met, 0
        self.sources: set[int] = set()

    def prepare(self, payload: Mapping[str, object]) -> dict[str, object]:
        """Return the payload with a placeholder for each list in the source that may be packed.

        The source is put last. So the other parts are pickled, and their objects are in `met`,
        before a placeholder is pickled.
        """
        others = {name: part for name, part in payload.items() if name != "source"}
        return {**others, "source": self._stand_in(payload["source"])}

    def _stand_in(self, source: object) -> object:
        if isinstance(source, Columns):
            return source.map(lambda column, path: self._of_list(column))
        return self._of_list(source)

    def _of_list(self, items: Any) -> object:
        is_object_array = type(items) is np.ndarray and items.dtype == object and items.ndim == 1
        if (type(items) not in (list, tuple) and not is_object_array) or len(items) < LEAST_ITEMS:
            return items
        self.sources.add(id(items))
        return _ItemsStandIn(self, items)

    def pack(self, items: Sequence[Any]) -> PackedList | None:
        """Return the packed items; None if packing saves nothing, or is impossible."""
        try:
            if not self._is_worth_it(items):
                return None
            packed = _ItemPickler(self.met, refuses_generators=True).pack(items)
        except _NotPackableError:
            return None
        self.packed += len(packed)
        return packed

    def _is_worth_it(self, items: Sequence[Any]) -> bool:
        """Return True if the items are many bytes and share little.

        A few items are packed as a trial, one by one and together.
        """
        tried = [items[at] for at in range(0, len(items), len(items) // _TRIED)]
        found = _ItemPickler(self.met, refuses_generators=True).pack(tried, _MOST_TRIED_BYTES)
        alone, tried = found.nbytes, tried[: len(found)]
        first, together = (_ItemPickler(self.met).pack([each]).nbytes for each in (tried[0], tried))
        is_much = alone * len(items) // len(tried) >= _LEAST_BYTES
        # The first item cannot share objects with an earlier one.
        return is_much and alone - first <= max(
            _MOST_REPEATED * (together - first), _SMALL_BYTES * len(tried)
        )


class _ItemsStandIn:
    """Placeholder for items in a payload. It packs them when it is pickled itself."""

    def __init__(self, packing: ItemPacking, items: Sequence[Any]) -> None:
        self._packing, self._items = packing, items

    def __getitem__(self, index: int) -> object:
        return self._items[index]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        packed = self._packing.pack(self._items)
        return (same, (self._items,)) if packed is None else packed.__reduce__()


# Shared classes, functions and modules. More: each item has one of its own, and packing gains
# nothing.
_MOST_PARTS = 1000
# Number of items between checks that the packed bytes are less than this process's memory.
_LOOK_EVERY = 4096
_keys = itertools.count(1)
_FUNCTION_KINDS = frozenset({types.FunctionType, LruCacheWrapper})
_NAMED_KINDS = _FUNCTION_KINDS | {types.BuiltinFunctionType, types.ModuleType}
_NO_OBJECT = (types.ModuleType, type(None))


class _NotPackableError(Exception):
    """The items cannot be pickled, or pickling them separately changes their meaning."""


class _ItemFailedError(_NotPackableError):
    """Pickling an item raised the cause."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class _ItemPickler(PayloadPickler):
    """Pickles items one after the other, with classes, functions and modules as numbers.

    Args:
        met: see `ItemPacking`.
        refuses_generators: True if items with a random generator cannot be packed. Each read would
            create the generator again, with the same numbers in each epoch.
        keys: iterator that yields the key of the packing. None: use a key that only this process
            has.
    """

    def __init__(
        self,
        met: AbstractSet[int],
        refuses_generators: bool = False,
        keys: Iterator[int] | None = None,
    ) -> None:
        # A plain dict: a look-up for each object in cloudpickle's chain of dicts takes longer than
        # all the rest.
        self.dispatch_table: dict[type, Function] = dict(PayloadPickler.dispatch_table)
        self._file = io.BytesIO()
        self._buffers: list[Any] = []
        self._wanted: list[int] = []  # number of each buffer of the items so far
        # The callback must not refer to the pickler. Otherwise this reference cycle would keep all
        # pickles until the next garbage collection.
        keep = functools.partial(_keep, self._buffers, self._wanted, {})
        super().__init__(self._file, buffer_callback=out_of_band(keep, OUT_OF_BAND_BYTES))
        self._others, self._refuses_generators = met, refuses_generators
        self._usual: set[type] = set()  # types that always use pickle's default
        # key of this pickler; classes, functions and modules by number
        self._key, self._parts = next(keys or _keys), list[object]()
        # pickled reference to each class, function and module, by id
        self._references: dict[int, tuple[Any, ...]] = {}

    def pack(self, items: Sequence[Any], most_bytes: int | None = None) -> PackedList:
        """Pickle the items. Called once.

        With `most_bytes`, stop at that size, but pickle at least two items.
        """
        ends, wanted_ends = array.array("q", [0]), array.array("q", [0])
        # cloudpickle's own `dump` is skipped. It only adds another error for deep nesting.
        file, dump, wanted = self._file, functools.partial(pickle.Pickler.dump, self), self._wanted
        try:
            for item in items:
                dump(item)
                self.clear_memo()
                ends.append(file.tell())
                wanted_ends.append(len(wanted))
                if most_bytes is not None and file.tell() > most_bytes and len(ends) > 2:
                    break
                if not len(ends) % _LOOK_EVERY and file.tell() > capacity.resident_bytes():
                    # More bytes than the memory of this process: the items share objects that the
                    # trial did not show.
                    raise _NotPackableError
        except Exception as error:
            if isinstance(error, (_NotPackableError, MemoryError)) or is_of_a_handler(error):
                raise
            raise _ItemFailedError(len(ends) - 1) from error
        return PackedList(
            np.frombuffer(file.getbuffer(), np.uint8),
            np.array(ends, np.int64),
            parts_of(self._key, self._parts) if self._parts else None,
            self._buffers,
            np.array(wanted, np.int64),
            np.array(wanted_ends, np.int64) if wanted else None,
        )

    def reducer_override(self, obj: object) -> object:
        kind = type(obj)
        if kind in self._usual:
            if id(obj) in self._others:
                raise _NotPackableError
            return NotImplemented
        if kind in _NAMED_KINDS or issubclass(kind, type):
            return self._by_number(obj, kind)
        if self._refuses_generators and is_generator(obj):
            raise _NotPackableError
        # A packed memmap would open its file again at each read.
        if id(obj) in self._others or issubclass(kind, np.memmap):
            raise _NotPackableError
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and kind is not io.TextIOWrapper:
            self._usual.add(kind)
        return reduced

    def _by_number(self, named: Any, kind: type) -> object:
        if id(named) not in self._references:
            if named is part or (
                kind is types.BuiltinFunctionType and not isinstance(named.__self__, _NO_OBJECT)
            ):
                return NotImplemented  # `some_list.append`: the list belongs to the item
            # The captured variables of a function may also belong to the item.
            is_own = kind in _FUNCTION_KINDS and not is_global(named)
            if is_own or len(self._parts) == _MOST_PARTS:
                raise _NotPackableError
            self._references[id(named)] = part, (self._key, len(self._parts))
            self._parts.append(named)
        return self._references[id(named)]


def _keep(
    buffers: list[Any],
    wanted: list[int],
    numbers: dict[tuple[int, int], int],  # numbers of buffers, by address and length
    buffer: memoryview,
) -> None:
    array_of = np.frombuffer(buffer, np.uint8)  # kept, so that its address is not reused
    key = array_of.__array_interface__["data"][0], array_of.nbytes
    number = numbers.setdefault(key, len(buffers))
    if number == len(buffers):
        buffers.append(array_of)
    wanted.append(number)


# ---- lists and dicts that the user shares ----


def shared(data: Any, keys: Iterator[int] | None = None) -> Any:
    """Copy the user's data into shared memory, and return the copy.

    Args:
        data: see `share`.
        keys: iterator that yields the keys of the packings. None: use keys that only this process
            has.
    """
    if isinstance(data, (list, tuple)):
        return _packed([data], keys)[0]
    if isinstance(data, dict):
        return PackedDict(*_packed([list(data), list(data.values())], keys))
    return share_array(data)


def _packed(lists: Sequence[Sequence[Any]], keys: Iterator[int] | None) -> list[PackedList]:
    """Pack lists into one block of shared memory."""
    packed = [_pickled(items, keys) for items in lists]
    block = shared_block(sum(aligned(array.nbytes) for each in packed for array in each.arrays))
    end = 0

    def move(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        nonlocal end
        moved: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer=block, offset=end)
        end += aligned(array.nbytes)
        np.copyto(moved, array)
        moved.flags.writeable = False
        return moved

    return [each.moved(move) for each in packed]


def _pickled(items: Sequence[Any], keys: Iterator[int] | None) -> PackedList:
    try:
        return _ItemPickler(set(), keys=keys).pack(items)
    except _ItemFailedError as failed:
        cause = failed.__cause__
        raise UnpicklableError(
            f"element {failed.index}, of type {type(items[failed.index]).__qualname__}, cannot be "
            f"shared: pickling it raised {type(cause).__name__}: {cause}"
        ) from cause
    except _NotPackableError:
        raise UnpicklableError(
            "the elements cannot be pickled one by one: they hold functions with captured "
            "variables, a numpy.memmap, or one large object that they share"
        ) from None
