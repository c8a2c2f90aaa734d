"""A loader's cache as the trainer has it: made with the loader, and told of where it cannot keep what it should."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.cache.counters import CacheCounts, Trouble
from loaderpool.cache.setting import Cache
from loaderpool.cache.shared import SharedCache, plan_in_memory, plan_on_disk
from loaderpool.errors import CacheError, CacheWarning
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.session.warnings import level_outside

_MORE_MEMORY = "give it a smaller max_bytes, or a directory in place of memory"
_TEXTS = {
    Trouble.NO_MEMORY: f"the machine has too little memory left for it: {_MORE_MEMORY}",
    Trouble.NO_SPACE: "the disk is full: make room there, or give it a max_bytes",
    Trouble.BROKEN: "it cannot be written to any more (deleted, damaged, or its descriptors were closed)",
}


def make_cache(cache: Cache, payload: Mapping[str, Any], items: int) -> SharedCache:
    """Return what the processes of a loader that is made now will share. Ownership: the caller closes it.

    Args:
        cache: the user's setting.
        payload: has fn, setup and source.
        items: of the source.

    Raises:
        CacheError: the directory is another function's or source's, or cannot be used.
    """
    if cache.in_memory:
        return SharedCache.create(plan_in_memory(cache, items))
    try:
        import sqlite3  # noqa: F401
    except ImportError as error:
        raise CacheError(f"cache: this Python has no sqlite3 ({error}), which a cache on disk needs") from error
    from loaderpool.cache.identity import describe, mark_of

    fields = describe(payload["fn"], payload["setup"], payload["source"])
    return SharedCache.create(plan_on_disk(cache, items, mark_of(fields), fields))


class CacheWatch:
    """Says, once for each kind, what went wrong with a cache while workers used it.

    Args:
        where: the cache is, as its setting says it.
        counts: gives what its processes have counted.
        items: of the source that this process has in an epoch.
    """

    def __init__(self, where: str, counts: Callable[[], CacheCounts], items: int) -> None:
        self._where, self._counts, self._items = where, counts, items
        self._filling: LongWork | None = None
        self._said: set[Trouble | None] = set()

    def look(self) -> None:
        """Tell how far the cache is filled. Runs in: the trainer, every two seconds in which batches are taken."""
        if not self._items:
            return
        if self._filling is None:
            self._filling = LongWork(f"loaderpool: filling cache={self._where!r}", self._items, in_lines=True)
        elif self._filling.is_due:
            counts = self._counts()
            made = counts.hits + counts.misses
            if made >= self._items or counts.is_full or not counts.misses:
                self._end()
            else:
                self._filling.reach(made)

    def _end(self) -> None:
        self._items = 0
        if self._filling is not None:
            self._filling.end()

    def __call__(self) -> None:
        """Warn in the user's line where there is news. Runs in: the trainer, at the end of a pass."""
        self._end()  # each item was asked for once
        counts, where = self._counts(), self._where
        for trouble in sorted(counts.troubles & _TEXTS.keys() - self._said):
            self._said.add(trouble)
            warnings.warn(
                f"cache={where!r} does not keep all: {_TEXTS[trouble]}. The training goes on, and fn is called in "
                "every epoch for items that are not kept",
                CacheWarning,
                stacklevel=level_outside(),
            )
        if counts.damaged and None not in self._said:
            self._said.add(None)
            warnings.warn(
                f"cache={where!r} is damaged: {counts.damaged} entries did not have what was written there, were not "
                "used, and were made anew. Is the disk failing? Delete the directory if this goes on",
                CacheWarning,
                stacklevel=level_outside(),
            )
