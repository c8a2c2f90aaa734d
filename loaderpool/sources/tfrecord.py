"""TFRecord files by record, and `tf.train.Example` as NumPy values, without TensorFlow.

A record is its length (uint64), the masked CRC-32C of those 8 bytes (uint32), its data, and the masked CRC-32C of the
data (uint32), all little-endian: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import array
import functools
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError, brief, shortened
from loaderpool.sources.files import FileSource, Record, read_at
from loaderpool.sources.tables import import_extra

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_AROUND = _HEADER.size + _FOOTER.size

_WINDOW_BYTES = 1 << 16
"""Read at a time in search of headers, where records are short. Larger: more is read in vain once they are not."""
_PIECE_BYTES = 1 << 24
"""Scanned from one piece of the index to the next. Larger: some seconds where a disk must seek for each record."""
_SHORT_BYTES = 1 << 13
"""Records up to this length are short. Longer: a window would hold too few headers to be worth its bytes."""

# RFC 1952 and RFC 1950: a method, and for zlib a check value. Looked at only where the first record is damaged: the
# length of a sound one may begin so, too.
_COMPRESSED = ((rb"\x1f\x8b\x08", "GZIP"), (rb"\x78[\x01\x5e\x9c\xda]", "ZLIB"))


class TFRecords(FileSource):
    """Records of TFRecord files as bytes, without TensorFlow: a `FileSource`. Needs the extra `files`.

    Args:
        paths: as in `FileSource`.
        check_crc: compare the checksums.

    Raises:
        SourceError: a file is damaged, cut or no TFRecord file. When a record is read: its checksum is wrong.
    """

    kind = "TFRecord"

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], check_crc: bool = True
    ) -> None:
        if not isinstance(check_crc, bool):
            raise ArgumentError(f"check_crc must be True or False, got {brief(check_crc)}")
        self._check_crc = check_crc
        self._library = "google_crc32c" if check_crc else ""
        super().__init__(paths)

    def index(self, path: str) -> Iterator[npt.NDArray[np.int64]]:
        """Where its records begin, by their lengths."""
        checksum = _checksum() if self._check_crc else None
        unpack, header_bytes = _HEADER.unpack_from, _HEADER.size
        at, length, window, window_at, count = 0, 0, b"", 0, 0
        with open(path, "rb", buffering=0) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            while at < size:
                starts = array.array("q")
                until, what = min(size, at + _PIECE_BYTES), ""
                while at < until:  # a million times a second or two: what can be done outside is
                    inside = at - window_at
                    if inside + header_bytes > len(window):
                        window = read_at(descriptor, _WINDOW_BYTES if length <= _SHORT_BYTES else header_bytes, at)
                        window_at, inside = at, 0
                        if len(window) < header_bytes:
                            what = "it ends inside the length"
                            break
                    length, crc = unpack(window, inside)
                    if checksum is not None and _masked(checksum(window[inside : inside + 8])) != crc:
                        what = "the checksum of its length is wrong"
                        break
                    end = at + length + _AROUND
                    if end > size:
                        what = f"it is to have {length} bytes, and the file ends before"
                        break
                    starts.append(at)
                    at = end
                count += len(starts)
                if what:
                    raise _cut(path, count, at, size, what)
                yield np.array(starts, np.int64)
        yield np.array([at])

    def read(self, handle: Any, record: Record) -> bytes:
        """The data of a record."""
        data: bytes = handle.read(record)
        checksum = _checksum() if self._check_crc else None
        length, length_crc = _HEADER.unpack_from(data)
        if length != len(data) - _AROUND or (checksum is not None and _masked(checksum(data[:8])) != length_crc):
            raise SourceError(f"{self.where(record)}: its length was changed since it was indexed")
        payload = data[_HEADER.size : -_FOOTER.size]
        if checksum is not None:
            (stored,) = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
            found = _masked(checksum(payload))
            if found != stored:
                raise SourceError(
                    f"{self.where(record)} is damaged: the checksum of its {length} bytes is {found:#010x}, and the "
                    f"file says {stored:#010x}. on_error= can leave out such records, check_crc=False reads them as "
                    "they are"
                )
        return payload


@functools.cache
def _checksum() -> Callable[[bytes], int]:
    value: Callable[[bytes], int] = import_extra("google_crc32c", "TFRecords").value
    return value


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _cut(path: str, number: int, at: int, size: int, what: str) -> Exception:
    """Return the error of a file in which no way leads on from a byte."""
    if at:
        return SourceError(
            f"{path}: record {number + 1}, at byte {at}, is cut or damaged ({what}), so what is behind byte {at} of "
            f"{size} cannot be read. Write a file of what is before it: head -c {at} {shortened(path)} > NEW"
        )
    with open(path, "rb") as file:
        head = file.read(16)
    for beginning, kind in _COMPRESSED:
        if re.match(beginning, head):
            return ArgumentError(
                f"paths: {path} is compressed ({kind}), and a record in it cannot be read without all before it: "
                "write its records once more without compression, from "
                f'tf.data.TFRecordDataset(path, compression_type="{kind}")'
            )
    return SourceError(f"{path}: record 1, at byte 0, is cut or damaged ({what}): is this a TFRecord file at all?")


# ---- tf.train.Example ----

_KINDS = {"bytes_list": "bytes", "float_list": "float32", "int64_list": "int64"}
_DTYPES = {
    np.dtype(bytes): ("bytes_list", np.dtype(object)),
    np.dtype(np.float32): ("float_list", np.dtype(np.float32)),
    np.dtype(np.int64): ("int64_list", np.dtype(np.int64)),
}


class _WantedFeature(NamedTuple):
    name: str
    kind: str  # the name of its list in the message
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    number: int  # of its values; where its length varies, it has a multiple of so many
    has_default: bool


def parse_example(record: bytes, features: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a `tf.train.Example` into NumPy values, as `tf.io.parse_single_example` does. Needs the extra `files`.

    Args:
        record: the message's bytes, such as an item of `TFRecords`.
        features: the features wanted, by name; others are left out. What each is:

            - a dtype (`np.int64`, `np.float32` or `bytes`): one value, as `FixedLenFeature([], dtype)`.
            - `(shape, dtype)`: an array, as `FixedLenFeature(shape, dtype)`; with None as its first dimension of any
              length, as `VarLenFeature(dtype)`.
            - `(shape, dtype, default)`: the default where the record lacks it.

    Returns:
        NumPy scalars, bytes, and arrays (of objects for bytes), by name.

    Raises:
        ArgumentError: the record lacks a feature, has another kind or number of values, or is no Example.
        ImportError: protobuf is not installed.
    """
    if not isinstance(record, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"record must be the bytes of a tf.train.Example, got {type(record).__name__}")
    if not isinstance(features, Mapping):
        raise ArgumentError(f"features must be a dict of names and what they are, got {type(features).__name__}")
    asked = tuple(features.items())
    try:
        wanted = _cached_wanted(asked)
    except TypeError:  # a default that cannot be hashed, such as an array
        wanted = _wanted(asked)
    parse, error = _parser()
    try:
        found = parse(bytes(record)).features.feature
    except error:
        raise ArgumentError(f"record: these {len(record):,} bytes are no tf.train.Example (or a damaged one)") from None
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
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="loaderpool", syntax="proto3")

    def add(of: Any, name: str, number: int, kind: int, of_message: str = "", is_repeated: bool = False) -> Any:
        label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
        field = of.field.add(name=name, number=number, type=kind, label=label)
        if of_message:
            field.type_name = f".loaderpool.{of_message}"
        return field

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", kinds.TYPE_BYTES), ("float_list", kinds.TYPE_FLOAT), ("int64_list", kinds.TYPE_INT64)), 1
    ):
        add(file.message_type.add(name=name), "value", 1, kind, is_repeated=True)
        add(feature, name, number, kinds.TYPE_MESSAGE, name).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kinds.TYPE_STRING)
    add(entry, "value", 2, kinds.TYPE_MESSAGE, "Feature")
    add(features, "feature", 1, kinds.TYPE_MESSAGE, "Features.FeatureEntry", is_repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, kinds.TYPE_MESSAGE, "Features")
    pool = descriptor_pool.DescriptorPool()  # of its own: TensorFlow has an Example in the one for all
    pool.AddSerializedFile(file.SerializeToString())
    example: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("loaderpool.Example"))
    return example.FromString, message.DecodeError


def _wanted(asked: tuple[tuple[str, Any], ...]) -> tuple[_WantedFeature, ...]:
    return tuple(_want(name, what) for name, what in asked)


_cached_wanted = functools.lru_cache(64)(_wanted)


def _want(name: str, what: Any) -> _WantedFeature:
    if not isinstance(name, str):
        raise ArgumentError(f"features: names must be str, got {brief(name)}")
    if isinstance(what, tuple) and len(what) not in (2, 3):
        raise ArgumentError(
            f"features[{brief(name)}] must be dtype, (shape, dtype) or (shape, dtype, default): {brief(what)}"
        )
    given_shape, dtype, default = (*what, None)[:3] if isinstance(what, tuple) else ((), what, None)
    kind, made = _kind_of_dtype(name, dtype)
    shape = _checked_shape(name, given_shape)
    number = math.prod(size for size in shape if size is not None)
    if shape[:1] == (None,):
        if default is not None:
            raise ArgumentError(
                f"features[{brief(name)}]: what may have any length is empty where it lacks: no default"
            )
        if not number:
            raise ArgumentError(f"features[{brief(name)}]: shape {shape} has no values, however long it is")
    wanted = _WantedFeature(name, kind, made, shape, number, default is not None)
    if wanted.has_default:
        _default(wanted, default)
    return wanted


def _kind_of_dtype(name: str, dtype: Any) -> tuple[str, np.dtype[Any]]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found not in _DTYPES or dtype is None:  # which NumPy takes for float64
        named = dtype.__name__ if isinstance(dtype, type) else shortened(str(dtype))
        raise ArgumentError(f"features[{brief(name)}]: an Example has np.int64, np.float32 or bytes, not {named}")
    return _DTYPES[found]


def _checked_shape(name: str, shape: Any) -> tuple[int | None, ...]:
    if not isinstance(shape, (tuple, list)):
        raise ArgumentError(
            f"features[{brief(name)}]: the shape must be a tuple such as () or (None, 4), got {brief(shape)}"
        )
    for at, size in enumerate(shape):
        is_size = isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0
        if not (is_size or (size is None and at == 0)):
            raise ArgumentError(
                f"features[{brief(name)}]: shape {brief(shape)}: sizes are numbers, the first may be None"
            )
    return tuple(None if size is None else int(size) for size in shape)


def _default(wanted: _WantedFeature, default: Any) -> Any:
    """Returns the default's value for one record. It is not kept with `wanted`: a cache cannot tell -0.0 from 0.0."""
    try:
        given = np.array(default, object if wanted.dtype == object else None)
        values = np.broadcast_to(given.astype(wanted.dtype, casting="same_kind"), wanted.shape)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"features[{brief(wanted.name)}]: default {brief(default)} does not fit: {error}") from None
    if wanted.dtype == object and not all(isinstance(value, bytes) for value in values.flat):
        raise ArgumentError(f"features[{brief(wanted.name)}]: default {brief(default)} is not bytes")
    return values.copy() if wanted.shape else values[()]


def _value(wanted: _WantedFeature, features: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    shape = wanted.shape
    feature = found[wanted.name] if wanted.name in found else None  # noqa: SIM401 - `get` would be slower
    kind = None if feature is None else feature.WhichOneof("kind")
    is_open = shape[:1] == (None,)
    if feature is None or kind is None:
        if is_open:
            return np.empty((0, *shape[1:]), wanted.dtype)
        if wanted.has_default:
            return _default(wanted, features[wanted.name][2])
    if feature is None or kind != wanted.kind:
        raise _differs(wanted, found, kind)
    values = getattr(feature, kind).value
    has, number = len(values), wanted.number
    if has % number if is_open else has != number:
        takes = f"a multiple of {number}" if is_open else f"{number} ((None,) takes any number)"
        raise ArgumentError(
            f"features[{brief(wanted.name)}]: the record has {has} {_KINDS[kind]} values there, and shape {shape} "
            f"takes {takes}"
        )
    if not shape:
        return values[0] if wanted.dtype == object else wanted.dtype.type(values[0])
    array = np.array(list(values) if wanted.dtype == object else values, wanted.dtype)
    return array if len(shape) == 1 else array.reshape(tuple(-1 if size is None else size for size in shape))


def _differs(wanted: _WantedFeature, found: Mapping[str, Any], kind: str | None) -> ArgumentError:
    if kind:
        return ArgumentError(
            f"features[{brief(wanted.name)}]: the record has {_KINDS[kind]} there, not {_KINDS[wanted.kind]}"
        )
    kinds = {name: found[name].WhichOneof("kind") for name in sorted(found)}
    has = ", ".join(f"{brief(name)} ({_KINDS[kind]})" for name, kind in kinds.items() if kind)
    return ArgumentError(
        f"features[{brief(wanted.name)}]: the record has no such feature, and there is no default: "
        f"(shape, dtype, default), or (None,) as the shape where it may be empty. It has {has or 'none at all'}"
    )
