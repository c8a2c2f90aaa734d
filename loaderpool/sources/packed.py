"""Items packed in one block of bytes. Each item is pickled separately, and unpickled at each read.

If forked workers share Python objects, changes of reference counts copy the memory page by page.
Bytes have no reference counts, so all workers read the same pages in all epochs
(docs/internals/memory.md, "Items").
"""

from __future__ import annotations

import bisect
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt


class Parts:
    """Classes, functions and modules to which the pickles of items refer by number.

    A class that is pickled by value is sent only once. Modules of the items are imported in the
    process that loads the payload, not by each worker at its first item.

    Args:
        key: key of the packing, unique in the main process.
        parts: the objects, by number.
    """

    __slots__ = ("__weakref__", "key", "parts")

    def __init__(self, key: int, parts: list[Any]) -> None:
        self.key, self.parts = key, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return parts_of, (self.key, self.parts)


_by_key: weakref.WeakValueDictionary[int, Parts] = weakref.WeakValueDictionary()


def parts_of(key: int, parts: list[Any]) -> Parts:
    """Return this process's parts for a key; register `parts` if there are none.

    From then on, `part` finds them when it unpickles items.
    """
    known = _by_key.get(key)
    if known is None:
        known = _by_key[key] = Parts(key, parts)
    return known


def part(key: int, number: int) -> object:
    """Return the part to which an item's pickle refers. Called by `pickle`, in any reader.

    Its caller is `PackedList`, while it reads an item.
    """
    return _by_key[key].parts[number]


def same(value: object) -> object:
    """Return the value. Pickles call this for a list that could not be packed."""
    return value


class PackedList(Sequence[Any]):
    """A packed list, read-only: of a source, or one that the user shares.

    Each read of an item returns a new object.

    Args:
        pickles: `uint8[bytes]`, the pickles of all items, joined.
        offsets: `int64[items + 1]`, start of each pickle, and the end of the last one.
        parts: objects to which the pickles refer by number; None: there are none.
        buffers: large arrays inside items, each `uint8[n]`. Reading an item does not copy them.
        wanted: numbers of the items' buffers, in the order in which the pickles use them.
        wanted_offsets: `int64[items + 1]`, start of each item's numbers in `wanted`, and their end;
            None: no item has buffers.
    """

    __slots__ = (
        "__weakref__",
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
        # Memoryviews, because they return Python numbers and slices much faster than arrays do.
        self._bytes, self._ends, self._wanted = pickles.data, offsets.data, wanted.data
        self._views = [buffer.data for buffer in buffers]
        self._wanted_ends = None if wanted_offsets is None else wanted_offsets.data
        self._size = len(offsets) - 1

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
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
        """Size of all pickles in bytes, without the arrays in `buffers`."""
        return len(self._bytes)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """All arrays of the list, such as pickles, offsets and buffers."""
        return [each for each in (*self._state, *self._state[3]) if isinstance(each, np.ndarray)]

    def moved(self, move: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> PackedList:
        """Return a copy of the list, with each array copied by `move`."""
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
    """A read-only dict in shared memory. It keeps the order of its keys.

    Each read of a value returns a new object. A key is found by its hash, in a sorted array of
    hashes. Each process makes that array itself, because hashes of text differ between
    interpreters.
    """

    __slots__ = ("__weakref__", "_hashes", "_items", "_keys", "_positions")

    def __init__(self, keys: PackedList, items: PackedList) -> None:
        self._keys, self._items = keys, items
        hashes = np.fromiter(map(hash, self), np.int64, len(keys))
        positions = np.argsort(hashes, kind="stable")
        # Memoryviews, because they return Python numbers much faster than arrays do.
        self._hashes = hashes[positions].data
        few = np.int32 if len(keys) <= np.iinfo(np.int32).max else np.int64
        self._positions = positions.astype(few).data

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: object) -> Any:
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

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """All arrays of keys and values."""
        return [*self._keys.arrays, *self._items.arrays]

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedDict, (self._keys, self._items)

    def __repr__(self) -> str:
        return f"<shared dict of {len(self):,} items>"
