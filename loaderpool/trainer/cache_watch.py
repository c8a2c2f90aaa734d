"""A loader's cache as the trainer has it: made with the loader, and told of where it cannot keep what it should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loaderpool.cache.setting import MEMORY, Cache, CachePlan, Count
from loaderpool.cache.store import SharedCache
from loaderpool.errors import brief, warn
from loaderpool.system import capacity

_FREE_SHARE = 2  # in memory without a bound: this part of what is free
_GOES_ON = "Training continues, and fn is called in every epoch for items that are not stored."
_TEXTS = {
    Count.NO_ROOM: "does not store all items: {no_room}. " + _GOES_ON,
    Count.BROKEN: "does not store all items: it can no longer be written (deleted, damaged, or its files were closed). "
    + _GOES_ON,
    Count.DAMAGED: "is damaged: {damaged} entries could not be read, so fn was called again for them. If this "
    "continues, delete the directory and check the disk.",
}
_NO_MEMORY = "the machine has too little free memory. Set a smaller max_bytes, or pass a directory as cache="
_NO_DISK = "the disk is full. Free some space, or set max_bytes"


def make_cache(cache: Cache, payload: Mapping[str, Any], items: int) -> SharedCache:
    """Return what the processes of a loader that is made now will share. Ownership: the caller closes it.

    Raises:
        CacheError: the directory is another function's or source's, or cannot be used.
    """
    plan = CachePlan(cache.where, cache.max_bytes, items)
    if not cache.in_memory:
        from loaderpool.cache.identity import describe

        plan = plan._replace(fields=describe(payload["fn"], payload["setup"], payload["source"]))
    elif cache.max_bytes is None:
        plan = plan._replace(max_bytes=capacity.available_memory_bytes() // _FREE_SHARE)
    return SharedCache.create(plan)


class CacheWatch:
    """Says, once for each kind, what went wrong with a cache while workers used it. Called at the end of a pass."""

    def __init__(self, where: str, counts: Callable[[], Sequence[int]]) -> None:
        self._where, self._counts = where, counts
        self._said: set[Count] = set()

    def __call__(self) -> None:
        counts = self._counts()
        for count, text in _TEXTS.items():
            if counts[count] and count not in self._said:
                self._said.add(count)
                no_room = _NO_MEMORY if self._where == MEMORY else _NO_DISK
                text = text.format(no_room=no_room, damaged=counts[Count.DAMAGED])
                warn(f"cache={brief(self._where)} {text}")
