"""What the supervisor knows of each ticket, loader, slot, run and worker."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import operator
from collections.abc import Iterable
from typing import NamedTuple

from loaderpool.memory.board import Board, Field
from loaderpool.transport.messages import Command, Notice, Status, encode, join32

# Batches of which something is made beside the first probe. Less: workers idle behind a first sample that takes very
# long. More: the tickets of what a worker keeps, which all wait for it, may not fit its pipe.
_MOST_EARLY = 128


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """Some work for one worker: a chunk of batches, rows of a batch, a probe, or a call made early."""

    number: int
    run: RunRecord | None  # None: a probe, or made early
    loader: LoaderRecord
    first: int  # first batch, counted from the run's first epoch on; where there is no run, the epoch
    count: int
    row_start: int  # where there is no run: which batch
    row_stop: int
    slot: int
    attempt: int = 0
    deaths: int = 0
    is_isolated: bool = False  # a worker that had it has died: nothing shall be made beside it; of hosts, nor dealt
    uses_kept: bool = False  # what a probe kept stands for some of its work, so its time tells nothing
    suspect: Ticket | None = None  # this is a trial of that ticket: one of its rows alone, the result thrown away
    trial: int = 0  # which row
    hint: int | None = None  # source index at which a worker died over it
    acquittals: int = 0  # how often all its rows were tried and none killed
    lost: int = 0  # deaths over it and its trials, in all
    early: int | None = None  # it is made early: this call of its batch, the result kept

    @property
    def calls(self) -> int:
        """How many calls of the function it is."""
        return self.count * (self.row_stop - self.row_start if self.loader.is_per_sample else 1)

    @property
    def is_alone(self) -> bool:
        """Whether it is one call of the function, so that a death over it is that call's."""
        if self.run is None or self.suspect is not None:
            return True
        return self.count == 1 and (not self.loader.is_per_sample or self.row_stop - self.row_start == 1)

    def command(self) -> bytes:
        """Return what the worker is told."""
        if self.early is not None:
            return encode(Command.EARLY, self.number, self.loader.number, self.first, self.row_start, self.early)
        if self.run is None:
            return encode(Command.PROBE, self.number, self.loader.number, self.first, self.loader.feed, self.row_start)
        if self.suspect is not None:
            return encode(
                Command.TRY,
                self.number,
                self.run.number,
                self.first,
                join32(self.count, self.trial),
                join32(self.row_start, self.row_stop),
                0 if self.suspect.hint is None else self.suspect.hint + 1,
            )
        return encode(
            Command.TICKET,
            self.number,
            self.run.number,
            self.first,
            join32(self.count, self.attempt),
            join32(self.row_start, self.row_stop),
            self.slot,
            int(self.is_isolated),
        )

    def completion(self, status: Status, worker: int) -> bytes:
        """Return what the trainer is told, where the supervisor answers for a worker."""
        return self._notice(Notice.COMPLETION, join32(status, worker))

    def unsure(self) -> bytes:
        """Return what the trainer is told, where only it can know whether the ticket was answered."""
        return self._notice(Notice.UNSURE, 0)

    def _notice(self, kind: Notice, last: int) -> bytes:
        assert self.run is not None
        return encode(
            kind,
            self.number,
            self.run.number,
            self.first,
            join32(self.count, self.attempt),
            join32(self.row_start, self.row_stop),
            self.slot,
            last,
        )


class LastCell(NamedTuple):
    """What a dead worker left: the fields of its cell, read when it was reaped, and how it ended."""

    finished: int = 0
    sending: int = 0
    status: int = 0
    source_index: int | None = None  # of the sample that it was at
    exit_code: int = 0  # minus a signal's number where one ended it
    has_begun: bool = False  # it came as far as to wait for work
    in_setup: bool = False  # the user's `setup` hook was running
    in_generator: bool = False  # a generator was making that item

    @staticmethod
    def of(board: Board, cell: int, pid: int, exit_code: int) -> LastCell:
        """Return what a reaped worker has left in its cell, which does not change any more."""
        index = board.read(cell, Field.INDEX)
        return LastCell(
            finished=board.read(cell, Field.FINISHED),
            sending=board.read(cell, Field.SENDING),
            status=board.read(cell, Field.STATUS),
            source_index=index - 1 if index else None,
            exit_code=exit_code,
            has_begun=board.read(cell, Field.PID) == pid,
            in_setup=bool(board.read(cell, Field.IN_SETUP)),
            in_generator=bool(board.read(cell, Field.IN_GENERATOR)),
        )


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Kept:
    """What a worker has made of a batch before any run began: its first rows (or calls), kept for their turns."""

    worker: int
    batch: int
    rows: int  # made, or being made
    of: int = 0  # that the batch has; 0: not known yet
    is_early: bool = False  # made early; else a probe has looked at it


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class LoaderRecord:
    """A loader that was loaded."""

    number: int
    max_deaths: int
    probe_epoch: int | None
    timeout_ns: int = 0  # for one sample; 0: none
    may_exclude: bool = False  # on_error skips or replaces, so a sample that hangs is left out and the ticket redone
    is_per_sample: bool = True  # one call of the function makes one row
    # Not to be run again: epoch, source index, ran_ns, exit code.
    excluded: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    is_loaded: bool = False
    is_failed: bool = False  # it or a change of it could not be loaded
    layout: tuple[int, int] | None = None  # where the form's pickle lies in the arena
    max_chunk: int = 1
    can_split: bool = False
    threads: int = 1  # that make its calls in each worker
    batch_rows: int = 1
    last_rows: int = 1
    full_batches: int = 0
    batch_ns: int = 0
    is_measured: bool = False
    probe: Ticket | None = None  # the first one, until it is answered
    probed_epoch: int = 0  # of which `kept` tells
    is_slow: bool = False  # that takes long
    next_early: int = 1  # the next batch to be begun beside it
    end_early: int = _MOST_EARLY  # and the one behind the last
    kept: dict[int, Kept] = dataclasses.field(default_factory=dict)  # by batch
    feed: int = 0  # where the table lies that has the items of the probe; 0: the source has them
    free: list[int] = dataclasses.field(default_factory=list)  # last freed, first used: hot in cache
    is_unloading: bool = False
    outstanding: int = 0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class SlotRecord:
    """A slot of a loader's ring."""

    number: int
    loader: LoaderRecord
    offset: int
    nbytes: int
    run: RunRecord | None = None  # who holds it; None: free
    lent_ticket: int = 0  # of a supervisor before this one; the consumer still looks at it
    is_retiring: bool = False
    tickets: list[Ticket] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class RunRecord:
    """A run: batches of consecutive epochs that a consumer wants."""

    number: int
    loader: LoaderRecord
    first_epoch: int
    batches_per_epoch: int
    next: int  # next batch to cut into tickets
    limit: int
    quota: int  # most slots it may hold
    held: int = 0
    outstanding: int = 0  # tickets dealt or due again
    is_ended: bool = False
    part_slot: int | None = None  # of a batch that is being cut into row ranges
    part_batch: int = 0
    part_row: int = 0
    portions: PortionRecords | None = None  # where a dispatcher says what is made of it
    after: tuple[int, int] = (0, 0)  # where the epoch begins, as Control.RUN_AFTER says it
    feed: int = 0  # where the table of its stream lies; 0: the source has the items
    lanes: LaneRecords | None = None  # of generators whose batches take turns
    full_batches: int = dataclasses.field(init=False)  # of an epoch: how many have all their rows
    last_rows: int = dataclasses.field(init=False)  # of the batch behind these

    def __post_init__(self) -> None:
        self.full_batches, self.last_rows = self.loader.full_batches, self.loader.last_rows

    @property
    def kept(self) -> dict[int, Kept]:
        """What workers keep of its batches, counted from the run's first epoch on."""
        is_foretold = self.first_epoch == self.loader.probed_epoch and not any(self.after)
        return self.loader.kept if is_foretold else {}

    def rows_of(self, batch: int) -> int:
        """Return the rows that the plan gives a batch, counted from the run's first epoch on."""
        is_full = batch % self.batches_per_epoch < self.full_batches
        return self.loader.batch_rows if is_full else self.last_rows

    def epoch_of(self, batch: int) -> int:
        """Return the epoch of a batch that is counted from the first one of the run."""
        return self.first_epoch + batch // self.batches_per_epoch


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class LaneRecords:
    """Generators whose batches take turns: batch k is one of lane k modulo their number."""

    next: list[int]  # of each lane, the next batch to cut into a ticket
    over: set[int] = dataclasses.field(default_factory=set)  # lanes that have ended
    failed: set[int] = dataclasses.field(default_factory=set)  # whose generators raised or hung: nothing comes behind
    homes: dict[int, int] = dataclasses.field(default_factory=dict)  # the worker in which each stands, by lane
    weights: dict[int, int] = dataclasses.field(default_factory=dict)  # of hosts that are homes, how many workers

    def settle(self, batch: int, worker: WorkerRecord) -> None:
        """Note that the generator of this batch stands in this worker."""
        self.homes[batch % len(self.next)] = worker.number
        self.weights[worker.number] = worker.workers

    def lane_for(self, worker: WorkerRecord, workers: int, limit: int) -> int | None:
        """Return the lane with the lowest next batch that this worker may make: the generator stands there, or nowhere.

        Otherwise, where another worker has more than its share of them, one of these moves, and is run again here. That
        takes as long as all that it has made so far, so it is not done because generators elsewhere have ended: shares
        are of all lanes, and change with the number of workers alone (LANE-4).

        Args:
            worker: a host has the share of all its workers.
            workers: how many share the lanes.
            limit: no batch from here on is made yet.
        """
        homes, number, gone = self.homes, worker.number, self.over | self.failed
        waiting = [lane for lane, batch in enumerate(self.next) if batch < limit and lane not in gone]
        counts = collections.Counter(homes.values())
        share = -(-len(self.next) // max(1, workers))
        may_take = counts[number] < share * max(1, worker.workers)
        mine = [lane for lane in waiting if homes.get(lane, number if may_take else None) == number]
        if not mine and may_take:
            mine = [lane for lane in waiting if counts[homes[lane]] > share * max(1, self.weights[homes[lane]])]
        return min(mine, key=self.next.__getitem__, default=None)

    def portion_for(self, worker: WorkerRecord, workers: int, portions: Iterable[range]) -> range | None:
        """Return the first of these portions whose generator this worker may run: one that stands there, or nowhere.

        Also one that is not made any more, as its generator has failed before it.
        """
        counts = collections.Counter(self.homes.values())
        for portion in portions:
            lane = portion.start % len(self.next)
            home = self.homes.get(lane)
            if home == worker.number or lane in self.failed:
                return portion
            if home is None and counts[worker.number] * max(1, workers) <= len(self.homes):  # no more than its share
                return portion
        return None


_start_of = operator.attrgetter("start")


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class PortionRecords:
    """What a dispatcher has dealt of a run to this host: consecutive batches each, made once, in one slot (DEAL-1)."""

    # By the batches' order: what another host has lost is dealt behind what is wanted later.
    waiting: list[range] = dataclasses.field(default_factory=list)
    in_slots: dict[int, range] = dataclasses.field(default_factory=dict)  # by slot, until that is released
    out: set[int] = dataclasses.field(default_factory=set)  # batches of all these
    later: list[range] = dataclasses.field(default_factory=list)  # dealt while some of their batches are out

    def deal(self, portion: range) -> None:
        """Add a portion; one of whose batches some are out already waits until these are released (DEAL-1)."""
        if self.out.isdisjoint(portion):
            self.out.update(portion)
            bisect.insort(self.waiting, portion, key=_start_of)
        else:
            self.later.append(portion)

    def place(self, slot: int, portion: range) -> range:
        """Return a portion that has waited; it is made into this slot."""
        self.waiting.remove(portion)
        self.in_slots[slot] = portion
        return portion

    def release(self, slot: int) -> None:
        """Note that a slot was released, so that what it held may be dealt again."""
        self.out.difference_update(self.in_slots.pop(slot, ()))
        later, self.later = self.later, []
        for portion in later:
            self.deal(portion)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class WorkerRecord:
    """A worker process, or a host that a dispatcher has in its place."""

    number: int
    cell: int
    tickets: dict[int, Ticket] = dataclasses.field(default_factory=dict)  # by number, longest there first
    runs: set[int] = dataclasses.field(default_factory=set)  # that it has been told of
    layouts: set[int] = dataclasses.field(default_factory=set)
    slots: set[int] = dataclasses.field(default_factory=set)
    early: Kept | None = None  # the batch that it makes early
    room: int = 0  # of a host: how many tickets it may have; of forked workers the scheduler knows
    workers: int = 0  # of a host: how many it has
    place: int = -1  # of a host: where it stands on the roster; -1: nowhere, it is given nothing
    is_reserved: bool = False  # of a host: for a ticket that is dealt alone
    is_leaving: bool = False
    is_dead: bool = False  # its last reports are still being read

    @property
    def first(self) -> Ticket | None:
        """The ticket that it has had longest."""
        return next(iter(self.tickets.values()), None)
