"""What is asked of a loader's work and what comes of it, where its items come from, and what is noted meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ElementSpec
from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.layout import VaryingLayout
from loaderpool.memory.recorder import CallKind
from loaderpool.plan.batches import bounds_of
from loaderpool.plan.generators import CapturedGenerators
from loaderpool.system import clock, process
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.reports import (
    Failure,
    RowFailure,
    describe_failure,
    describe_timeout,
    how_it_ended,
)
from loaderpool.worker.own_process import end_stray


class Abandoned(Exception):
    """This ticket's run was abandoned."""


class WorkFailed(Exception):
    """The user's function raised, or returned what the spec does not allow."""

    def __init__(self, failure: Failure, error: BaseException) -> None:
        super().__init__(failure.text)
        self.failure, self.error = failure, error


class Ticket(NamedTuple):
    """Supervisor -> worker: make these rows.

    Rows `start` to `stop` of `batches` batches, counted through them; either all, or some of the one batch. With a
    negative `offset` only the first sample is made, and answered by `Found`.
    """

    number: int = 0
    loader: int = 0
    run: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch, or of its rest
    rest: int | tuple[int, ...] = 0  # where that epoch begins; 0: it is whole
    batches: int = 1
    start: int = 0
    stop: int = -1  # in the caller's process: the end of the batch
    offset: int = 0  # of the slot
    slot_bytes: int = 0
    is_fresh: bool = False  # the slot has had no batch: its pages are to be taken first
    feed: int = 0  # where in the arena the table of its stream is; 0: items are read by index
    # Of workers that had it: then rows are made one by one, so that the board names the last, and nothing else is made
    # at the same time.
    deaths: int = 0
    left_out: tuple[
        tuple[int, float, int], ...
    ] = ()  # samples that ended a worker: index, seconds, exit code


@dataclasses.dataclass(slots=True)
class Opened:
    """A ticket and its rows."""

    ticket: Ticket
    positions: npt.NDArray[np.int64]  # in the plan's order
    indices: list[int]  # source index of each
    # Gives the item of a source index also when later tickets were opened; None: the source itself does.
    read: Callable[[int], Any] | None = None
    batch_rows: tuple[int, ...] = ()  # rows of each batch of a chunk, where they vary
    arrays: Sequence[npt.NDArray[Any]] | None = (
        None  # the slot's, for rows that are written one after the other
    )
    slot: tuple[Any, int, int] = (None, 0, 0)  # a buffer, its first byte there, and how many it has
    calls: Any = None  # that threads make, by the first row of each

    def bounds(self) -> list[tuple[int, int]]:
        """Return where each batch begins and ends among the rows."""
        if self.batch_rows:
            return bounds_of(self.batch_rows)
        size = len(self.indices) // self.ticket.batches  # a chunk is of full batches only
        return [(start, start + size) for start in range(0, len(self.indices), size)]


class MadeRows(NamedTuple):
    """What was made."""

    rows: int
    row_failures: tuple[RowFailure, ...] = ()
    oversize: VaryingLayout | None = None  # it did not fit the slot; write it elsewhere
    items: int = 0  # that it was made of


class Probe(NamedTuple):
    """What the first call of the function told, and how far others of the first batch differ from it."""

    spec: ElementSpec  # of what the first one returned
    seen: ElementSpec  # the same, with None for the axes that others showed to vary; where none did, for all that may
    nbytes: int  # of what one returned: the most that was seen in the first batch
    rows: int  # of the batch it was called for; 1 for a sample
    elapsed_ns: int  # of the first call
    batch_rows: int  # of the batch that it is part of
    classes: bytes = (
        b""  # pickled `OwnClasses` of what the first one returned; empty if there are none
    )


# ---- the items of a stream; `lanes.LaneItems` has those of generators ----


class StreamedItems:
    """The items of the batches of one ticket at a time, by position. It travels to the workers as the loader's source.

    Attributes:
        shared: the arena's mapping; None in the caller's process, where items are `put` here.
        loader: the loader's number, by which classes of items are found that travel by value.
    """

    def __init__(self) -> None:
        self.shared: Any = None
        self.loader = 0
        self._items: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedItems, ()

    def __getitem__(self, position: int) -> Any:
        return self._items[position]

    @property
    def first_batches(self) -> int:
        """One: no other one need be there."""
        return 1

    def open(self, ticket: Ticket) -> Opened:
        """Return the rows of a ticket, as the bundle has them; Abandoned: it is gone."""
        positions = self._positions(ticket)
        return Opened(ticket, positions, positions.tolist(), self._items.__getitem__)

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Do nothing: the stream is read in another process."""

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Do nothing."""

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Do nothing."""

    def forget(self, epoch: int) -> None:
        """Do nothing: the items of the latest ticket are kept."""

    def close(self) -> None:
        """Do nothing."""

    def put(self, first: int, items: list[Any]) -> None:
        """Have these be the items of the next ticket, for `workers=0`."""
        self._items = dict(enumerate(items, first))

    def _positions(self, ticket: Ticket) -> npt.NDArray[np.int64]:
        if self.shared is None:
            return np.array(list(self._items), np.int64)
        from loaderpool.worker.bundles import (
            FeedTable,
        )  # with cloudpickle, which `workers=0` does without

        table = FeedTable(self.shared, ticket.feed)
        self._items = {}
        for batch in range(ticket.batch, ticket.batch + ticket.batches):
            read = table.items(batch, self.loader)
            if read is None:
                raise Abandoned
            first, items = read
            self._items.update(enumerate(items, first))
        positions = np.array(list(self._items), np.int64)
        return positions if ticket.batches > 1 else positions[ticket.start : ticket.stop]


# ---- what is noted ----


class Progress:
    """Notes on the board what one process is at, and names it where something fails.

    Args:
        numbers: the board, or a stand-in.
        cell: first field of the worker's cell.
        worker: its number; None: this is the caller's process.
        catches: what is an error of the user's code; BaseException in a worker, which has no user at its keys.
        calls: takes how long calls take; None: it is not wanted.
    """

    def __init__(
        self,
        numbers: memoryview,
        cell: int,
        worker: int | None,
        catches: type[BaseException],
        calls: CallClock | None = None,
    ) -> None:
        self._numbers, self.worker, self.catches, self.cell = numbers, worker, catches, cell
        self._calls, self.timeout_s = calls, 0.0  # seconds that a sample may take; 0: any
        self._counted: CallClock | None = None  # where calls of this ticket follow one another
        self._run, self._mark = (
            1,
            Board.mark(1),
        )  # of the ticket, and where it is marked as abandoned
        self.counts_generated = False  # an item that a generator makes is a call
        self._index_field, self._started_field = cell + Field.INDEX, cell + Field.STARTED_NS
        # Of samples that are not to be run: what each counts as, by epoch and source index (of a batch: its first).
        self._excluded: dict[tuple[int, int], Failure] = {}

    def note(self, index: int) -> None:
        """Note that the sample of this source index is made from now on; Abandoned: the ticket's run was."""
        numbers = self._numbers
        if numbers[self._mark] == self._run:
            raise Abandoned
        now_ns, calls = clock.monotonic_ns(), self._counted
        if calls is not None:  # here, and not in a method: it is paid for each sample
            if now_ns - calls.begun_ns > calls.kept_from_ns:
                calls.keep(now_ns - calls.begun_ns, numbers[self._index_field])
            calls.begun_ns = now_ns
            if calls.begins is not None:
                calls.begins.append(now_ns)
        # In this order: between the two a look at the board sees no more than the last sample begun again.
        numbers[self._started_field] = now_ns
        numbers[self._index_field] = index + 1

    # ---- how long calls take ----

    def begin_ticket(self, now_ns: int, ticket: Ticket, are_told: bool) -> None:
        """Take the time of calls from now on: each ends where the next one begins, or is told of (`note_call`)."""
        self._run, self._mark = ticket.run, Board.mark(ticket.run)
        self._numbers[self.cell + Field.BLOCK] = 0
        if self._calls is not None:
            self._calls.begin_ticket(now_ns, ticket.epoch)
            self._counted = None if are_told else self._calls

    def note_call(self, begun_ns: int, ended_ns: int, index: int) -> None:
        """A call of a thread, or of a generator, is over."""
        if self._calls is not None:
            self._calls.note(begun_ns, ended_ns - begun_ns, index)

    def end_ticket(self, now_ns: int) -> None:
        """The last call is over."""
        if self._counted is not None:
            self._counted.end_ticket(now_ns, self._numbers[self._index_field])
            self._counted = None

    def begin_blocks(self, rows: int) -> None:
        """Note that from now on the sample that is noted is the first of so many; the ticket's calls do not count."""
        self._counted = None
        self._numbers[self.cell + Field.BLOCK] = rows

    # ---- threads, generators and the setup hook ----

    def note_thread(self, thread: int, started_ns: int, index: int) -> None:
        """Note that this sample is made by this thread (0: the main one), since then, whatever run it is for."""
        self._numbers[self.cell + Field.THREAD] = thread
        self._numbers[self._started_field] = started_ns
        self._numbers[self._index_field] = index + 1

    def note_generator(self, run: int, position: int) -> None:
        """Note that a generator makes items from this position on; Abandoned: the run was."""
        if run and self._numbers[Board.mark(run)] == run:  # 0: a probe, which is of none
            raise Abandoned
        self._numbers[self._started_field] = clock.monotonic_ns()
        self._numbers[self.cell + Field.IN_GENERATOR] = 1
        self._numbers[self._index_field] = position + 1

    def end_generator(self) -> None:
        """Note that no generator runs any more."""
        self._numbers[self._index_field] = 0
        self._numbers[self.cell + Field.IN_GENERATOR] = 0

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """Note that the `setup` hook runs in the block. A field that stays set says that it ended its process."""
        self._numbers[self.cell + Field.IN_SETUP] = 1
        begun_ns = clock.monotonic_ns()
        try:
            yield
        finally:
            self._numbers[self.cell + Field.IN_SETUP] = 0
            if self._calls is not None:
                self._calls.recorder.note_call(begun_ns, clock.monotonic_ns(), 0, CallKind.SETUP)

    # ---- failures ----

    def failed(
        self,
        error: BaseException,
        epoch: int,
        indices: Sequence[int] = (),
        position: int | None = None,
    ) -> WorkFailed:
        """Return the error as one about these items, the first of which has this position.

        Raises:
            Exception: the error itself: it was told of before, or the handler of a signal has raised it.
        """
        if isinstance(error, (Abandoned, WorkFailed)) or is_of_a_handler(error):
            raise error
        end_stray(error)
        is_of_one = len(indices) == 1
        failure = describe_failure(
            error,
            epoch=epoch,
            worker=self.worker,
            index=indices[0] if is_of_one else None,
            indices=() if is_of_one else tuple(indices),
            position=position,
        )
        return WorkFailed(failure, error)

    def exclude(self, epoch: int, index: int, ran_s: float, exit_code: int) -> None:
        """Count a sample as failed: it hung a worker for `ran_s`, or (0) ended it with this exit code."""
        if ran_s:
            failure = describe_timeout(
                index=index,
                epoch=epoch,
                worker=self.worker,
                ran_s=ran_s,
                timeout_s=self.timeout_s,
                stacks="",
            )
        else:
            text = f"the sample crashed its worker again and again: {how_it_ended(exit_code)}"
            failure = Failure(
                "loaderpool.WorkerLostError",
                text,
                epoch,
                self.worker,
                index=index,
                node=process.node(),
            )
        self._excluded[epoch, index] = failure

    def excluded(self, epoch: int, indices: Sequence[int]) -> Failure | None:
        """Return the failure of the call for these items, None where it may run."""
        failure = self._excluded.get((epoch, indices[0])) if self._excluded else None
        if failure is None or len(indices) == 1:
            return failure
        return failure._replace(index=None, indices=tuple(indices[:1000]))
