"""What always holds of the supervisor's state."""

from __future__ import annotations

from loaderpool.core.state import State


def check_state(state: State) -> None:
    """No slot and no ticket is in two places, or in none."""
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


def release(state: State, number: int, offset: int) -> None:
    """Release a slot's latest batch."""
    run = state.runs.get(number)
    state.release(number, offset, 0 if run is None else run.filled.get(offset, 0))
