"""Where a consumer stands among generators that take turns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanePlaces:
    """How many batches of each lane were taken; the batches of one lane are always taken in their order."""

    taken: tuple[int, ...]
    """By lane."""
    over: frozenset[int] = frozenset()
    """Lanes that have no more."""

    @property
    def begin_at(self) -> int:
        """The lowest number of a batch that was not taken; where all lanes are over, one behind all batches."""
        lanes = len(self.taken)
        left = [batch * lanes + lane for lane, batch in enumerate(self.taken) if lane not in self.over]
        return min(left) if left else max(self.taken) * lanes
