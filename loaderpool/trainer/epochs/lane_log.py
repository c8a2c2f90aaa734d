"""What a pass over generators has handed out, batch by batch, so that a consumer can be found who is behind it."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from loaderpool.errors import StateError
from loaderpool.plan.lane_places import LanePlaces

# Of how many batches back it is known where each came from. Fewer: no consumer fetches so far ahead. More: a pass
# without end would keep them all.
_KEPT = 65_536


class LaneLog:
    """How many batches of each lane were handed out, now and some time ago.

    Args:
        lanes: how many there are.
        places: what was taken before the pass began.
    """

    def __init__(self, lanes: int, places: LanePlaces | None) -> None:
        self._counts = [0] * lanes if places is None else list(places.taken)
        self._ended: dict[int, int] = {} if places is None else {lane: places.taken[lane] for lane in places.over}
        self._latest: collections.deque[int] = collections.deque(maxlen=_KEPT)  # the lanes of the latest batches
        self._noted = 0

    def note(self, number: int, ended: Mapping[int, int]) -> None:
        """Note that this batch was handed out; by now these lanes had ended, each after so many batches."""
        lane = number % len(self._counts)
        self._counts[lane] += 1
        self._latest.append(lane)
        self._noted += 1
        if len(ended) > len(self._ended):
            self._ended.update(ended)

    def places(self, consumed: int) -> LanePlaces | None:
        """Return what a consumer has taken that is past so many batches; None: nothing at all.

        Raises:
            StateError: that was too long ago.
        """
        back = self._noted - consumed
        if back > len(self._latest):
            raise StateError(f"that is {back} batches back; of generators the places of the last {_KEPT} are kept")
        counts = list(self._counts)
        for at in range(len(self._latest) - back, len(self._latest)):
            counts[self._latest[at]] -= 1
        if not any(counts):
            return None
        return LanePlaces(tuple(counts), frozenset(lane for lane, end in self._ended.items() if counts[lane] == end))
