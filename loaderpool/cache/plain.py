"""Plain values as bytes, without pickle: arrays of numbers and text, alone or in containers with plain Python values.

    [ 0x01 | how long the outline is: u32 | the outline: JSON | the bytes of each array, one behind the other ]

The outline says what there is: a number or a text is itself, and all else a list that begins with its kind. Reading
them back runs no code but that of NumPy and JSON, whatever the bytes are.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

PLAIN = 1
"""The first byte. A pickle's is 128."""

_START = struct.Struct("<BI")
_SCALARS = frozenset({bool, int, float, str})
_CONTAINERS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}
_KINDS = "biufcSUmM"  # of dtypes that their text says all of; others (records, objects, extensions) are pickled
_decode = json.JSONDecoder().raw_decode  # `decode` looks for blanks besides, and takes twice as long


class _NotPlain(Exception):
    """The value is another one, or would not come back as it is."""


def dump_plain(value: Any) -> bytes | None:
    """The value's bytes; None where it is not plain, or has no array and no bytes: a pickle of that is quicker."""
    parts: list[Any] = []
    try:
        outline = json.dumps(_outline(value, parts, set()), separators=(",", ":")).encode()
    except (_NotPlain, ValueError, RecursionError):  # ValueError: an integer of thousands of digits
        return None
    return b"".join([_START.pack(PLAIN, len(outline)), outline, *parts]) if parts else None


def load_plain(data: bytes | memoryview) -> Any:
    """Return the value again, in memory of its own.

    Raises:
        Exception: these are not the bytes of `dump_plain`; nothing else has happened.
    """
    _, length = _START.unpack_from(data)
    start = _START.size + length
    return _Reader(data, start).value(_decode(str(data[_START.size : start], "ascii"))[0])


def _outline(value: Any, parts: list[Any], seen: set[int]) -> Any:
    kind = type(value)
    if value is None or kind in _SCALARS:
        if kind is float and math.isnan(value):  # JSON has only one of them
            raise _NotPlain
        return value
    if kind is bytes:
        parts.append(value)
        return ["bytes", len(value)]
    if isinstance(value, np.generic):
        _check_dtype(value.dtype)
        if kind is not value.dtype.type:
            raise _NotPlain
        parts.append(value.tobytes())
        return ["scalar", value.dtype.str]
    if id(value) in seen:  # the same object twice, or within itself: pickle has it come back as one
        raise _NotPlain
    seen.add(id(value))
    if kind is np.ndarray:
        return _array_outline(value, parts)
    name = _CONTAINERS.get(kind)
    if name is None:
        raise _NotPlain
    items = [part for pair in value.items() for part in pair] if kind is dict else value
    return [name, *(_outline(item, parts, seen) for item in items)]


def _array_outline(array: npt.NDArray[Any], parts: list[Any]) -> Any:
    _check_dtype(array.dtype)
    flags = array.flags
    is_fortran = flags.f_contiguous and not flags.c_contiguous
    flat = np.ascontiguousarray(array.T if is_fortran else array).reshape(-1)  # a copy of what is not contiguous
    parts.append(flat.view(np.uint8).data)
    is_locked = flags.forc and not flags.writeable  # as pickle has it: of others the copy is the reader's own
    outline = ["array", array.dtype.str, array.shape]
    return [*outline, is_fortran, is_locked] if is_fortran or is_locked else outline


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in _KINDS or not dtype.itemsize or dtype.metadata or np.dtype(dtype.str) != dtype:
        raise _NotPlain


@functools.lru_cache(maxsize=64)
def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {text!r} is not plain")
    return dtype


class _Reader:
    """Takes what the outline says from the bytes behind them, in order."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data, self._at = data, at

    def value(self, outline: Any) -> Any:
        if type(outline) is not list:
            return outline
        kind, *rest = outline
        if kind == "array":
            return self._array(*rest)
        if kind == "scalar":
            return self._array(rest[0], ())[()]
        if kind == "bytes":
            return self._bytes(rest[0])
        items = [each if type(each) is not list else self.value(each) for each in rest]
        if kind == "list":
            return items
        if kind == "tuple":
            return tuple(items)
        if kind == "dict":
            return dict(zip(items[::2], items[1::2], strict=True))
        raise ValueError(f"there is no kind {kind!r}")

    def _array(self, text: str, shape: Any, is_fortran: bool = False, is_locked: bool = False) -> Any:
        if is_fortran:
            array = np.ndarray(shape, _dtype(text), self._data, self._at, order="F").copy("F")
        else:
            array = np.ndarray(shape, _dtype(text), self._data, self._at).copy()
        self._at += array.nbytes
        if is_locked:
            array.flags.writeable = False
        return array

    def _bytes(self, length: int) -> bytes:
        start = self._at
        self._at += length
        if not start <= self._at <= len(self._data):
            raise ValueError("the bytes end early")
        return bytes(self._data[start : self._at])
