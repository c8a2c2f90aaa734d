"""Which parts of the memory file are in use, and how many slots a run has. Pure; of the supervisor's state."""

from __future__ import annotations

from loaderpool.memory.extents import ExtentMap

_FEW_BYTES = 64 << 20  # a run has 32 slots if they take less than this


class Space(ExtentMap):
    """Free parts of `size` bytes from `start` on."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, start + size)
        self.size = size

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((hole.nbytes for hole in self._free), default=0)


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
