"""What this process has open, the last few of it: opened when first needed, closed when others were needed since.

A forked process may have closed what it inherited, and opened something else under the same number. So what is kept is
used, and closed, only in the process that opened it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Key = tuple[int, int]


class _Kept(Generic[T]):
    """What one process has."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()  # a new one, for a fork may have copied the old one while it was held
        self.things: OrderedDict[_Key, T] = OrderedDict()  # the one used last at the end


class KeptOpen(Generic[T]):
    """The things that were used last in this process, by owner and number; threads may use them at the same time.

    A thing closes itself when nothing refers to it any more, and does nothing in another process than its own: so
    a caller that uses one goes on using it while it is already given up here.

    Args:
        most: things kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owners = itertools.count()
        self._gone: deque[int] = deque()
        self._kept: _Kept[T] = _Kept()

    def new_owner(self) -> int:
        """Return a number that no other owner has in this process."""
        return next(self._owners)

    def get(self, owner: int, number: int, make: Callable[[int], T]) -> T:
        """The thing that is kept under these numbers, or else what `make(number)` gives; raises what that raises."""
        kept = self._kept
        if kept.pid != os.getpid():
            kept = self._kept = _Kept()
        key = owner, number
        with kept.lock:
            if self._gone:
                self._sweep(kept)
            thing = kept.things.get(key)
            if thing is not None:
                kept.things.move_to_end(key)
                return thing
        made = make(number)
        with kept.lock:
            thing = kept.things.setdefault(key, made)  # another thread may have made one meanwhile
            given_up = [kept.things.popitem(last=False) for _ in range(len(kept.things) - self._most)]
        del given_up  # closed when the lock is free
        return thing

    def forget(self, owner: int) -> None:
        """Give up what an owner has. May run inside any garbage collection: it waits for no lock."""
        self._gone.append(owner)
        kept = self._kept
        if kept.pid == os.getpid() and kept.lock.acquire(blocking=False):
            try:
                self._sweep(kept)
            finally:
                kept.lock.release()

    def _sweep(self, kept: _Kept[Any]) -> None:
        while self._gone:
            owner = self._gone.popleft()
            for key in [key for key in kept.things if key[0] == owner]:
                del kept.things[key]
