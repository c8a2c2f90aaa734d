"""What the processes that use a cache tell of it: a cell of counters for each worker, in memory that all share."""

from __future__ import annotations

import dataclasses
import enum

from loaderpool.config import MAX_WORKERS

_FIELDS_PER_CELL = 16  # 128 bytes, for the reason that the board has
COUNTER_BYTES = MAX_WORKERS * _FIELDS_PER_CELL * 8


class Trouble(enum.IntEnum):
    """Why an item was not kept."""

    NONE = 0
    BOUND = 1  # there is no room for it within `max_bytes`
    BUSY = 2  # other processes were writing all the time
    NO_MEMORY = 3  # the machine has too little left
    NO_SPACE = 4  # nor has the disk
    BROKEN = 5  # the files cannot be written any more


class _Field(enum.IntEnum):
    HITS = 0
    MISSES = 1
    DAMAGED = 2
    TROUBLES = 3  # a bit for each that there was


@dataclasses.dataclass(frozen=True)
class CacheCounts:
    """What a loader's processes have counted."""

    hits: int = 0  # results that came from the cache
    misses: int = 0  # results that the function gave
    damaged: int = 0  # entries that did not have what was written
    bytes: int = 0  # taken now
    troubles: frozenset[Trouble] = frozenset()

    @property
    def is_full(self) -> bool:
        """Whether some item was not kept for lack of room."""
        return not self.troubles.isdisjoint({Trouble.BOUND, Trouble.NO_MEMORY, Trouble.NO_SPACE})


class CacheCell:
    """One process's counters. Every cell has one writer at a time: a worker, and after its death its successor.

    Args:
        numbers: all cells, as u64.
        cell: which.
    """

    def __init__(self, numbers: memoryview, cell: int) -> None:
        self._numbers, self._base = numbers, cell * _FIELDS_PER_CELL

    def hit(self) -> None:
        """A result came from the cache."""
        self._numbers[self._base] += 1

    def miss(self) -> None:
        """The function gave a result."""
        self._numbers[self._base + _Field.MISSES] += 1

    def damage(self) -> None:
        """An entry is not what was written."""
        self._numbers[self._base + _Field.DAMAGED] += 1

    def trouble(self, trouble: Trouble) -> None:
        """An item could not be kept."""
        self._numbers[self._base + _Field.TROUBLES] |= 1 << trouble


def count(numbers: memoryview, nbytes: int) -> CacheCounts:
    """Return the sum over all cells."""
    hits, misses, damaged, troubles = (numbers[field::_FIELDS_PER_CELL].tolist() for field in _Field)
    met = frozenset(trouble for trouble in Trouble if any(bits >> trouble & 1 for bits in troubles))
    return CacheCounts(sum(hits), sum(misses), sum(damaged), nbytes, met)
