"""Where batches of generators that take turns wait; where each generator ends is not known before."""

from __future__ import annotations

import functools

from loaderpool.memory.board import Field
from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import LanePlaces, generated_item
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.engine.reorder_buffer import Arrived, ReorderBuffer
from loaderpool.trainer.session.engine_session import EngineSession

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

    def __init__(self, session: EngineSession, plan: BasePlan, buffer: ReorderBuffer, of_stream: bool) -> None:
        self._session = session
        self._work: LongWork | None = None
        places = buffer.places if isinstance(buffer, LaneBuffer) else None
        if places is not None and any(places.taken):
            self._work = LongWork(
                RUNNING_GENERATORS, measure=functools.partial(_furthest, session, places, plan.most_rows)
            )
        elif of_stream and plan.begins_at:
            what = f"loaderpool: reading the stream up to item {plan.begins_at:,} to resume there"
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


def _furthest(session: EngineSession, places: LanePlaces, rows: int) -> str:
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
        """Keep what arrived for its turn; False: it was taken, or lies behind its lane's end."""
        number = arrived.first
        batch, lane = divmod(number, self._lanes)
        if batch < self._taken[lane] or lane in self.ended:
            return False
        self._waiting[number] = arrived
        if batch == self._taken[lane]:
            self._ready[number] = None
        return True

    def is_ready(self) -> bool:
        return self.begin_at in self._waiting if self._in_order else bool(self._ready)

    def front(self) -> Arrived | None:
        if self._in_order:
            return self._waiting.get(self.begin_at)
        return self._waiting[next(iter(self._ready))] if self._ready else None

    def drop_front(self) -> None:
        number = self._front_number()
        del self._waiting[number], self._ready[number]
        self._taken[number % self._lanes] += 1
        self.taken += 1
        if number + self._lanes in self._waiting:
            self._ready[number + self._lanes] = None
        self._move_on()

    def end_lane(self) -> list[Arrived]:
        """What is in front says that its lane has ended; returns it, and what waits behind it."""
        number = self._front_number()
        lane = number % self._lanes
        self.ended[lane] = self._taken[lane]
        behind = [first for first in self._waiting if first % self._lanes == lane]
        del self._ready[number]
        self._move_on()
        return [self._waiting.pop(first) for first in behind]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def clear(self) -> list[Arrived]:
        waiting, self._waiting, self._ready = self._waiting, {}, {}
        return list(waiting.values())

    def rest(self) -> LaneBuffer:
        return LaneBuffer(self._lanes, self._in_order, self.places)

    def _front_number(self) -> int:
        return self.begin_at if self._in_order else next(iter(self._ready))

    def _move_on(self) -> None:
        while not self.is_over:
            batch, lane = divmod(self.begin_at, self._lanes)
            if batch >= self._taken[lane] and lane not in self.ended:
                return
            self.begin_at += 1
