"""Where the batches of a run wait that have no one order: they come as they are finished, or generator by generator."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from loaderpool.core.delivery import Delivery, OrderedBuffer
from loaderpool.plan.places import LanePlaces


class UnorderedBuffer(OrderedBuffer):
    """Batches as they come, epoch by epoch.

    Args:
        begin_at: the first batch that was not taken.
        batches_per_epoch: of this shard.
        taken: batches after `begin_at` that were taken.
    """

    def __init__(self, begin_at: int, batches_per_epoch: int, taken: Collection[int] = ()) -> None:
        super().__init__(begin_at)
        self._per_epoch = batches_per_epoch
        self._taken, self._taken_count = set(taken), begin_at + len(taken)
        self._before = frozenset(self._taken)
        self._by_epoch: dict[int, collections.deque[Delivery]] = {}
        # Of what this buffer was begun for all has arrived before this one, taken earlier or not.
        self._arrived_before = begin_at
        self._arrived: dict[int, int] = {}  # ranges behind that one

    @property
    def taken(self) -> int:
        return self._taken_count

    @property
    def done_before(self) -> int:
        """The first batch that may still come: one that was taken may be in one ticket with one that was not."""
        return min(self.begin_at, self._arrived_before)

    def put(self, arrived: Delivery) -> bool:
        """Keep what arrived; False: all was taken. Workers make ranges without gaps, so some batches may come again."""
        self._arrived[arrived.first] = arrived.count
        while count := self._arrived.pop(self._arrived_before, 0):
            self._arrived_before += count
        if self._before:
            keep = [at for at in range(arrived.count) if arrived.first + at not in self._before]
            if not keep:
                return False
            if len(keep) < arrived.count:
                arrived.choose(keep)
        self._by_epoch.setdefault(arrived.first // self._per_epoch, collections.deque()).append(
            arrived
        )
        self._look()
        return True

    def _look(self) -> None:
        queue = self._by_epoch.get(self._taken_count // self._per_epoch)
        self.front = queue[0] if queue else None

    def drop_front(self) -> None:
        epoch = self._taken_count // self._per_epoch
        queue = self._by_epoch[epoch]
        arrived = queue.popleft()
        if not queue:
            del self._by_epoch[epoch]
        self._taken.update(arrived.numbers())
        self._taken_count += arrived.count
        while self.begin_at in self._taken:
            self._taken.remove(self.begin_at)
            self.begin_at += 1
        self._look()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in list(self._by_epoch.values()))

    def rest(self) -> UnorderedBuffer:
        return UnorderedBuffer(self.begin_at, self._per_epoch, self._taken)

    def had(self) -> tuple[Sequence[int], Sequence[int]]:
        return sorted(self._taken), ()


class LaneBuffer(OrderedBuffer):
    """Batches of some lanes: batch k is one of lane k modulo their number.

    LANE-1: the batches of one lane are handed out in their order, whatever the order among lanes is. So what was taken
    of a lane is a number, and where it ends is known when all before it was taken.

    Args:
        first: number of the first batch of the epoch.
        lanes: how many there are.
        in_order: whether they are handed out in their numbers' order, lanes that have ended left out; or as they come.
        places: what was taken before.
    """

    def __init__(
        self, first: int, lanes: int, in_order: bool, places: LanePlaces | None = None
    ) -> None:
        places = places or LanePlaces((0,) * lanes)
        super().__init__(first + places.begin_at)
        self._epoch_first, self._lanes, self._in_order = first, lanes, in_order
        self._taken = list(places.taken)
        self.ended: dict[int, int] = {lane: places.taken[lane] for lane in places.over}
        self._waiting: dict[int, Delivery] = {}
        self._ready: dict[
            int, None
        ] = {}  # of these what may be handed out next, where there is no order

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self._lanes

    @property
    def taken(self) -> int:
        return sum(self._taken)

    @property
    def places(self) -> LanePlaces:
        """What was taken."""
        return LanePlaces(tuple(self._taken), frozenset(self.ended))

    def put(self, arrived: Delivery) -> bool:
        """Keep what arrived for its turn; False: it was taken, or lies after its lane's end."""
        number = arrived.first
        batch, lane = divmod(number - self._epoch_first, self._lanes)
        if batch < self._taken[lane] or lane in self.ended:
            return False
        self._waiting[number] = arrived
        if batch == self._taken[lane]:
            self._ready[number] = None
        self._look()
        return True

    def _look(self) -> None:
        while (front := self._first()) is not None and front.slot is None:
            self._end_lane(front.first)
        self.front = front

    def drop_front(self) -> None:
        front = self._first()
        assert front is not None
        number = front.first
        del self._waiting[number], self._ready[number]
        self._taken[number % self._lanes] += 1
        if number + self._lanes in self._waiting:
            self._ready[number + self._lanes] = None
        self._move_on()
        self._look()

    def _first(self) -> Delivery | None:
        """What has its turn, the end of a lane too."""
        if self._in_order:
            return self._waiting.get(self.begin_at)
        return self._waiting[next(iter(self._ready))] if self._ready else None

    def _end_lane(self, number: int) -> None:
        """All of a lane was taken; this would be its next batch, and after it there are ends only."""
        lane = number % self._lanes
        self.ended[lane] = self._taken[lane]
        del self._ready[number]
        for after in [first for first in self._waiting if first % self._lanes == lane]:
            del self._waiting[after]
        self._move_on()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def rest(self) -> LaneBuffer:
        return LaneBuffer(self._epoch_first, self._lanes, self._in_order, self.places)

    def had(self) -> tuple[Sequence[int], Sequence[int]]:
        first, lanes, had = self._epoch_first, self._lanes, list[int]()
        begin_at = self.begin_at - first
        for lane, taken in enumerate(self._taken):
            after = lane + lanes * (-(-(begin_at - lane) // lanes))
            had += range(first + after, first + taken * lanes + lane, lanes)
        return sorted(had), sorted(self.ended)

    def _move_on(self) -> None:
        while not self.is_over:
            batch, lane = divmod(self.begin_at - self._epoch_first, self._lanes)
            if batch >= self._taken[lane] and lane not in self.ended:
                return
            self.begin_at += 1
