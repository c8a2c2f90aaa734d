"""Pickles items one by one into one block of bytes; what they refer to by name goes beside them, once.

Runs in: the trainer. `sources.packed` is the other end.
"""

from __future__ import annotations

import array
import functools
import io
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loaderpool.sources.packed import PackedItems, Parts, part, same
from loaderpool.system import capacity
from loaderpool.transport.payload.pickler import PayloadPickler

# Things by number. More: each item has a class or function of its own, and there is nothing to gain.
_MOST_PARTS = 1000
# How often the packed bytes are held against the memory that this process has.
_LOOK_EVERY = 4096
_keys = itertools.count(1)
_FUNCTION_KINDS = frozenset({types.FunctionType, type(functools.lru_cache(same))})
_NAMED_KINDS = _FUNCTION_KINDS | {types.BuiltinFunctionType, types.ModuleType}
_NO_OBJECT = (types.ModuleType, type(None))


class ItemFailedError(Exception):
    """Pickling an item raised the cause."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class NotPackableError(Exception):
    """What items are or hold makes another thing of them when each travels alone."""


class Packer:
    """Pickles items one behind the other."""

    def __init__(self, met: set[int], out_of_band_bytes: int) -> None:
        self._file = io.BytesIO()
        self._key, self._parts = next(_keys), _NumberedParts()
        self._pickler = _ItemPickler(self._file, self._is_in_band, met, self._key, self._parts)
        # Past cloudpickle's own `dump`, whose only addition is another error for a deep nesting.
        self._dump = functools.partial(pickle.Pickler.dump, self._pickler)
        self._out_of_band_bytes = out_of_band_bytes
        self._numbers: dict[tuple[int, int], int] = {}  # of buffers, by address and length
        self._buffers: list[Any] = []
        self._wanted: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all pickles so far."""
        return self._file.tell()

    def add(self, item: Any, index: int, forget: bool = True) -> int:
        """Pickle one more item; returns how many bytes it has taken.

        Args:
            item: the item.
            index: its number.
            forget: False: what it holds is written only once, if it is in a later item, too.
        """
        before = self._file.tell()
        try:
            self._dump(item)
        except (NotPackableError, MemoryError):
            raise
        except Exception as error:
            raise ItemFailedError(index) from error
        if forget:
            self._pickler.clear_memo()
        return self._file.tell() - before

    def pack(self, items: Sequence[Any]) -> PackedItems:
        """Pickle all items."""
        ends, wanted_ends = array.array("q", [0]), array.array("q", [0])
        file, dump, pickler, wanted = self._file, self._dump, self._pickler, self._wanted
        try:
            for item in items:
                dump(item)
                pickler.clear_memo()
                ends.append(file.tell())
                wanted_ends.append(len(wanted))
                if not len(ends) % _LOOK_EVERY and file.tell() > capacity.resident_bytes():
                    # More than all that this process has: they hold things together that the first look did not show.
                    raise NotPackableError
        except (NotPackableError, MemoryError):
            raise
        except Exception as error:
            raise ItemFailedError(len(ends) - 1) from error
        return PackedItems(
            np.frombuffer(file.getbuffer(), np.uint8),
            np.array(ends, np.int64),
            Parts(self._key, self._parts.things),
            self._buffers,
            np.array(self._wanted, np.int64),
            np.array(wanted_ends, np.int64) if self._wanted else None,
        )

    def _is_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        flat = flat_bytes(buffer)
        if flat is None or flat.nbytes < self._out_of_band_bytes:
            return True
        bytes_of = np.frombuffer(flat, np.uint8)  # kept, so that its address stays its own
        key = bytes_of.__array_interface__["data"][0], flat.nbytes
        number = self._numbers.setdefault(key, len(self._buffers))
        if number == len(self._buffers):
            self._buffers.append(bytes_of)
        self._wanted.append(number)
        return False


class _NumberedParts:
    """Things that get a number when they are met first."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.references: dict[int, tuple[Any, ...]] = {}  # how each is pickled, by its id


class _ItemPickler(PayloadPickler):
    """Pickles an item; classes, functions and modules by number.

    Raises:
        NotPackableError: the item holds what means another thing when it travels alone.
    """

    def __init__(
        self,
        file: io.BytesIO,
        is_in_band: Callable[[pickle.PickleBuffer], bool],
        met: set[int],
        key: int,
        parts: _NumberedParts,
    ) -> None:
        # A plain dict: cloudpickle's chain of dicts, asked for each object, takes longer than all the rest.
        self.dispatch_table: Any = dict(PayloadPickler.dispatch_table)
        super().__init__(file, protocol=5, buffer_callback=is_in_band)
        self._others, self._key, self._parts = met, key, parts
        self._usual: set[type] = set()  # kinds that are pickled as they are everywhere

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in self._usual:
            if id(obj) in self._others:
                raise NotPackableError
            return NotImplemented
        if kind in _NAMED_KINDS or issubclass(kind, type):
            return self._by_number(obj, kind)
        if id(obj) in self._others or issubclass(
            kind, np.memmap
        ):  # a memmap's file would be opened again for each reading
            raise NotPackableError
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and kind is not io.TextIOWrapper:
            self._usual.add(kind)
        return reduced

    def _by_number(self, named: Any, kind: type) -> Any:
        parts = self._parts
        reference = parts.references.get(id(named))
        if reference is None:
            if named is part or (kind is types.BuiltinFunctionType and not isinstance(named.__self__, _NO_OBJECT)):
                return NotImplemented  # `some_list.append`: the list is the item's own
            is_own = kind in _FUNCTION_KINDS and not _is_global(named)  # what it captures may be the item's own, too
            if is_own or len(parts.things) == _MOST_PARTS:
                raise NotPackableError
            reference = parts.references[id(named)] = part, (self._key, len(parts.things))
            parts.things.append(named)
        return reference


def _is_global(function: Any) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def flat_bytes(buffer: pickle.PickleBuffer) -> memoryview | None:
    """Return the buffer's bytes; None where they are not contiguous, which pickle refuses with a message of its own."""
    try:
        return buffer.raw()
    except BufferError:
        return None
