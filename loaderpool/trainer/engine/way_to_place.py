"""What is told while a pass that goes on elsewhere waits: its generators, or its stream, are run up to their place."""

from __future__ import annotations

import functools

from loaderpool.memory.board import Field
from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import generated_item
from loaderpool.plan.lane_places import LanePlaces
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.engine.lane_buffer import LaneBuffer
from loaderpool.trainer.engine.reorder_buffer import ReorderBuffer
from loaderpool.trainer.session.engine_session import EngineSession

RUNNING_GENERATORS = "loaderpool: running generators up to their place"


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
            what = f"loaderpool: reading the stream up to item {plan.begins_at:,}, where it goes on"
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
    return f"item {item:,} of generator {generator}, of {rows * max(places.taken):,} at most"
