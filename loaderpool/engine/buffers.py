"""Buffers for runs without a single order of batches: by arrival, or by lane."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from loaderpool.engine.delivery import Delivery, OrderedBuffer
from loaderpool.plan.places import LanePlaces


class UnorderedBuffer(OrderedBuffer):
    """Buffer that delivers batches in order of arrival. Epochs remain in order.

    Args:
        begin_at: Number of the first batch that was not taken.
        batches_per_epoch: Number of batches of this shard in an epoch.
        taken: Numbers of batches after `begin_at` that were taken.
    """

    def __init__(self, begin_at: int, batches_per_epoch: int, taken: Collection[int] = ()) -> None:
        super().__init__(begin_at)
        self._per_epoch = batches_per_epoch
        self._taken, self._taken_count = set(taken), begin_at + len(taken)
        self._before = frozenset(self._taken)
        self._by_epoch: dict[int, collections.deque[Delivery]] = {}
        # All batches in [begin_at, _arrived_before) have arrived at this buffer, including those
        # that were taken from an earlier one.
        self._arrived_before = begin_at
        self._arrived: dict[int, int] = {}  # received ranges after `_arrived_before`: first, count

    @property
    def taken(self) -> int:
        return self._taken_count

    @property
    def done_before(self) -> int:
        """Number of the first batch that workers may still make.

        It may have been taken before. A ticket can contain both taken and missing batches.
        """
        return min(self.begin_at, self._arrived_before)

    def put(self, arrived: Delivery) -> bool:
        """Store a delivery; return False if all its batches were taken.

        Workers make ranges without gaps, so batches that were taken may arrive again.
        """
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
    """Buffer for the batches of lanes. Batch b belongs to lane b % n, if there are n lanes.

    LANE-1: The batches of one lane are delivered in their order, whatever the order among lanes is.
    So one number describes the taken batches of a lane. A lane's end takes effect when all batches
    before it were taken.

    Args:
        first: Number of the first batch of the epoch.
        lanes: Number of lanes.
        in_order: If True, batches are delivered in order of their numbers, without those of lanes
            that have ended. If False, lanes do not wait for each other.
        places: Number of taken batches of each lane; None: no batch was taken.
    """

    def __init__(
        self, first: int, lanes: int, in_order: bool, places: LanePlaces | None = None
    ) -> None:
        places = places or LanePlaces((0,) * lanes)
        super().__init__(first + places.begin_at)
        self._epoch_first, self._lanes, self._in_order = first, lanes, in_order
        self._taken = list(places.taken)
        self.ended: dict[int, int] = {lane: places.taken[lane] for lane in places.over}
        # deliveries by number of their batch; a delivery without a slot is the end of its lane
        self._waiting: dict[int, Delivery] = {}
        # numbers in `_waiting` that are the next batch of their lane, in order of arrival
        self._ready: dict[int, None] = {}

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self._lanes

    @property
    def taken(self) -> int:
        return sum(self._taken)

    @property
    def places(self) -> LanePlaces:
        """Number of taken batches of each lane, and the lanes that have ended."""
        return LanePlaces(tuple(self._taken), frozenset(self.ended))

    def put(self, arrived: Delivery) -> bool:
        """Store a batch; return False if it was taken, or if its lane has ended."""
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
        """Return the next delivery or the end of a lane, or None if it has not arrived."""
        if self._in_order:
            return self._waiting.get(self.begin_at)
        return self._waiting[next(iter(self._ready))] if self._ready else None

    def _end_lane(self, number: int) -> None:
        """Mark a lane as ended. Its next batch would have this number, but does not exist."""
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
