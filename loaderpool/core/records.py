"""What the supervisor knows: loaders, runs, slots, jobs, workers and deaths; and what it has others do. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from loaderpool.core.messages import Done, Message, Ticket
from loaderpool.plan.batches import Numbering
from loaderpool.system.process import RestartLimit
from loaderpool.transport.reports import GivenUp

MOST_TICKETS = 2  # of a worker: one that it makes, one that waits in its channel
_TOGETHER = (
    3  # a ticket is given up at so many times the deaths of one sample: together its samples kill
)
_IDLE = 5  # beside the number of workers: so many may die running before they have begun anything


class Layout(NamedTuple):
    """The layout of a loader's slots."""

    slot_bytes: int
    max_chunk: int  # batches that fit a slot
    splits: bool  # whether several workers may make rows of one batch
    limit_bytes: int = 1 << 62  # of all slots of a run
    room: int = MOST_TICKETS  # tickets that a worker may have: more, where it has threads


class ToMain(NamedTuple):
    """Send a message to the main process."""

    message: Message
    file: Any = None  # that goes with it


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


class Abandon(NamedTuple):
    """Let workers see on the board that this run has ended."""

    run: int


class ReturnPages(NamedTuple):
    """Give a part of the memory file back to the machine."""

    offset: int
    nbytes: int


class DropFile(NamedTuple):
    """Close a file that came with an answer: the batch in it is not wanted."""

    file: Any


Instruction = ToMain | ToWorker | Start | Stop | Abandon | ReturnPages | DropFile


@dataclasses.dataclass
class LoaderRecord:
    """A loader that was loaded."""

    number: int
    plan: Numbering
    of: int  # the number of the first version: all share the limit of memory
    leaves_out: bool  # samples that end a worker; else a batch with one is an error
    most_deaths: int  # a ticket over which more workers die is given up
    layout: Layout | None = None
    keeper: int | None = None  # the worker that has the first sample
    row_s: float = 0.0  # a moving mean
    rows_measured: int = 0
    left_out: list[tuple[int, int, float, int]] = dataclasses.field(
        default_factory=list
    )  # epoch, and as in a ticket
    failure: bytes | None = None


@dataclasses.dataclass
class RunRecord:
    """Batches of a loader that are being made."""

    number: int
    loader: LoaderRecord
    plan: Numbering
    next: int  # the next batch to be cut; of lanes: the first of the run, as each lane has its own turn
    stop: int  # the number after the last batch
    had: set[int]  # batches from `next` on that are not to be made
    again: list[int] = dataclasses.field(
        default_factory=list
    )  # heap: batches to be made one by one, before `next`
    free: list[int] = dataclasses.field(
        default_factory=list
    )  # offsets; the last one released is used first
    making: dict[int, Filling] = dataclasses.field(
        default_factory=dict
    )  # by offset: workers write into them
    filled: dict[int, int] = dataclasses.field(
        default_factory=dict
    )  # offset to ticket, until `Release`
    fresh: set[int] = dataclasses.field(
        default_factory=set
    )  # offsets of slots that have had no batch
    slots: int = 0  # how many it has, all of one size
    slots_wanted: int = 0  # that it would have, were memory no limit
    may_lend: int = 0  # the most that was ever told
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    window: tuple[float, dict[int | None, int]] | None = (
        None  # of lanes, until something changes: see `next_batch`
    )
    is_in_order: bool = True
    feed: int = 0  # where the items of a stream are; 0: they are read by index
    last_rows: int = 0  # of the batch before `stop`; 0: as many as by the plan
    last_ticket: int = 0  # number of the last one that was cut
    is_ended: bool = False
    is_whole: bool = False  # all its batches go into one slot: it is a ticket of another machine

    def total_rows(self, batch: int, count: int) -> int:
        """Return the rows of `count` batches from this one on."""
        rows = self.plan.total_rows(batch, count)
        return (
            rows
            if not self.last_rows or batch + count < self.stop
            else rows - self.plan.batch_size + self.last_rows
        )

    def alike(self, batch: int) -> int:
        """Return how many batches from this one on may share a slot."""
        is_shorter = 0 < self.last_rows < self.plan.batch_size
        return max(1, min(self.plan.alike(batch), self.stop - is_shorter - batch))


@dataclasses.dataclass
class Lane:
    """A generator of a run: it only moves forward, so one worker has it."""

    turn: int  # batches that were cut
    home: int | None = None  # the worker that was given a ticket of it last
    batches: int | None = None  # that it has; None: not known yet


@dataclasses.dataclass(slots=True)
class Filling:
    """A slot that workers write into."""

    run: RunRecord
    offset: int
    batch: int
    count: int
    unanswered: int  # jobs
    may_lend: int
    asked: int  # rows
    lane: Lane | None  # that the rows come from
    rows: int = 0  # that were made
    answer: Done | None = None  # the last one
    file: Any = None  # that came with it
    failure: tuple[int, bytes] | None = None  # (row, error) of the first row that failed


@dataclasses.dataclass(slots=True)
class Job:
    """A ticket, its slot (None: a first sample is made), and at which samples workers died over it."""

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
    def is_alone(self) -> bool:
        """Whether a node is to have nothing else, so that it is known what the node dies of."""
        return len(self.deaths) >= self.loader.most_deaths - 1


@dataclasses.dataclass
class WorkerRecord:
    """A worker that was started, and is not known to be gone."""

    number: int
    workers: int = 1  # that it has: a node has several, and none while it starts
    jobs: dict[int, Job] = dataclasses.field(
        default_factory=dict
    )  # by ticket, in the order in which they were dealt
    is_leaving: bool = False
    is_paused: bool = False  # it gets no new ticket for a moment: see `core/trial.py`


class Death(NamedTuple):
    """How a worker ended, as far as the state must know."""

    error: Callable[
        [GivenUp, int, Ticket | None], bytes
    ]  # what is said if work is given up: why, deaths, ticket
    sample: int = -1  # source index of what it was at; -1: nothing
    hung_s: float = 0.0  # the sample had run for so long, and was ended for it: once is enough
    exit_code: int = 0
    has_begun: bool = True  # it had come to serve
    is_generator: bool = False  # a generator made that sample: nothing of it can be left out


class Deaths:
    """The deaths of late: some, within some seconds, are made good; None: any number.

    Attributes:
        idle: running, before anything was begun.
    """

    def __init__(self, restarts: tuple[int, float] | None, of_nodes: bool) -> None:
        self._limit, self._of_nodes = RestartLimit(restarts), of_nodes
        self.idle = 0

    def note(
        self, now: float, death: Death, had_begun: bool, workers: int
    ) -> tuple[GivenUp | None, int]:
        """A worker has died; return why nothing can go on (None: it can), and after how many deaths."""
        self.idle = 0 if had_begun or death.has_begun else self.idle + 1
        if not death.hung_s:
            self._limit.note(int(now * 1e9))
        if self._limit.is_exceeded:
            return GivenUp.STORM, self._limit.count
        return (GivenUp.BEFORE if self.idle > _IDLE + workers else None), self.idle

    def blame(self, job: Job, death: Death) -> GivenUp | None:
        """A worker has died over this job; return why that is given up, None: it is made again.

        It is given up if the last two deaths were at the same sample, or if its samples took too many in all.
        """
        job.deaths.append(death.sample)
        deaths, most = len(job.deaths), job.loader.most_deaths
        if self._of_nodes:
            return GivenUp.NODE if deaths >= most else None
        is_same = deaths >= most and job.deaths[-1] == job.deaths[-2]
        if not (death.hung_s or is_same):
            return GivenUp.TOGETHER if deaths >= _TOGETHER * most else None
        self._limit.forget(deaths - bool(death.hung_s))  # they are explained, so they are no storm
        return GivenUp.ALONE
