"""Slots that consumers have views of: each is released when its last view dies. In the main process.

A finalizer may run inside any garbage collection, on any thread, in the middle of anything. The news of a death goes
into a deque by a call in C, which no Ctrl-C can come between. What follows is done at once in Python, or with the next
batch where a Ctrl-C came first.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.core.memory import SlotFile
from loaderpool.core.messages import Release
from loaderpool.memory import forks
from loaderpool.memory.arena import PAGE_BYTES
from loaderpool.memory.recorder import MarkKind, MarkRecorder
from loaderpool.system import interrupts

_RELEASED = int(MarkKind.RELEASED)  # a finalizer may run when modules are gone


class _Lease(weakref.ref[Any]):
    """A reference to a slot, which knows what to release when that dies."""

    __slots__ = ("lent", "nbytes", "offset", "run", "ticket")

    run: int
    nbytes: int
    ticket: int
    offset: int
    lent: dict[int, None]


class Lender:
    """The slots of one memory file that have views.

    Args:
        slots: the file.
        recorder: told of each slot that is released.
        send: sends the supervisor a message. Never blocks; called in finalizers.
    """

    def __init__(self, slots: SlotFile, recorder: MarkRecorder, send: Callable[[Release], None]) -> None:
        self._slots, self._recorder, self._send = slots, recorder, send
        self._leases: dict[int, tuple[_Lease, weakref.ref[Any]]] = {}  # by offset; their callbacks release it
        self.returned: collections.deque[_Lease] = collections.deque()
        self._is_lost = False
        forks.guard(self)

    def __len__(self) -> int:
        return len(self._leases)

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Return the slots that have views."""
        slots = [lease() for lease, _ in list(self._leases.values())]
        return [slot for slot in slots if slot is not None]

    def disown(self) -> None:
        """Release nothing of what has views now: a forked child has it as its own."""
        self._leases.clear()  # and with the references what their deaths would call
        self.returned.clear()

    def lend(self, run: int, ticket: int, offset: int, nbytes: int, lent: dict[int, None]) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`; when it and all views of it are dead the slot is released.

        Args:
            run: whose slot.
            ticket: of those whose work it holds.
            offset: its name.
            nbytes: that are shown.
            lent: notes the offset for as long as it has views.
        """
        slot = self._slots.slot(offset, nbytes)
        follower = weakref.ref(slot, self._on_death)  # of two references the younger is called first
        lease = _Lease(slot, self.returned.append)
        lease.run, lease.ticket, lease.offset, lease.nbytes, lease.lent = run, ticket, offset, nbytes, lent
        lent[offset] = None
        self._leases[offset] = lease, follower
        return slot

    def release(self, run: int, offset: int, ticket: int) -> None:
        """Release a slot that has no views."""
        self._send(Release(run, offset, ticket))

    def settle(self) -> None:
        """Release the slots whose last views have died; none while a forked child still copies them."""
        while self.returned and not forks.is_waiting():
            try:
                lease = self.returned[0]
            except IndexError:  # another thread has settled it
                return
            self._settle(lease)  # of several threads, too: a release that is said twice is said once
            with contextlib.suppress(ValueError):  # that other thread has taken it out
                self.returned.remove(lease)

    def _settle(self, lease: _Lease) -> None:
        found = self._leases.get(lease.offset)
        if found is not None and found[0] is lease:
            lease.lent.pop(lease.offset, None)
            self._leases.pop(lease.offset, None)
        if self._is_lost:
            self._slots.return_pages(lease.offset, lease.nbytes)
        else:
            self._send(Release(lease.run, lease.offset, lease.ticket))
        self._recorder.mark(_RELEASED, lease.ticket, lease.offset // PAGE_BYTES)

    def keep_only_lent(self) -> None:
        """The supervisor is gone: give back all memory but that of slots with views, which give back their own."""
        self._is_lost, end = True, 0
        kept = sorted((lease.offset, lease.nbytes) for lease, _ in list(self._leases.values()))
        for offset, nbytes in [*kept, (self._slots.nbytes, 0)]:
            self._slots.return_pages(end, offset - end)
            end = offset + -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def _on_death(self, _: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            if not is_finalizing():  # else modules may be gone already, and no slot is wanted any more
                self.settle()
        except KeyboardInterrupt:  # Python drops what a finalizer raises
            interrupts.send_again()
