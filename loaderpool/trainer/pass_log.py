"""`PassLog` and `IterationLog`: counts of delivered batches, and positions that follow from them.

Workers make batches ahead, `tf.data` fetches ahead, and a chunk has several batches. To resume a
training, the batches that its consumer has taken must be counted. So each pass keeps a log. A
position is computed from the passes of one iterator. A loop over a loader has one pass, and a
dataset of several epochs has several.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.errors import StateError
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import checksum_of
from loaderpool.plan.places import LanePlaces, Position, first_number

if TYPE_CHECKING:
    from loaderpool.engine.contracts import Run
    from loaderpool.engine.delivery import Delivery

# Number of latest batches of generators whose lanes are known one by one. Smaller: a consumer that
# fetches far ahead cannot save its position. Larger: a pass without end uses more memory.
_KEPT = 65_536
_MOST_PASSES = 1000  # passes that an iteration keeps


class DeliveredNumbers:
    """Numbers of the delivered batches of one pass, relative to its first batch.

    For generators, only the latest _KEPT numbers are kept, because a pass may never end. Earlier
    batches are counted by lane.

    Args:
        first: Number of the pass's first batch, counted through all epochs.
        place: Position at which the pass starts.
        lanes: Number of lanes; 0: the source is not made of generators.
    """

    def __init__(self, first: int, place: Position, lanes: int) -> None:
        self._first = first
        self._latest: collections.deque[int] = collections.deque()  # in order of arrival
        self._forgotten = 0  # number of batches delivered before these
        before = place.lanes or LanePlaces((0,) * lanes)
        self._lanes = list(before.taken)  # batches of each lane delivered before `_latest`
        self._ended: Mapping[int, int] = {lane: before.taken[lane] for lane in before.over}

    def note(self, delivery: Delivery, run: Run | None) -> None:
        """Store the numbers of delivered batches.

        Args:
            delivery: The batches.
            run: The run that made them; None if the run was ended since then.
        """
        self._latest.extend(number - self._first for number in delivery.numbers())
        while self._lanes and len(self._latest) > _KEPT:
            self._lanes[self._latest.popleft() % len(self._lanes)] += 1
            self._forgotten += 1
        if run is not None and len(run.ended_lanes) > len(self._ended):
            self._ended = dict(run.ended_lanes)

    def before(self, consumed: int) -> list[int]:
        """Return the stored numbers of the first `consumed` batches, in order of arrival.

        Raises:
            StateError: Later numbers have replaced them.
        """
        if consumed < self._forgotten:
            back = self._forgotten + len(self._latest) - consumed
            raise StateError(
                f"That is {back} batches back; for generators only the last {_KEPT} positions are "
                "kept."
            )
        return [*self._latest][: consumed - self._forgotten]

    def lane_places(self, consumed: int) -> LanePlaces | None:
        """Return the places of the lanes after `consumed` batches, or None at an epoch's start.

        Raises:
            StateError: As `before`.
        """
        counts = list(self._lanes)
        for number in self.before(consumed):
            counts[number % len(counts)] += 1
        over = frozenset(lane for lane, end in self._ended.items() if counts[lane] == end)
        return LanePlaces(tuple(counts), over) if any(counts) else None


class PassLog:
    """Record of the delivered batches of one pass.

    Attributes:
        place: Position at which the pass starts.
        first: Number of the pass's first batch, counted through all epochs.
        whole: Plan of the epoch.
        plan: Plan of the epoch, or of its remainder.
        batches: Number of batches of the whole pass. For a stream, an upper bound until its end.
        delivered: Number of batches that the engine has delivered.
        omitted: Delivered batches that were left out, because no row of them was left. Ascending
            indices in the pass, from 0.
        numbers: Numbers of the delivered batches; None: their count is sufficient.
        given_before: Number of batches that earlier passes of the same iterator gave.
    """

    def __init__(self, place: Position, plan: Plan, in_order: bool) -> None:
        self.place, self.epoch, self.plan = place, place.epoch, plan.after(place.start)
        self.whole = plan
        self.first = first_number(plan, place)
        self.numbers: DeliveredNumbers | None = None
        if plan.lanes or not in_order:
            self.numbers = DeliveredNumbers(self.first, place, plan.lanes)
        self.batches = self.plan.batches_per_epoch - len(place.taken)
        if plan.stated_batches is not None:
            before = 0 if place.lanes is None else sum(place.lanes.taken)
            self.batches = plan.stated_batches - before
        self.delivered = self.given_before = 0
        self.omitted: list[int] = []

    @property
    def given(self) -> int:
        """Number of delivered batches that the consumer gets, without those left out."""
        return self.delivered - len(self.omitted)

    def past(self, given: int) -> int:
        """Return how many of the plan's batches precede a consumer, including those left out.

        Args:
            given: Number of batches that the consumer has got.
        """
        for number in self.omitted:
            if number > given:
                break
            given += 1
        return given

    def position(self, consumed: int) -> Position:
        """Return the position of a consumer in this pass.

        Args:
            consumed: Number of the plan's batches that precede the consumer, as returned by `past`.

        Raises:
            StateError: The log does not reach back so far.
        """
        if consumed >= self.batches:
            return Position(self.epoch + 1)
        position = self._position(consumed)
        is_drawn = position.is_rest and self.plan.order.is_drawn
        return position._replace(order=self._checksum) if is_drawn else position

    @functools.cached_property
    def _checksum(self) -> str:
        return checksum_of(self.whole)

    def _position(self, consumed: int) -> Position:
        if self.numbers is None:
            return Position(self.epoch, self.plan.start_after(self.epoch, consumed))
        if self.plan.lanes:
            return Position(self.epoch, lanes=self.numbers.lane_places(consumed))
        had = self.place.taken.union(self.numbers.before(consumed))  # may have gaps
        first = next(number for number in itertools.count() if number not in had)
        start = self.plan.start_after(self.epoch, first)
        return Position(
            self.epoch, start, frozenset(number - first for number in had if number > first)
        )


class IterationLog:
    """Passes of one iterator, in order. Only the latest _MOST_PASSES are kept."""

    def __init__(self) -> None:
        self.passes: collections.deque[PassLog] = collections.deque(maxlen=_MOST_PASSES)
        # the active `LoaderIterator`; None: there is none
        self.reader: weakref.ref[Any] | None = None
        self.is_dataset = False  # True if a dataset of `tf.data` reads the iteration

    def add(self, log: PassLog) -> None:
        """Add a pass that starts. The previous one gives no more batches."""
        if self.passes:
            log.given_before = self.passes[-1].given_before + self.passes[-1].given
        self.passes.append(log)

    def position(self, batches_taken: int) -> Position | None:
        """Return the position of a consumer, or None if no pass has started.

        Args:
            batches_taken: Number of batches that the consumer has taken since the iteration began.

        Raises:
            StateError: Fewer batches were delivered, or the log does not reach back so far.
        """
        given = self.passes[-1].given_before + self.passes[-1].given if self.passes else 0
        if batches_taken > given:
            told = f"only {given} batches were delivered since the latest iteration began"
            raise StateError(f"batches_taken={batches_taken}, but {told}")
        for log in reversed(self.passes):
            if batches_taken >= log.given_before:
                return log.position(log.past(batches_taken - log.given_before))
        if self.passes:
            raise StateError(
                f"batches_taken={batches_taken} is too long ago: only {_MOST_PASSES} iterations "
                "are kept."
            )
        return None


class Iterations:
    """Iterators over one loader, identified by their logs. Called by any thread.

    Attributes:
        latest: Log of the iterator that was started last.
        count: Number of iterators that were started.
        live: Logs of active iterators, by id.
    """

    def __init__(self) -> None:
        self.latest = IterationLog()
        self.count = 0
        self.live: dict[int, IterationLog] = {}

    def start(self, log: IterationLog, reader: object = None) -> None:
        """Register an iterator that has started. `end` pairs with it.

        Args:
            log: Log of its passes.
            reader: The `LoaderIterator`; None for a dataset of `tf.data`.
        """
        if self.latest is not log:
            self.latest = log
            self.count += 1
        log.is_dataset = reader is None
        log.reader = None if reader is None else weakref.ref(reader)
        self.live[id(log)] = log

    def end(self, log: IterationLog) -> None:
        """Remove an iterator that is at its end, or was abandoned. Idempotent, finalizer-safe."""
        self.live.pop(id(log), None)
