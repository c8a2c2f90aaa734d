"""Items as one block of bytes: each pickled by itself, and made again each time it is read.

Python objects that workers share by fork are copied page by page as their reference counts change. Bytes have no
reference counts: all workers read the same pages, epoch after epoch (docs/explanation/memory.md, "Items").
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt


class Parts:
    """What the pickles of items name by number instead of holding it: classes, functions, modules.

    So a class that travels by value travels once, and the items' modules are imported where the payload is loaded, not
    by each worker at its first item.

    Args:
        key: the packing's own number; no other one of the same trainer has it.
        parts: the things, by number.
    """

    __slots__ = ("__weakref__", "key", "parts")

    def __init__(self, key: int, parts: list[Any]) -> None:
        self.key, self.parts = key, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _parts_of, (self.key, self.parts)


_by_key: weakref.WeakValueDictionary[int, Parts] = weakref.WeakValueDictionary()


def _parts_of(key: int, parts: list[Any]) -> Parts:
    """Return the parts that this process has under this key, or new ones; pickles of items find them from now on."""
    known = _by_key.get(key)
    if known is None:
        known = _by_key[key] = Parts(key, parts)
    return known


def part(key: int, number: int) -> Any:
    """Return what an item's pickle names. Runs in: a worker, while `PackedItems` reads an item."""
    return _by_key[key].parts[number]


def same(value: Any) -> Any:
    """Return the value: what arrives where something was to be packed and was not."""
    return value


class PackedItems:
    """A list that was packed, read by index; each item is a new object each time.

    Args:
        pickles: `uint8[bytes]`, the items' pickles one behind the other.
        offsets: `int64[items + 1]`, where each begins.
        parts: what they name by number.
        buffers: `uint8[n]` each: large arrays inside items, which are not copied when an item is read.
        wanted: numbers of the buffers that the items hold, in the order in which their pickles ask for them.
        wanted_offsets: `int64[items + 1]`, where each item's begin in `wanted`; None where no item has any.
    """

    __slots__ = ("_bytes", "_ends", "_parts", "_size", "_state", "_views", "_wanted", "_wanted_ends")

    def __init__(
        self,
        pickles: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        parts: Parts,
        buffers: list[npt.NDArray[np.uint8]],
        wanted: npt.NDArray[np.int64],
        wanted_offsets: npt.NDArray[np.int64] | None,
    ) -> None:
        self._state = (pickles, offsets, parts, buffers, wanted, wanted_offsets)
        # Views, because they give Python numbers and slices in a fraction of the time that arrays take.
        self._bytes, self._ends, self._wanted = pickles.data, offsets.data, wanted.data
        self._views = [buffer.data for buffer in buffers]
        self._wanted_ends = None if wanted_offsets is None else wanted_offsets.data
        self._size = len(offsets) - 1

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(f"item {index} of {self._size}")
        ends = self._ends
        pickled = self._bytes[ends[index] : ends[index + 1]]
        wanted_ends = self._wanted_ends
        if wanted_ends is None:
            return pickle.loads(pickled)
        wanted = self._wanted[wanted_ends[index] : wanted_ends[index + 1]]
        return pickle.loads(pickled, buffers=[self._views[number] for number in wanted])

    @property
    def nbytes(self) -> int:
        """Bytes of all pickles, without the arrays beside them."""
        return len(self._bytes)

    def pickle_of(self, index: int) -> bytes:
        """Return what an item is made from, a copy; the index is not checked."""
        return bytes(self._bytes[self._ends[index] : self._ends[index + 1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedItems, self._state

    def __repr__(self) -> str:
        return f"<{self._size} packed items>"
