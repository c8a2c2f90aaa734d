"""How the runs of one loader share its ring: each is sure of a slot, whatever the others' consumers do.

That is rule 7 (docs/internals/rules.md).

RING-3: where several runs are active, their quotas add up to no more than the slots that there are, or will be as soon
as outgrown ones are back, without those that are lent and no active run's. A run fills at most its quota, and of these
it lends all but one at most: so each can always have a batch made and delivered. A quota is never lowered while its
slots are held: the run begins again with fewer (`HoldsSlots.restart`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from loaderpool.errors import MemoryLimitError
from loaderpool.trainer.engine.ring import Ring


class HoldsSlots(Protocol):
    """A run, as the quotas see it."""

    is_over: bool
    quota: int  # slots that it may hold

    @property
    def lent(self) -> Iterable[int]:
        """Slots of it that the consumer looks at."""

    def set_quota(self, quota: int) -> None:
        """Hold at most so many slots from now on, not fewer than before."""

    def restart(self, quota: int) -> None:
        """Give back every slot that is not taken, and go on with so many."""

    def end(self) -> None:
        """The consumer abandoned the rest."""


_Run = TypeVar("_Run", bound=HoldsSlots)


class SlotQuotas(Generic[_Run]):
    """The active runs and their quotas. The caller holds the session's lock.

    Args:
        ring: what they share.
        keeps_count: no run may go on with fewer slots, for more is made ahead than there were places for (RING-4).
    """

    def __init__(self, ring: Ring, keeps_count: bool = False) -> None:
        self._ring, self._keeps_count = ring, keeps_count
        self._runs: list[_Run] = []

    @property
    def active(self) -> list[_Run]:
        """The runs that are not over; a parked one is active."""
        self._runs = [run for run in self._runs if not run.is_over]
        return self._runs

    def add(self, run: _Run) -> None:
        """This run was begun, with the quota of `make_way`."""
        self._runs.append(run)

    def end_all(self) -> None:
        """All of them are abandoned."""
        for run in self.active:
            run.end()
        self._runs = []

    def make_way(self) -> int:
        """Slots for a new run: all, or where others are active some that these cannot take.

        The ring grows for it, or, where the budget is spent, all begin again with the same share.

        Raises:
            MemoryLimitError: that would leave a run without a slot.
        """
        try:
            return self._room_for_one_more()
        except MemoryLimitError:
            gc.collect()  # iterators that were dropped, but in a cycle (a traceback's, say), hold theirs until then
            return self._room_for_one_more()

    def _room_for_one_more(self) -> int:
        ring, active = self._ring, self.active
        if not ring.fits_workers:
            self.fit_to_workers()
        if not active:
            return ring.prospect
        spare = self._spare(active)
        wanted = ring.slots_of_another_run()
        if spare < wanted:
            spare += ring.make_room(wanted - spare, len(active) + 1)
        if spare >= 1:
            return spare
        return self._share_anew(active, with_new=True)

    def restart_all(self) -> None:
        """Every run begins again at its first batch that was not taken; what consumers look at is no run's any more."""
        active = self.active
        if len(active) == 1:
            active[0].restart(self._ring.prospect)
        elif active:
            self._share_anew(active)  # never short: a run lends less than its quota

    def grow_by_one(self) -> bool:
        """Add a slot, for one run's quota, if the budget has room for it."""
        return self._ring.grow_by_one(len(self.active))

    def outgrown(self, nbytes: int) -> None:
        """A batch of `nbytes` did not fit: larger slots, which may be fewer, are shared again.

        Raises:
            MemoryLimitError: the machine has no room for as many as there are runs.
        """
        ring, active = self._ring, self.active
        least = ring.count if self._keeps_count else 0
        if not ring.outgrown(nbytes, len(active), least):
            return
        # Not only the quotas: slots that a run has filled and its consumer does not read would never make room for
        # larger ones.
        if ring.count < least or (len(active) > 1 and self._spare(active) < 0):
            self.restart_all()

    def retired(self, slot: int) -> None:
        """An outgrown slot has come back.

        Raises:
            MemoryLimitError: the machine has no room for as many larger ones as there are runs.
        """
        ring, active = self._ring, self.active
        ring.retired(slot)
        # The machine may have less than we thought.
        if len(active) > 1 and self._spare(active, ring.prospect) < 0:
            self._share_anew(active)
        elif self._keeps_count and any(run.quota > ring.prospect for run in active):
            self.restart_all()  # what is made so far ahead could take every slot (RING-4)

    def fit_to_workers(self) -> None:
        """The number of workers has changed: the ring grows for more of them, and the runs may use it."""
        ring, active = self._ring, self.active
        ring.fit_to_workers()
        if len(active) == 1:
            if active[0].quota < ring.prospect:
                active[0].set_quota(ring.prospect)
        elif active:
            more = self._spare(active) // len(active)
            for run in active if more > 0 else ():
                run.set_quota(run.quota + more)

    def _spare(self, active: list[_Run], slots: int | None = None) -> int:
        """Slots (of those that there are, or of so many) that are in no active run's quota."""
        # What the consumer keeps of other passes serves no other: what the active ones hold is among the rest.
        kept = self._ring.lent_count(but={slot for run in active for slot in run.lent})
        return (self._ring.count if slots is None else slots) - kept - sum(run.quota for run in active)

    def _share_anew(self, active: list[_Run], with_new: bool = False) -> int:
        ring, runs = self._ring, len(active) + with_new
        # What was lent by a run that begins again is no longer its.
        share, rest = divmod(ring.prospect - ring.lent_count(but=()), runs)
        if share < 1:
            raise MemoryLimitError(
                f"{len(active)} iterators of this loader are active, and Limits.memory leaves no batch buffer for "
                f"{'another' if with_new else 'one of them'}: each needs at least {ring.slot_bytes:,} bytes. "
                "Raise Limits.memory, or close the other iterators."
            )
        for run in active:
            run.restart(share)
        return share + rest
