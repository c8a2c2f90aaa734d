"""TFRecord and tar files of numbered samples, written without TensorFlow; and compression."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import struct
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord_bytes(records: Iterable[bytes]) -> bytes:
    """Return the bytes of an uncompressed TFRecord file."""
    crc32c = pytest.importorskip("google_crc32c")
    pieces = []
    for record in records:
        length = struct.pack("<Q", len(record))
        pieces += [length, struct.pack("<I", _masked(crc32c.value(length)))]
        pieces += [record, struct.pack("<I", _masked(crc32c.value(record)))]
    return b"".join(pieces)


def tar_bytes(members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return the bytes of an uncompressed tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def numbered_records(first: int, count: int) -> list[bytes]:
    """Return records of varied length that begin with their number."""
    rng = np.random.default_rng(first)
    return [
        struct.pack("<q", first + number) + rng.bytes(int(rng.integers(0, 4000)))
        for number in range(count)
    ]


def numbered_members(first: int, count: int) -> list[tuple[str, bytes]]:
    """Return members of samples with two fields: the number, and bytes of varied length."""
    members = []
    for number, record in enumerate(numbered_records(first, count), first):
        members += [(f"some/{number}.id", record[:8]), (f"some/{number}.data", record[8:])]
    return members


def number_of(item: Any) -> int:
    """Return the number of a record or of a sample."""
    return int(struct.unpack("<q", item["id"] if isinstance(item, dict) else item[:8])[0])


def numbered(item: Any, rng: np.random.Generator) -> tuple[int, float]:
    """Sample function. Return the number of the record or tar sample, and a random number."""
    return number_of(item), rng.random()


def zstd(data: bytes) -> bytes:
    """Compress bytes with zstd. Skips the test if no library is installed."""
    for name in ("compression.zstd", "zstandard"):
        try:
            compressed: bytes = importlib.import_module(name).compress(data)
            return compressed
        except ModuleNotFoundError:
            continue
    pytest.skip("no library for zstd")


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}
