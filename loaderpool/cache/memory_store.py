"""Entries in an anonymous memory file that all processes of a loader share.

    [ counters | table: a number for each item | entries, one behind the other → ]

An entry is appended by one `write` to a descriptor opened with O_APPEND: the kernel finds its place, so that no two
processes get the same, and none holds a lock. Then its place is put into the table, as one number. A process
that dies before that leaves bytes that no process looks at; one that dies after it leaves a whole entry (CACHE-1).
"""

from __future__ import annotations

import os
import struct
import weakref

from loaderpool.cache.counters import Trouble
from loaderpool.memory.arena import map_whole_file
from loaderpool.system import capacity, clock

_HEADER = struct.Struct("<8sQQ")  # the loader's mark, item, length of the pickle
# A number of the table: where the entry begins, and how many units it has. One number is stored whole, so that what is
# read is always the place of one entry.
_UNIT_BYTES = 64
_UNIT_BITS = 24
_MOST_ENTRY_BYTES = _UNIT_BYTES * ((1 << _UNIT_BITS) - 1)
MOST_BYTES = 1 << (64 - _UNIT_BITS)
# What one item must be able to take of the bound for the table to have a number for it. Smaller, and the table of a
# source of billions would be most of the cache; larger, and of tiny entries some are not kept that would fit.
_BYTES_PER_ITEM = 64
# Memory is left alone below this, so that the trainer's next allocation does not wake the OOM killer.
_HEADROOM_BYTES = 128 << 20
# The share of what is free that one process fills before it looks again: so many of them may do so at the same time.
_LOOKS = 64
_LOOK_AGAIN_S = 1.0  # after a look that found too little


def table_items(items: int, max_bytes: int) -> int:
    """For how many items of a source there is a number in the table; the others are not kept."""
    return min(items, max_bytes // _BYTES_PER_ITEM)


class MemoryStore:
    """One process's way to the entries.

    Ownership: of a descriptor of its own.

    Args:
        file: a descriptor of the memory file.
        table: its numbers, one for each item.
        end: where they must end.
        mark: eight bytes that all its entries begin with.
    """

    def __init__(self, file: int, table: memoryview, end: int, mark: bytes) -> None:
        # Opened again: forked workers share one position of an inherited descriptor, and so would not know their own.
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._file)
        self._finalizer.atexit = False
        self._identity = _identity(os.fstat(self._file))
        self._table, self._end, self._mark = table, end, mark
        self._view: memoryview | None = None
        try:
            # Address space, of which nothing is looked at but entries that are there. Read from it, an entry is copied
            # once; by `pread` twice, and that in ten times as long.
            self._view = memoryview(map_whole_file(self._file, end)).cast("B")
        except OSError:  # a limit on it (ulimit -v)
            pass
        self._spare_bytes = 0  # may be written before memory is looked at again
        self._look_at_s = 0.0

    def get(self, item: int) -> memoryview | None:
        """Return the item's pickle; None where it has none."""
        if item >= len(self._table):
            return None
        # SYNC: the entry was written before this number; pairs with MemoryStore.put.
        place = self._table[item]
        if not place:
            return None
        start, nbytes = place >> _UNIT_BITS, (place & (1 << _UNIT_BITS) - 1) * _UNIT_BYTES
        view = self._view
        data = memoryview(os.pread(self._file, nbytes, start)) if view is None else view[start : start + nbytes]
        if len(data) < _HEADER.size:
            return None
        mark, found, nbytes = _HEADER.unpack_from(data)
        end = _HEADER.size + nbytes
        if mark != self._mark or found != item or len(data) < end:  # the loader was closed, or files were mixed up
            return None
        return data[_HEADER.size : end]

    def put(self, item: int, pickled: bytes) -> Trouble:
        """Keep the item's pickle, if there is room."""
        nbytes = _HEADER.size + len(pickled)
        status = os.fstat(self._file)
        if _identity(status) != self._identity:  # the function has closed our descriptors, and this is another file
            return Trouble.BROKEN
        if item >= len(self._table) or nbytes > _MOST_ENTRY_BYTES or status.st_size + nbytes > self._end:
            return Trouble.BOUND
        if not self._has_memory(nbytes):
            return Trouble.NO_MEMORY
        try:
            written = os.writev(self._file, [_HEADER.pack(self._mark, item, len(pickled)), pickled])
        except OSError:  # the machine has no pages left, or RLIMIT_FSIZE is reached
            return Trouble.NO_MEMORY
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        if end > self._end:  # another process has written since the look; what ends behind the bound is not used
            os.ftruncate(self._file, self._end)
            return Trouble.BOUND
        if written < nbytes:
            return Trouble.NO_MEMORY
        # SYNC: stored last; pairs with MemoryStore.get.
        self._table[item] = (end - nbytes) << _UNIT_BITS | -(-nbytes // _UNIT_BYTES)
        return Trouble.NONE

    def close(self) -> None:
        """Let go of the descriptor and the mapping."""
        self._view = None
        self._finalizer()

    def _has_memory(self, nbytes: int) -> bool:
        if self._spare_bytes < nbytes:
            now = clock.monotonic_s()
            if now < self._look_at_s:
                return False
            spare = capacity.available_memory_bytes() - _HEADROOM_BYTES
            if spare < nbytes:
                self._look_at_s = now + _LOOK_AGAIN_S
                return False
            self._spare_bytes = max(nbytes, spare // _LOOKS)
        self._spare_bytes -= nbytes
        return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
