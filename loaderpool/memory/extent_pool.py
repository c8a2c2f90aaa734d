"""Extents of the arena that are used again, for contents of varied size: fresh pages cost more than a copy."""

from __future__ import annotations

import bisect

from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import PAGE_BYTES, Extent

# Sizes are rounded up to an eighth of a power of two, so that what varies a little fits what is there.
_STEPS = 8


def room_bytes(nbytes: int) -> int:
    """Return the size of an extent for so many bytes."""
    step = max(PAGE_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-max(nbytes, 1) // step) * step


class ExtentPool:
    """The extents that are not in use now. The caller holds the session's lock.

    Args:
        arena: where from.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._spare: list[tuple[int, Extent]] = []  # by size
        self.is_closed = False

    def take(self, nbytes: int) -> Extent:
        """Reserve an extent for so many bytes.

        Raises:
            MemoryLimitError: there is none.
        """
        size = room_bytes(nbytes)
        at = bisect.bisect_left(self._spare, (size,))
        if at < len(self._spare) and self._spare[at][0] <= 2 * size:
            return self._spare.pop(at)[1]
        if self._spare:  # of other sizes than what comes now
            self._arena.give_back(self._spare.pop(0 if at else -1)[1])
        return self._arena.take(size, "the items of a batch")

    def give(self, extent: Extent) -> None:
        """Take back an extent that is not looked at any more."""
        if self.is_closed:
            self._arena.give_back(extent)
        else:
            bisect.insort(self._spare, (extent.nbytes, extent))

    def close(self) -> None:
        """Give all memory back, and extents that come later at once."""
        self.is_closed = True
        while self._spare:
            self._arena.give_back(self._spare.pop()[1])
