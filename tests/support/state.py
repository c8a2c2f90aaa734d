"""What always holds of the supervisor's state, and what tests of it have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from loaderpool.core.messages import Begin, Look
from loaderpool.core.records import Death
from loaderpool.core.state import State


@dataclasses.dataclass
class Endless:
    """A plan of batches of four items by index."""

    batch_size: int = 4
    batches_per_epoch: int = 1 << 40
    lanes: int = 0

    def locate(self, number: int) -> tuple[int, int, int]:
        return 0, number, 0

    def alike(self, number: int) -> int:
        return 1 << 30

    def total_rows(self, number: int, count: int) -> int:
        return 4 * count


def turn(state: State, obey: Callable[[Any], None]) -> None:
    """Deal, and carry out instructions until there are none."""
    while True:
        state.deal()
        check_state(state)
        if not state.instructions:
            return
        instructions = state.instructions[:]
        state.instructions.clear()
        for instruction in instructions:
            obey(instruction)


def check_state(state: State) -> None:
    """No slot and no ticket is in two places, or in none, and who may have more tickets is known."""
    jobs = [*state.due, *(job for worker in state.workers.values() for job in worker.jobs.values())]
    assert len({job.ticket.number for job in jobs}) == len(jobs)
    assert sum(run.slots for run in state.runs.values()) <= state.slots.most
    for slot in (job.slot for job in jobs if job.slot is not None):
        assert slot.unanswered == sum(job.slot is slot for job in jobs)
        assert slot.offset not in slot.run.free and state.runs[slot.run.number] is slot.run
    for run in state.runs.values():
        making = {job.slot.offset for job in jobs if job.slot is not None and job.slot.run is run}
        offsets = [*run.free, *run.filled, *making]
        assert len(offsets) == len(set(offsets)) == run.slots and run.fresh <= run.sizes.keys()
    roomy = [*state.roomy]
    for worker in state.workers.values():
        state.note_room(worker)
    assert roomy == [*state.roomy]


def look(state: State, loader: int) -> None:
    """Have a loader's first sample made."""
    state.look(Look(loader, 0, 0, 0))


def begin(state: State, run: int, loader: int, first: int, stop: int = -1, **other: Any) -> None:
    """Begin a run, with other fields of `Begin` by name."""
    fields = {"rest": 0, "had": (), "lanes_over": (), "is_in_order": True, "feed": 0, **other}
    state.begin(Begin(run, loader, first, stop, **fields))


def release(state: State, number: int, offset: int) -> None:
    """Release a slot's latest batch."""
    run = state.runs.get(number)
    state.release(number, offset, 0 if run is None else run.filled.get(offset, 0))


def death(index: int = -1) -> Death:
    """A worker's death at this sample, whose error has the verdict."""
    return Death(lambda verdict, deaths, _: f"{verdict.name} {deaths}".encode(), index)
