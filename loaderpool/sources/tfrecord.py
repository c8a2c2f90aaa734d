"""TFRecord files by record, and `tf.train.Example` as NumPy values, without TensorFlow.

A record is its length (uint64), the masked CRC-32C of those 8 bytes (uint32), its data, and the masked CRC-32C of the
data (uint32), all little-endian: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import array
import functools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import flag
from loaderpool.errors import ArgumentError, SourceError, brief, shortened
from loaderpool.sources.files import FileSource, Paths, Record, read_at, refuse_compressed
from loaderpool.sources.tables import import_extra

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_AROUND = _HEADER.size + _FOOTER_BYTES

_WINDOW_BYTES = 1 << 16
"""Read at a time in search of headers, where records are short. Larger: more is read in vain once they are not."""
_PIECE_BYTES = 1 << 24
"""Scanned from one piece of the index to the next. Larger: some seconds where a disk must seek for each record."""
_SHORT_BYTES = 1 << 13
"""Records up to this length are short. Longer: a window would hold too few headers to be worth its bytes."""


class TFRecords(FileSource):
    """Source of records of uncompressed TFRecord files, as bytes, without TensorFlow. Needs the extra `files`.

    Args:
        paths: As in `FileSource`.
        check_crc: Set to `False` to skip the checksums. Default: `True`.

    Raises:
        SourceError: If a file is cut, damaged or not a TFRecord file; when a record is read, if its checksum is wrong.
    """

    kind = "TFRecord"

    def __init__(self, paths: Paths, check_crc: bool = True) -> None:
        self._check_crc = flag("check_crc", check_crc)
        self._library = "google_crc32c" if check_crc else ""
        super().__init__(paths)

    def index(self, path: str) -> Iterator[npt.NDArray[np.int64]]:
        """Return the offsets of the records in a file."""
        checksum = _checksum() if self._check_crc else None
        unpack, header_bytes = _HEADER.unpack_from, _HEADER.size
        at, length, window, window_at, count = 0, 0, b"", 0, 0
        with open(path, "rb", buffering=0) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            while at < size:
                starts = array.array("q")
                until = min(size, at + _PIECE_BYTES)
                while at < until:  # a million times a second or two: what can be done outside is
                    inside = at - window_at
                    if inside + header_bytes > len(window):
                        window = read_at(descriptor, _WINDOW_BYTES if length <= _SHORT_BYTES else header_bytes, at)
                        window_at, inside = at, 0
                        if len(window) < header_bytes:
                            raise _cut(path, count + len(starts), at, size, "the file ends inside its length")
                    length, crc = unpack(window, inside)
                    if checksum is not None and _masked(checksum(window[inside : inside + 8])) != crc:
                        raise _cut(path, count + len(starts), at, size, "the checksum of its length is wrong")
                    end = at + length + _AROUND
                    if end > size:
                        raise _cut(path, count + len(starts), at, size, f"its length of {length} exceeds the file")
                    starts.append(at)
                    at = end
                count += len(starts)
                yield np.array(starts, np.int64)
        yield np.array([at])

    def read(self, handle: Any, record: Record) -> bytes:
        """Return the data of one record."""
        data: bytes = handle.read(record)
        payload = data[_HEADER.size : -_FOOTER_BYTES]
        if self._check_crc:
            found, stored = _masked(_checksum()(payload)), int.from_bytes(data[-_FOOTER_BYTES:], "little")
            if found != stored:
                raise SourceError(
                    f"{self.where(record)} is damaged: the checksum of its {len(payload)} bytes is {found:#010x}, but "
                    f"the file has {stored:#010x}. Choose one:\n"
                    '    on_error="skip" of the Loader: leave out damaged records\n'
                    "    check_crc=False: read records without a check"
                )
        return payload


@functools.cache
def _checksum() -> Any:
    return import_extra("google_crc32c", "TFRecords").value


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _cut(path: str, number: int, at: int, size: int, what: str) -> SourceError:
    """Return the error of a file in which no way leads on from a byte."""
    if at:
        return SourceError(
            f"{path}: record {number + 1} (at byte {at}) is truncated or damaged: {what}. The data after byte {at} of "
            f"{size} cannot be read. To keep the records before it, run: head -c {at} {shortened(path)} > NEW"
        )
    refuse_compressed(path, "a record")  # only here: the length of a sound record may begin so, too
    return SourceError(
        f"{path}: record 1 (at byte 0) is truncated or damaged: {what}. Is this a TFRecord file? Decompress a "
        "compressed file first."
    )


# ---- tf.train.Example ----

_KINDS = {np.dtype(bytes): "bytes_list", np.dtype(np.float32): "float_list", np.dtype(np.int64): "int64_list"}
_NAMES = {"bytes_list": "bytes", "float_list": "float32", "int64_list": "int64"}


class _WantedFeature(NamedTuple):
    name: str
    kind: str  # the name of its list in the message
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    number: int  # of its values; where its length varies, it has a multiple of so many
    has_default: bool


def parse_example(record: bytes, features: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a `tf.train.Example` like `tf.io.parse_single_example`, without TensorFlow. Needs the extra `files`.

    Args:
        record: Serialized message, such as an item of `TFRecords`.
        features: Features to return, by name. Each is one of:

            - a dtype (`np.int64`, `np.float32` or `bytes`): one value, like `FixedLenFeature([], dtype)`.
            - `(shape, dtype)`: an array, like `FixedLenFeature(shape, dtype)`. If the first dimension is `None`, it may
              have any length, like `VarLenFeature(dtype)`.
            - `(shape, dtype, default)`: the same, with a default if the record lacks the feature.

    Returns:
        NumPy scalars, bytes and arrays (object arrays for bytes), by name.

    Raises:
        ArgumentError: If a feature is missing or has another type or number of values, or if this is not an Example.
    """
    if not isinstance(record, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"record must be the bytes of a tf.train.Example, got {type(record).__name__}")
    if not isinstance(features, Mapping):
        raise ArgumentError(f"features must be a dict of names and dtypes, got {type(features).__name__}")
    asked = tuple(features.items())
    try:
        wanted = _wanted(asked)
    except TypeError:  # a default that cannot be hashed, such as an array
        wanted = _wanted.__wrapped__(asked)
    parse, error = _parser()
    try:
        found = parse(bytes(record)).features.feature
    except error:
        raise ArgumentError(f"record: these {len(record):,} bytes are not a valid tf.train.Example") from None
    return {each.name: _value(each, features, found) for each in wanted}


@functools.cache
def _parser() -> tuple[Callable[[bytes], Any], type[Exception]]:
    """What parses an Example, and what it raises. The message is described here: a map of names to Features.

    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
    """
    descriptor_pb2, descriptor_pool, message, message_factory = (
        import_extra(f"google.protobuf.{name}", "parse_example")
        for name in ("descriptor_pb2", "descriptor_pool", "message", "message_factory")
    )

    def one(name: str, number: int, of: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "number": number, "type": "TYPE_MESSAGE", "type_name": f".loaderpool.{of}", **more}

    lists = {"bytes_list": "TYPE_BYTES", "float_list": "TYPE_FLOAT", "int64_list": "TYPE_INT64"}
    value = {"name": "value", "number": 1, "label": "LABEL_REPEATED"}
    kinds = [one(name, number, name, oneof_index=0) for number, name in enumerate(lists, 1)]
    key = {"name": "key", "number": 1, "type": "TYPE_STRING"}
    entry = {"name": "FeatureEntry", "field": [key, one("value", 2, "Feature")], "options": {"map_entry": True}}
    entries = one("feature", 1, "Features.FeatureEntry", label="LABEL_REPEATED")
    messages = [
        *({"name": name, "field": [{**value, "type": kind}]} for name, kind in lists.items()),
        {"name": "Feature", "oneof_decl": [{"name": "kind"}], "field": kinds},
        {"name": "Features", "nested_type": [entry], "field": [entries]},
        {"name": "Example", "field": [one("features", 1, "Features")]},
    ]
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="loaderpool", syntax="proto3", message_type=messages
    )
    pool = descriptor_pool.DescriptorPool()  # of its own: TensorFlow has an Example in the one for all
    pool.AddSerializedFile(file.SerializeToString())
    example: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("loaderpool.Example"))
    return example.FromString, message.DecodeError


def _fault(name: str, says: str) -> ArgumentError:
    return ArgumentError(f"features[{brief(name)}]: {says}")


@functools.lru_cache(64)
def _wanted(asked: tuple[tuple[str, Any], ...]) -> tuple[_WantedFeature, ...]:
    return tuple(_want(name, what) for name, what in asked)


def _want(name: str, what: Any) -> _WantedFeature:
    if not isinstance(name, str):
        raise ArgumentError(f"features: names must be strings, got {brief(name)}")
    given = what if isinstance(what, tuple) else ((), what)
    if len(given) not in (2, 3):
        raise _fault(name, f"must be a dtype, (shape, dtype) or (shape, dtype, default), got {brief(what)}")
    shape, dtype, default = (*given, None)[:3]
    try:
        known = np.dtype(dtype if dtype is not None else object)  # NumPy takes None for float64
        kind = _KINDS[known]
    except (KeyError, TypeError):
        named = shortened(str(getattr(dtype, "__name__", dtype)))
        raise _fault(name, f"the dtype must be np.int64, np.float32 or bytes, got {named}") from None
    if not isinstance(shape, (tuple, list)):
        raise _fault(name, f"the shape must be a tuple such as () or (None, 4), got {brief(shape)}")
    is_open = tuple(shape[:1]) == (None,)
    sizes = shape[is_open:]
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise _fault(name, f"the shape must have sizes >= 0, of which the first may be None, got {brief(shape)}")
    number = math.prod(map(int, sizes))
    if is_open and default is not None:
        raise _fault(name, "a feature of any length takes no default: it is empty if the record lacks it")
    if is_open and not number:
        raise _fault(name, f"shape {shape} has no values at any length")
    made = np.dtype(object) if kind == "bytes_list" else known
    wanted = _WantedFeature(name, kind, made, tuple(shape), number, default is not None)
    if default is not None:
        _default(wanted, default)
    return wanted


def _default(wanted: _WantedFeature, default: Any) -> Any:
    """Returns the default's value for one record. It is not kept with `wanted`: a cache cannot tell -0.0 from 0.0."""
    try:
        given = np.array(default, object if wanted.dtype.hasobject else None)
        values = np.broadcast_to(given.astype(wanted.dtype, casting="same_kind"), wanted.shape)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise _fault(wanted.name, f"default {brief(default)} does not fit: {error}") from None
    if wanted.dtype == object and not all(isinstance(value, bytes) for value in values.flat):
        raise _fault(wanted.name, f"default {brief(default)} is not bytes")
    return values.copy() if wanted.shape else values[()]


def _value(wanted: _WantedFeature, features: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    name, shape, dtype, number = wanted.name, wanted.shape, wanted.dtype, wanted.number
    feature = found[name] if name in found else None  # noqa: SIM401 - `get` would be slower
    kind = None if feature is None else feature.WhichOneof("kind")
    is_open = shape[:1] == (None,)
    if feature is None or kind is None:
        if is_open:
            return np.empty((0, *shape[1:]), dtype)
        if wanted.has_default:
            return _default(wanted, features[name][2])
        kinds = {each: found[each].WhichOneof("kind") for each in sorted(found)}
        has = ", ".join(f"{brief(each)} ({_NAMES[kind]})" for each, kind in kinds.items() if kind)
        raise _fault(
            name,
            f"the record lacks this feature; it has {has or 'no features'}. Pass a default, as in (shape, dtype, "
            "default), or the shape (None,) if the feature may be empty.",
        )
    if kind != wanted.kind:
        raise _fault(name, f"expected {_NAMES[wanted.kind]}, but the record has {_NAMES[kind]}")
    values = getattr(feature, kind).value
    has_number = len(values)
    if has_number % number if is_open else has_number != number:
        takes = f"a multiple of {number}" if is_open else f"{number} (shape (None,) takes any number)"
        raise _fault(name, f"the record has {has_number} {_NAMES[kind]} values, but shape {shape} takes {takes}")
    if not shape:
        return values[0] if dtype.hasobject else dtype.type(values[0])
    array = np.array(list(values) if dtype.hasobject else values, dtype)
    return array if len(shape) == 1 else array.reshape(tuple(-1 if size is None else size for size in shape))
