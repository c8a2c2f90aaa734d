"""Files that are read at any offset: opened in each process when first needed, and refused once they have changed."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from loaderpool.errors import SourceError
from loaderpool.sources.kept_open import KeptOpen
from loaderpool.system import machine, reading

_KEPT_OPEN = 128
"""Files open at once in a process, of all its sources, where it may have enough. Fewer: a shuffle over many files opens
one for most items. More: they would near the 1024 descriptors that many systems allow a process."""


@dataclass(frozen=True)
class Stamp:
    """A file as it was when it was looked through."""

    size: int
    """Bytes."""
    modified_ns: int
    """Its time of modification, since 1970."""

    @staticmethod
    def of(file: int | str) -> Stamp:
        """Take the stamp of an open file or a path, as it is now."""
        status = os.stat(file)
        return Stamp(status.st_size, status.st_mtime_ns)


class _Descriptor:
    """A file that this process has open. Ownership: closes it with the last reference, not in a fork of the process."""

    __slots__ = ("_owner", "number")

    def __init__(self, path: str) -> None:
        self._owner = 0
        self.number = reading.open_to_read(path)
        self._owner = os.getpid()

    def __del__(self, getpid: Any = os.getpid, close: Any = os.close) -> None:
        if self._owner == getpid():
            close(self.number)


_open: KeptOpen[_Descriptor] = KeptOpen(machine.descriptors_to_keep(_KEPT_OPEN))


class Files:
    """Some files by number; threads and forked processes may read them at the same time.

    Ownership: what this process has opened is closed when this is collected, or when others are needed.

    Args:
        paths: absolute, so that another working directory does not matter.
        stamps: of each; a file that is not like that any more is refused.
    """

    __slots__ = ("__weakref__", "_owner", "_paths", "_stamps")

    def __init__(self, paths: tuple[str, ...], stamps: tuple[Stamp, ...]) -> None:
        self._paths = paths
        self._stamps = stamps
        self._owner = _open.new_owner()
        weakref.finalize(self, _open.forget, self._owner).atexit = False

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of a file from `offset` on.

        Raises:
            SourceError: it cannot be opened, or is not as it was: another size or time of modification.
        """
        file = _open.get(self._owner, number, self._opened)
        # Looked at before each read, not only when opened: a file may be written to while an epoch runs.
        check_stamp(self._paths[number], self._stamps[number], file.number)
        data = reading.read_at(file.number, length, offset)
        while len(data) < length:  # a signal, a network file system, or the file was cut this very moment
            more = reading.read_at(file.number, length - len(data), offset + len(data))
            if not more:
                check_stamp(self._paths[number], self._stamps[number], file.number)
                raise SourceError(f"{self._paths[number]} ends before byte {offset + length}; {_ADVICE}")
            data += more
        return data

    def _opened(self, number: int) -> _Descriptor:
        try:
            return _Descriptor(self._paths[number])
        except OSError as error:
            raise SourceError(missing(self._paths[number], error)) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self._paths, self._stamps)


_ADVICE = "make the source anew, and write to a new file and rename it where it has to change while it is read"


def check_stamp(path: str, then: Stamp, file: int | str) -> None:
    """Whether a file is as it was.

    Args:
        path: how it is named in an error.
        then: as it was.
        file: its descriptor, or its path again.

    Raises:
        SourceError: it is not.
        OSError: it is not there.
    """
    status = os.stat(file)
    if status.st_size != then.size or status.st_mtime_ns != then.modified_ns:
        raise SourceError(changed(path, then, Stamp(status.st_size, status.st_mtime_ns)))


def changed(path: str, then: Stamp, now: Stamp) -> str:
    """Return what is said of a file that is not as it was."""
    if now.size < then.size:
        what = f"became shorter since it was indexed ({then.size} bytes then, {now.size} now)"
    elif now.size > then.size:
        what = f"became longer since it was indexed ({then.size} bytes then, {now.size} now)"
    else:
        what = "was written to since it was indexed (same size, other time of modification)"
    return f"{path} {what}; {_ADVICE}"


def missing(path: str, error: OSError) -> str:
    """Return what is said of a file that cannot be opened any more."""
    return f"{path} was there when it was indexed, and now: {error}"
