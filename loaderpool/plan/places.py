"""`Position`: a place in the order of all epochs, as a consumer has reached it."""

from __future__ import annotations

from typing import NamedTuple

from loaderpool.plan.batches import Plan, Start


class LanePlaces(NamedTuple):
    """How many batches of each lane were taken; the batches of one lane are always taken in their order."""

    taken: tuple[int, ...]
    """By lane."""
    over: frozenset[int] = frozenset()
    """Lanes that have no more."""

    @property
    def begin_at(self) -> int:
        """The lowest number of a batch that was not taken; where all lanes are over, one after all batches."""
        lanes = len(self.taken)
        left = [
            batch * lanes + lane for lane, batch in enumerate(self.taken) if lane not in self.over
        ]
        return min(left) if left else max(self.taken) * lanes


class Position(NamedTuple):
    """A place in the order of all epochs."""

    epoch: int
    start: Start = 0
    """What of the epoch is taken, over all shards, as its plan says it (`Plan.start_after`); falsy: nothing."""
    taken: frozenset[int] = frozenset()
    """Without an order: batches that are taken nevertheless, counted from `start`."""
    lanes: LanePlaces | None = None
    """Of generators: what is taken of each lane; None: nothing."""

    @property
    def is_rest(self) -> bool:
        """Whether it is not the epoch's beginning."""
        return bool(self.start or self.taken or self.lanes is not None)


def first_number(plan: Plan, position: Position) -> int:
    """Return the number of the first batch after a position that is not out of turn.

    Batches are numbered through all epochs. The rest of an epoch has the epoch's last numbers.
    """
    rest = plan.after(position.start).batches_per_epoch
    return (position.epoch + 1) * plan.batches_per_epoch - rest
