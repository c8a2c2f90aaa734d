"""Files that are read at any offset: opened in each process when first needed, and refused once they have changed.

A forked process may have closed what it inherited, and opened something else under the same number. So a descriptor is
used, and closed, only in the process that opened it.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from loaderpool.errors import SourceError

__all__ = ["Files", "Stamp"]

_KEPT_OPEN = 64
"""Files open at once in a process. Fewer: a source of many files opens one for most items. More: with 32 loaders in a
process they would near the 1024 descriptors that many systems allow it."""


@dataclass(frozen=True)
class Stamp:
    """A file as it was when it was looked through."""

    size: int
    """Bytes."""
    modified_ns: int
    """Its time of modification, since 1970."""

    @staticmethod
    def of(descriptor: int) -> Stamp:
        """Of an open file, as it is now."""
        status = os.fstat(descriptor)
        return Stamp(status.st_size, status.st_mtime_ns)


class Files:
    """Some files by number; threads and forked processes may read them at the same time.

    Ownership: closes what this process opened when it is collected.

    Args:
        paths: absolute, so that another working directory does not matter.
        stamps: of each; a file that is not like that any more is refused.
    """

    __slots__ = ("__weakref__", "_descriptors", "_lock", "_owner", "_paths", "_stamps")

    def __init__(self, paths: tuple[str, ...], stamps: tuple[Stamp, ...]) -> None:
        self._paths = paths
        self._stamps = stamps
        self._own()

    def _own(self) -> None:
        """From now on files are opened for this process; what another one opened is left alone."""
        self._owner = os.getpid()
        self._lock = threading.Lock()  # a new one, for a fork may have copied the old one while it was held
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors, self._owner).atexit = False

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of a file from `offset` on.

        Raises:
            SourceError: it cannot be opened, or is not as it was: another size or time of modification.
        """
        if os.getpid() != self._owner:
            self._own()
        with self._lock:  # else another thread may close the file between the look-up and the read
            descriptor = self._descriptors.get(number)
            if descriptor is None:
                descriptor = self._opened(number)
            # Looked at before each read, not only when opened: a file may be written to while an epoch runs.
            self._check(number, descriptor)
            data = os.pread(descriptor, length, offset)
            while len(data) < length:  # a signal, a network file system, or the file was cut this very moment
                more = os.pread(descriptor, length - len(data), offset + len(data))
                if not more:
                    self._check(number, descriptor)
                    raise SourceError(f"{self._paths[number]} ends before byte {offset + length}; {_ADVICE}")
                data += more
            return data

    def _opened(self, number: int) -> int:
        if len(self._descriptors) >= _KEPT_OPEN:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        try:
            descriptor = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{self._paths[number]} was there when it was indexed, and now: {error}") from error
        self._descriptors[number] = descriptor
        return descriptor

    def _check(self, number: int, descriptor: int) -> None:
        then, now = self._stamps[number], Stamp.of(descriptor)
        if now != then:
            raise SourceError(changed(self._paths[number], then, now))

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self._paths, self._stamps)


_ADVICE = "make the source anew, and write to a new file and rename it where it has to change while it is read"


def changed(path: str, then: Stamp, now: Stamp) -> str:
    """What is said of a file that is not as it was."""
    if now.size < then.size:
        what = f"became shorter since it was indexed ({then.size} bytes then, {now.size} now)"
    elif now.size > then.size:
        what = f"became longer since it was indexed ({then.size} bytes then, {now.size} now)"
    else:
        what = "was written to since it was indexed (same size, other time of modification)"
    return f"{path} {what}; {_ADVICE}"


def _close(descriptors: dict[int, int], owner: int) -> None:
    if os.getpid() == owner:
        while descriptors:
            os.close(descriptors.popitem()[1])
