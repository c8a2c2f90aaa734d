"""Data files: memory files that hold arrays of the trainer's, and that all workers map.

Each is a file of its own, not a part of the arena: it lives exactly as long as a process maps it or has a descriptor of
it, so no death leaves anything behind, and an array that looks at it stays whole when others let go of it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref

from loaderpool.system import machine
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.system.undoing import Undoing

# How such files are named, so that they are found in a list of mappings.
NAME = "data"

_COMPARED_BYTES = 64 << 20


class DataFile:
    """A memory file with the contents of a range of this process's memory.

    Ownership: of the descriptor, which is closed with the last reference to this; mappings stay.

    Args:
        address: of the memory, a multiple of the page size.
        nbytes: its length, whole pages.

    Attributes:
        is_shared: the memory still is a shared mapping of the file, so that writes to it are writes to the file.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.is_shared = False
        with InterruptsHeld():
            self.descriptor = machine.create_memory_file(NAME)
            Undoing(self, functools.partial(os.close, self.descriptor))
        os.ftruncate(self.descriptor, nbytes)

    def note(self) -> None:
        """Have `find_file` find it from now on."""
        with _lock:
            _files.append(weakref.ref(self))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the file holds what a range of memory holds now."""
        offset = address - self.address
        if offset < 0 or offset + nbytes > self.nbytes:
            return False
        return self.is_shared or self._is_equal(address, nbytes, offset)

    def freeze(self) -> None:
        """Have what the trainer writes from now on stay its own: the file is what workers were promised."""
        if self.is_shared:
            machine.map_over(self.address, self.nbytes, self.descriptor, 0)
            self.is_shared = False

    def _is_equal(self, address: int, nbytes: int, offset: int) -> bool:
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        with mmap.mmap(self.descriptor, self.nbytes, mmap.MAP_PRIVATE) as view:  # private, so that its address is had
            start = ctypes.c_char.from_buffer(view)
            try:
                base = ctypes.addressof(start) + offset
                return all(
                    compare(address + at, base + at, min(_COMPARED_BYTES, nbytes - at)) == 0
                    for at in range(0, nbytes, _COMPARED_BYTES)
                )
            finally:
                del start


_files: list[weakref.ref[DataFile]] = []
_lock = threading.Lock()


def find_file(address: int, nbytes: int) -> DataFile | None:
    """Return a file that holds what this range of memory holds now; None where there is none.

    By contents, not by what lay there once: the array may have been written to, or freed and its place given away.
    """
    with _lock:
        _files[:] = [each for each in _files if each() is not None]
        found = [each() for each in _files]
    return next((file for file in found if file is not None and file.holds(address, nbytes)), None)


@functools.cache
def freeze_at_forks() -> None:
    """Have forks of this process and itself not see each other's writes to arrays of `share`, from now on."""
    machine.at_forks(before=_freeze_all)


def _freeze_all() -> None:
    for each in list(_files):
        file = each()
        if file is not None:
            file.freeze()
