"""Leases: a slot is lent to the consumer until the last array that looks at it dies.

The finalizer may run inside any garbage collection, on any thread, in the middle of anything: it takes no lock, and a
write that does not fit the pipe is left in a deque for the next turn of the trainer's loop (rule 4,
docs/internals/rules.md).
"""

from __future__ import annotations

import collections
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.memory import forks
from loaderpool.memory.arena import Arena
from loaderpool.memory.recorder import MarkKind
from loaderpool.system import interrupts
from loaderpool.trainer.session.engine_session import ReleasePipe
from loaderpool.transport.messages import Control, encode

# A finalizer may run when modules are gone.
_RELEASED = int(MarkKind.RELEASED)


class ReturnPipe:
    """The trainer's end of the control pipe, kept open for as long as anything may still return a slot.

    Leases hold it, so its descriptor can never be closed and used again for another file under a late finalizer.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._owner_pid = os.getpid()
        self._releases: collections.deque[bytes] = collections.deque()  # their order does not matter
        self._messages: collections.deque[bytes] = collections.deque()  # theirs does
        self.is_dead = False
        self.on_leftover: Callable[[], None] | None = None  # has the thread that waits come and see

    def renew(self, descriptor: int) -> None:
        """Write to another pipe from now on; messages that the old one did not take are forgotten.

        The descriptor's number stays, so that a finalizer in the middle of a write meets the one pipe or the other.
        The caller holds the session's lock. Ownership: takes the descriptor.
        """
        os.set_blocking(descriptor, False)
        self._messages.clear()
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)

    def release(self, message: bytes) -> None:
        """Write a message whose place among others does not matter; never blocks, never raises, takes no lock."""
        if self.is_dead:  # asked first: when the interpreter ends, modules are gone before the last arrays
            return
        if os.getpid() == self._owner_pid and not self._write(message):
            self._releases.append(message)
            if (on_leftover := self.on_leftover) is not None:
                on_leftover()

    def send(self, message: bytes) -> None:
        """Write a message behind all earlier ones given to `send`. The caller holds the session's lock."""
        if self._messages or not self._write(message):
            self._messages.append(message)

    def flush(self) -> bool:
        """Write what was left over; True when nothing is left. The caller holds the session's lock."""
        for unsent in (self._messages, self._releases):
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
        return bool(self._messages or self._releases)

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._descriptor

    def _write(self, message: bytes) -> bool:
        """Whether the message is gone: written, or without a reader any more."""
        if self.is_dead:
            return True
        try:
            os.write(self._descriptor, message)
            return True
        except BlockingIOError:  # the pipe is full
            return False
        except OSError:  # it is read no more: the thread that leads finds out itself
            return True

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        self.is_dead = True
        close(self._descriptor)  # `os` may be gone at the interpreter's end


class _Lease(weakref.ref[Any]):
    """A reference to a lent slot's anchor, which knows what to return when that dies."""

    __slots__ = ("by_run", "message", "slot", "ticket")

    slot: int
    ticket: int
    message: bytes
    by_run: dict[int, None]


class Lender:
    """Lends a ring's slots as arrays and returns each when its last array has died.

    The news of an anchor's death goes into a deque by a call in C, which no Ctrl-C can come between; what follows from
    it is done at once in Python, and again where a Ctrl-C broke it off: a release that is said twice is said once.
    """

    def __init__(self, arena: Arena, pipe: ReleasePipe) -> None:
        self._arena = arena
        self._pipe, self._recorder = pipe, arena.recorder.trainer
        # By slot; the references' callbacks return it.
        self.lent: dict[int, tuple[_Lease, weakref.ref[Any]]] = {}
        self.on_return: list[Callable[[int], None]] = []  # also called with each slot that returns, as finalizers are
        self.returned: collections.deque[_Lease] = collections.deque()
        forks.guard(self)

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Return the anchors of what is lent now."""
        anchors = [lease() for lease, _ in list(self.lent.values())]
        return [anchor for anchor in anchors if anchor is not None]

    def disown(self) -> None:
        """Return nothing of what is lent now: a forked child has it as its own."""
        self.lent.clear()  # and with the references what their deaths would call
        self.returned.clear()
        self.on_return.clear()

    def lend(self, slot: int, ticket: int, offset: int, nbytes: int, by_run: dict[int, None]) -> npt.NDArray[np.uint8]:
        """Return the slot's bytes as an anchor array; when it and all views of it are dead the slot is returned.

        Args:
            slot: its number.
            ticket: of those whose work it holds.
            offset: of the slot in the arena.
            nbytes: of the slot that are shown.
            by_run: notes the slot for as long as it is lent.
        """
        anchor = self._arena.anchor(offset, nbytes)
        # The younger reference is called first.
        follower = weakref.ref(anchor, self._on_death)
        lease = _Lease(anchor, self.returned.append)
        lease.slot, lease.ticket, lease.by_run = slot, ticket, by_run
        lease.message = encode(Control.RELEASE, slot, ticket)
        by_run[slot] = None
        self.lent[slot] = lease, follower
        return anchor

    def give_back(self, slot: int, ticket: int) -> None:
        """Return a slot at which no array looks."""
        self._pipe.release(encode(Control.RELEASE, slot, ticket))

    def lent_message(self, slot: int) -> bytes | None:
        """Return what will be said when the slot returns; None where it is not lent."""
        found = self.lent.get(slot)
        return None if found is None else found[0].message

    def settle(self) -> None:
        """Return the slots whose last arrays have died; none while a forked child still copies them.

        Takes no lock, and may run on several threads at once.
        """
        while self.returned and not forks.is_waiting():
            try:
                lease = self.returned[0]
            except IndexError:  # another thread has settled it
                return
            slot = lease.slot
            found = self.lent.get(slot)
            if found is not None and found[0] is lease:
                lease.by_run.pop(slot, None)
                self.lent.pop(slot, None)
            self._pipe.release(lease.message)
            self._recorder.mark(_RELEASED, lease.ticket, slot)
            for call in self.on_return:
                call(slot)
            try:
                self.returned.remove(lease)
            except ValueError:
                pass

    def _on_death(self, _: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            if not is_finalizing():  # else modules may be gone already, and no slot is wanted any more
                self.settle()
        except KeyboardInterrupt:  # Python drops what a finalizer raises
            interrupts.send_again()
