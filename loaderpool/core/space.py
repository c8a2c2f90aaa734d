"""Which parts of the memory file are in use, and how many slots a run has. Pure; of the supervisor's state."""

from __future__ import annotations

import bisect

_FEW_BYTES = 64 << 20  # a run has 32 slots if they take less than this


class Space:
    """Free parts of `size` bytes from `start` on."""

    def __init__(self, start: int, size: int) -> None:
        self.size = size
        self._free = [(start, size)]  # (offset, bytes), by offset, never adjacent

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((size for _, size in self._free), default=0)

    def take(self, size: int) -> int:
        """Return the offset of the first free part of `size` bytes, so that pages are used again."""
        for at, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[at : at + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        raise MemoryError(size)

    def give_back(self, offset: int, size: int) -> None:
        """The part is free again."""
        at = bisect.bisect(self._free, (offset,))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, before_size = self._free.pop(at - 1)
            offset, size, at = before, before_size + size, at - 1
        self._free.insert(at, (offset, size))


def slots_of(slot_bytes: int, workers: int, budget: int) -> int:
    """Return how many slots a run has.

    Each worker fills one while the next one waits for it, and the consumer has views of two. Small slots are more, so
    that one slow sample does not stop all workers.

    Args:
        slot_bytes: of each.
        workers: of the pool.
        budget: bytes that may be used.
    """
    wanted = max(2 * workers + 2, min(32, _FEW_BYTES // slot_bytes))
    return max(0, min(wanted, budget // slot_bytes))


def lendable(slots: int, workers: int) -> int:
    """Return how many of a run's slots may have views, so that each worker and the next batch still have one."""
    return max(slots - min(workers + 1, (slots + 1) // 2), 0)
