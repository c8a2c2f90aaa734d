"""Records of the supervisor's state: loaders, runs, slots, jobs, workers, deaths; and instructions.

Pure: no clock, no process, no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from loaderpool.memory.layout import FixedLayout
from loaderpool.plan.batches import Numbering
from loaderpool.system.process import RestartLimit
from loaderpool.transport.messages import Done, Message, Ticket
from loaderpool.transport.reports import GivenUp

MOST_TICKETS = 2  # tickets of a worker: one in work, one waiting in its channel
# A ticket whose deaths were at changing samples is abandoned after this times `most_deaths`.
_TOGETHER = 3
# Workers that may die in a row before they have begun anything: this plus the number of workers.
_IDLE = 5


class Layout(NamedTuple):
    """The layout of a loader's slots."""

    slot_bytes: int  # size of a slot
    max_chunk: int  # number of batches that fit a slot
    # Ranges of rows begin at multiples of this number, if several workers may make one batch.
    # 0: one worker makes the whole batch.
    range_rows: int
    limit_bytes: int = 1 << 62  # limit of all slots of the loader's runs together
    room: int = MOST_TICKETS  # tickets that a worker may have; larger for workers with threads
    # Layout of rows, if batches differ in their numbers of rows. Each run then has its own slot
    # size.
    rows: FixedLayout | None = None
    most_rows: int = 1 << 62  # number of rows that fit into a slot


class ToMain(NamedTuple):
    """Send a message to the main process."""

    message: Message
    file: int | None = None  # descriptor to send with the message, then to close


class ToWorker(NamedTuple):
    """Send a message to a worker. Do nothing if the worker is gone."""

    worker: int
    message: Message
    file: int | None = None  # descriptor to send with the message; it stays open


class Start(NamedTuple):
    """Start a worker with this new number. If that fails, `State.not_started` is called."""

    worker: int


class Stop(NamedTuple):
    """Stop a worker that has no tickets. Do nothing if the worker is gone."""

    worker: int


class Abandon(NamedTuple):
    """Mark this run as ended on the board, where workers check it before each sample."""

    run: int


class ReturnPages(NamedTuple):
    """Return the pages of a part of the memory file to the operating system."""

    offset: int
    nbytes: int


class DropFile(NamedTuple):
    """Close a file that came with a `Done`, because its batch is not needed."""

    file: int


Instruction = ToMain | ToWorker | Start | Stop | Abandon | ReturnPages | DropFile


@dataclasses.dataclass(eq=False, repr=False)
class LoaderRecord:
    """A version of a loader that was loaded."""

    number: int
    plan: Numbering
    of: int  # number of the loader's first version; all versions share one limit of memory
    leaves_out: bool  # True: leave out samples that end a worker; False: they fail their batch
    most_deaths: int  # deaths of workers at one sample before its ticket is abandoned
    # Longest time of a sample in seconds; None: no limit. A job keeps it after the loader is gone.
    timeout_s: float | None = None
    layout: Layout | None = None  # None until the first sample was made
    probe_owner: int | None = None  # number of the worker that still has the first sample
    row_s: float = 0.0  # moving mean of the seconds for a row
    rows_measured: int = 0  # number of rows that `row_s` was measured with
    # Samples that are left out: epoch, then as in `Ticket.left_out`.
    left_out: list[tuple[int, int, float, int]] = dataclasses.field(default_factory=list)
    failure: bytes | None = None  # pickled error: the reason why no batch can be made


@dataclasses.dataclass(eq=False, repr=False)
class RunRecord:
    """A run: consecutive batches of a loader, and the slots for them."""

    number: int
    loader: LoaderRecord
    plan: Numbering
    next: int  # next batch to cut; with lanes, the first batch of the run, because lanes have turns
    stop: int  # number after the last batch
    had: set[int]  # batches from `next` on that must not be made
    # Heap of batches to make again, one by one, before `next`.
    again: list[int] = dataclasses.field(default_factory=list)
    # Offsets of free slots that have had a batch. The last one released is used first.
    free: list[int] = dataclasses.field(default_factory=list)
    # Offsets of slots that have never had a batch, in the reverse of the order of their use.
    fresh: list[int] = dataclasses.field(default_factory=list)
    # Number of the worker that got the latest ticket of each slot, by offset.
    writers: dict[int, int] = dataclasses.field(default_factory=dict)
    # Slots that workers write into, by offset.
    making: dict[int, Filling] = dataclasses.field(default_factory=dict)
    # Ticket of each slot that the main process has, by offset. `Release` removes it.
    filled: dict[int, int] = dataclasses.field(default_factory=dict)
    sized: Layout | None = None  # layout of the run's slots, if the run has its own slot size
    slots: int = 0  # number of its slots, all of one size
    slots_wanted: int = 0  # number of slots that it would have if memory were unlimited
    may_lend: int = 0  # largest `may_lend` that was reported to the main process
    lanes: list[Lane] = dataclasses.field(default_factory=list)
    # Cached result of `slots._window` for the lanes; None: compute it again.
    window: tuple[float, dict[int | None, int]] | None = None
    is_in_order: bool = True  # True if the consumer takes the batches in their order
    feed: int = 0  # offset of the stream's table in the arena; 0: items are read by index
    last_rows: int = 0  # rows of the batch before `stop`; 0: the number in the plan
    last_ticket: int = 0  # number of the last ticket that was cut
    is_ended: bool = False
    # Requests of a run on demand that were not cut yet, by number of the first batch. The values
    # are the number of batches, and the rows of the last one as in `last_rows`. None: batches are
    # made in order.
    demand: dict[int, tuple[int, int]] | None = None

    @property
    def layout(self) -> Layout | None:
        """Layout of the run's slots; None until the probe has made the first sample."""
        return self.sized or self.loader.layout

    def total_rows(self, batch: int, count: int) -> int:
        """Return the number of rows of `count` batches from `batch` on."""
        rows = self.plan.total_rows(batch, count)
        return (
            rows
            if not self.last_rows or batch + count < self.stop
            else rows - self.plan.batch_size + self.last_rows
        )

    def alike(self, batch: int) -> int:
        """Return the number of batches from `batch` on that may share a slot."""
        is_shorter = 0 < self.last_rows < self.plan.batch_size
        return max(1, min(self.plan.alike(batch), self.stop - is_shorter - batch))


@dataclasses.dataclass(eq=False, repr=False)
class Lane:
    """A generator of a run. It only moves forward, so one worker has it at a time."""

    turn: int  # number of its batches that were cut
    home: int | None = None  # number of the worker that got its last ticket
    batches: int | None = None  # number of its batches; None: not known yet


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Filling:
    """A slot that workers write into."""

    run: RunRecord
    offset: int  # start of the slot in the memory file
    batch: int  # number of the first batch in the slot
    count: int  # number of consecutive batches in the slot
    unanswered: int  # number of its jobs without an answer
    may_lend: int  # number of slots that may have views, reported with `Filled`
    asked: int  # number of rows to make
    lane: Lane | None  # generator of the rows
    batch_rows: tuple[int, ...] = ()  # rows of each batch, as in `Filled`
    rows: int = 0  # number of rows that were made
    answer: Done | None = None  # last answer
    file: int | None = None  # descriptor that came with the last answer
    # Descriptor of the file with the items, if another worker has read them.
    items: int | None = None
    failure: tuple[int, bytes] | None = None  # (start, error) of the lowest row range that failed


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Job:
    """A ticket with its slot, and the deaths of workers that had it."""

    ticket: Ticket
    loader: LoaderRecord
    slot: Filling | None  # None: the ticket makes a first sample
    seconds: float = 0.0  # expected time of the ticket
    # Source index of the sample at each death; -1: none.
    deaths: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_unwanted(self) -> bool:
        """True if its run has ended."""
        return self.slot is not None and self.slot.run.is_ended

    @property
    def is_alone(self) -> bool:
        """True if a node must have no other job, so that its death has one possible cause."""
        return len(self.deaths) >= self.loader.most_deaths - 1


@dataclasses.dataclass(eq=False, repr=False)
class WorkerRecord:
    """A worker, or a node, that was started and whose death is not known."""

    number: int
    workers: int = 1  # number of processes: several for a node, 0 while the node starts
    # Jobs by ticket number, in the order in which the worker got them.
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)
    is_leaving: bool = False  # True: the worker gets no new tickets, and stops after its last one
    is_paused: bool = False  # True: the worker gets no new tickets during a pause of `Trial`


class Death(NamedTuple):
    """The death of a worker."""

    # Makes the pickled error for abandoned work, from the reason, the number of deaths, and the
    # ticket.
    error: Callable[[GivenUp, int, Ticket | None], bytes]
    sample: int = -1  # source index of the sample in work; -1: none
    hung_s: float = 0.0  # seconds that a sample had run when its timeout ended it; 0.0: no timeout
    exit_code: int = 0
    has_begun: bool = True  # True if the worker had started to read tickets
    is_generator: bool = False  # True if a generator made the sample, which cannot be left out
    rows: int = 1  # number of rows that the call was reading; any of them may be the cause


class Deaths:
    """Retry policy: counts deaths, and decides if the work of a dead worker is retried.

    Attributes:
        idle: Number of deaths in a row of workers that had not started any work.

    Args:
        restarts: Limit (deaths, seconds): more deaths within these seconds end all work; None: no
            limit.
        of_nodes: True if the workers are nodes.
    """

    def __init__(self, restarts: tuple[int, float] | None, of_nodes: bool) -> None:
        self._limit, self._of_nodes = RestartLimit(restarts), of_nodes
        self.idle = 0

    def note(
        self, now: float, death: Death, had_begun: bool, workers: int
    ) -> tuple[GivenUp | None, int]:
        """Count the death of a worker. Return why all work is abandoned, and the number of deaths.

        Args:
            now: Time in seconds.
            death: The death.
            had_begun: True if the worker had a ticket in work.
            workers: Number of workers that there should be.

        Returns:
            The reason (None: continue), and the number of deaths for the error.
        """
        self.idle = 0 if had_begun or death.has_begun else self.idle + 1
        if not death.hung_s:
            self._limit.note(int(now * 1e9))
        if self._limit.is_exceeded:
            return GivenUp.STORM, self._limit.count
        return (GivenUp.BEFORE if self.idle > _IDLE + workers else None), self.idle

    def blame(self, job: Job, death: Death) -> GivenUp | None:
        """Count a worker's death at this job. Return the reason to abandon it, or None to retry it.

        A job is abandoned at the first timeout. Otherwise it is abandoned after `most_deaths`
        deaths if the last two were at the same sample, and after `_TOGETHER` times `most_deaths`
        deaths in any case. The job of a node is abandoned after `most_deaths` deaths.
        """
        job.deaths.append(death.sample)
        deaths, most = len(job.deaths), job.loader.most_deaths
        if self._of_nodes:
            return GivenUp.NODE if deaths >= most else None
        is_same = deaths >= most and job.deaths[-1] == job.deaths[-2]
        if not (death.hung_s or is_same):
            return GivenUp.TOGETHER if deaths >= _TOGETHER * most else None
        # The sample explains these deaths, so they do not count as a storm.
        self._limit.forget(deaths - bool(death.hung_s))
        return GivenUp.ALONE
