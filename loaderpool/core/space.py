"""Which parts of the memory file are in use, and how many slots a run has. Pure; of the supervisor's state."""

from __future__ import annotations

from loaderpool.memory.extents import Extent, ExtentMap

_FEW_BYTES = 64 << 20  # a run has 32 slots if they take less than this,
_MANY_BATCHES_BYTES = 8 << 20  # ... or this, if each holds very many batches: to take their pages takes time, too
_MANY_BATCHES = 64
_AT_CONSUMER = 8  # what `tf.data` has under prefetch(2), which is five or six, and some that are ready


class Space(ExtentMap):
    """Free parts of `size` bytes from `start` on."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, start + size)
        self.size = size

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((hole.nbytes for hole in self._free), default=0)

    def holes(self) -> list[Extent]:
        """Return all free parts."""
        return list(self._free)


def slots_of(slot_bytes: int, most: int, workers: int, room: int, budget: int) -> int:
    """Return how many slots a run has.

    Each worker fills some while the next ones wait for it, and the consumer has views of others. Small slots are more,
    so that one slow sample does not stop all workers.

    Args:
        slot_bytes: of each.
        most: batches that fit one.
        workers: of the pool.
        room: tickets that each may have.
        budget: bytes that may be used.
    """
    few = _MANY_BATCHES_BYTES if most > _MANY_BATCHES else _FEW_BYTES
    wanted = max(room * workers + _AT_CONSUMER, min(max(32, 4 * workers), few // slot_bytes))
    return max(0, min(wanted, budget // slot_bytes))


def lendable(slots: int, workers: int) -> int:
    """Return how many of a run's slots may have views, so that each worker and the next batch still have one."""
    return max(slots - min(workers + 1, (slots + 1) // 2), 0)
