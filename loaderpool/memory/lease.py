"""Leases: a slot is lent to the consumer until the last array that looks at it dies.

The finalizer may run inside any garbage collection, on any thread, in the middle of anything: it takes no lock, and a
write that does not fit the pipe is left in a deque for the next turn of the trainer's loop (rule 4 of the design).
"""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool import messages
from loaderpool.memory.arena import Arena

__all__ = ["Lender", "ReturnPipe"]


class ReturnPipe:
    """The trainer's end of the control pipe, kept open for as long as anything may still return a slot.

    Leases hold it, so its descriptor can never be closed and used again by somebody else under a late finalizer.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._owner_pid = os.getpid()
        self._releases: collections.deque[bytes] = collections.deque()  # their order does not matter
        self._orders: collections.deque[bytes] = collections.deque()  # theirs does
        self.is_dead = False

    def release(self, message: bytes) -> None:
        """Write a message whose place among others does not matter; never blocks, never raises, takes no lock."""
        if self.is_dead:  # asked first: when the interpreter ends, modules are gone before the last arrays
            return
        if os.getpid() == self._owner_pid and not self._write(message):
            self._releases.append(message)

    def order(self, message: bytes) -> None:
        """Write a message behind all earlier ones given to `order`. The caller holds the session's lock."""
        if self._orders or not self._write(message):
            self._orders.append(message)

    def flush(self) -> bool:
        """Write what was left over; True when nothing is left. The caller holds the session's lock."""
        for unsent in (self._orders, self._releases):
            while unsent:
                try:
                    message = unsent.popleft()
                except IndexError:  # a finalizer's thread took the last one
                    break
                if not self._write(message):
                    unsent.appendleft(message)
                    return False
        return True

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._orders or self._releases)

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._descriptor

    def _write(self, message: bytes) -> bool:
        """True when the message is gone: written, or nobody is there to read it."""
        if self.is_dead:
            return True
        try:
            os.write(self._descriptor, message)
            return True
        except BlockingIOError:  # the pipe is full
            return False
        except OSError:
            self.is_dead = True
            return True

    def __del__(self) -> None:
        self.is_dead = True
        os.close(self._descriptor)


class Lender:
    """Lends a ring's slots as arrays and returns each when its last array has died."""

    def __init__(self, arena: Arena, pipe: ReturnPipe) -> None:
        self._arena = arena
        self._pipe = pipe
        self.lent: dict[int, weakref.ref[Any]] = {}  # by slot; each reference's callback returns its slot
        self.on_return: list[Callable[[int], None]] = []  # also called with each slot that returns, as finalizers are

    def lend(self, slot: int, offset: int, nbytes: int, by_run: dict[int, None]) -> npt.NDArray[np.uint8]:
        """The slot's bytes as an anchor array; when it and all views of it are dead the slot is returned.

        Args:
            slot: its number.
            offset: of the slot in the arena.
            nbytes: of the slot that are shown.
            by_run: notes the slot for as long as it is lent.
        """
        anchor = self._arena.anchor(offset, nbytes)
        on_return = self.on_return
        lent, release, message = self.lent, self._pipe.release, messages.pack(messages.Control.RELEASE, slot)

        def give_back(_: Any) -> None:
            lent.pop(slot, None)
            by_run.pop(slot, None)
            release(message)
            for call in on_return:
                call(slot)

        by_run[slot] = None
        lent[slot] = weakref.ref(anchor, give_back)
        return anchor

    def give_back(self, slot: int) -> None:
        """Return a slot that nobody looks at."""
        self._pipe.release(messages.pack(messages.Control.RELEASE, slot))
