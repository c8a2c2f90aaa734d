"""Where the batches of generators wait that take turns, each of which ends at a place nobody knows before."""

from __future__ import annotations

from loaderpool.shelf import Arrival

__all__ = ["LaneShelf"]


class LaneShelf:
    """Batches of some lanes: batch k is one of lane k modulo their number. A `Shelf`.

    Args:
        lanes: how many there are.
        in_order: whether they are handed out in their numbers' order, lanes that have ended left out; or as they come.
    """

    def __init__(self, lanes: int, in_order: bool) -> None:
        self._lanes, self._in_order = lanes, in_order
        self.begin_at = 0
        self.taken = 0
        self.ended: dict[int, int] = {}  # lanes: how many batches each had
        self._taken: set[int] = set()  # behind `begin_at`
        self._waiting: dict[int, Arrival] = {}

    @property
    def is_over(self) -> bool:
        """Whether all lanes have ended and all their batches were taken."""
        return len(self.ended) == self._lanes and self.taken >= sum(self.ended.values())

    def put(self, arrival: Arrival) -> bool:
        """See `Shelf`; False also for what a lane has behind its end."""
        if self._is_behind(arrival.first) or arrival.first < self.begin_at or arrival.first in self._taken:
            return False
        self._waiting[arrival.first] = arrival
        return True

    def is_ready(self) -> bool:
        """See `Shelf`."""
        return self.begin_at in self._waiting if self._in_order else bool(self._waiting)

    def front(self) -> Arrival:
        """See `Shelf`."""
        return self._waiting[self.begin_at if self._in_order else next(iter(self._waiting))]

    def drop_front(self) -> None:
        """See `Shelf`."""
        number = self.front().first
        del self._waiting[number]
        self._taken.add(number)
        self.taken += 1
        self._move_on()

    def end_lane(self, number: int) -> list[Arrival]:
        """This batch is not there, for its lane ended before it; returns what waits behind it, and it."""
        batch, lane = divmod(number, self._lanes)
        self.ended[lane] = min(batch, self.ended.get(lane, batch))
        behind = [first for first in self._waiting if self._is_behind(first)]
        self._move_on()
        return [self._waiting.pop(first) for first in behind]

    def clear(self) -> list[Arrival]:
        """See `Shelf`."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def rest(self) -> LaneShelf:
        """See `Shelf`."""
        shelf = LaneShelf(self._lanes, self._in_order)
        shelf.begin_at, shelf.taken = self.begin_at, self.taken
        shelf.ended, shelf._taken = dict(self.ended), set(self._taken)
        return shelf

    def _is_behind(self, number: int) -> bool:
        batch, lane = divmod(number, self._lanes)
        return lane in self.ended and batch >= self.ended[lane]

    def _move_on(self) -> None:
        while not self.is_over and (self.begin_at in self._taken or self._is_behind(self.begin_at)):
            self._taken.discard(self.begin_at)
            self.begin_at += 1
