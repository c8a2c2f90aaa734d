"""The user's first function where a cache stands before it: called for an item only where its result is not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loaderpool.cache.counters import Trouble
from loaderpool.cache.entries import dump, load
from loaderpool.cache.shared import SharedCache, Store
from loaderpool.errors import CacheError
from loaderpool.worker.forked_children import end_stray
from loaderpool.worker.global_rng import GlobalsWatch


class CachedFunction:
    """Gives what `fn` gives for a source index, in memory of its own.

    What comes out is always what the entry's bytes are read as, also where `fn` was called just now, and where its
    result could not be kept: so a sample does not depend on who has met the item before.

    Args:
        get: gives the item of a source index.
        fn: the user's function.
        shared: the loader's cache.
        cell: of the worker that this is.

    Attributes:
        refusal: why the function cannot have a cache, once that is known: no matter of a single sample.
    """

    def __init__(self, get: Callable[[int], Any], fn: Callable[[Any], Any], shared: SharedCache, cell: int) -> None:
        self._get, self._fn, self._shared = get, fn, shared
        self._cell = shared.cell(cell)
        self._watch = GlobalsWatch()
        self._has_none = False
        self.refusal: CacheError | None = None

    def __call__(self, index: int) -> Any:
        """Return what `fn` gives for this source index.

        Raises:
            CacheError: the function is random, or its result is no pickle; see `refusal`.
            BaseException: whatever the source or the function raises; nothing is kept then.
        """
        store = self._store()
        if store is not None:
            try:
                pickled = store.get(index)
                if pickled is not None:
                    found = load(pickled)
                    self._cell.hit()
                    return found
            except Exception:  # damaged, or not to be had now: it is made again, and written over
                self._cell.damage()
        value, drew = self._call(index)
        if drew:
            # Once more: the first call may have imported what draws on import, or another thread may have drawn.
            value, drew = self._call(index)
        if drew:
            self._refuse(
                f"fn has drawn from random or numpy.random for source index {index}, and with a cache it is called "
                "once for each item, so that every epoch would have the same draw. Move what is random to augment=, "
                "which is called in every epoch with what fn gave; or leave cache= away"
            )
        self._cell.miss()
        try:
            made = dump(value)
            value = load(made)
        except Exception as error:
            self._refuse(
                f"what fn gave for source index {index}, a {type(value).__name__}, cannot be kept: {error}. A cache "
                "keeps pickles: have fn give arrays, numbers, text and the like, or leave cache= away"
            )
        if store is not None:
            trouble = store.put(index, made) if self._shared.is_intact else Trouble.BROKEN
            if trouble != Trouble.NONE:
                self._cell.trouble(trouble)
        return value

    def _call(self, index: int) -> tuple[Any, bool]:
        """Return what the function gives, and whether any code drew from the global generators meanwhile."""
        self._watch.arm()
        value = self._fn(self._get(index))
        end_stray()  # a child that the function has forked shall not write
        return value, self._watch.drew()

    def _store(self) -> Store | None:
        if self._has_none:
            return None
        try:
            return self._shared.store()
        except Exception:  # it was deleted, or no descriptor is left for it
            self._has_none = True
            self._cell.trouble(Trouble.BROKEN)
            return None

    def _refuse(self, text: str) -> None:
        self.refusal = CacheError(text)
        raise self.refusal
