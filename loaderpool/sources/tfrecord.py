"""Records of TFRecord files, and `tf.train.Example` as NumPy values, without TensorFlow.

A record has four parts: its length (uint64), the masked CRC-32C of these 8 bytes (uint32), its
data, and the masked CRC-32C of the data (uint32). All numbers are little-endian:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import array
import functools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loaderpool.checks import flag
from loaderpool.element.spec import ArraySpec
from loaderpool.element.structure import listed
from loaderpool.errors import ArgumentError, SourceError, brief, shortened
from loaderpool.hints import known_names_only, nearest
from loaderpool.sources.files import FileSource, Paths, PositionedFile, Record
from loaderpool.sources.in_order import ZLIB, Compression, InOrder, compression_of
from loaderpool.sources.tables import import_extra

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_AROUND = _HEADER.size + _FOOTER_BYTES

_BUFFER_BYTES = 1 << 13
"""Bytes per read while headers are read. Smaller: more reads if records are short. Larger: more
data is read needlessly."""


class TFRecords(FileSource):
    """Source of records of TFRecord files, as bytes, without TensorFlow.

    Needs the extra `files`, and for URLs also `remote`. Uncompressed local files are read by index.
    If any file is compressed (gzip, zlib, bzip2, xz, zstd) or at a URL, all are read in order. Then
    each file has its own generator.

    Args:
        paths: As in `FileSource`.
        check_crc: Set to `False` to skip the checksums. Default: `True`.
        shard_lengths: As in `FileSource`.
        storage_options: As in `FileSource`.

    Raises:
        SourceError: If a file is cut, damaged or not a TFRecord file; when a record is read, if its
            checksum is wrong.
    """

    kind = "TFRecord"

    @known_names_only
    def __init__(
        self,
        paths: Paths,
        check_crc: bool = True,
        *,
        shard_lengths: int | Sequence[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._check_crc = flag("check_crc", check_crc)
        self._library = "google_crc32c" if check_crc else ""
        super().__init__(paths, shard_lengths=shard_lengths, storage_options=storage_options)

    def index(self, path: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the records in a file."""
        checksum = _checksum() if self._check_crc else None
        at, starts = 0, array.array("q")
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            size = os.fstat(file.fileno()).st_size
            while at < size:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    raise _cut(path, len(starts), at, size, "the file ends inside its length")
                length, crc = _HEADER.unpack(header)
                if checksum is not None and _masked(checksum(header[:8])) != crc:
                    raise _cut(path, len(starts), at, size, "the checksum of its length is wrong")
                end = at + length + _AROUND
                if end > size:
                    raise _cut(
                        path, len(starts), at, size, f"its length of {length} exceeds the file"
                    )
                starts.append(at)
                at = file.seek(end)
        starts.append(at)
        return np.array(starts, np.int64)

    def read(self, handle: PositionedFile, record: Record) -> bytes:
        """Return the data of one record."""
        data = handle.read(record)
        payload = data[_HEADER.size : -_FOOTER_BYTES]
        if self._check_crc:
            found, stored = (
                _masked(_checksum()(payload)),
                int.from_bytes(data[-_FOOTER_BYTES:], "little"),
            )
            if found != stored:
                raise SourceError(
                    f"{self.where(record)} is damaged: "
                    f"{_wrong_checksum(payload, found, stored)}. Choose one:\n"
                    '    on_error="skip" of the Loader: leave out damaged records\n'
                    "    check_crc=False: read records without a check"
                )
        return payload

    def read_records(self, file: InOrder, path: str) -> Iterator[bytes]:
        """Yield the data of each record."""
        checksum = _checksum() if self._check_crc else None
        read, unpack, at, number = file.read, _HEADER.unpack, 0, 0
        latest = b""  # last header that was checked; records of equal length have equal headers
        while header := read(_HEADER.size):
            number += 1
            if header != latest:
                self._check_header(header, file, path, number, at)
                latest, length = header, unpack(header)[0]
            data = read(length + _FOOTER_BYTES)
            if len(data) < length + _FOOTER_BYTES:
                raise _cut_in_order(
                    file, path, number, at, f"its length of {length} exceeds the file"
                )
            payload = data[:length]
            if checksum is not None:
                found, stored = _masked(checksum(payload)), int.from_bytes(data[length:], "little")
                if found != stored:
                    raise SourceError(
                        f"record {number} of {path} (at byte {at}{_of_what(file)}) is damaged: "
                        f"{_wrong_checksum(payload, found, stored)}. Set check_crc=False to read "
                        "records without a check"
                    )
            at += length + _AROUND
            yield payload

    def _check_header(self, header: bytes, file: InOrder, path: str, number: int, at: int) -> None:
        what = ""
        if len(header) < _HEADER.size:
            what = "the file ends inside its length"
        elif self._check_crc and _masked(_checksum()(header[:8])) != _HEADER.unpack(header)[1]:
            what = "the checksum of its length is wrong"
        if what:
            advice = "" if at else ". Is this a TFRecord file?"
            raise _cut_in_order(file, path, number, at, f"{what}{advice}")

    def compression_of(self, head: bytes) -> Compression | None:
        """Return the compression that a file's first 16 bytes show, or None."""
        found = compression_of(head)
        if found is None and head[:1] == ZLIB.magic and int.from_bytes(head[:2], "big") % 31 == 0:
            found = ZLIB
        if found is not None and _masked(_slow_checksum(head[:8])) == int.from_bytes(
            head[8:12], "little"
        ):
            return None  # a valid record whose length happens to start with these bytes
        return found


@functools.cache
def _checksum() -> Callable[[bytes], int]:
    checksum: Callable[[bytes], int] = import_extra("google_crc32c", "TFRecords").value
    return checksum


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _cut(path: str, number: int, at: int, size: int, what: str) -> SourceError:
    """Return the error for a file whose data after a byte cannot be read.

    Args:
        path: path of the file.
        number: number of records before the byte.
        at: position of the byte.
        size: size of the file.
        what: the reason.
    """
    if at:
        return SourceError(
            f"{path}: record {number + 1} (at byte {at}) is truncated or damaged: {what}. The data "
            f"after byte {at} of {size} cannot be read. To keep the records before it, run: "
            f"head -c {at} {shortened(path)} > NEW"
        )
    return SourceError(
        f"{path}: record 1 (at byte 0) is truncated or damaged: {what}. Is this a TFRecord file?"
    )


def _cut_in_order(file: InOrder, path: str, number: int, at: int, what: str) -> SourceError:
    return SourceError(
        f"record {number} of {path} (at byte {at}{_of_what(file)}) is truncated or damaged: {what}"
    )


def _of_what(file: InOrder) -> str:
    return "" if file.compression is None else " of the decompressed data"


def _wrong_checksum(payload: bytes, found: int, stored: int) -> str:
    return (
        f"the checksum of its {len(payload)} bytes is {found:#010x}, but the file has "
        f"{stored:#010x}"
    )


def _slow_checksum(data: bytes) -> int:
    """Return the CRC-32C of a few bytes, without a library."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


# ---- tf.train.Example ----

# Length of a list of floats from which on serializing it is faster than reading its elements.
_MANY_FLOATS = 24
_LISTS = {
    np.dtype(bytes): "bytes_list",
    np.dtype(np.float32): "float_list",
    np.dtype(np.int64): "int64_list",
}
_DTYPES = {"bytes_list": "bytes", "float_list": "float32", "int64_list": "int64"}


def parse_example(record: bytes, features: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a `tf.train.Example` like `tf.io.parse_single_example`, without TensorFlow.

    Needs the extra `files`.

    Args:
        record: Serialized message, such as an item of `TFRecords`.
        features: Features to return, by name. Each is one of:

            - a dtype (`np.int64`, `np.float32` or `bytes`): one value, like
              `FixedLenFeature([], dtype)`.
            - `(shape, dtype)`: an array, like `FixedLenFeature(shape, dtype)`. If the first
              dimension is `None`, it may have any length, like `VarLenFeature(dtype)`.
            - `(shape, dtype, default)`: the same, with a default if the record lacks the feature.

    Returns:
        NumPy scalars, bytes and arrays (object arrays for bytes), by name.

    Raises:
        ArgumentError: If a feature is missing or has another type or number of values, or if this
            is not an Example.
    """
    if not isinstance(record, (bytes, bytearray, memoryview)):
        is_path = isinstance(record, (str, os.PathLike))
        advice = ". To read records of files, pass lp.TFRecords(paths) as the source" * is_path
        raise ArgumentError(
            f"record must be the bytes of a tf.train.Example, got {type(record).__name__}{advice}"
        )
    if not isinstance(features, Mapping):
        raise ArgumentError(
            "features must be a dict of names and what they are, such as "
            f'{{"label": np.int64, "image": bytes}}, got {brief(features)}'
        )
    parse, error = _parser()
    try:
        found = parse(bytes(record)).features.feature
    except error:
        raise ArgumentError(
            f"record: these {len(record):,} bytes are not a valid tf.train.Example"
        ) from None
    return {name: _value(name, what, found) for name, what in features.items()}


@functools.cache
def _parser() -> tuple[Callable[[bytes], Any], type[Exception]]:
    """Return the function that parses an Example, and the class of its errors.

    The message type is built here, so that TensorFlow is not needed. An Example is a map from names
    to features:
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
    """
    descriptor_pb2, descriptor_pool, message, message_factory = (
        import_extra(f"google.protobuf.{name}", "parse_example")
        for name in ("descriptor_pb2", "descriptor_pool", "message", "message_factory")
    )

    def one(name: str, number: int, of: str, **more: object) -> dict[str, Any]:
        return {
            "name": name,
            "number": number,
            "type": "TYPE_MESSAGE",
            "type_name": f".loaderpool.{of}",
            **more,
        }

    lists = {"bytes_list": "TYPE_BYTES", "float_list": "TYPE_FLOAT", "int64_list": "TYPE_INT64"}
    value = {"name": "value", "number": 1, "label": "LABEL_REPEATED"}
    kinds = [one(name, number, name, oneof_index=0) for number, name in enumerate(lists, 1)]
    key = {"name": "key", "number": 1, "type": "TYPE_STRING"}
    entry = {
        "name": "FeatureEntry",
        "field": [key, one("value", 2, "Feature")],
        "options": {"map_entry": True},
    }
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
    # A separate pool, because TensorFlow has registered an Example in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    example = message_factory.GetMessageClass(pool.FindMessageTypeByName("loaderpool.Example"))
    return example.FromString, message.DecodeError


@functools.lru_cache(256)
def _layout(
    shape: tuple[Any, ...], dtype: npt.DTypeLike, defaults: int
) -> tuple[str, np.dtype[Any], int]:
    """Return how a feature of this description is stored.

    Returns:
        Name of the list with the values, dtype of the array, and number of values. If the first
        dimension is None, the number of values must be a multiple of the last.

    Raises:
        TypeError, ValueError, LookupError: the description is invalid.
    """
    if isinstance(dtype, ArraySpec):  # NumPy would use its dtype, and its shape would be ignored
        raise TypeError
    is_open, known = shape[:1] == (None,), np.dtype(dtype)
    kind, number = _LISTS[known], math.prod(shape[is_open:])
    if min(shape[is_open:], default=0) < 0 or (is_open and not number) or defaults > (not is_open):
        raise ValueError
    return kind, np.dtype(object) if kind == "bytes_list" else known, number


def _parts(what: object) -> tuple[Any, ...]:
    return what if isinstance(what, tuple) else ((), what)


@functools.lru_cache(256)
def _described(what: object) -> tuple[str, np.dtype[Any], int, bool, tuple[Any, ...]]:
    """Return the parsed description of a feature without a default.

    Returns:
        The result of `_layout`, True if the first dimension is None, and the shape.
    """
    shape, dtype = _parts(what)
    return *_layout(tuple(shape), dtype, 0), tuple(shape[:1]) == (None,), tuple(shape)


def _value(name: str, what: object, found: Mapping[str, Any]) -> object:
    """Return the value of a feature.

    This is the fast path for features that match their descriptions. `_checked_value` handles all
    other cases, and raises the errors.
    """
    # The description may have a default, be unhashable, or be invalid.
    try:
        kind, made, number, is_open, shape = _described(what)
    except (LookupError, TypeError, ValueError):
        return _checked_value(name, what, found)
    if name not in found:
        return _checked_value(name, what, found)
    values = getattr(found[name], kind)
    count = len(values.value)
    if not count or (count % number if is_open else count != number):
        return _checked_value(name, what, found)
    return _converted(values, count, made, shape)


class _Values(Protocol):
    """Values of one feature of an Example: a BytesList, FloatList or Int64List."""

    value: Sequence[Any]

    def SerializeToString(self) -> bytes: ...


def _converted(values: _Values, count: int, made: np.dtype[Any], shape: tuple[Any, ...]) -> object:
    """Return a list of an Example as one value, or as an array of the given shape."""
    if not shape:
        return values.value[0] if made.hasobject else made.type(values.value[0])
    # A serialized list has tag and length first, and then all floats without gaps.
    if made == np.float32 and count >= _MANY_FLOATS:
        data = values.SerializeToString()
        array = np.frombuffer(data, "<f4", count, len(data) - 4 * count).astype(np.float32)
    else:
        array = np.array(list(values.value) if made.hasobject else values.value, made)
    return (
        array
        if len(shape) == 1
        else array.reshape(tuple(-1 if size is None else size for size in shape))
    )


def _dtype_in(what: object) -> object:
    """Return the dtype of a feature's description, which may be invalid."""
    return what[1] if type(what) is tuple and len(what) > 1 else what


def _advice_on(dtype: object) -> str:
    """Return advice on a dtype that no list of an Example has, as a new sentence."""
    name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype)))
    if name in ("str", "string"):
        return ". Use bytes for images and for text, then .decode()"
    if name == "uint8":
        return (
            ". Records store np.int64 for integers, and pixels mostly as bytes: use bytes, then "
            "np.frombuffer(value, np.uint8)"
        )
    if name.startswith(("int", "uint", "bool")):
        return ". Records store np.int64 for integers: use np.int64, then .astype"
    if name.startswith(("float", "bfloat", "double")):
        return ". Records store np.float32 for floats: use np.float32, then .astype"
    if "Feature" in type(dtype).__name__:
        return ". Write FixedLenFeature([3], tf.int64) as ((3,), np.int64)"
    return ""


def _checked_value(name: str, what: object, found: Mapping[str, Any]) -> object:
    try:
        shape, dtype, *defaults = _parts(what)
        wanted, made, number = _layout(tuple(shape), dtype, len(defaults))
    except (LookupError, TypeError, ValueError):
        raise ArgumentError(
            f"features[{brief(name)}] must be np.int64, np.float32, bytes, (shape, dtype) or "
            f"(shape, dtype, default), got {brief(what)}. A shape is a tuple such as (2, 3), or "
            f"(None, 3) without a default{_advice_on(_dtype_in(what))}"
        ) from None
    feature = found[name] if name in found else None  # noqa: SIM401 - `get` would be slower
    kind = None if feature is None else feature.WhichOneof("kind")
    is_open = tuple(shape[:1]) == (None,)
    if feature is None or kind is None:
        if is_open:
            return np.empty((0, *shape[1:]), made)
        if defaults:
            return _default(name, defaults[0], shape, made)
        near = nearest(name, found)
        raise ArgumentError(
            f"features[{brief(name)}]: the record lacks this feature; it has "
            f"{listed(sorted(found)) or 'none'}. "
            + f"Did you mean {brief(near)}? "
            * bool(near)
            + "Pass a default, as in (shape, dtype, default), or the shape (None,) if the feature "
            "may be empty."
        )
    if kind != wanted:
        raise ArgumentError(
            f"features[{brief(name)}]: expected {_DTYPES[wanted]}, but the record has "
            f"{_DTYPES[kind]}"
        )
    values = getattr(feature, kind)
    count = len(values.value)
    if count % number if is_open else count != number:
        takes = (
            f"a multiple of {number}" if is_open else f"{number} (shape (None,) takes any number)"
        )
        raise ArgumentError(
            f"features[{brief(name)}]: the record has {count} {_DTYPES[kind]} values, but shape "
            f"{shape} takes {takes}"
        )
    return _converted(values, count, made, tuple(shape))


def _default(name: str, default: object, shape: tuple[int, ...], made: np.dtype[Any]) -> object:
    """Convert a default to a feature's shape and dtype. Raise ArgumentError if it does not fit."""
    try:
        given = np.array(default, object if made.hasobject else None)
        values = np.broadcast_to(given.astype(made, casting="same_kind"), shape)
        if made.hasobject and not all(isinstance(value, bytes) for value in values.flat):
            raise TypeError("it is not bytes")
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"features[{brief(name)}]: the default {brief(default)} does not fit: {error}"
        ) from None
    return values.copy() if shape else values[()]
