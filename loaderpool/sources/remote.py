"""Files at URLs, which fsspec reads from front to back, with retries."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from loaderpool.errors import shortened
from loaderpool.sources.in_order import ReadFailedError
from loaderpool.sources.tables import import_extra
from loaderpool.system.interrupts import is_of_a_handler

_BLOCK_BYTES = 1 << 22
"""Bytes per request. Smaller: the latency of a request costs more time than its bytes. Larger: more
memory for each open file, and a loader has up to 16 open files by default."""
_DELAYS_S = (0.1, 0.3, 0.9, 2.7, 8.1)
"""Seconds to wait before each retry. Smaller (or fewer): a restart of the server ends a training.
Larger (or more): a permanent failure is reported later."""
_PERMANENT = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError,
    LookupError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip
_NOT_FOUND = 404
_PASSING_STATUS = (408, 425, 429)  # HTTP errors from 400 to 499 that are retried
# URLs such as "s3://bucket/x", and chained URLs such as "simplecache::s3://bucket/x".
_URL = re.compile(r"[a-z][a-z0-9+.-]+(::|://)", re.IGNORECASE)


def is_url(path: str) -> bool:
    """Return True if a path is a URL, such as "gs://bucket/file"."""
    return _URL.match(path) is not None


def is_of_this_process(url: str) -> bool:
    """Return True if a URL refers to memory of this process."""
    return "memory://" in url


def remote_chunks(url: str, options: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of a file at a URL. Temporary errors are retried.

    Raises:
        ReadFailedError: an error is permanent or all retries failed, or the file has changed
            meanwhile.
    """
    file: IO[bytes] | None = None
    size: int | None = None
    at = failures = 0
    streams = False  # True if the server cannot send a part of a file
    try:
        while True:
            try:
                if file is None:
                    file = _opened(url, options, at, streams)
                    found = getattr(file, "size", None)
                    if size is not None and found is not None and found != size:
                        raise ReadFailedError(
                            f"cannot be read, because the file has changed from {size} to {found} "
                            "bytes"
                        )
                    size = found if size is None else size
                chunk = file.read(_BLOCK_BYTES)
                if not chunk and size is not None and at < size:
                    raise OSError(f"the file ended after {at} of {size} bytes")
            except Exception as error:
                _close(file)
                file = None
                if is_of_a_handler(error) or isinstance(error, (ReadFailedError, ImportError)):
                    raise
                if isinstance(error, ValueError) and not streams and "range requests" in str(error):
                    streams = True
                    continue
                cause = _cause_of(error)
                if not _may_pass(cause) or failures == len(_DELAYS_S):
                    tries = f" in {failures + 1} tries" * (failures > 0)
                    raise ReadFailedError(
                        f"cannot be read{tries}, from byte {at} on: {type(cause).__name__}: "
                        f"{shortened(str(cause))}"
                    ) from error
                time.sleep(_DELAYS_S[failures])
                failures += 1
                continue
            if not chunk:
                return
            at += len(chunk)
            failures = 0
            yield chunk
    finally:
        _close(file)


def _opened(url: str, options: Mapping[str, Any], at: int, streams: bool) -> IO[bytes]:
    """Open a file and move to the position `at`.

    Args:
        url: URL of the file.
        options: options of fsspec.
        at: position in bytes.
        streams: True to read from the start and drop the bytes before the position.
    """
    core = import_extra("fsspec.core", f"reading {url}", "remote")
    system, path = core.url_to_fs(url, **options)
    if not streams:
        file: IO[bytes] = system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="none")
        if not at:
            return file
        try:
            file.seek(at)
            return file
        except (OSError, ValueError):  # the file cannot seek, because fsspec opened a stream
            _close(file)
    file = system.open(path, "rb", block_size=0)
    while at:
        skipped = file.read(min(at, _BLOCK_BYTES))
        if not skipped:
            _close(file)
            raise OSError(f"the file ended {at} bytes before the position")
        at -= len(skipped)
    return file


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError, RuntimeError):  # the connection may have failed
            file.close()


def _cause_of(error: BaseException) -> BaseException:
    """Return the actual cause of an error.

    fsspec raises FileNotFoundError for every failure to open an HTTP file. The cause of that error
    is returned instead, unless its status is 404.
    """
    cause = error.__cause__
    is_other = (
        isinstance(error, FileNotFoundError)
        and cause is not None
        and _status_of(cause) != _NOT_FOUND
    )
    return cause if is_other and cause is not None else error


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, _PERMANENT):
        return False
    status = _status_of(error)
    return not 400 <= status < 500 or status in _PASSING_STATUS


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of an error of aiohttp, requests or gcsfs, or 0 if there is none."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (response, "status_code"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return 0
