"""`PassLog` and `IterationLog`: the batches that passes have delivered, and the positions that follow from them.

Workers make batches ahead, `tf.data` fetches ahead, and a chunk brings several batches at once. A training that is to
resume must count the batches that its consumer has taken. So each pass keeps a log, and a position is read from the
passes of one iterator: one for a loop over a loader, several for a dataset of several epochs.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.errors import StateError
from loaderpool.plan.batches import Plan
from loaderpool.plan.places import LanePlaces, Position, first_number

if TYPE_CHECKING:
    from loaderpool.core.contracts import Run
    from loaderpool.core.delivery import Delivery

# Of generators, for how many batches back it is known where each came from. Fewer: no consumer fetches so far ahead.
# More: a pass without end would keep them all.
_KEPT = 65_536
_MOST_PASSES = 1000


class PassLog:
    """What one pass has handed out.

    Attributes:
        place: where the pass begins.
        first: number of its first batch.
        plan: of its batches: the loader's, or the rest of that epoch.
        batches: how many the whole pass has; of a stream, until its end, more than there can be.
        delivered: how many of these came from the engine.
        omitted: which of these were left out, as no row of them was left: numbers from 0 on, rising.
        keeps_places: which batches came is noted, and not only how many.
        given_before: how many batches the same iterator's passes before it gave.
    """

    def __init__(self, place: Position, plan: Plan, in_order: bool) -> None:
        self.place, self.epoch, self.plan = place, place.epoch, plan.after(place.start)
        self.first = first_number(plan, place)
        self.keeps_places = bool(plan.lanes) or not in_order
        self._numbers: collections.deque[int] = (
            collections.deque()
        )  # of batches after `first`, as they came
        self._forgotten = 0  # how many came before these; only generators may go on without end
        before = place.lanes or LanePlaces((0,) * plan.lanes)
        self._lanes = list(before.taken)  # how many batches of each lane came before these
        self._ended: Mapping[int, int] = {lane: before.taken[lane] for lane in before.over}
        self.batches = self.plan.batches_per_epoch - len(place.taken)
        if plan.stated_batches is not None:
            self.batches = plan.stated_batches - sum(before.taken)
        self.delivered = self.given_before = 0
        self.omitted: list[int] = []

    @property
    def given(self) -> int:
        """How many batches a consumer has got, or will get, of those that were delivered."""
        return self.delivered - len(self.omitted)

    def note_places(self, delivery: Delivery, run: Run | None) -> None:
        """Note which batches were delivered.

        Args:
            delivery: The batches.
            run: The run that made them; None if it was ended since then.
        """
        self._numbers.extend(number - self.first for number in delivery.numbers())
        while self._lanes and len(self._numbers) > _KEPT:
            self._lanes[self._numbers.popleft() % len(self._lanes)] += 1
            self._forgotten += 1
        if run is not None and len(run.ended_lanes) > len(self._ended):
            self._ended = dict(run.ended_lanes)

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
            raise StateError(
                f"That is {back} batches back; for generators only the last {_KEPT} positions are kept."
            )
        taken = [*self._numbers][: consumed - self._forgotten]
        if not self._lanes:
            had = self.place.taken.union(taken)  # in which there may be gaps
            first = next(number for number in itertools.count() if number not in had)
            start = self.plan.start_after(self.epoch, first)
            return Position(
                self.epoch, start, frozenset(number - first for number in had if number > first)
            )
        counts = list(self._lanes)
        for number in taken:
            counts[number % len(counts)] += 1
        over = frozenset(lane for lane, end in self._ended.items() if counts[lane] == end)
        return Position(self.epoch, lanes=LanePlaces(tuple(counts), over) if any(counts) else None)


class IterationLog:
    """The passes of one iterator, in their order; of a stream without end the last thousand."""

    def __init__(self) -> None:
        self.passes: collections.deque[PassLog] = collections.deque(maxlen=_MOST_PASSES)
        self.reader: weakref.ref[Any] | None = (
            None  # the `LoaderIterator` that has begun; None: there is none
        )
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
            raise StateError(
                f"batches_taken={batches_taken} is too long ago: only {_MOST_PASSES} iterations are kept."
            )
        return None


class Iterations:
    """Iterators over one loader, by their logs. Any thread may start or end one.

    Attributes:
        latest: Log of the iterator that was started last.
        count: Number of iterators that were started.
        live: Logs of active iterators, by id.
    """

    def __init__(self) -> None:
        self.latest = IterationLog()
        self.count = 0
        self.live: dict[int, IterationLog] = {}

    def start(self, log: IterationLog, reader: Any = None) -> None:
        """Note that an iterator has started. `end` pairs with it.

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
        """Note that an iterator is at its end, or was abandoned. Idempotent and finalizer-safe."""
        self.live.pop(id(log), None)
