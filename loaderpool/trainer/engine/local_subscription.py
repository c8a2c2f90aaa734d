"""Subscriptions to batches made in the caller's process: each batch is made when it is taken."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from loaderpool.plan.base import BasePlan
from loaderpool.plan.lane_places import LanePlaces
from loaderpool.plan.order import Plan
from loaderpool.trainer.engine.delivery import Delivery
from loaderpool.trainer.session.remote_errors import source_error
from loaderpool.transport.bundles import OURS
from loaderpool.transport.reports import describe_failure


class LaneEnded(Exception):
    """The generator whose turn it was has no more."""


class MakeBatch(Protocol):
    """Makes one batch, as `LocalEngine.make` does."""

    def __call__(
        self, epoch: int, batch: int, number: int, plan: BasePlan, items: tuple[int, list[Any]] | None = None
    ) -> Delivery: ...


class LocalSubscription(ABC):
    """Batches of consecutive epochs, or of one that tells its end itself; `delivery.Subscription` has the contract.

    Args:
        make: makes a batch.
        forget: called with the first epoch when the consumer has abandoned the rest.
        first_epoch: where it begins.
        plan: the plan of its batches.
    """

    limit = 0  # batches before this one are wanted; of one that tells its end itself it says nothing
    outlives_interrupts = False  # they come in the user's code, in a generator's, say

    def __init__(self, make: MakeBatch, forget: Callable[[int], None], first_epoch: int, plan: BasePlan) -> None:
        self._make, self._forget, self._plan = make, forget, plan
        self.first_epoch = first_epoch
        self.ended_lanes: dict[int, int] = {}
        self.is_over = False

    @abstractmethod
    def take(self) -> Delivery:
        """The next batch."""

    @property
    def is_at_end(self) -> bool:
        return False

    @abstractmethod
    def extend(self, limit: int) -> None:
        """More batches are wanted."""

    def end(self) -> None:
        """The consumer abandoned the rest."""
        self.is_over = True
        self._forget(self.first_epoch)


class IndexedSubscription(LocalSubscription):
    """Of items that are had by index.

    Args:
        make, forget, first_epoch, plan: of `LocalSubscription`.
        limit: batches before this one are wanted.
        taken: ranges of numbers that are left out: the first of each, and how many.
    """

    def __init__(
        self, make: MakeBatch, forget: Callable[[int], None], first_epoch: int, plan: BasePlan, limit: int,
        taken: Mapping[int, int],
    ) -> None:  # fmt: skip
        super().__init__(make, forget, first_epoch, plan)
        self.limit, self._taken = limit, taken
        self._next = 0

    def take(self) -> Delivery:
        """The next batch."""
        number = self._next + self._taken.get(self._next, 0)  # ranges never touch each other
        if self.is_over or number >= self.limit:
            raise StopIteration
        self._next = number + 1
        epoch, batch = divmod(number, self._plan.batches_per_epoch)
        return self._make(self.first_epoch + epoch, batch, number, self._plan)

    def extend(self, limit: int) -> None:
        """More batches are wanted."""
        self.limit = limit


class StreamReading:
    """One pass over a stream, batch by batch.

    Args:
        batches: positions of first items, and the items.
        epoch: the pass.
        plan: of its batches.
    """

    def __init__(self, batches: Iterator[tuple[int, list[Any]]], epoch: int, plan: Plan) -> None:
        self._batches, self.epoch, self._plan = batches, epoch, plan
        self._seen: list[tuple[int, list[Any]]] = []  # at most one: read, and not taken
        self._taken = 0
        self.is_over = False
        self._make_error: Callable[[], Exception] | None = None  # what it ended with, for who asks again

    def peek(self) -> tuple[int, list[Any]] | None:
        """What `take` will give."""
        if self._make_error is not None:
            raise self._make_error()
        if not self._seen and not self.is_over:
            try:
                self._seen = list(itertools.islice(self._batches, 1))
            except Exception as error:
                if type(error) in OURS:
                    raise
                failure = describe_failure(error, epoch=self.epoch, worker=None)
                position = self._plan.start_after(self.epoch, self._taken)
                self._make_error = functools.partial(source_error, failure, position)
                raise source_error(failure, position, error) from error
        self.is_over = not self._seen
        return self._seen[0] if self._seen else None

    def take(self) -> tuple[int, list[Any]] | None:
        """The next batch; None: the stream is at its end.

        Raises:
            SourceReadError: reading the stream raised.
        """
        batch = self.peek()
        self._seen = []
        self._taken += 1
        return batch


class StreamSubscription(LocalSubscription):
    """Of a stream: its items are read here, batch by batch.

    Args:
        make, forget, first_epoch, plan: of `LocalSubscription`.
        taken: ranges of numbers that are left out: the first of each, and how many.
        reading: of the pass.
    """

    def __init__(
        self, make: MakeBatch, forget: Callable[[int], None], first_epoch: int, plan: BasePlan,
        taken: Mapping[int, int], reading: StreamReading,
    ) -> None:  # fmt: skip
        super().__init__(make, forget, first_epoch, plan)
        self._taken, self._reading = taken, reading
        self._next = 0

    def take(self) -> Delivery:
        """The next batch."""
        while not self.is_over:
            items = self._reading.take()
            if items is None:
                break
            number, self._next = self._next, self._next + 1
            if not any(first <= number < first + count for first, count in self._taken.items()):
                return self._make(self.first_epoch, number, number, self._plan, items)
        raise StopIteration

    def extend(self, limit: int) -> None:
        """Its end is told by the stream."""

    @property
    def is_at_end(self) -> bool:
        return self._reading.is_over


class GeneratorSubscription(LocalSubscription):
    """Of generators that take turns.

    Args:
        make, forget, first_epoch, plan: of `LocalSubscription`. Raises `LaneEnded` when the generator has no more.
        places: where the generators go on; None: they begin.
    """

    def __init__(
        self, make: MakeBatch, forget: Callable[[int], None], first_epoch: int, plan: BasePlan,
        places: LanePlaces | None,
    ) -> None:  # fmt: skip
        super().__init__(make, forget, first_epoch, plan)
        self._places = places or LanePlaces((0,) * plan.lanes)
        self._next = self._places.begin_at
        self.ended_lanes = {lane: self._places.taken[lane] for lane in self._places.over}

    def take(self) -> Delivery:
        """The next batch, of the generator whose turn it is."""
        while not self.is_over and not self.is_at_end:
            number, self._next = self._next, self._next + 1
            batch, lane = divmod(number, self._plan.lanes)
            if lane in self.ended_lanes or batch < self._places.taken[lane]:
                continue
            try:
                return self._make(self.first_epoch, number, number, self._plan)
            except LaneEnded:
                self.ended_lanes[lane] = batch
        raise StopIteration

    def extend(self, limit: int) -> None:
        """Its end is told by the generators."""

    @property
    def is_at_end(self) -> bool:
        return len(self.ended_lanes) == self._plan.lanes
