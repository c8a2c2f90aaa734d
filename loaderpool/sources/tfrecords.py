"""The records of TFRecord files by index, without TensorFlow.

A record is its length (uint64), the masked CRC-32C of those 8 bytes (uint32), its data, and the masked CRC-32C of the
data (uint32), all little-endian: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import array
import functools
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError
from loaderpool.sources.damaged_tail import DamagedTail, check_rule
from loaderpool.sources.extras import import_extra
from loaderpool.sources.file_records import FileRecords
from loaderpool.sources.paths import checked_paths
from loaderpool.sources.record_index import FileScan, head_of, index_records
from loaderpool.system.reading import read_at

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_AROUND = _HEADER.size + _FOOTER.size

_WINDOW_BYTES = 1 << 16
"""Read at a time in search of headers, where records are short. Larger: more is read in vain once they are not."""
_TOLD_BYTES = 1 << 24
"""From one word about how far a scan is to the next. Larger: some seconds where a disk must seek for each record."""
_SHORT_BYTES = 1 << 13
"""Records up to this length are short. Longer: a window would hold too few headers to be worth its bytes."""

# RFC 1952 and RFC 1950: a method, and for zlib a check value. Looked at only where the first record is damaged: the
# length of a sound one may begin so, too.
_COMPRESSED = ((rb"\x1f\x8b\x08", "GZIP"), (rb"\x78[\x01\x5e\x9c\xda]", "ZLIB"))


class TFRecords(FileRecords):
    """Records of TFRecord files as bytes, of several one after the other; any of them is read at once.

    They are those of `tf.data.TFRecordDataset(paths)`, byte for byte and in its order; TensorFlow is not needed. The
    lengths are walked through once, when this is made, and where records begin is kept: 4 bytes a record, 8 where the
    files have 4 GiB or more together. Workers share that, and each opens the files for itself; they must stay as they
    are.

    Needs the extra `tfrecord` (google-crc32c) for the checksums.

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        check_crc: whether checksums are compared: that of each length when this is made and when the record is read,
            that of the data when the record is read.
        damaged_tail: what is done where a file ends in the middle of a record, or the length of one is damaged, so that
            none behind it can be found: "raise", or "skip" to have the whole records before it.

    Raises:
        ArgumentError: there is no record in any file, a file is compressed, there is no path, or a wrong value.
        ArgumentTypeError: an argument is of a wrong type.
        SourceError: a file is damaged, cut or no TFRecord file, or is written to meanwhile. When a record is read: its
            checksum is wrong, or the file has changed.
        ImportError: the extra is not installed.
        OSError: a file cannot be opened.
    """

    __slots__ = ("_checksum",)

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        check_crc: bool = True,
        damaged_tail: Literal["raise", "skip"] = "raise",
    ) -> None:
        if not isinstance(check_crc, bool):
            raise ArgumentTypeError(f"check_crc must be True or False, got {check_crc!r}")
        tail = DamagedTail(check_rule(damaged_tail))
        absolute = checked_paths(paths, "TFRecord")
        checksum = _import_checksum() if check_crc else None
        index = index_records(absolute, functools.partial(_scan, checksum=checksum, tail=tail))
        super().__init__(absolute, index, (check_crc, tuple(tail.skipped)))
        if not len(self):
            lost = f": {'; '.join(tail.skipped[:3])}" if tail.skipped else ""
            raise ArgumentError(f"paths: there is no record in {self._described}{lost}")

    def _settle(self) -> None:
        check_crc, _ = self._settings
        self._checksum = _import_checksum() if check_crc else None

    def _makes(self) -> tuple[Any, ...]:
        return ()

    @property
    def skipped_tails(self) -> tuple[str, ...]:
        """What `damaged_tail="skip"` left out: for each such file its path, the bytes, and what is wrong with them."""
        skipped: tuple[str, ...] = self._settings[1]
        return skipped

    def _item(self, data: bytes, file: int, number: int, offset: int) -> bytes:
        checksum = self._checksum
        length, length_crc = _HEADER.unpack_from(data)
        if length != len(data) - _AROUND or (checksum is not None and _masked(checksum(data[:8])) != length_crc):
            raise SourceError(f"{self._where(file, number, offset)}: its length was changed since it was indexed")
        payload = data[_HEADER.size : -_FOOTER.size]
        if checksum is not None:
            (stored,) = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
            found = _masked(checksum(payload))
            if found != stored:
                raise SourceError(
                    f"{self._where(file, number, offset)} is damaged: the checksum of its {length} bytes is "
                    f"{found:#010x}, and the file says {stored:#010x}. on_error= can leave out such records, "
                    "check_crc=False reads them as they are"
                )
        return payload


def _import_checksum() -> Callable[[bytes], int]:
    module = import_extra("google_crc32c", what="TFRecords with check_crc=True", extra="tfrecord")
    value: Callable[[bytes], int] = module.value
    return value


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _scan(scan: FileScan, checksum: Callable[[bytes], int] | None, tail: DamagedTail) -> int:
    """Note where the records of a file begin; returns where the last whole one ends."""
    starts = array.array("q")
    descriptor, size, unpack, header_bytes = scan.file.fileno(), scan.size, _HEADER.unpack_from, _HEADER.size
    at, length, window, window_at = 0, 0, b"", 0
    what = ""
    while at < size and not what:
        until = min(size, at + _TOLD_BYTES)
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
        scan.reached(at)
    if what:
        if not at:
            _refuse_compressed(scan)
        hint = ", if this is a TFRecord file at all" if not at else ""
        tail.met(scan.path, at, size, f"record {len(starts) + 1}, at byte {at}, is cut or damaged{hint} ({what})")
    scan.add(np.array(starts, np.int64))
    return at


def _refuse_compressed(scan: FileScan) -> None:
    head = head_of(scan.file)
    for beginning, kind in _COMPRESSED:
        if re.match(beginning, head):
            raise ArgumentError(
                f"paths: {scan.path} is compressed ({kind}), and a record in it cannot be read without all before it: "
                f"write its records once more without compression, from "
                f'tf.data.TFRecordDataset(path, compression_type="{kind}")'
            )
