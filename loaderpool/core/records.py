"""What the supervisor knows: loaders, runs, slots, jobs and workers; and what it has others do."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

from loaderpool.core.messages import Message, Ticket

MOST_TICKETS = 2  # of a worker: one that it makes, one that waits in its channel


class Plan(Protocol):
    """What is asked of a loader's plan. Batch numbers count through all epochs."""

    batch_size: int
    batches_per_epoch: int
    lanes: int  # generators, whose batches take turns; 0: items by index

    def total_rows(self, number: int, count: int) -> int:
        """Return the rows of `count` batches from `number` on."""


class Layout(Protocol):
    """What is asked of the layout of a loader's slots."""

    slot_bytes: int
    row_bytes: int
    most: int  # batches that fit a slot
    splits: bool  # whether several workers may make rows of one batch


class ToMain(NamedTuple):
    """Send a message to the main process."""

    message: Message


class ToWorker(NamedTuple):
    """Send a message to a worker; nothing happens if it is gone."""

    worker: int
    message: Message


class Start(NamedTuple):
    """Start a worker with this number, which no other one has had; answered by `not_started` if that fails."""

    worker: int


class Stop(NamedTuple):
    """Let a worker exit, which has nothing to do; nothing happens if it is gone."""

    worker: int


class MarkEnded(NamedTuple):
    """Let workers see in shared memory that this run has ended."""

    run: int


Instruction = ToMain | ToWorker | Start | Stop | MarkEnded


@dataclasses.dataclass
class LoaderRecord:
    """A loader that was loaded."""

    number: int
    plan: Plan
    timeout_s: float | None
    leaves_out: bool  # samples that fail; else a batch with one is an error
    first: int  # the batch whose first sample is made
    layout: Layout | None = None
    keeper: int | None = None  # the worker that has the first sample
    row_s: float = 0.0  # a moving mean
    rows_measured: int = 0
    failure: bytes | None = None
    has_given_back: bool = False  # its latest run has ended to give back slots, and will begin again


@dataclasses.dataclass
class RunRecord:
    """Batches of a loader that are being made."""

    number: int
    loader: LoaderRecord
    next: int  # the next batch to be cut; of lanes: the first of the run, as each lane has its own turn
    had: set[int]  # batches from `next` on that are not to be made
    again: list[int] = dataclasses.field(default_factory=list)  # heap: batches to be made one by one, before `next`
    free: list[int] = dataclasses.field(default_factory=list)  # offsets; the last one released is used first
    filled: set[int] = dataclasses.field(default_factory=set)  # offsets that the main process has until `Release`
    slots: int = 0
    may_lend: int = 0  # the most that was ever told
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    last_ticket: int = 0  # number of the last one that was cut
    is_ended: bool = False
    is_asked: bool = False  # to give its slots back
    may_ask: int = 3  # so many other runs for their slots; then it is an error that it has none


@dataclasses.dataclass
class Lane:
    """A generator of a run: it only moves forward, so one worker has it."""

    turn: int  # batches that were cut
    home: int | None = None  # the worker that was given a ticket of it last
    batches: int | None = None  # that it has; None: not known yet

    @property
    def is_over(self) -> bool:
        """Whether nothing more is cut of it."""
        return self.batches is not None


@dataclasses.dataclass
class Filling:
    """A slot that workers write into."""

    run: RunRecord
    offset: int
    batch: int
    count: int
    unanswered: int  # jobs
    may_lend: int
    asked: int  # rows
    rows: int = 0  # that were made
    failure: tuple[int, bytes] | None = None  # (row, error) of the first row that failed


@dataclasses.dataclass
class Job:
    """A ticket, its slot (None: a first sample is made), and at which rows workers died over it."""

    ticket: Ticket
    loader: LoaderRecord
    slot: Filling | None
    seconds: float = 0.0  # expected
    deaths: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_unwanted(self) -> bool:
        """Whether its run has ended meanwhile."""
        return self.slot is not None and self.slot.run.is_ended

    @property
    def lane(self) -> Lane | None:
        """The generator that its rows come from."""
        lanes = self.slot.run.lanes if self.slot is not None else []
        return lanes[self.ticket.batch % len(lanes)] if lanes else None


@dataclasses.dataclass
class WorkerRecord:
    """A worker that was started, and is not known to be gone."""

    number: int
    room: int = MOST_TICKETS
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)  # by ticket, in the order in which they were dealt
    is_leaving: bool = False


class Blame(NamedTuple):
    """What is said of a row that ended its worker."""

    error: bytes
    is_final: bool = False  # it took too long: once is enough


def slot_bytes(run: RunRecord) -> int:
    """Return the bytes of each of a run's slots; 0: not known yet."""
    return run.loader.layout.slot_bytes if run.loader.layout is not None else 0
