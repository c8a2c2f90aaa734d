"""Which byte ranges of the arena are taken: a first-fit list of free extents, pure bookkeeping."""

from __future__ import annotations

import bisect
from typing import NamedTuple

PAGE_BYTES = 4096


class Extent(NamedTuple):
    """A byte range of the arena."""

    offset: int  # from the arena's start, a multiple of PAGE_BYTES
    nbytes: int  # a multiple of PAGE_BYTES

    @property
    def end(self) -> int:
        """The first byte behind the extent."""
        return self.offset + self.nbytes


class ExtentMap:
    """Hands out page-aligned extents of `[start, end)` and takes them back, merging neighbours."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [Extent(start, end - start)]
        self.taken_bytes = 0

    def take(self, nbytes: int) -> Extent:
        """Return the first free extent of at least `nbytes`, rounded up to whole pages.

        Raises:
            MemoryError: no hole is large enough; the arena is sparse, so this means terabytes.
        """
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        for position, hole in enumerate(self._free):
            if hole.nbytes >= size:
                taken = Extent(hole.offset, size)
                if hole.nbytes == size:
                    del self._free[position]
                else:
                    self._free[position] = Extent(hole.offset + size, hole.nbytes - size)
                self.taken_bytes += size
                return taken
        raise MemoryError(f"no free range of {size} bytes is left")

    def give_back(self, extent: Extent) -> None:
        """Make the extent free again."""
        position = bisect.bisect(self._free, extent)
        before = self._free[position - 1] if position else None
        after = self._free[position] if position < len(self._free) else None
        if (before and before.end > extent.offset) or (after and extent.end > after.offset):
            raise ValueError(f"{extent} is free already")
        self.taken_bytes -= extent.nbytes
        if after and extent.end == after.offset:
            extent = Extent(extent.offset, extent.nbytes + after.nbytes)
            del self._free[position]
        if before and before.end == extent.offset:
            self._free[position - 1] = Extent(before.offset, before.nbytes + extent.nbytes)
        else:
            self._free.insert(position, extent)
