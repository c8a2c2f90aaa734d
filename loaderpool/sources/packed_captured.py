"""Stand-ins for a list, tuple or dict that a function captures: read as these are, out of one block of bytes.

They take the place of what `supervisor.captured` has found to be read only element by element. An element is made again
when it is read, and stays one object for as long as anything can tell: while something refers to it, while it is among
the latest that were read, and for good once it was changed. So a function that writes into an element, or keeps it,
finds what it would find in a list of its own.
"""

from __future__ import annotations

import bisect
import itertools
import pickle
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loaderpool.sources.packed import PackedItems

# The latest elements that are held although nothing refers to them. Fewer: a function that has kept only a part of an
# element, and writes into it later, would not find that in the element again. More: memory of each worker.
_HELD = 256
# References to an element that only we have: from a variable, and from the call that counts them.
_OWN_REFERENCES = 2


class Elements:
    """Elements by position.

    Args:
        items: their pickles, without arrays beside them.
        are_frozen: no element can be changed, nor anything in it.
        are_exact: an element that was not changed pickles to the bytes that it came from.
    """

    __slots__ = ("_are_exact", "_are_frozen", "_changed", "_held", "_items", "_lock", "_reads")

    def __init__(self, items: PackedItems, are_frozen: bool, are_exact: bool) -> None:
        self._items, self._are_frozen, self._are_exact = items, are_frozen, are_exact
        self._held: dict[int, tuple[Any, bytes]] = {}  # with what each was made from, the latest last
        self._reads = 0  # since some were let go
        self._changed: dict[int, Any] = {}
        self._lock = threading.RLock()  # a worker's threads; pickling may run code that reads elements

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> Any:
        if self._are_frozen:
            return self._items[position]
        with self._lock:
            self._reads += 1
            if self._reads > _HELD and len(self._held) > 2 * _HELD:
                self._let_go()
            found = self._held.get(position)
            if found is not None:
                return found[0]
            if position in self._changed:
                return self._changed[position]
            pickled = self._items.pickle_of(position)
            item = pickle.loads(pickled)
            self._held[position] = item, pickled
            return item

    def _let_go(self) -> None:
        """Forget elements that nothing refers to and that are what they were, but for the latest."""
        held, changed, are_exact = self._held, self._changed, self._are_exact
        # More than have come since the last time: so all that a function has dropped is let go in the end.
        for position in list(itertools.islice(held, min(2 * _HELD, len(held) - _HELD))):
            if position not in held:  # let go by code that pickling ran
                continue
            item, pickled = held.pop(position)
            if sys.getrefcount(item) > _OWN_REFERENCES:
                held[position] = item, pickled
                continue
            try:
                found = pickle.dumps(item, 5)
                is_changed = found != (pickled if are_exact else pickle.dumps(pickle.loads(pickled), 5))
            except Exception:  # it holds something now that it did not come with
                is_changed = True
            if is_changed:
                changed[position] = item
        self._reads = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Elements, (self._items, self._are_frozen, self._are_exact)


class PackedList(Sequence[Any]):
    """A list or tuple whose elements are read; nothing else can be done with it.

    Args:
        elements: the elements.
        kind: list or tuple.
    """

    __slots__ = ("_elements", "_kind", "_size")

    def __init__(self, elements: Elements, kind: type) -> None:
        self._elements, self._kind, self._size = elements, kind, len(elements)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < self._size:  # the usual, first
            return self._elements[index]
        if isinstance(index, slice):
            return self._kind(map(self._elements.__getitem__, range(self._size)[index]))
        try:
            position = range(self._size)[index]
        except (IndexError, TypeError):
            return self._kind()[index]  # raises what a list raises, in its words
        return self._elements[position]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return bool(self._kind(self) == (self._kind(other) if isinstance(other, PackedList) else other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Anywhere else it is a list again."""
        return self._kind, (list(self),)

    def __repr__(self) -> str:
        return repr(self._kind(self))


class PackedDict(Mapping[Any, Any]):
    """A dict whose values are read by key; nothing else can be done with it.

    Keys are found by their hashes, which are sorted here: those of text differ from the trainer's.

    Args:
        keys: in the dict's order; all are of immutable types.
        elements: their values.
    """

    __slots__ = ("_elements", "_hashes", "_keys", "_positions")

    def __init__(self, keys: PackedItems, elements: Elements) -> None:
        self._keys, self._elements = keys, elements
        hashes = np.fromiter((hash(keys[at]) for at in range(len(keys))), np.int64, len(keys))
        positions = np.argsort(hashes, kind="stable")
        # Views, because they give Python numbers in a fraction of the time that arrays take.
        self._hashes, self._positions = hashes[positions].data, positions.data

    def _find(self, key: Hashable) -> int:
        """Return the key's position, or -1."""
        hashes, wanted = self._hashes, hash(key)
        at = bisect.bisect_left(hashes, wanted)
        while at < len(hashes) and hashes[at] == wanted:
            position: int = self._positions[at]
            if self._keys[position] == key:
                return position
            at += 1
        return -1

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: Any) -> Any:
        position = self._find(key)
        if position < 0:
            raise KeyError(key)
        return self._elements[position]

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def get(self, key: Any, default: Any = None, /) -> Any:
        """Return the key's value, or the default."""
        position = self._find(key)
        return default if position < 0 else self._elements[position]

    def __iter__(self) -> Iterator[Any]:
        return map(self._keys.__getitem__, range(len(self._keys)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Anywhere else it is a dict again."""
        return dict, (list(self.items()),)

    def __repr__(self) -> str:
        return repr(dict(self))
