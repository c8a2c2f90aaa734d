"""`Cache`: where a loader keeps what its function gave, and how much of it; and what its processes count of it."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from loaderpool.checks import read_bytes_count
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only

MEMORY = "memory"


class Count(enum.IntEnum):
    """What each worker counts of a loader's cache."""

    HITS = 0  # a result came from the cache
    MISSES = 1  # the function gave a result
    DAMAGED = 2  # an entry did not have what was written
    OVER_BOUND = 3  # an item was not kept: there is no room for it within `max_bytes`
    NO_ROOM = 4  # nor was this one: the machine has too little memory left, the disk is full, or the file is gone
    BYTES = 5  # no worker's: what the entries take


NO_COUNTS = [0] * len(Count)
FULL = (Count.OVER_BOUND, Count.NO_ROOM)  # some item was not kept for lack of room


class CachedOf(NamedTuple):
    """What the results in a cache are made of."""

    fn: Any  # the function
    setup: Any  # the hook that runs before it; None: there is none
    source: Any  # gives its items


class CachePlan(NamedTuple):
    """What every process of a loader must know of its cache; travels beside the payload."""

    where: str  # "memory", or a directory
    max_bytes: int | None
    items: int  # of the source
    fields: Mapping[str, str] = {}  # on disk: what entries are of
    counters_at: int = 0  # where in the arena the counters are


@dataclasses.dataclass(frozen=True, init=False)
class Cache:
    """Storage for the result of `fn` for each item.

    Args:
        where: `"memory"`, until the loader is closed; or a directory on a local disk, which is kept for later runs.
        max_bytes: Largest size in bytes, or as `"8GiB"`. Default: half of the free memory; of a disk, all but 5 %.
    """

    where: str
    max_bytes: int | None

    @known_names_only
    def __init__(self, where: str | os.PathLike[str], max_bytes: int | str | None = None) -> None:
        place = os.fspath(where) if isinstance(where, (str, os.PathLike)) else None
        if not isinstance(place, str) or not place or "\0" in place:
            raise ArgumentError(
                f'cache must be "memory", a directory or a loaderpool.Cache, got {brief(where)}'
            )
        # pathlib makes "memory" of "./memory", and who has a Path means a directory.
        in_memory = isinstance(where, str) and place == MEMORY
        object.__setattr__(
            self, "where", MEMORY if in_memory else os.path.abspath(os.path.expanduser(place))
        )
        object.__setattr__(self, "max_bytes", read_bytes_count("Cache.max_bytes", max_bytes))

    @property
    def in_memory(self) -> bool:
        """`True` if the cache is in memory, and so ends with its loader."""
        return self.where == MEMORY  # a directory's path is absolute


def as_cache(value: Any) -> Cache | None:
    """Return the checked `cache` argument of `Loader`."""
    return value if value is None or isinstance(value, Cache) else Cache(value)
