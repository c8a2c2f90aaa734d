"""Where a run's batches wait until they are taken, in order or not, and which of them were taken already."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.errors import LoaderpoolError
from loaderpool.memory.board import Field
from loaderpool.plan.base import LanePlaces, generated_item
from loaderpool.plan.order import Plan
from loaderpool.system.long_work import LongWork
from loaderpool.transport.reports import RowFailure

if TYPE_CHECKING:
    from loaderpool.core.pool import Pool


@dataclasses.dataclass(slots=True)
class Arrived:
    """A slot whose batches are all there (or whose error is)."""

    first: int
    count: int
    rows: int  # of each batch
    slot: int | None  # None: there is no such batch, for its lane has ended
    # Makes a new error for each that takes it: a kept exception would keep, through its traceback, all its frames.
    make_error: Callable[[], LoaderpoolError] | None = None
    oversize: tuple[Any, int] | None = None  # mapped memory file and its length
    row_failures: tuple[RowFailure, ...] = ()
    ticket: int = 0  # one of those whose work the slot holds
    arrived_ns: int = 0  # when the last row was known to be there
    keep: tuple[int, ...] | None = None  # which of the batches are wanted, counted from `first`; None: all


class ReorderBuffer(Protocol):
    """What the buffers have in common. The caller holds the pool's lock."""

    @property
    def begin_at(self) -> int:
        """The first batch that was not taken."""

    @property
    def taken(self) -> int:
        """How many batches were taken, counted from the run's first epoch on."""

    @property
    def done_before(self) -> int:
        """All batches before this one were taken, and no worker makes any of them again."""

    def put(self, arrived: Arrived) -> bool:
        """Keep what arrived for its turn; False: all its batches were taken before the run began again."""

    def front(self) -> Arrived | None:
        """What arrived and has its turn now; None: that is still to come. It stays until `drop_front`."""

    def drop_front(self) -> None:
        """What is in front was taken."""

    @property
    def waiting(self) -> int:
        """How many slots' batches wait. Runs in: any thread, without the lock."""

    def rest(self) -> ReorderBuffer:
        """An empty buffer for what was not taken from this one."""


class OrderedBuffer:
    """Batches in their order.

    Args:
        begin_at: the first batch.
    """

    def __init__(self, begin_at: int) -> None:
        self.begin_at = begin_at
        self._by_first: dict[int, Arrived] = {}

    @property
    def taken(self) -> int:
        return self.begin_at

    @property
    def done_before(self) -> int:
        return self.begin_at

    def put(self, arrived: Arrived) -> bool:
        self._by_first[arrived.first] = arrived
        return True

    def front(self) -> Arrived | None:
        return self._by_first.get(self.begin_at)

    def drop_front(self) -> None:
        self.begin_at += self._by_first.pop(self.begin_at).count

    @property
    def waiting(self) -> int:
        return len(self._by_first)

    def rest(self) -> OrderedBuffer:
        return OrderedBuffer(self.begin_at)


class UnorderedBuffer:
    """Batches as they come, epoch by epoch.

    Args:
        begin_at: the first batch that was not taken.
        batches_per_epoch: of this shard.
        taken: ranges of batches behind `begin_at` that were taken: their first ones and lengths.
        taken_count: how many batches were taken, counted from the run's first epoch on; None: those before `begin_at`.
    """

    def __init__(
        self, begin_at: int, batches_per_epoch: int, taken: dict[int, int] | None = None, taken_count: int | None = None
    ) -> None:
        self.begin_at = begin_at
        self._per_epoch = batches_per_epoch
        self._taken = taken or {}
        self._taken_count = begin_at if taken_count is None else taken_count
        self._before = frozenset(batch for first, count in self._taken.items() for batch in range(first, first + count))
        self._by_epoch: dict[int, collections.deque[Arrived]] = {}
        # Of what this buffer was begun for all has arrived before this one, taken earlier or not.
        self._arrived_before = begin_at
        self._arrived: dict[int, int] = {}  # ranges behind that one

    @property
    def taken(self) -> int:
        return self._taken_count

    @property
    def taken_ranges(self) -> dict[int, int]:
        """Ranges behind `begin_at` that were taken: first ones and lengths."""
        return dict(self._taken)

    @property
    def done_before(self) -> int:
        """The first batch that may still come: one that was taken may be in one ticket with one that was not."""
        return min(self.begin_at, self._arrived_before)

    def put(self, arrived: Arrived) -> bool:
        """Keep what arrived; False: all was taken. Workers make ranges without gaps, so some batches may come again."""
        self._arrived[arrived.first] = arrived.count
        while count := self._arrived.pop(self._arrived_before, 0):
            self._arrived_before += count
        if self._before:
            keep = tuple(at for at in range(arrived.count) if arrived.first + at not in self._before)
            if not keep:
                return False
            if len(keep) < arrived.count:
                arrived.keep = keep
        self._by_epoch.setdefault(arrived.first // self._per_epoch, collections.deque()).append(arrived)
        return True

    def front(self) -> Arrived | None:
        queue = self._by_epoch.get(self._taken_count // self._per_epoch)
        return queue[0] if queue else None

    def drop_front(self) -> None:
        epoch = self._taken_count // self._per_epoch
        queue = self._by_epoch[epoch]
        arrived = queue.popleft()
        if not queue:
            del self._by_epoch[epoch]
        if arrived.keep is None:
            self._taken[arrived.first] = arrived.count
            self._taken_count += arrived.count
        else:
            self._taken.update((arrived.first + at, 1) for at in arrived.keep)
            self._taken_count += len(arrived.keep)
        while count := self._taken.pop(self.begin_at, 0):
            self.begin_at += count

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in list(self._by_epoch.values()))

    def rest(self) -> UnorderedBuffer:
        return UnorderedBuffer(self.begin_at, self._per_epoch, dict(self._taken), self._taken_count)


RUNNING_GENERATORS = "loaderpool: running generators up to their saved position"


class WayToPlace:
    """Tells of a run how far it is on the way to its first batch; of one that begins at the beginning it says nothing.

    The session asks, as its consumers wait. Made with its lock held.

    Args:
        session: whose consumers wait.
        plan: of the run's batches.
        buffer: of the run, from which nothing was taken.
        of_stream: whether its items come from one that another process reads.
    """

    def __init__(self, session: Pool, plan: Plan, buffer: ReorderBuffer, of_stream: bool) -> None:
        self._session = session
        self._work: LongWork | None = None
        places = buffer.places if isinstance(buffer, LaneBuffer) else None
        if places is not None and any(places.taken):
            self._work = LongWork(
                RUNNING_GENERATORS, measure=functools.partial(_furthest, session, places, plan.most_rows)
            )
        elif of_stream and plan.start:
            what = f"loaderpool: reading the stream up to item {plan.start:,} to resume there"
            self._work = LongWork(what, measure=str)
        if self._work is not None and session.long_work is None:
            session.long_work = self._work

    def end(self) -> None:
        """The first batch is there, or is not wanted any more."""
        work, self._work = self._work, None
        if work is not None:
            if self._session.long_work is work:
                self._session.long_work = None
            work.end()


def _furthest(session: Pool, places: LanePlaces, rows: int) -> str:
    """Return at which item a generator is that has furthest to go; empty: none runs just now."""
    board, found = session.arena.board, []
    for worker in session.workers.values():
        if worker.place is None and board.read(worker.cell, Field.IN_GENERATOR):
            generated = generated_item(board.read(worker.cell, Field.INDEX) - 1)
            if generated is not None:
                found.append(generated)
    if not found:
        return ""
    generator, item = max(found, key=lambda each: each[1])
    return f"item {item:,} of generator {generator} (at most {rows * max(places.taken):,})"


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
        """Keep what arrived for its turn; False: it was taken, or lies after its lane's end."""
        number = arrived.first
        batch, lane = divmod(number, self._lanes)
        if batch < self._taken[lane] or lane in self.ended:
            return False
        self._waiting[number] = arrived
        if batch == self._taken[lane]:
            self._ready[number] = None
        return True

    def front(self) -> Arrived | None:
        while (front := self._first()) is not None and front.slot is None:
            self._end_lane(front.first)
        return front

    def drop_front(self) -> None:
        front = self._first()
        assert front is not None
        number = front.first
        del self._waiting[number], self._ready[number]
        self._taken[number % self._lanes] += 1
        self.taken += 1
        if number + self._lanes in self._waiting:
            self._ready[number + self._lanes] = None
        self._move_on()

    def _first(self) -> Arrived | None:
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
        return LaneBuffer(self._lanes, self._in_order, self.places)

    def _move_on(self) -> None:
        while not self.is_over:
            batch, lane = divmod(self.begin_at, self._lanes)
            if batch >= self._taken[lane] and lane not in self.ended:
                return
            self.begin_at += 1
