"""Files that can only be read from front to back: compressed files, and files at URLs."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from loaderpool.errors import ArgumentError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK_BYTES = 1 << 18
"""Bytes per read of a local file. Smaller: more calls per gigabyte. Larger: more memory for each
open file."""
_STEP_BYTES = 1 << 16
"""Maximum input and output of one step of a decompressor. Smaller: more calls. Larger: damage is
found later, so an error may name a record long before the damage."""
_ZSTANDARD_BYTES = 1 << 12  # input per step of `zstandard`, which cannot limit its output
_KEPT_BYTES = 1 << 12  # bytes kept before the position, because `tarfile` seeks back by a block


class ReadFailedError(Exception):
    """Failure to read a file. Its text continues a sentence that starts with the record's name."""


class Decompressor(Protocol):
    """Interface of `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Compression(NamedTuple):
    """A format of compressed files."""

    name: str  # name of the format, such as "gzip"
    magic: bytes  # first bytes of each file of the format
    make: Callable[[], Decompressor] | None  # None: the format is not supported


def compression_of(head: bytes) -> Compression | None:
    """Return the compression that a file's first 16 bytes show, or None."""
    return next((each for each in _COMPRESSIONS if head.startswith(each.magic)), None)


def head_of(path: str) -> bytes:
    """Return the first 16 bytes of a local file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(16)


def refuse_compressed(path: str, what: str) -> None:
    """Raise ArgumentError if a local file is compressed.

    Args:
        path: path of the file.
        what: name of a record in the message, such as "a line".
    """
    if compression_of(head_of(path)) is not None:
        raise ArgumentError(
            f"paths: {path} is compressed, so {what} cannot be read without all data before it. "
            "Decompress the file, such as with gunzip, and pass the result"
        )


def local_chunks(path: str) -> Iterator[bytes]:
    """Yield the bytes of a local file in chunks."""
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


class InOrder(io.RawIOBase):
    """A binary file that is decompressed while it is read once, from front to back.

    `seek` goes forward. It goes back only to the position `keep_from`, or by up to 4 KiB.

    Args:
        chunks: bytes of the file, as stored. They are closed with this file.
        path: path or URL, for messages.
        compression_of: returns the compression by the first 16 bytes.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        path: str,
        compression_of: Callable[[bytes], Compression | None],
    ) -> None:
        self.path = path
        self.keep_from: int | None = None  # first position that can be read again; None: none can
        self._data = b""
        self._start = self._at = 0  # positions of the first byte of `_data`, and of the next byte
        self._chunks = chunks
        # If the first read fails, nothing stays open, because a generator that raises is closed.
        self._fill(16)
        self.compression = compression_of(self._data[:16])
        if self.compression is not None:
            raw, self._data = self._data, b""
            self._chunks = _decompressed(_in_steps(raw, chunks), self.compression, path)

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or fewer at the end of the file."""
        begin = self._at - self._start
        end = begin + size
        if size < 0 or end > len(self._data):
            self._fill(size)
            begin = self._at - self._start
            end = len(self._data) if size < 0 else begin + size
        data = self._data[begin:end]
        self._at += len(data)
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer and return the number of bytes, or 0 at the end of the file."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def tell(self) -> int:
        """Return the position of the next byte in the decompressed data."""
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, counted from the start. A position after the end means the end."""
        if whence != io.SEEK_SET or position < self._start:
            raise io.UnsupportedOperation(
                f"{self.path} is read from front to back, so it cannot go to {position}"
            )
        if self.keep_from is not None:
            self._fill(position - self._at)
        while position > self._start + len(self._data) and self._skip():
            pass
        self._at = min(position, self._start + len(self._data))
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True, because seeking forward is possible."""
        return True

    def between(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start`, at least `keep_from`, to `stop`. They were read before."""
        return self._data[start - self._start : stop - self._start]

    def close(self) -> None:
        """Close the underlying file."""
        if not self.closed:
            _close(self._chunks)
        super().close()

    def _skip(self) -> bool:
        """Read one step beyond the data, and move there; return False at the end of the file."""
        self._at = self._start + len(self._data)
        return self._fill(1)

    def _fill(self, size: int) -> bool:
        """Read until `_data` has `size` bytes from the position on, or all bytes if `size` is -1.

        Return False if the file has fewer bytes.
        """
        keep = (
            self._at - _KEPT_BYTES
            if self.keep_from is None
            else min(self.keep_from, self._at - _KEPT_BYTES)
        )
        pieces = [self._data[max(keep - self._start, 0) :]]
        self._start = max(keep, self._start)
        missing = size - (self._start + len(pieces[0]) - self._at)
        while size < 0 or missing > 0:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            pieces.append(chunk)
            missing -= len(chunk)
        self._data = b"".join(pieces)
        return missing <= 0


def _close(chunks: Iterator[bytes]) -> None:
    """Close the file that a generator reads. Other iterators have no file."""
    close: Callable[[], None] | None = getattr(chunks, "close", None)
    if close is not None:
        close()


def _in_steps(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `first` and then `rest` in pieces of `_STEP_BYTES`, and close `rest` at the end."""
    try:
        for chunk in itertools.chain((first,), rest):
            for at in range(0, len(chunk), _STEP_BYTES):
                yield chunk[at : at + _STEP_BYTES]
    finally:
        _close(rest)


def _decompressed(chunks: Iterator[bytes], compression: Compression, path: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, which may consist of several compressed files."""
    make = compression.make
    if make is None:
        raise ArgumentError(
            f"paths: {path} is a {compression.name} file. Extract it, and pass the result"
        )
    try:
        decompressor, data, is_over = make(), b"", False
        while True:
            if decompressor.eof:  # zeros may follow, as padding of tapes and blocks
                data = decompressor.unused_data.lstrip(b"\0")
                while not data and (chunk := next(chunks, b"")):
                    data = chunk.lstrip(b"\0")
                if not data:
                    return
                decompressor = make()
            elif decompressor.needs_input:
                data = next(chunks, b"")
                is_over = not data
            try:
                found = decompressor.decompress(data, _STEP_BYTES)
            except (ImportError, MemoryError):
                raise
            except Exception as error:
                if not type(error).__module__.startswith(_RAISED_IN) and not isinstance(
                    error, (OSError, EOFError)
                ):
                    raise
                raise ReadFailedError(
                    f"cannot be read, because the {compression.name} data is damaged ({error})"
                ) from error
            if found:
                yield found
            elif is_over and not decompressor.eof:
                raise ReadFailedError(
                    f"cannot be read, because the {compression.name} file is truncated"
                )
            data = b""
    finally:
        chunks.close()  # type: ignore[attr-defined]  # a generator


# Modules whose exceptions mean damaged data. `bz2` raises OSError, so it is not in the list.
_RAISED_IN = (
    "zlib",
    "igzip_lib",
    "isal",
    "_lzma",
    "lzma",
    "zstd",
    "zstandard",
    "compression",
    "_zstd",
)


class _LibraryDecompressor(Protocol):
    """Decompressor of `zlib`, `isal` or `zstandard` (which does not accept `max_length`)."""

    @property
    def eof(self) -> bool: ...

    @property
    def unconsumed_tail(self) -> bytes: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _Limited:
    """Adapter: a decompressor of `zlib` or `zstandard` with the interface of `bz2`.

    Args:
        inner: decompressor of the library.
        step: maximum input per call in bytes; None: the library accepts `max_length`.
    """

    def __init__(self, inner: _LibraryDecompressor, step: int | None) -> None:
        self._inner, self._step = inner, step
        self._rest = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        data = self._rest + data
        if self._step is None:
            found = self._inner.decompress(data, max_length)
            self._rest = self._inner.unconsumed_tail
            return found
        self._rest = data[self._step :]
        return self._inner.decompress(data[: self._step]) if data else b""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data + (b"" if self._step is None else self._rest)


def _inflater(window_bits: int) -> _Limited:
    """Return a decompressor of `isal`, or of `zlib` if `isal` is not installed.

    `isal` takes half the time of `zlib`.
    """
    library = zlib
    with contextlib.suppress(ImportError):
        library = importlib.import_module("isal.isal_zlib")
    return _Limited(library.decompressobj(window_bits), None)


def _gzip() -> _Limited:
    return _inflater(16 + zlib.MAX_WBITS)


def _bzip2() -> Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _xz() -> Decompressor:
    import lzma

    return lzma.LZMADecompressor()


def _zstd() -> Decompressor:
    for name in ("compression.zstd", "zstandard"):
        try:
            library = importlib.import_module(name)
        # Most builds of Python 3.14 and later have `compression.zstd`.
        except ModuleNotFoundError:
            continue
        inner = library.ZstdDecompressor()
        return _Limited(inner.decompressobj(), _ZSTANDARD_BYTES) if name == "zstandard" else inner
    raise ImportError(
        "reading files compressed with zstd needs Python 3.14 or zstandard: pip install zstandard",
        name="zstandard",
    )


def _zlib() -> _Limited:
    return _inflater(zlib.MAX_WBITS)


ZLIB = Compression("zlib", b"\x78", _zlib)  # callers also check the second byte, a checksum
# Formats that are detected by their first bytes. No text begins with these bytes. File names are
# ignored.
_COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b\x08", _gzip),
    Compression("bzip2", b"BZh91AY&SY", _bzip2),
    Compression("xz", b"\xfd7zXZ\0", _xz),
    Compression("zstd", b"\x28\xb5\x2f\xfd", _zstd),
    Compression("zip", b"PK\x03\x04", None),
)
