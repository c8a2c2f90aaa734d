"""Where a consumer stands: how many batches of which epoch it has taken, whatever was made or fetched ahead of it.

`tf.data` fetches ahead, workers make ahead, and a chunk brings several batches at once; a training that is to go on
where it stopped must count what its consumer has taken. So each pass keeps a log of what it handed out, and a reading
is the passes of one iterator: one for a loop over a loader, several for a dataset of several epochs.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.errors import StateError
from loaderpool.plan.order import LanePlaces, Plan, Start

if TYPE_CHECKING:
    from loaderpool.core.delivery import Delivery, Subscription

# Of generators, for how many batches back it is known where each came from. Fewer: no consumer fetches so far ahead.
# More: a pass without end would keep them all.
_KEPT = 65_536
_MOST_PASSES = 1000


class Position(NamedTuple):
    """A place in the order of all epochs."""

    epoch: int
    start: Start = 0
    """What of the epoch is taken, over all shards, as its plan says it (see `Plan.start_after`); falsy: nothing."""
    taken: Mapping[int, int] = {}
    """Without an order: ranges of batches that are taken nevertheless, counted from `start`: first ones, lengths."""
    lanes: LanePlaces | None = None
    """Of generators: what is taken of each lane; None: nothing."""

    @property
    def is_rest(self) -> bool:
        """Whether it is not the epoch's beginning."""
        return bool(self.start or self.taken or self.lanes is not None)


class PassLog:
    """What one pass has handed out.

    Attributes:
        place: where the pass begins.
        plan: of its batches: the loader's, or the rest of that epoch.
        batches: how many the whole pass has; of a stream, until its end, more than there can be.
        delivered: how many of these came from the engine.
        omitted: which of these were left out, as no row of them was left: numbers from 0 on, rising.
        keeps_places: which batches came is noted, and not only how many.
        given_before: how many batches the same iterator's passes before it gave.
        is_followed: whether another pass will come after it; None: unknown.

    Args:
        place: as above.
        plan: of the loader.
        in_order: batches come in the plan's order.
    """

    def __init__(self, place: Position, plan: Plan, in_order: bool) -> None:
        self.place, self.epoch, self.plan = place, place.epoch, plan.after(place.start)
        self._taken_before = {n for first, count in place.taken.items() for n in range(first, first + count)}
        self.keeps_places = bool(plan.lanes) or not in_order
        self._numbers: collections.deque[int] = collections.deque()  # of batches, as they came
        self._forgotten = 0  # how many came before these; only generators may go on without end
        before = place.lanes or LanePlaces((0,) * plan.lanes)
        self._lanes = list(before.taken)  # how many batches of each lane came before these
        self._ended: Mapping[int, int] = {lane: before.taken[lane] for lane in before.over}
        self.batches = self.plan.batches_per_epoch - len(self._taken_before)
        self.delivered = self.given_before = 0
        self.omitted: list[int] = []
        self.is_followed: bool | None = None

    @property
    def is_rest(self) -> bool:
        """Whether it begins behind the epoch's beginning."""
        return self.place.is_rest

    @property
    def given(self) -> int:
        """How many batches a consumer has got, or will get, of those that were delivered."""
        return self.delivered - len(self.omitted)

    def close(self) -> None:
        """Note that the stream has ended: there are no more batches than were delivered."""
        self.batches = self.delivered

    def note_places(self, delivery: Delivery, subscription: Subscription | None) -> None:
        """Note which batches were delivered, by that subscription; None: by one that was ended meanwhile."""
        first_epoch = self.epoch if subscription is None else subscription.first_epoch
        before = (self.epoch - first_epoch) * self.plan.batches_per_epoch
        self._numbers.extend(number - before for number in delivery.numbers())
        while self._lanes and len(self._numbers) > _KEPT:
            self._lanes[self._numbers.popleft() % len(self._lanes)] += 1
            self._forgotten += 1
        if subscription is not None and len(subscription.ended_lanes) > len(self._ended):
            self._ended = dict(subscription.ended_lanes)

    def past(self, given: int) -> int:
        """How many batches of the plan a consumer is past that was given so many: those left out count as well."""
        for number in self.omitted:
            if number > given:
                break
            given += 1
        return given

    def position(self, consumed: int) -> Position:
        """Return where a consumer stands that is past so many of its batches.

        Raises:
            StateError: that was too long ago.
        """
        if consumed >= self.batches:
            return Position(self.epoch + 1)
        if not self.keeps_places:
            return Position(self.epoch, self.plan.start_after(self.epoch, consumed))
        if consumed < self._forgotten:
            back = self.delivered - consumed
            raise StateError(f"That is {back} batches back; for generators only the last {_KEPT} positions are kept.")
        taken = [*self._numbers][: consumed - self._forgotten]
        if not self._lanes:
            return self._unordered(self._taken_before.union(taken))
        counts = list(self._lanes)
        for number in taken:
            counts[number % len(counts)] += 1
        over = frozenset(lane for lane, end in self._ended.items() if counts[lane] == end)
        return Position(self.epoch, lanes=LanePlaces(tuple(counts), over) if any(counts) else None)

    def _unordered(self, taken: set[int]) -> Position:
        """Return where a consumer stands that has these batches, in which there may be gaps."""
        prefix = next(number for number in itertools.count() if number not in taken)
        ranges: dict[int, int] = {}
        first = -1
        for number in sorted(number for number in taken if number > prefix):
            if first >= 0 and number - prefix == first + ranges[first]:
                ranges[first] += 1
            else:
                first = number - prefix
                ranges[first] = 1
        return Position(self.epoch, self.plan.start_after(self.epoch, prefix), ranges)


class IterationLog:
    """The passes of one iterator, in their order; of a stream without end the last thousand."""

    def __init__(self) -> None:
        self.passes: collections.deque[PassLog] = collections.deque(maxlen=_MOST_PASSES)
        self.reader: weakref.ref[Any] | None = None  # the `LoaderIterator` that has begun; None: there is none
        self.is_dataset = False  # `tf.data` has begun to read it

    def add(self, log: PassLog) -> None:
        """Note that another pass begins; the one before gives no more."""
        if self.passes:
            log.given_before = self.passes[-1].given_before + self.passes[-1].given
        self.passes.append(log)

    def position(self, batches_taken: int) -> Position | None:
        """Return where a consumer stands that has taken so many batches since it began; None: nothing was begun.

        Raises:
            StateError: so many were never handed out, or that was long ago.
        """
        given = self.passes[-1].given_before + self.passes[-1].given if self.passes else 0
        if batches_taken > given:
            told = f"only {given} batches were delivered since the latest iteration began"
            raise StateError(f"batches_taken={batches_taken}, but {told}")
        for log in reversed(self.passes):
            if batches_taken >= log.given_before:
                return log.position(log.past(batches_taken - log.given_before))
        if self.passes:
            raise StateError(f"batches_taken={batches_taken} is too long ago: only {_MOST_PASSES} iterations are kept.")
        return None
