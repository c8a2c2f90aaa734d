"""Files at URLs, read from front to back by fsspec, with retries."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from loaderpool.errors import shortened
from loaderpool.sources.in_order import ReadFailedError
from loaderpool.sources.tables import import_extra
from loaderpool.system.interrupts import is_of_a_handler

_BLOCK_BYTES = 1 << 22
"""Requested at a time. Smaller: the latency of a request costs more than its bytes. Larger: more memory for each file
that is open, of which there are up to 16 in a loader."""
_DELAYS_S = (0.1, 0.3, 0.9, 2.7, 8.1)
"""Before each retry. Fewer or shorter: a server that restarts ends a training."""
_PERMANENT = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, LookupError,
    NotImplementedError, TypeError, ValueError,
)  # fmt: skip
_NOT_FOUND = 404
_PASSING_STATUS = (408, 425, 429)  # of the HTTP errors from 400 to 499
# "s3://bucket/x", and also chained ones such as "simplecache::s3://bucket/x".
_URL = re.compile(r"[a-z][a-z0-9+.-]+(::|://)", re.IGNORECASE)


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as "gs://bucket/file"."""
    return _URL.match(path) is not None


def is_of_this_process(url: str) -> bool:
    """Return whether a URL names memory of this process."""
    return "memory://" in url


def remote_chunks(url: str, options: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of a file at a URL. Errors that may pass are retried.

    Raises:
        ReadFailedError: An error did not pass, or the file has changed meanwhile.
    """
    file: Any = None
    size: int | None = None
    at = failures = 0
    streams = False  # the server cannot send a part of a file
    try:
        while True:
            try:
                if file is None:
                    file = _opened(url, options, at, streams)
                    found = getattr(file, "size", None)
                    if size is not None and found is not None and found != size:
                        raise ReadFailedError(
                            f"cannot be read, because the file has changed from {size} to {found} bytes"
                        )
                    size = found if size is None else size
                chunk: bytes = file.read(_BLOCK_BYTES)
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
                        f"cannot be read{tries}, from byte {at} on: {type(cause).__name__}: {shortened(str(cause))}"
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


def _opened(url: str, options: Mapping[str, Any], at: int, streams: bool) -> Any:
    """Open a file at a position."""
    core = import_extra("fsspec.core", f"reading {url}", "remote")
    system, path = core.url_to_fs(url, **options)
    if not streams:
        file = system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="none")
        if not at:
            return file
        try:
            file.seek(at)
            return file
        except (OSError, ValueError):  # it is a stream already
            _close(file)
    file = system.open(path, "rb", block_size=0)
    while at:
        skipped = file.read(min(at, _BLOCK_BYTES))
        if not skipped:
            _close(file)
            raise OSError(f"the file ended {at} bytes before the position")
        at -= len(skipped)
    return file


def _close(file: Any) -> None:
    if file is not None:
        with contextlib.suppress(OSError, RuntimeError):  # of a connection that has failed
            file.close()


def _cause_of(error: BaseException) -> BaseException:
    """Return the error that says what happened: fsspec calls all that fails when it opens an HTTP file "not found"."""
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
    """Return the HTTP status of an error of aiohttp, requests or gcsfs; 0: it has none."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (response, "status_code"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return 0
