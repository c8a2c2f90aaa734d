"""What the processes that use a cache tell of it: a cell of counters for each worker, in memory that all share."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from loaderpool.settings.groups import MAX_WORKERS

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
    BYTES = 4  # that a host's cache takes


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


class CacheNews(NamedTuple):
    """What has come to a host's counts since it was told last."""

    hits: int
    misses: int
    damaged: int
    troubles: int  # a bit for each
    bytes: int  # taken now


class CacheCell:
    """Counters of one worker, or of one host. Every cell has one writer at a time: a worker, and after its death its
    successor, or the dispatcher of the host.

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

    def add(self, news: CacheNews) -> None:
        """Count what a host tells."""
        numbers, base = self._numbers, self._base
        numbers[base + _Field.HITS] += news.hits
        numbers[base + _Field.MISSES] += news.misses
        numbers[base + _Field.DAMAGED] += news.damaged
        numbers[base + _Field.TROUBLES] |= news.troubles
        numbers[base + _Field.BYTES] = news.bytes

    def end(self) -> None:
        """The host has gone, and what it kept in memory with it."""
        self._numbers[self._base + _Field.BYTES] = 0


def news_between(before: CacheCounts, now: CacheCounts) -> CacheNews:
    """Return what has come since."""
    return CacheNews(
        now.hits - before.hits,
        now.misses - before.misses,
        now.damaged - before.damaged,
        sum(1 << trouble for trouble in now.troubles),
        now.bytes,
    )


def count(numbers: memoryview, nbytes: int) -> CacheCounts:
    """Return the sum over all cells, and over what hosts take beside these bytes."""
    hits, misses, damaged, troubles, elsewhere = (numbers[field::_FIELDS_PER_CELL].tolist() for field in _Field)
    met = frozenset(trouble for trouble in Trouble if any(bits >> trouble & 1 for bits in troubles))
    return CacheCounts(sum(hits), sum(misses), sum(damaged), nbytes + sum(elsewhere), met)
