"""Invariants of the supervisor's state, and helpers of its tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from loaderpool.memory.arena import ExtentMap
from loaderpool.supervisor.records import Death, Layout, Start, ToMain, ToWorker
from loaderpool.supervisor.state import State
from loaderpool.transport.messages import Begin, Done, Filled, Found, Look, Status, Ticket

LOADER, RUN = 1, 1001


@dataclasses.dataclass
class Endless:
    """A plan of indexed batches with four items."""

    batch_size: int = 4
    usual_rows: int = 4
    batches_per_epoch: int = 1 << 40
    lanes: int = 0

    def locate(self, number: int) -> tuple[int, int, int]:
        return 0, number, 0

    def alike(self, number: int) -> int:
        return 1 << 30

    def total_rows(self, number: int, count: int) -> int:
        return 4 * count


def turn(state: State, obey: Callable[[Any], None], has_waited: bool = True) -> None:
    """Call `deal`, and carry out instructions until none are left."""
    while True:
        state.deal(has_waited)
        check_state(state)
        is_for_any = any(job.slot is None or job.slot.lane is None for job in state.due)
        assert state._of_nodes or not (is_for_any and state.roomy), (
            "a worker has room, and no ticket that is due"
        )
        if not state.instructions:
            return
        instructions = state.instructions[:]
        state.instructions.clear()
        for instruction in instructions:
            obey(instruction)


def check_state(state: State) -> None:
    """Check that each slot and each ticket is in exactly one place, and that the workers with
    capacity are known.
    """
    jobs = [*state.due, *(job for worker in state.workers.values() for job in worker.jobs.values())]
    assert len({job.ticket.number for job in jobs}) == len(jobs)
    assert sum(run.slots for run in state.runs.values()) <= state.slots.most
    for slot in (job.slot for job in jobs if job.slot is not None):
        assert slot.unanswered == sum(job.slot is slot for job in jobs)
        assert (
            slot.offset not in (*slot.run.free, *slot.run.fresh)
            and state.runs[slot.run.number] is slot.run
        )
    for run in state.runs.values():
        making = {
            job.slot.offset: job.slot
            for job in jobs
            if job.slot is not None and job.slot.run is run
        }
        assert making == run.making
        offsets = [*run.free, *run.fresh, *run.filled, *making]
        assert len(offsets) == len(set(offsets)) == run.slots
    roomy = [*state.roomy]
    for worker in state.workers.values():
        state.note_room(worker)
    assert roomy == [*state.roomy]


def look(state: State, loader: int) -> None:
    """Make a loader's first sample."""
    state.look(Look(loader, 0))


def begin(state: State, run: int, loader: int, first: int, stop: int = -1, **other: Any) -> None:
    """Begin a run, with other fields of `Begin` by name."""
    fields = {"rest": 0, "had": (), "lanes_over": (), "is_in_order": True, "feed": 0, **other}
    state.begin(Begin(run, loader, first, stop, **fields))


def release(state: State, number: int, offset: int) -> None:
    """Release a slot's latest batch."""
    run = state.runs.get(number)
    state.release(number, offset, 0 if run is None else run.filled.get(offset, 0))


def death(index: int = -1) -> Death:
    """Return a worker's death at this sample, whose error has the verdict."""
    return Death(lambda verdict, deaths, _: f"{verdict.name} {deaths}".encode(), index)


class Pool:
    """The state, and the instructions that it has given."""

    def __init__(
        self, workers: int, restarts: tuple[int, float] | None = None, of_nodes: bool = False
    ) -> None:
        self.state = State(workers, ExtentMap(4096, 1 << 30), 160, restarts, of_nodes)
        self.channels: dict[int, list[Ticket]] = {}  # tickets of each running worker
        self.started: list[int] = []
        self.told: list[Any] = []  # messages to the main process
        self.can_start = 1 << 30  # number of further workers that can be started
        self.now = 0.0

    def with_a_run(self, most_deaths: int = 3, slot_bytes: int = 4096, room: int = 2) -> Pool:
        """Add a loader whose first sample was made, and a run of it: one batch for each slot, made
        by one worker.
        """
        self.state.load(LOADER, Endless(), most_deaths=most_deaths)
        look(self.state, LOADER)
        self.turn()
        (worker,) = self.busy()
        found = Found(self.channels[worker].pop().number, LOADER, b"", 0.0)
        self.state.found(worker, found)
        self.state.lay_out(LOADER, Layout(slot_bytes, 1, False, room=room), 0.001)
        begin(self.state, RUN, LOADER, 0)
        self.turn()
        return self

    def turn(self, has_waited: bool = True) -> None:
        """Call `deal`, and carry out the instructions."""
        turn(self.state, self.obey, has_waited)

    def obey(self, instruction: Any) -> None:
        """Carry out an instruction."""
        match instruction:
            case Start(worker) if not self.can_start:
                self.state.not_started(worker, b"EAGAIN")
            case Start(worker):
                self.can_start -= 1
                self.started.append(worker)
                self.channels[worker] = []
            case ToWorker(worker, message) if worker in self.channels and isinstance(
                message, Ticket
            ):
                self.channels[worker].append(message)
            case ToMain(message):
                self.told.append(message)

    def answer(self, worker: int, place: int = 0, row_s: float = 0.00025) -> Ticket:
        """Let a worker answer one of its tickets with `Done`."""
        ticket = self.channels[worker].pop(place)
        rows = ticket.stop - ticket.start
        self.state.done(worker, Done(ticket.number, rows, rows * row_s))
        return ticket

    def step(self) -> None:
        """Let the first worker with work make a step."""
        self.answer(self.busy()[0])
        self.turn()

    def die(self, worker: int, index: int = -1) -> list[Ticket]:
        """Let a worker die during its first ticket, if it has one. Return all its tickets."""
        tickets = self.channels.pop(worker)
        self.state.died(worker, self.now, tickets[0].number if tickets else 0, death(index))
        return tickets

    def wait(self, can_start: int) -> None:
        """Let a minute pass, after which this number of workers can be started."""
        self.can_start, self.now = can_start, self.now + 60
        self.state.tick()
        self.turn()

    def busy(self) -> list[int]:
        """Return the workers with tickets."""
        return [worker for worker, tickets in self.channels.items() if tickets]

    def of(self, *kinds: type) -> list[Any]:
        """Return the messages of a kind to the main process."""
        return [message for message in self.told if isinstance(message, kinds)]

    def failed(self) -> list[Filled]:
        """Return the `Filled` messages of batches that cannot be made."""
        return [message for message in self.of(Filled) if message.error]

    def is_told_that_a_run_cannot_be(self, loader: int) -> None:
        """Begin a run, and check that the state reports that it cannot be made."""
        begin(self.state, RUN + 1, loader, 7)
        self.turn()
        assert [message.number for message in self.of(Status)] == [RUN + 1]
