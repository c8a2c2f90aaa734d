"""Where a consumer stands: how many batches of which epoch it has taken, whatever was made or fetched ahead of it.

`tf.data` fetches ahead, workers make ahead, and a chunk brings several batches at once; a training that is to go on
where it stopped must count what its consumer has taken. So each pass keeps a log of what it handed out, and a reading
is the passes of one iterator: one for a loop over a loader, several for a dataset of several epochs.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from loaderpool.errors import StateError
from loaderpool.plan.order import LanePlaces, Plan, Start

if TYPE_CHECKING:
    from loaderpool.core.delivery import Delivery, Subscription

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
            raise StateError(f"That is {back} batches back; for generators only the last {_KEPT} positions are kept.")
        counts = list(self._counts)
        for at in range(len(self._latest) - back, len(self._latest)):
            counts[self._latest[at]] -= 1
        if not any(counts):
            return None
        return LanePlaces(tuple(counts), frozenset(lane for lane, end in self._ended.items() if counts[lane] == end))


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
        batches: how many the whole pass has; of a stream, until its end, more than there can be.
        delivered: how many of these came from the engine.
        omitted: which of these were left out, as no row of them was left: numbers from 0 on, rising.
        numbers: without an order: those of the batches that came, as they came.
        lanes: of generators: how many batches of each came.
        keeps_places: which batches came is noted, and not only how many.
        taken_before: without an order: numbers of batches that were taken before.
        is_followed: whether another pass will come after it; None: unknown.
        is_sure: whether that is taken for certain: it was said, or a whole pass came before.

    Args:
        epoch: its epoch.
        plan: of its batches: the loader's, or the rest of that epoch.
        taken: without an order: ranges of batches that were taken before.
        keeps_numbers: batches come in no order, so their numbers must be kept.
        lanes: of generators: what was taken before.
    """

    def __init__(
        self,
        epoch: int,
        plan: Plan,
        taken: Mapping[int, int],
        keeps_numbers: bool,
        lanes: LanePlaces | None = None,
    ) -> None:
        self.epoch, self.plan = epoch, plan
        numbers = (n for first, count in taken.items() for n in range(first, first + count)) if taken else ()
        self.taken_before = frozenset(numbers)
        self._places_before = lanes
        self.lanes = LaneLog(plan.lanes, lanes) if plan.lanes else None
        self.numbers: list[int] | None = [] if keeps_numbers and self.lanes is None else None
        self.keeps_places = bool(plan.lanes) or keeps_numbers
        self.batches = plan.batches_per_epoch - len(self.taken_before)
        self.delivered = 0
        self.omitted: list[int] = []
        self.is_followed: bool | None = None
        self.is_sure = False

    @property
    def is_rest(self) -> bool:
        """Whether it begins behind the epoch's beginning."""
        return bool(self.plan.start or self.taken_before or self._places_before is not None)

    def close(self) -> None:
        """Note that the stream has ended: there are no more batches than were delivered."""
        self.batches = self.delivered

    def note_places(self, delivery: Delivery, subscription: Subscription | None) -> None:
        """Note which batches were delivered, by that subscription; None: by one that was ended meanwhile."""
        if self.lanes is not None:
            self.lanes.note(delivery.first, {} if subscription is None else subscription.ended_lanes)
        if self.numbers is not None:
            first_epoch = self.epoch if subscription is None else subscription.first_epoch
            before = (self.epoch - first_epoch) * self.plan.batches_per_epoch
            self.numbers += [number - before for number in delivery.numbers()]

    def given(self, batches: int) -> int:
        """How many batches of the plan a consumer is past that was given so many: those left out count as well."""
        for number in self.omitted:
            if number > batches:
                break
            batches += 1
        return batches

    def position(self, consumed: int) -> Position:
        """Return where a consumer stands that is past so many of its batches."""
        if consumed >= self.batches:
            return Position(self.epoch + 1)
        if self.lanes is not None:
            return Position(self.epoch, lanes=self.lanes.places(consumed))
        if self.numbers is None:
            return Position(self.epoch, self.plan.start_after(self.epoch, consumed))
        taken = self.taken_before.union(self.numbers[:consumed])
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
        self.passes: list[PassLog] = []
        self._forgotten = 0  # batches of passes before these

    def add(self, log: PassLog) -> None:
        """Note that another pass begins."""
        self.passes.append(log)
        if len(self.passes) > _MOST_PASSES:
            oldest = self.passes.pop(0)
            self._forgotten += oldest.delivered - len(oldest.omitted)

    def position(self, batches_taken: int) -> Position | None:
        """Return where a consumer stands that has taken so many batches since it began; None: nothing was begun.

        Raises:
            StateError: so many were never handed out, or that was long ago.
        """
        left = batches_taken - self._forgotten
        if left < 0:
            raise StateError(f"batches_taken={batches_taken} is too long ago: only {_MOST_PASSES} iterations are kept.")
        for log in self.passes:
            available = log.delivered - len(log.omitted)
            if left < available or (left == available and log is self.passes[-1]):
                return log.position(log.given(left))
            left -= available
        if left:
            raise StateError(
                f"batches_taken={batches_taken}, but only {batches_taken - left} batches were delivered since the "
                "latest iteration began"
            )
        return None
