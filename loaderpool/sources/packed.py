"""Items as one block of bytes: each pickled by itself, and made again each time it is read.

Python objects that workers share by fork are copied page by page as their reference counts change. Bytes have no
reference counts: all workers read the same pages, epoch after epoch (docs/internals/memory.md, "Items").
"""

from __future__ import annotations

import bisect
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Parts:
    """What the pickles of items name by number instead of holding it: classes, functions, modules.

    So a class that travels by value travels once, and the items' modules are imported where the payload is loaded, not
    by each worker at its first item. The key is the packing's own; no other one of the same trainer has it.
    """

    __slots__ = ("__weakref__", "key", "parts")

    def __init__(self, key: int, parts: list[Any]) -> None:
        self.key, self.parts = key, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return parts_of, (self.key, self.parts)


_by_key: weakref.WeakValueDictionary[int, Parts] = weakref.WeakValueDictionary()


def parts_of(key: int, parts: list[Any]) -> Parts:
    """Return the parts that this process has under this key, or new ones; pickles of items find them from now on."""
    known = _by_key.get(key)
    if known is None:
        known = _by_key[key] = Parts(key, parts)
    return known


def part(key: int, number: int) -> Any:
    """Return what an item's pickle names. Runs in: a worker, while `PackedList` reads an item."""
    return _by_key[key].parts[number]


def same(value: Any) -> Any:
    """Return the value: what arrives where something was to be packed and was not."""
    return value


class PackedList(Sequence[Any]):
    """A list that was packed, for reading: a source's, or one that the user shares. Each item is new each time.

    Args:
        pickles: `uint8[bytes]`, the items' pickles one after the other.
        offsets: `int64[items + 1]`, where each begins.
        parts: what they name by number, if anything.
        buffers: `uint8[n]` each: large arrays inside items, which are not copied when an item is read.
        wanted: numbers of the items' buffers, in the order in which their pickles ask for them.
        wanted_offsets: `int64[items + 1]`, where each item's begin in `wanted`; None where no item has any.
    """

    __slots__ = (
        "_bytes",
        "_ends",
        "_parts",
        "_size",
        "_state",
        "_views",
        "_wanted",
        "_wanted_ends",
    )

    def __init__(
        self,
        pickles: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        parts: Parts | None,
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

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index < self._size:
            positions = range(self._size)[index]
            return (
                [self[at] for at in positions] if isinstance(positions, range) else self[positions]
            )
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

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """All arrays that it consists of."""
        return [each for each in (*self._state, *self._state[3]) if isinstance(each, np.ndarray)]

    def moved(self, move: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> PackedList:
        """Return the same items in other memory: `move` returns a copy of each array."""
        pickles, offsets, parts, buffers, wanted, wanted_offsets = self._state
        ends = None if wanted_offsets is None else move(wanted_offsets)
        return PackedList(
            move(pickles), move(offsets), parts, list(map(move, buffers)), move(wanted), ends
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedList, self._state

    def __repr__(self) -> str:
        return f"<shared list of {self._size:,} elements>"


class PackedDict(Mapping[Any, Any]):
    """A dict in shared memory, for reading: its keys in order, and its values. A value is a new object each time.

    Keys are found by their hashes, which are sorted here: those of text are others in each interpreter.
    """

    __slots__ = ("_hashes", "_items", "_keys", "_positions")

    def __init__(self, keys: PackedList, items: PackedList) -> None:
        self._keys, self._items = keys, items
        hashes = np.fromiter(map(hash, self), np.int64, len(keys))
        positions = np.argsort(hashes, kind="stable")
        # Views, because they give Python numbers in a fraction of the time that arrays take.
        self._hashes, self._positions = hashes[positions].data, positions.data

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: Any) -> Any:
        hashes, wanted = self._hashes, hash(key)
        at = bisect.bisect_left(hashes, wanted)
        while at < len(hashes) and hashes[at] == wanted:
            position: int = self._positions[at]
            if self._keys[position] == key:
                return self._items[position]
            at += 1
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return map(self._keys.__getitem__, range(len(self._keys)))

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedDict, (self._keys, self._items)

    def __repr__(self) -> str:
        return f"<shared dict of {len(self):,} items>"
