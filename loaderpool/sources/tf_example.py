"""Parses `tf.train.Example`, the message that most TFRecord files hold, without TensorFlow and without protobuf.

An Example is a map of names to Features, and a Feature one list of bytes, floats or ints:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
How these lie in bytes: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, ArgumentTypeError

# A field's tag is its number << 3 | its wire type. The first field of a message, with a length before it:
_FIRST = 1 << 3 | 2
_SECOND = 2 << 3 | 2
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
# The lists of a Feature, by tag. Their values are the list's first field: all behind one tag, or each with its own tag.
_BYTES, _FLOAT, _INT64 = _FIRST, _SECOND, 3 << 3 | 2
_KINDS = {_BYTES: "bytes", _FLOAT: "float32", _INT64: "int64"}
_ONE_FLOAT, _ONE_INT64 = 1 << 3 | _FOUR_BYTES, 1 << 3 | _VARINT
_MOST_VARINT_BYTES = 10
_FEW_BYTES = 16
"""Ints in so many bytes are decoded one by one; where there are more, NumPy's dozen calls are sooner done."""

_Span = tuple[int, int]


class _WantedFeature(NamedTuple):
    name: str
    key: bytes
    kind: int  # the tag of its list
    dtype: npt.DTypeLike
    shape: tuple[int | None, ...]
    number: int  # of its values; where its length varies, it has a multiple of so many
    has_default: bool


def parse_example(record: bytes, features: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a serialised `tf.train.Example`, as `tf.io.parse_single_example` does, and returns NumPy values.

    Runs in: the caller's process, so in workers within the function. It needs neither TensorFlow nor protobuf.

    Args:
        record: the message's bytes, such as an item of `TFRecords`.
        features: the features wanted, by name; others are not looked into. What each is:

            - a dtype (`np.int64`, `np.float32` or `bytes`): one value, as `FixedLenFeature([], dtype)`.
            - `(shape, dtype)`: an array, as `FixedLenFeature(shape, dtype)`. With None as its first dimension, such as
              `(None,)` or `(None, 4)`: of any length, and empty where the record lacks it, as `VarLenFeature(dtype)`.
            - `(shape, dtype, default)`: the default, of that shape or one value for all, where the record lacks it.

    Returns:
        name to value, in the order of `features`. One value is a NumPy scalar or bytes; an array is int64[shape],
        float32[shape] or object[shape] of bytes, in memory of its own.

    Raises:
        ArgumentError: the record lacks a feature that has no default, has one of another kind or number of values, or
            is no Example; or `features` has a wrong value.
        ArgumentTypeError: the record is not bytes, or `features` no mapping.
    """
    if type(record) is not bytes:
        record = _as_bytes(record)
    if not isinstance(features, Mapping):
        raise ArgumentTypeError(f"features must be a dict of names and what they are, got {type(features).__name__}")
    asked = tuple(features.items())
    try:
        wanted = _cached_wanted(asked)
    except TypeError:  # a default that cannot be hashed, such as an array
        wanted = _wanted(asked)
    try:
        found = _find(record)
        return {each.name: _value(record, each, features, found) for each in wanted}
    except (IndexError, _Malformed):
        raise ArgumentError(f"record: these {len(record):,} bytes are no tf.train.Example (or a damaged one)") from None


class _Malformed(Exception):
    """A length or a value reaches beyond the message that it is in, or is nothing that Protocol Buffers have."""


def _as_bytes(record: Any) -> bytes:
    if isinstance(record, (bytes, bytearray, memoryview)):
        return bytes(record)
    raise ArgumentTypeError(f"record must be the bytes of a tf.train.Example, got {type(record).__name__}")


# ---- what is wanted ----


def _wanted(asked: tuple[tuple[str, Any], ...]) -> tuple[_WantedFeature, ...]:
    return tuple(_want(name, what) for name, what in asked)


_cached_wanted = functools.lru_cache(64)(_wanted)


def _want(name: str, what: Any) -> _WantedFeature:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"features: names must be str, got {name!r}")
    if isinstance(what, tuple) and len(what) not in (2, 3):
        raise ArgumentError(f"features[{name!r}] must be dtype, (shape, dtype) or (shape, dtype, default): {what!r}")
    given_shape, dtype, default = (*what, None)[:3] if isinstance(what, tuple) else ((), what, None)
    kind = _kind_of_dtype(name, dtype)
    shape = _checked_shape(name, given_shape)
    number = math.prod(size for size in shape if size is not None)
    if shape[:1] == (None,):
        if default is not None:
            raise ArgumentError(f"features[{name!r}]: what may have any length is empty where it lacks: no default")
        if not number:
            raise ArgumentError(f"features[{name!r}]: shape {shape} has no values, however long it is")
    made = {_BYTES: np.dtype(object), _FLOAT: np.dtype(np.float32), _INT64: np.dtype(np.int64)}[kind]
    wanted = _WantedFeature(name, name.encode(), kind, made, shape, number, default is not None)
    if wanted.has_default:
        _default(wanted, default)
    return wanted


def _kind_of_dtype(name: str, dtype: Any) -> int:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    kinds = {np.dtype(np.int64): _INT64, np.dtype(np.float32): _FLOAT, np.dtype(bytes): _BYTES}
    if found not in kinds or dtype is None:  # which NumPy takes for float64
        shown = dtype.__name__ if isinstance(dtype, type) else dtype
        raise ArgumentError(f"features[{name!r}]: an Example has np.int64, np.float32 or bytes, not {shown}")
    return kinds[found]


def _checked_shape(name: str, shape: Any) -> tuple[int | None, ...]:
    if not isinstance(shape, (tuple, list)):
        raise ArgumentError(f"features[{name!r}]: the shape must be a tuple such as () or (None, 4), got {shape!r}")
    for at, size in enumerate(shape):
        is_size = isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0
        if not (is_size or (size is None and at == 0)):
            raise ArgumentError(f"features[{name!r}]: shape {shape!r}: sizes are numbers, the first may be None")
    return tuple(None if size is None else int(size) for size in shape)


def _default(wanted: _WantedFeature, default: Any) -> Any:
    """Returns the default's value for one record. It is not kept with `wanted`: a cache cannot tell -0.0 from 0.0."""
    try:
        given = np.array(default, object if wanted.kind == _BYTES else None)
        values = np.broadcast_to(given.astype(wanted.dtype, casting="same_kind"), wanted.shape)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"features[{wanted.name!r}]: default {default!r} does not fit: {error}") from None
    if wanted.kind == _BYTES and not all(isinstance(value, bytes) for value in values.flat):
        raise ArgumentError(f"features[{wanted.name!r}]: default {default!r} is not bytes")
    return values.copy() if wanted.shape else values[()]


# ---- what there is ----


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in data[at:end]: tag, and where the value begins and ends."""
    while at < end:
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1)
        wire = tag & 7
        if wire == _LENGTH:
            size = data[at]
            at += 1
            if size > 127:
                size, at = _varint(data, at - 1)
            stop = at + size
        elif wire == _VARINT:
            stop = _varint(data, at)[1]
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            stop = at + (4 if wire == _FOUR_BYTES else 8)
        else:
            raise _Malformed
        if stop > end or tag < 8:  # no field has the number 0
            raise _Malformed
        yield tag, at, stop
        at = stop


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a whole number of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise _Malformed


def _find(data: bytes) -> dict[bytes, list[_Span]]:
    """Return where the Feature of each name lies; of a name that comes twice the last, as in any map."""
    found: dict[bytes, list[_Span]] = {}
    for tag, start, stop in _fields(data, 0, len(data)):
        if tag != _FIRST:
            continue
        for entry_tag, entry_start, entry_stop in _fields(data, start, stop):
            if entry_tag != _FIRST:
                continue
            key, spans = b"", []
            for part, at, end in _fields(data, entry_start, entry_stop):
                if part == _FIRST:
                    key = data[at:end]
                elif part == _SECOND:
                    spans.append((at, end))
            found[key] = spans
    return found


def _list_of(data: bytes, spans: list[_Span]) -> tuple[int, list[_Span]]:
    """Return the tag of a Feature's list, 0 where it has none, and the list's pieces; the Feature may be in pieces."""
    kind = 0
    pieces: list[_Span] = []
    for start, stop in spans:
        for tag, at, end in _fields(data, start, stop):
            if tag in _KINDS:
                if tag != kind:  # it has one list: the last kind that is set
                    kind, pieces = tag, []
                pieces.append((at, end))
    return kind, pieces


def _value(data: bytes, wanted: _WantedFeature, features: Mapping[str, Any], found: dict[bytes, list[_Span]]) -> Any:
    kind, pieces = _list_of(data, found.get(wanted.key, []))
    is_open = wanted.shape[:1] == (None,)
    if not kind and is_open:
        return np.empty((0, *wanted.shape[1:]), wanted.dtype)
    if not kind and wanted.has_default:
        return _default(wanted, features[wanted.name][2])
    if kind != wanted.kind:
        raise _differs(data, wanted, found, kind)
    fields = [field for start, stop in pieces for field in _fields(data, start, stop)]
    values: Any
    if kind == _BYTES:
        values = [data[at:end] for tag, at, end in fields if tag == _FIRST]
    else:
        one = _ONE_FLOAT if kind == _FLOAT else _ONE_INT64
        packed = [data[at:end] for tag, at, end in fields if tag in (_FIRST, one)]
        payload = packed[0] if len(packed) == 1 else b"".join(packed)
        values = _floats(payload) if kind == _FLOAT else _ints(payload)
    has, number = len(values), wanted.number
    if has % number if is_open else has != number:
        takes = f"a multiple of {number}" if is_open else str(number)
        raise ArgumentError(
            f"features[{wanted.name!r}]: the record has {has} {_KINDS[kind]} values there, and shape {wanted.shape} "
            f"takes {takes}{'' if is_open else ' ((None,) takes any number)'}"
        )
    if not wanted.shape:
        return values[0] if kind != _INT64 else np.int64(values[0])
    array = np.array(values, wanted.dtype) if isinstance(values, list) else values
    shape = wanted.shape
    return array if len(shape) == 1 else array.reshape(tuple(-1 if size is None else size for size in shape))


def _differs(data: bytes, wanted: _WantedFeature, found: dict[bytes, list[_Span]], kind: int) -> ArgumentError:
    if kind:
        return ArgumentError(
            f"features[{wanted.name!r}]: the record has {_KINDS[kind]} there, not {_KINDS[wanted.kind]}"
        )
    kinds = {key: _list_of(data, spans)[0] for key, spans in sorted(found.items())}
    has = ", ".join(f"{key.decode(errors='replace')!r} ({_KINDS[tag]})" for key, tag in kinds.items() if tag)
    return ArgumentError(
        f"features[{wanted.name!r}]: the record has no such feature, and there is no default: "
        f"(shape, dtype, default), or (None,) as the shape where it may be empty. It has {has or 'none at all'}"
    )


def _floats(payload: bytes) -> npt.NDArray[np.float32]:
    if len(payload) % 4:
        raise _Malformed
    return np.frombuffer(payload, "<f4").astype(np.float32)  # a copy: the payload cannot be written to


def _ints(payload: bytes) -> list[int] | npt.NDArray[np.int64]:
    if len(payload) <= _FEW_BYTES:
        values, at = [], 0
        while at < len(payload):
            value, at = _varint(payload, at)
            values.append(value - (1 << 64) if value >> 63 else value)
        return values
    raw = np.frombuffer(payload, np.uint8)
    is_last = raw < 128
    if is_last.all():
        return raw.astype(np.int64)
    if not is_last[-1]:
        raise _Malformed
    stops = np.flatnonzero(is_last) + 1
    starts = np.concatenate(([0], stops[:-1]))
    lengths = stops - starts
    if lengths.max() > _MOST_VARINT_BYTES:
        raise _Malformed
    numbers = np.zeros(len(stops), np.uint64)
    for place in range(int(lengths.max())):
        has = np.flatnonzero(lengths > place)
        numbers[has] |= (raw[starts[has] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return numbers.view(np.int64)
