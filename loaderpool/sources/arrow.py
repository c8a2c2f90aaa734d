"""A column of a polars or pyarrow table as arrays that look at its memory, by Arrow's C data interface.

    column ──__arrow_c_stream__──▶ chunks: addresses of buffers ──▶ arrays; text, lists and categories made of arrays

So neither library need be imported here, nor come along to the workers. What the structures mean stands in
https://arrow.apache.org/docs/format/CDataInterface.html and, for the layout of buffers, in /docs/format/Columnar.html.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.arrow_columns import INLINE_BYTES, CodedColumn, ListColumn, TextColumn, ViewColumn

_Arrays = list[npt.NDArray[Any]]

_NUMBERS = {
    "c": "i1", "C": "u1", "s": "i2", "S": "u2", "i": "i4", "I": "u4", "l": "i8", "L": "u8",
    "e": "f2", "f": "f4", "g": "f8", "tdD": "i4", "tdm": "M8[ms]",
    "tDs": "m8[s]", "tDm": "m8[ms]", "tDu": "m8[us]", "tDn": "m8[ns]",
}  # fmt: skip
_TIMESTAMPS = {"tss": "M8[s]", "tsm": "M8[ms]", "tsu": "M8[us]", "tsn": "M8[ns]"}  # then ":" and the time zone
_TEXTS = {"u": True, "U": True, "z": False, "Z": False}  # whether it is text
_VIEWS = {"vu": True, "vz": False}
_LISTS = ("+l", "+L")
_OFFSETS = {"u": "i4", "z": "i4", "+l": "i4", "U": "i8", "Z": "i8", "+L": "i8"}
# Buffers of views that hold more than so many times what the rows of a slice need are not sent whole.
_MOST_WASTE = 2
_EXACT_IN_FLOAT64 = 1 << 53


class _Schema(ctypes.Structure):
    pass


class _Array(ctypes.Structure):
    pass


class _Stream(ctypes.Structure):
    pass


_Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_void_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ("private_data", ctypes.c_void_p),
]
_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ("private_data", ctypes.c_void_p),
]
_Stream._fields_ = [
    ("get_schema", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
    ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
    ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ("private_data", ctypes.c_void_p),
]
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class TableMemory:
    """Memory that a library has lent: an array over it keeps what owns it alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, dtype: np.dtype[Any], count: int, owner: Any) -> None:
        self.__array_interface__ = {"data": (address, True), "typestr": dtype.str, "shape": (count,), "version": 3}
        self._owner = owner


class _Chunk(NamedTuple):
    """Rows of one array of a column."""

    array: Any  # an _Array
    start: int  # of its first row in the buffers
    rows: int
    owner: Any

    @classmethod
    def of(cls, array: Any, owner: Any) -> _Chunk:
        return cls(array, array.offset, array.length, owner)

    def part(self, start: int, rows: int) -> _Chunk:
        """Return some rows of its only child, by number there."""
        child = self.array.children[0].contents
        return _Chunk(child, child.offset + start, rows, self.owner)

    def buffer(self, number: int, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
        """Return the elements of one of its buffers."""
        kind = np.dtype(dtype)
        address = self.array.buffers[number]
        if not count or not address:
            return np.zeros(count, kind)
        return np.asarray(TableMemory(address + start * kind.itemsize, kind, count, self.owner))

    def bits(self, number: int) -> npt.NDArray[np.bool_]:
        """Return the rows' bits, of a buffer of bits."""
        first = self.start // 8
        packed = self.buffer(number, "u1", first, (self.start + self.rows + 7) // 8 - first)
        return np.unpackbits(packed, bitorder="little")[self.start % 8 :][: self.rows].view(bool)

    @property
    def missing(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are null; None: none is."""
        if self.array.null_count == 0 or not self.array.n_buffers or not self.array.buffers[0]:
            return None
        missing = ~self.bits(0)
        return missing if missing.any() else None


def arrow_column(column: Any, name: str) -> Any:
    """Return what gives a column's rows by number; None where its type is none that is read from memory.

    Numbers, truth values and times are arrays: without a copy where they stand in one chunk and none is null. A null
    among numbers is NaN (and the numbers are floats), among times NaT, else None.

    Args:
        column: has `__arrow_c_stream__` or `__arrow_c_array__`.
        name: for messages.

    Raises:
        ArgumentError: it has nulls beside integers that no float64 can hold.
        SourceError: the library could not give the column away.
    """
    opened = _opened(column, name)
    if opened is None:
        return None
    schema, chunks, release = opened
    try:
        return _column(schema, [chunk for chunk in chunks if chunk.rows] or chunks[:1], name)
    finally:
        release()


def _opened(column: Any, name: str) -> tuple[Any, list[_Chunk], Callable[[], None]] | None:
    """Return the column's schema, its chunks, and what gives the schema back."""
    if hasattr(column, "__arrow_c_stream__"):
        return _of_stream(column.__arrow_c_stream__(), name)
    if not hasattr(column, "__arrow_c_array__"):
        return None
    capsules = column.__arrow_c_array__()  # they own what they point to
    schema = _Schema.from_address(_pointer_of(capsules[0], b"arrow_schema"))
    array = _Array.from_address(_pointer_of(capsules[1], b"arrow_array"))
    return schema, [_Chunk.of(array, capsules)], lambda: None


def _of_stream(capsule: Any, name: str) -> tuple[Any, list[_Chunk], Callable[[], None]]:
    address = _pointer_of(capsule, b"arrow_array_stream")
    stream = _Stream.from_address(address)
    schema = _Schema()
    _check(stream.get_schema(address, ctypes.addressof(schema)), stream, address, name)

    def release() -> None:
        schema.release(ctypes.addressof(schema))

    chunks: list[_Chunk] = []
    try:
        while True:
            array = _Array()
            _check(stream.get_next(address, ctypes.addressof(array)), stream, address, name)
            if not array.release:
                return schema, chunks, release
            chunks.append(_Chunk.of(array, _Lent(array)))
    except BaseException:
        release()
        raise


class _Lent:
    """Gives an array back to its library when nothing looks at it any more."""

    def __init__(self, array: Any) -> None:
        finalizer: Any = weakref.finalize(self, _give_back, array)
        finalizer.atexit = False  # views may outlive it, and the process's end frees all


def _give_back(array: Any) -> None:
    array.release(ctypes.addressof(array))


def _check(code: int, stream: Any, address: int, name: str) -> None:
    if code:
        told = stream.get_last_error(address)
        raise SourceError(f"{name} cannot be read: {(told or b'').decode(errors='replace') or f'error {code}'}")


# ---- from chunks to a column ----


def _column(schema: Any, chunks: list[_Chunk], name: str) -> Any:
    kind = schema.format.decode()
    if not chunks or _is_extension(schema):
        return None
    if schema.dictionary:
        return _categories(schema, kind, chunks, name)
    if kind == "b":
        truths = _joined([chunk.bits(1) for chunk in chunks])
        missing = _missing(chunks)
        if missing is None:
            return truths
        objects = truths.astype(object)
        objects[missing] = None
        return objects
    dtype = _NUMBERS.get(kind) or _TIMESTAMPS.get(kind[:3]) or ""
    if dtype:
        values = _joined([chunk.buffer(1, dtype, chunk.start, chunk.rows) for chunk in chunks])
        if kind == "tdD":
            values = values.astype("M8[D]")
        return _without_nulls(values, _missing(chunks), name)
    if kind in _TEXTS:
        offsets, data = _pieces(chunks, kind, lambda chunk, start, count: chunk.buffer(2, "u1", start, count))
        return TextColumn(offsets, data, _missing(chunks), _TEXTS[kind])
    if kind in _VIEWS:
        return _views(chunks, _VIEWS[kind])
    if kind in _LISTS:
        return _lists(schema, kind, chunks, name)
    if kind.startswith("+w:") and _missing(chunks) is None:
        width = int(kind[3:])
        inner = schema.children[0].contents
        values = _column(inner, [chunk.part(chunk.start * width, chunk.rows * width) for chunk in chunks], name)
        return values.reshape(-1, width, *values.shape[1:]) if _is_numeric(values) else None
    return None


def _is_extension(schema: Any) -> bool:
    """Whether the column is of a type that only its library knows, and this is just how it is stored."""
    address = schema.metadata
    if not address:
        return False

    def number() -> int:
        nonlocal address
        address += 4
        return ctypes.c_int32.from_address(address - 4).value

    for part in range(2 * number()):
        length = number()
        if part % 2 == 0 and ctypes.string_at(address, length) == b"ARROW:extension:name":
            return True
        address += length
    return False


def _is_numeric(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind in "iufb"


def _joined(parts: _Arrays) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _missing(chunks: list[_Chunk]) -> npt.NDArray[np.bool_] | None:
    parts = [chunk.missing for chunk in chunks]
    if all(part is None for part in parts):
        return None
    return _joined(
        [np.zeros(chunk.rows, bool) if part is None else part for chunk, part in zip(chunks, parts, strict=True)]
    )


def _without_nulls(values: npt.NDArray[Any], missing: Any, name: str) -> npt.NDArray[Any]:
    if missing is None:
        return values
    if values.dtype.kind in "iu":
        there = values[~missing]
        if len(there) and max(abs(int(there.min())), abs(int(there.max()))) > _EXACT_IN_FLOAT64:
            raise ArgumentError(
                f"{name} has nulls, which are read as NaN, and integers beyond 2**53, which a float64 cannot hold: "
                "fill its nulls first, or make the column one of text"
            )
        values = values.astype(np.float64)
    filled: npt.NDArray[Any] = values.copy()
    filled[missing] = np.nan if values.dtype.kind == "f" else np.array("NaT", values.dtype)
    return filled


def _pieces(
    chunks: list[_Chunk], kind: str, contents: Callable[[_Chunk, int, int], Any]
) -> tuple[npt.NDArray[np.int64], Any]:
    """Return the offsets from 0 on, and what lies between them, of columns with one buffer of offsets."""
    offsets, parts = [np.zeros(1, np.int64)], []
    end = 0
    for chunk in chunks:
        own = chunk.buffer(1, _OFFSETS[kind], chunk.start, chunk.rows + 1)
        first, last = int(own[0]), int(own[-1])
        offsets.append(own[1:].astype(np.int64) + (end - first))
        parts.append(contents(chunk, first, last - first))
        end += last - first
    return np.concatenate(offsets), _joined(parts)


def _lists(schema: Any, kind: str, chunks: list[_Chunk], name: str) -> ListColumn | None:
    inner = schema.children[0].contents
    nulls = False

    def contents(chunk: _Chunk, start: int, count: int) -> Any:
        nonlocal nulls
        part = chunk.part(start, count)
        if part.missing is None:
            return _column(inner, [part], name)
        nulls = True
        return np.zeros(0)

    if inner.format.decode() not in _NUMBERS or inner.dictionary or _is_extension(inner):
        return None
    offsets, values = _pieces(chunks, kind, contents)
    return None if nulls else ListColumn(offsets, values, _missing(chunks))


def _views(chunks: list[_Chunk], is_text: bool) -> ViewColumn | TextColumn:
    views: _Arrays = []
    buffers: _Arrays = []
    numbers: dict[int, int] = {}  # by address: chunks that are parts of one column share their buffers
    for chunk in chunks:
        own = chunk.buffer(1, "i4", 4 * chunk.start, 4 * chunk.rows).reshape(-1, 4)
        count = chunk.array.n_buffers - 3  # beside validity, views, and the sizes of the others
        sizes = chunk.buffer(2 + count, "i8", 0, count).tolist()
        for number, size in enumerate(sizes):
            if numbers.setdefault(chunk.array.buffers[2 + number] or 0, len(buffers)) == len(buffers):
                buffers.append(chunk.buffer(2 + number, "u1", 0, size))
        found = [numbers[chunk.array.buffers[2 + number] or 0] for number in range(count)]
        if found != list(range(count)):
            own = own.copy()
            is_long = own[:, 0] > INLINE_BYTES
            if chunk.missing is not None:  # whose views are anything
                is_long &= ~chunk.missing
            own[is_long, 2] = np.array(found, np.int32)[own[is_long, 2]]
        views.append(own)
    joined, missing = _joined(views), _missing(chunks)
    column = ViewColumn(joined, buffers, missing, is_text)
    lengths = joined[:, 0] if missing is None else joined[~missing, 0]
    if sum(buffer.nbytes for buffer in buffers) <= _MOST_WASTE * int(lengths.sum(dtype=np.int64)):
        return column
    return column.compact()  # rows of a slice share their buffers with all that was sliced


def _categories(schema: Any, kind: str, chunks: list[_Chunk], name: str) -> CodedColumn | None:
    """Each chunk may have values of its own."""
    parts = [_Chunk.of(chunk.array.dictionary.contents, chunk.owner) for chunk in chunks]
    values = _column(schema.dictionary.contents, parts, name)
    if values is None:
        return None
    firsts = np.cumsum([0, *(part.rows for part in parts[:-1])])
    codes = [
        chunk.buffer(1, _NUMBERS[kind], chunk.start, chunk.rows).astype(np.int64) + first
        for chunk, first in zip(chunks, firsts.tolist(), strict=True)
    ]
    return CodedColumn(_joined(codes), values, _missing(chunks))
