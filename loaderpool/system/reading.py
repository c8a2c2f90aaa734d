"""Reading a file at a place of one's own, also where the system has no call for that."""

from __future__ import annotations

import os
import threading

_lock = threading.Lock()
_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_to_read(path: str) -> int:
    """Return a descriptor of a file's bytes, which no process that is started inherits."""
    return os.open(path, _READ_ONLY)


def _read_in_turn(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read at an offset, with the file's one position where it was; for threads, not for forks."""
    with _lock:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, offset, os.SEEK_SET)
        try:
            return os.read(descriptor, nbytes)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


# (descriptor, nbytes, offset): at most so many bytes from there on; without them moving, the file's position.
read_at = os.pread if hasattr(os, "pread") else _read_in_turn
