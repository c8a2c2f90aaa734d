"""Subscriptions to batches made in the caller's process: each batch is made when it is taken."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import LanePlaces
from loaderpool.plan.order import Plan
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.trainer.engine.delivery import Delivery
from loaderpool.trainer.session.remote_errors import source_error
from loaderpool.transport.reports import OURS, describe_failure


class LaneEnded(Exception):
    """The generator whose turn it was has no more."""


class MakeBatch(Protocol):
    """Makes one batch, as `LocalEngine.make` does.

    Raises:
        LaneEnded: the generator whose turn it was has no more.
    """

    def __call__(
        self, epoch: int, batch: int, number: int, plan: BasePlan, items: tuple[int, list[Any]] | None = None
    ) -> Delivery: ...


@dataclasses.dataclass(eq=False)
class LocalSubscription(ABC):
    """Batches of consecutive epochs, or of one that tells its end itself; `delivery.Subscription` has the contract."""

    make: MakeBatch
    forget: Callable[[int], None]  # called with the first epoch when the consumer has abandoned the rest
    first_epoch: int
    plan: BasePlan
    # Batches before this one are wanted; of one that tells its end itself it says nothing.
    limit: int = dataclasses.field(init=False, default_factory=int)
    ended_lanes: dict[int, int] = dataclasses.field(init=False, default_factory=dict)
    is_over: bool = dataclasses.field(init=False, default=False)
    _next: int = dataclasses.field(init=False, default=0)

    outlives_interrupts = False  # they come in the user's code, in a generator's, say

    @abstractmethod
    def take(self) -> Delivery:
        """The next batch."""

    @property
    def is_ready(self) -> bool:
        return False

    @property
    def is_at_end(self) -> bool:
        return False

    def extend(self, limit: int) -> None:
        """More batches are wanted."""
        self.limit = limit

    def end(self) -> None:
        """The consumer abandoned the rest."""
        self.is_over = True
        self.forget(self.first_epoch)


@dataclasses.dataclass(eq=False)
class IndexedSubscription(LocalSubscription):
    """Of items that are had by index."""

    limit: int
    taken: Mapping[int, int]  # ranges of numbers that are left out: the first of each, and how many

    def take(self) -> Delivery:
        """The next batch."""
        number = self._next + self.taken.get(self._next, 0)  # ranges never touch each other
        if self.is_over or number >= self.limit:
            raise StopIteration
        self._next = number + 1
        epoch, batch = divmod(number, self.plan.batches_per_epoch)
        return self.make(self.first_epoch + epoch, batch, number, self.plan)


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
                if type(error) in OURS or is_of_a_handler(error):
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
            SourceError: reading the stream raised.
        """
        batch = self.peek()
        self._seen = []
        self._taken += 1
        return batch


@dataclasses.dataclass(eq=False)
class StreamSubscription(LocalSubscription):
    """Of a stream: its items are read here, batch by batch."""

    taken: Mapping[int, int]  # as of `IndexedSubscription`
    reading: StreamReading

    def take(self) -> Delivery:
        """The next batch."""
        while not self.is_over:
            items = self.reading.take()
            if items is None:
                break
            number, self._next = self._next, self._next + 1
            if not any(first <= number < first + count for first, count in self.taken.items()):
                return self.make(self.first_epoch, number, number, self.plan, items)
        raise StopIteration

    @property
    def is_at_end(self) -> bool:
        return self.reading.is_over


@dataclasses.dataclass(eq=False)
class GeneratorSubscription(LocalSubscription):
    """Of generators that take turns."""

    places: LanePlaces | None  # where the generators go on; None: they begin

    def __post_init__(self) -> None:
        self._places = self.places or LanePlaces((0,) * self.plan.lanes)
        self._next = self._places.begin_at
        self.ended_lanes = {lane: self._places.taken[lane] for lane in self._places.over}

    def take(self) -> Delivery:
        """The next batch, of the generator whose turn it is."""
        while not self.is_over and not self.is_at_end:
            number, self._next = self._next, self._next + 1
            batch, lane = divmod(number, self.plan.lanes)
            if lane in self.ended_lanes or batch < self._places.taken[lane]:
                continue
            try:
                return self.make(self.first_epoch, number, number, self.plan)
            except LaneEnded:
                self.ended_lanes[lane] = batch
        raise StopIteration

    @property
    def is_at_end(self) -> bool:
        return len(self.ended_lanes) == self.plan.lanes
