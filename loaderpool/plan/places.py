"""`Position`: the place that a consumer has reached in the order of all epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loaderpool.plan.batches import Plan

if TYPE_CHECKING:
    from loaderpool.plan.taken import Start


class LanePlaces(NamedTuple):
    """Number of received batches of each lane. A lane's batches are always received in order."""

    taken: tuple[int, ...]
    """Number of batches, by lane."""
    over: frozenset[int] = frozenset()
    """Lanes that have no more batches."""

    @property
    def begin_at(self) -> int:
        """Lowest number of a batch that was not received.

        If all lanes are finished, it is a number after all batches.
        """
        lanes = len(self.taken)
        left = [
            batch * lanes + lane for lane, batch in enumerate(self.taken) if lane not in self.over
        ]
        return min(left) if left else max(self.taken) * lanes


class Position(NamedTuple):
    """Place in the order of all epochs."""

    epoch: int
    start: Start = 0
    """Parts of the epoch that were received or left out, over all shards; falsy: none."""
    taken: frozenset[int] = frozenset()
    """Without an order: other batches that were received, counted from `start`."""
    lanes: LanePlaces | None = None
    """For generators: number of batches received of each lane; None: none."""
    order: str = ""
    """Within an epoch whose order was drawn: its checksum, as in `drawn.checksum_of`."""

    @property
    def is_rest(self) -> bool:
        """True if the position is not the epoch's beginning."""
        return bool(self.start or self.taken or self.lanes is not None)


def first_number(plan: Plan, position: Position) -> int:
    """Return the number of the first batch after a position that is not out of turn.

    Batches are numbered through all epochs. The rest of an epoch has the epoch's last numbers.
    """
    rest = plan.after(position.start).batches_per_epoch
    return (position.epoch + 1) * plan.batches_per_epoch - rest
