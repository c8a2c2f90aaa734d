"""Where batches of generators that take turns wait; where each generator ends is not known before."""

from __future__ import annotations

from loaderpool.plan.lane_places import LanePlaces
from loaderpool.trainer.engine.reorder_buffer import Arrived


class LaneBuffer:
    """Batches of some lanes: batch k is one of lane k modulo their number. A `ReorderBuffer`.

    LANE-1: the batches of one lane are handed out in their order, whatever the order among lanes is. So what was taken
    of a lane is a number, and where it ends is known when all before it was taken.

    Attributes:
        ended: lanes of which there are no more batches, and how many each had.
        begin_at: the lowest batch that was not taken.

    Args:
        lanes: how many there are.
        in_order: whether they are handed out in their numbers' order, lanes that have ended left out; or as they come.
        places: what was taken before.
    """

    def __init__(self, lanes: int, in_order: bool, places: LanePlaces | None = None) -> None:
        self._lanes, self._in_order = lanes, in_order
        self._taken = [0] * lanes if places is None else list(places.taken)
        self.ended = {} if places is None else {lane: places.taken[lane] for lane in places.over}
        self.begin_at = 0 if places is None else places.begin_at
        self.taken = sum(self._taken)
        self._waiting: dict[int, Arrived] = {}
        self._ready: dict[int, None] = {}  # of these what may be handed out next, where there is no order

    @property
    def is_over(self) -> bool:
        """Whether all lanes have ended, and so all their batches were taken."""
        return len(self.ended) == self._lanes

    @property
    def places(self) -> LanePlaces:
        """What was taken."""
        return LanePlaces(tuple(self._taken), frozenset(self.ended))

    @property
    def done_before(self) -> int:
        return self.begin_at

    def put(self, arrived: Arrived) -> bool:
        """Keep what arrived for its turn; False: it was taken, or lies behind its lane's end."""
        number = arrived.first
        batch, lane = divmod(number, self._lanes)
        if batch < self._taken[lane] or lane in self.ended:
            return False
        self._waiting[number] = arrived
        if batch == self._taken[lane]:
            self._ready[number] = None
        return True

    def is_ready(self) -> bool:
        return self.begin_at in self._waiting if self._in_order else bool(self._ready)

    def front(self) -> Arrived | None:
        if self._in_order:
            return self._waiting.get(self.begin_at)
        return self._waiting[next(iter(self._ready))] if self._ready else None

    def drop_front(self) -> None:
        number = self._front_number()
        del self._waiting[number], self._ready[number]
        self._taken[number % self._lanes] += 1
        self.taken += 1
        if number + self._lanes in self._waiting:
            self._ready[number + self._lanes] = None
        self._move_on()

    def end_lane(self) -> list[Arrived]:
        """What is in front says that its lane has ended; returns it, and what waits behind it."""
        number = self._front_number()
        lane = number % self._lanes
        self.ended[lane] = self._taken[lane]
        behind = [first for first in self._waiting if first % self._lanes == lane]
        del self._ready[number]
        self._move_on()
        return [self._waiting.pop(first) for first in behind]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def clear(self) -> list[Arrived]:
        waiting, self._waiting, self._ready = self._waiting, {}, {}
        return list(waiting.values())

    def rest(self) -> LaneBuffer:
        return LaneBuffer(self._lanes, self._in_order, self.places)

    def _front_number(self) -> int:
        return self.begin_at if self._in_order else next(iter(self._ready))

    def _move_on(self) -> None:
        while not self.is_over:
            batch, lane = divmod(self.begin_at, self._lanes)
            if batch >= self._taken[lane] and lane not in self.ended:
                return
            self.begin_at += 1
