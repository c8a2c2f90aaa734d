"""Checksums of values that another process, started from the same program and data, comes to as well.

A pickle will not do: it depends on which objects are the same one, on the order of sets (another in each process), and
has functions by name.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import io
import os
import pickle
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loaderpool.sources.arrow_columns import ViewColumn

# Arrays up to this are read whole; of a larger one so many pieces, evenly spaced, so that a matrix of many gigabytes
# takes no minute.
_WHOLE_BYTES = 64 << 20
_PIECES, _PIECE_BYTES = 64, 1 << 20
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type(functools.lru_cache(lambda: None)),
)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_SET_CODES = (pickle.EMPTY_SET, pickle.FROZENSET)
_CHUNK_ITEMS = 4096
# How deep values in values are looked into. Not as deep as Python allows: that depends on how deep the caller stands.
_MOST_LEVELS = 100


class Contents:
    """Feeds values to a checksum.

    Args:
        on_code: called with functions and classes that are met, which are not this one's to read.
    """

    def __init__(self, on_code: Callable[[Any], None]) -> None:
        self._state = hashlib.blake2b(digest_size=8)
        self._on_code = on_code
        self._within: set[int] = set()

    def hexdigest(self) -> str:
        """The checksum of all that was fed."""
        return self._state.hexdigest()

    def feed(self, value: Any) -> None:
        """Take in one value, whatever it is; of what cannot be looked into, its type counts."""
        kind = type(value)
        self._mark(f"{kind.__module__}.{kind.__qualname__}")
        if kind in _PLAIN or kind is complex:
            self._mark(repr(value))
        elif isinstance(value, (*_FUNCTIONS, type)):
            self._on_code(value)
            self._mark(getattr(value, "__qualname__", ""))
        elif id(value) in self._within:
            self._mark("itself")
        elif len(self._within) < _MOST_LEVELS:
            self._within.add(id(value))
            try:
                self._feed_composed(value)
            finally:
                self._within.discard(id(value))

    def _feed_composed(self, value: Any) -> None:
        if isinstance(value, np.memmap) and value.filename is not None:
            self._feed_file(value, os.fspath(value.filename))
        elif isinstance(value, np.ndarray):
            self._feed_array(value)
        elif isinstance(value, np.generic):
            self._mark(value.dtype.str)
            self._state.update(value.tobytes())
        elif type(value) in (list, tuple):
            self._feed_items(value)
        elif type(value) is dict:
            self._feed_items([part for item in value.items() for part in item])
        elif isinstance(value, (set, frozenset)):
            self._feed_items(sorted(self._digest(part) for part in value))
        elif isinstance(value, (bytearray, memoryview)):
            self._state.update(value)
        elif isinstance(value, os.PathLike):
            self._mark(os.fsdecode(value))
        elif isinstance(value, re.Pattern):
            self.feed((value.pattern, value.flags))
        elif isinstance(value, enum.Enum):
            self._mark(value.name)
        elif isinstance(value, types.ModuleType):
            self._mark(value.__name__)
        elif isinstance(value, (range, slice, np.dtype)):
            self._mark(repr(value))
        elif isinstance(value, ViewColumn):  # where its texts lie in which buffer is chance
            self.feed(value.compact())
        else:
            self._on_code(type(value))
            self._feed_parts(value)

    def _feed_parts(self, value: Any) -> None:
        """An object by what pickle takes it apart into."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # an open file, a lock
            parts = ()
        if isinstance(parts, str):
            self._mark(parts)
            return
        for part in parts[:3]:
            self.feed(part)
        for items in parts[3:5]:
            self.feed(list(items) if items is not None else None)

    def _feed_items(self, items: Sequence[Any]) -> None:
        """Many at a time: a source may have millions of them."""
        self._mark(str(len(items)))
        for start in range(0, len(items), _CHUNK_ITEMS):
            chunk = items[start : start + _CHUNK_ITEMS]
            if _PLAIN.issuperset(map(type, chunk)):
                self._mark(repr(chunk))
                continue
            for item in chunk:
                pickled = _quick_pickle(item) if len(items) > _CHUNK_ITEMS else None
                if pickled is None or any(code in pickled for code in _SET_CODES):
                    self.feed(item)
                else:
                    self._state.update(pickled)

    def _feed_array(self, array: np.ndarray[Any, Any]) -> None:
        self._mark(f"{array.dtype.descr} {array.shape}")
        if array.dtype.hasobject:
            self._feed_items(array.ravel().tolist())
            return
        if array.nbytes <= _WHOLE_BYTES:
            self._state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            return
        if not array.flags.forc:
            rows = np.unique(np.linspace(0, len(array) - 1, _PIECES).astype(int))
            self._state.update(np.ascontiguousarray(array[rows]).reshape(-1).view(np.uint8).data)
            return
        flat = array.ravel(order="K")
        size = max(1, _PIECE_BYTES // array.dtype.itemsize)
        for start in np.linspace(0, max(0, len(flat) - size), _PIECES).astype(int):
            self._state.update(flat[start : start + size].view(np.uint8).data)

    def _feed_file(self, array: np.memmap[Any, Any], path: str) -> None:
        """Feed an array by its file, which is not read."""
        self._mark(f"{path} {array.offset} {array.dtype.descr} {array.shape}")
        try:
            status = os.stat(path)
            self._mark(f"{status.st_size} {status.st_mtime_ns}")
        except OSError:
            pass

    def _digest(self, value: Any) -> str:
        part = Contents(self._on_code)
        part._within = self._within
        part.feed(value)
        return part.hexdigest()

    def _mark(self, text: str) -> None:
        """A text, and where it ends."""
        data = text.encode("utf-8", "surrogatepass")
        self._state.update(len(data).to_bytes(8, "little"))
        self._state.update(data)


def _quick_pickle(item: Any) -> bytes | None:
    """Return a pickle that tells equal objects not from the same ones; None where there is none.

    A byte of it may mean a set, whose order is another in each process: the caller looks for that.
    """
    with io.BytesIO() as file:
        pickler = pickle.Pickler(file, 4)
        pickler.fast = True  # without a memo
        try:
            pickler.dump(item)
        except Exception:
            return None
        return file.getvalue()
