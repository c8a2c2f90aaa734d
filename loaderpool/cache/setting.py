"""`Cache`, the user's setting; and the plan and the counters that a loader's processes share."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, Sized
from typing import NamedTuple

from loaderpool.checks import read_bytes_count
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only

MEMORY = "memory"
# Names that users may mean as a kind of cache, in upper or lower case. To use a directory with such
# a name, users must pass a path.
_KINDS = frozenset({MEMORY, "mem", "ram", "disk"})


class Count(enum.IntEnum):
    """Counters of a loader's cache. Each worker has its own, except BYTES."""

    HITS = 0  # results from the cache
    MISSES = 1  # results of function calls
    DAMAGED = 2  # entries that differ from the bytes that were written
    OVER_BOUND = 3  # items that were not stored because of `max_bytes`
    # Items that were not stored for lack of memory or disk space, or because the file is gone.
    NO_ROOM = 4
    BYTES = 5  # size of the store; read from the file, not counted by workers


NO_COUNTS = [0] * len(Count)
FULL = (Count.OVER_BOUND, Count.NO_ROOM)  # counters of items that were not stored


class CachedOf(NamedTuple):
    """Function, setup hook and source that determine the results in a cache."""

    fn: object  # function whose results are stored
    setup: object  # hook that runs before the function; None: there is none
    source: Sized  # source of the function's items
    samples: int | None = None  # samples that the function returns for an item; None: one


class CachePlan(NamedTuple):
    """Description of a loader's cache for all its processes. It is sent with the payload."""

    where: str  # "memory", or a directory
    max_bytes: int | None
    items: int  # number of different items of the source, or of samples if items have several
    # Fingerprint of function, setup hook and source, if the cache is on disk or ranks share it.
    fields: Mapping[str, str] = {}
    counters_at: int = 0  # offset of the counters in the arena


@dataclasses.dataclass(frozen=True, init=False)
class Cache:
    """Storage for the result of `fn` for each item.

    Args:
        where: `"memory"`, until the loader is closed; or a directory on a local disk, which is kept
            for later runs. Ranks of one job on a machine share a cache in memory. Function, `setup`
            and source must be equal.
        max_bytes: Largest size in bytes, or as `"8GiB"`; of a shared cache, for all ranks together.
            Default: half of the free memory; of a disk, all but 5 %.
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
        if place != MEMORY and place.lower() in _KINDS and isinstance(where, str):
            advice = 'cache="memory", or ' * (place.lower() != "disk")
            raise ArgumentError(
                f"cache={brief(place)} would be a directory: write {advice}a path such as "
                f"{brief(os.path.join(os.curdir, place))}"
            )
        # A Path is always a directory, because pathlib converts "./memory" to "memory".
        in_memory = isinstance(where, str) and place == MEMORY
        object.__setattr__(
            self, "where", MEMORY if in_memory else os.path.abspath(os.path.expanduser(place))
        )
        object.__setattr__(self, "max_bytes", read_bytes_count("Cache.max_bytes", max_bytes))

    @property
    def in_memory(self) -> bool:
        """`True` if the cache is in memory, and so ends with its loader."""
        return self.where == MEMORY  # the path of a directory is absolute, so it never matches


def as_cache(value: Cache | str | os.PathLike[str] | None) -> Cache | None:
    """Return the checked `cache` argument of `Loader`."""
    return value if value is None or isinstance(value, Cache) else Cache(value)
