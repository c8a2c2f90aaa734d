"""Tickets and their results, the items of streams, and a worker's notes on its progress."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ElementSpec
from loaderpool.errors import add_note, brief
from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.layout import Buffer, OwnMemory, VaryingLayout
from loaderpool.memory.recorder import CallKind
from loaderpool.plan.batches import Plan, bounds_of
from loaderpool.plan.generators import CapturedGenerators
from loaderpool.plan.item_names import generated_item
from loaderpool.system import clock, process
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.messages import Ticket
from loaderpool.transport.reports import (
    Failure,
    RowFailure,
    describe_failure,
    describe_timeout,
    how_it_ended,
)
from loaderpool.worker.event_loop import CallTimeoutError
from loaderpool.worker.fetching import Fetched
from loaderpool.worker.own_process import end_stray

if TYPE_CHECKING:
    from loaderpool.sources.indexing import Indexed, Keys
    from loaderpool.worker.bundles import Frame

_SHOWN_COLUMNS = 8  # columns in a message about a missing one
_NO_SLOT: tuple[Buffer, int, int] = (bytearray(), 0, 0)


class Abandoned(Exception):
    """The ticket's run was abandoned."""


class WorkFailed(Exception):
    """The user's function raised, or returned a result that the spec does not allow."""

    def __init__(self, failure: Failure, error: BaseException) -> None:
        super().__init__(failure.text)
        self.failure, self.error = failure, error


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Opened:
    """A ticket and its rows."""

    ticket: Ticket
    positions: npt.NDArray[np.int64]  # positions of the rows, in the plan's order
    indices: list[int]  # source index of each position
    # Returns the item of a key, even after later tickets were opened.
    read: Callable[[int], object]
    batch_rows: tuple[int, ...] = ()  # rows of each whole batch, if batches differ
    # Argument of `read` for each row: its source index, its record of a mix, or the number of its
    # sample, if an item has several. Empty: the source indices.
    keys: Keys = ()
    # source of each row, and index in it, if the rows are those of a mix and this is known
    parts: tuple[list[Indexed], list[int]] | None = None
    # the slot's arrays, if each row is written before the next one is made
    arrays: Sequence[npt.NDArray[Any]] | None = None
    own: OwnMemory | None = None  # memory of `arrays`, if the rows do not fit the slot
    # buffer, first byte in it, number of bytes; the probe and `replay` have no slot
    slot: tuple[Buffer, int, int] = _NO_SLOT
    fetched: Fetched | None = None  # the items, if the source reads many rows with one call
    samples: int = 0  # number of samples of each item; 0: an item is one sample
    plan: Plan | None = None  # plan of the ticket's epoch, or of its remainder

    def __post_init__(self) -> None:
        if not len(self.keys):
            self.keys = self.indices

    def name_sample(self, error: BaseException, row: int) -> None:
        """Add a note to an error: the number of the row's sample within its item."""
        if self.samples:
            at = self.keys[row] % self.samples
            add_note(error, f"for sample {at} of the item (of {self.samples}, from 0)")

    def item(self, row: int) -> object:
        """Return the argument of the first function for a row."""
        return self.read(self.keys[row]) if self.fetched is None else self.fetched.value(row)

    def bounds(self) -> list[tuple[int, int]]:
        """Return the first and the end row of each batch."""
        if len(self.batch_rows) > 1:
            return bounds_of(self.batch_rows)
        size = len(self.indices) // self.ticket.batches  # a chunk has full batches only
        return [(start, start + size) for start in range(0, len(self.indices), size)]


class MadeRows(NamedTuple):
    """Result of a ticket."""

    rows: int
    row_failures: tuple[RowFailure, ...] = ()
    # batches that did not fit the slot; the caller writes them elsewhere
    oversize: VaryingLayout | OwnMemory | None = None
    items: int = 0  # number of items that the rows were made of
    read: Frame | None = None  # the items themselves, because another worker makes the rows
    arrays: Sequence[npt.NDArray[Any]] = ()  # the rows, if they were written straight into a slot

    @property
    def is_in_file(self) -> bool:
        """True if the caller passes the result on in a file."""
        return self.oversize is not None or self.read is not None


class Probe(NamedTuple):
    """Result of the probe: the form of the function's first result, and the axes that vary in other
    results.
    """

    spec: ElementSpec  # spec of the first result
    # `spec` with None for axes that may vary: those that differed between samples, or all if none
    # did
    seen: ElementSpec
    nbytes: int  # bytes of one result: the maximum over the first batch
    rows: int  # rows of the call: those of a batch, or 1 for a sample
    elapsed_ns: int  # duration of the first call
    batch_rows: int  # rows of the batch that contains the call
    classes: bytes = b""  # pickled `OwnClasses` of the first result; empty if there are none


# ---- items of a stream; `lanes.LaneItems` has those of generators ----


class StreamedItems:
    """Items of a stream's batches, by position, for one ticket at a time.

    It is pickled to the workers as the loader's source.

    Attributes:
        shared: the arena's mapping. None in the main process, where `put` stores the items.
        loader: the loader's number. Classes that are pickled by value are looked up under it.
    """

    def __init__(self) -> None:
        self.shared: mmap.mmap | None = None
        self.loader = 0
        self._items: dict[int, object] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedItems, ()

    def __getitem__(self, position: int) -> object:
        return self._items[position]

    def first_batches(self, plan: Plan) -> int:
        """Return 1, because no other batch of a stream has to be available at the start."""
        return 1

    def open(self, ticket: Ticket, plan: Plan) -> Opened:
        """Return the rows of a ticket, in the order of the bundle.

        Raises:
            Abandoned: the bundle is gone.
        """
        positions = self._positions(ticket)
        return Opened(ticket, positions, positions.tolist(), self._items.__getitem__)

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Do nothing: another process reads the stream."""

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Do nothing."""

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Do nothing."""

    def forget(self, epoch: int) -> None:
        """Do nothing: the items of the latest ticket are kept."""

    def close(self) -> None:
        """Do nothing."""

    def put(self, positions: Sequence[int], items: Sequence[object]) -> None:
        """Store the items of the next ticket. Called by the main process, with `workers=0`."""
        self._items = dict(zip(positions, items, strict=True))

    def _positions(self, ticket: Ticket) -> npt.NDArray[np.int64]:
        if self.shared is None:
            return np.array(list(self._items), np.int64)
        # imported here: `workers=0` does not need it, nor the cloudpickle that it imports
        from loaderpool.worker.bundles import FeedTable

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


# ---- failures ----


class Failures:
    """Failures of a process's samples. Each names its sample.

    Args:
        worker: the worker's number. None in the main process.
        catches: exceptions that count as errors of the user's code. BaseException in a worker,
            because workers ignore Ctrl-C.

    Attributes:
        timeout_s: time limit of a sample in seconds; 0: none.
        shards: arguments of the generators, for messages; None: there are no shards.
        columns: paths of the source's columns, for messages.
    """

    def __init__(self, worker: int | None, catches: type[BaseException]) -> None:
        self._worker, self._catches = worker, catches
        self.timeout_s = 0.0
        self.shards: Sequence[object] | None = None
        self.columns: tuple[str, ...] = ()
        # Failures of calls that must not run again, by epoch and source index. The key of a batch
        # is its first index.
        self._excluded: dict[tuple[int, int], Failure] = {}

    @property
    def catches(self) -> tuple[type[BaseException], ...]:
        """Exceptions that count as errors of the user's code."""
        # A coroutine that awaits a canceled task raises CancelledError, which is not a subclass
        # of Exception. It cannot occur before asyncio is imported.
        asyncio = sys.modules.get("asyncio")
        return (self._catches,) if asyncio is None else (self._catches, asyncio.CancelledError)

    def of(
        self,
        error: BaseException,
        epoch: int,
        indices: Sequence[int] = (),
        position: int | None = None,
    ) -> WorkFailed:
        """Return the error as a `WorkFailed` about these items. The first item has this position.

        Raises:
            Exception: the error itself, if it was reported before or the handler of a signal raised
                it.
        """
        if isinstance(error, (Abandoned, WorkFailed)) or is_of_a_handler(error):
            raise error
        end_stray(error)
        if isinstance(error, CallTimeoutError):
            return WorkFailed(
                describe_timeout(
                    index=indices[0],
                    epoch=epoch,
                    worker=self._worker,
                    ran_s=error.ran_s,
                    timeout_s=self.timeout_s,
                    canceled=error.__cause__,
                ),
                error,
            )
        is_of_one = len(indices) == 1
        failure = describe_failure(
            error,
            epoch=epoch,
            worker=self._worker,
            index=indices[0] if is_of_one else None,
            indices=() if is_of_one else tuple(indices),
            position=position,
        )
        if isinstance(error, KeyError) and self.columns and error.args:
            step = f"[{brief(error.args[0])}]"
            if not any(path.startswith(step) for path in self.columns):
                shown = ", ".join(self.columns[:_SHOWN_COLUMNS])
                more = ", ..." * (len(self.columns) > _SHOWN_COLUMNS)
                failure = failure._replace(text=f"{failure.text}. The source has {shown}{more}")
        generated = generated_item(indices[0]) if indices and self.shards is not None else None
        if generated is not None and self.shards is not None:
            failure = failure._replace(shard=brief(self.shards[generated[0]]))
        return WorkFailed(failure, error)

    def exclude(self, epoch: int, index: int, ran_s: float, exit_code: int) -> None:
        """Count a sample as failed. It hung a worker for `ran_s`; if that is 0, it ended a worker
        with this exit code.
        """
        if ran_s:
            failure = describe_timeout(
                index=index,
                epoch=epoch,
                worker=self._worker,
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
                self._worker,
                index=index,
                node=process.node(),
            )
        self._excluded[epoch, index] = failure

    @property
    def has_excluded(self) -> bool:
        """True if there are calls that must not run again."""
        return bool(self._excluded)

    def excluded(self, epoch: int, indices: Sequence[int]) -> Failure | None:
        """Return the failure of the call for these items, or None if the call may run."""
        failure = self._excluded.get((epoch, indices[0])) if self._excluded else None
        if failure is None or len(indices) == 1:
            return failure
        return failure._replace(index=None, indices=tuple(indices[:1000]))


def with_preface(failed: WorkFailed, preface: str) -> WorkFailed:
    """Return the failure with `preface` at the beginning of its message."""
    return WorkFailed(failed.failure._replace(preface=f"{preface}:\n"), failed.error)


# ---- notes on progress ----


class Progress:
    """Notes on the board what a process is doing.

    Args:
        numbers: the board, or a substitute.
        cell: first field of the worker's cell.
        worker: the worker's number. None in the main process.
        catches: exceptions that count as errors of the user's code, as in `Failures`.
        calls: measures the duration of calls. None: durations are not measured.

    Attributes:
        failures: failures of the process's samples.
        counts_generated: True if a generator's item counts as a call.
        reading_ns: time of all reads of many rows that were noted.
    """

    def __init__(
        self,
        numbers: memoryview,
        cell: int,
        worker: int | None,
        catches: type[BaseException],
        calls: CallClock | None = None,
    ) -> None:
        self._numbers, self.worker, self.cell = numbers, worker, cell
        self.failures = Failures(worker, catches)
        self._calls = calls
        # clock for the calls of this ticket, if they are made one after the other; otherwise None
        self._counted: CallClock | None = None
        # the ticket's run, and the field that marks it as abandoned
        self._run, self._mark = 1, Board.mark(1)
        self.counts_generated = False
        self.reading_ns = 0
        self._index_field, self._started_field = cell + Field.INDEX, cell + Field.STARTED_NS

    def note(self, index: int) -> None:
        """Note that the sample of this source index starts now.

        Raises:
            Abandoned: the ticket's run was abandoned.
        """
        numbers = self._numbers
        if numbers[self._mark] == self._run:
            raise Abandoned
        now_ns, calls = clock.monotonic_ns(), self._counted
        # Inlined instead of a method, because it runs for each sample.
        if calls is not None:
            if now_ns - calls.begun_ns > calls.kept_from_ns:
                calls.keep(now_ns - calls.begun_ns, numbers[self._index_field])
            calls.begun_ns = now_ns
            if calls.begins is not None:
                calls.begins.append(now_ns)
        # In this order: a reader of the board between the two stores sees only the last sample
        # start again.
        numbers[self._started_field] = now_ns
        numbers[self._index_field] = index + 1

    def check_run(self) -> None:
        """Raise `Abandoned` if the ticket's run was abandoned."""
        if self._numbers[self._mark] == self._run:
            raise Abandoned

    # ---- durations of calls ----

    def begin_ticket(self, now_ns: int, ticket: Ticket, are_told: bool) -> None:
        """Start to measure the calls of a ticket.

        Each call ends where the next one starts. With `are_told`, `note_call` reports each call
        instead.
        """
        self._run, self._mark = ticket.run, Board.mark(ticket.run)
        self._numbers[self.cell + Field.BLOCK] = 0
        if self._calls is not None:
            self._calls.begin_ticket(now_ns, ticket.epoch)
            self._counted = None if are_told else self._calls

    def note_call(self, begun_ns: int, ended_ns: int, index: int) -> None:
        """Note a finished call of a thread or of a generator."""
        if self._calls is not None:
            self._calls.note(begun_ns, ended_ns - begun_ns, index)

    def end_ticket(self, now_ns: int) -> None:
        """Note that the last call of the ticket is over."""
        if self._counted is not None:
            self._counted.end_ticket(now_ns, self._numbers[self._index_field])
            self._counted = None

    def begin_blocks(self, rows: int) -> None:
        """Note blocks of `rows` samples from now on: each noted sample is the first of its block.

        The calls of this ticket are not counted any more.
        """
        self._counted = None
        self._numbers[self.cell + Field.BLOCK] = rows

    # ---- threads, generators and the setup hook ----

    def note_thread(self, thread: int, started_ns: int, index: int) -> None:
        """Note that this thread (0: the main one) has been making this sample since `started_ns`.

        Unlike `note`, it does not check the run.
        """
        self._numbers[self.cell + Field.BLOCK] = 0
        self._numbers[self.cell + Field.THREAD] = thread
        self._numbers[self._started_field] = started_ns
        self._numbers[self._index_field] = index + 1

    def begin_step(self, index: int) -> tuple[int, int]:
        """Note that the coroutine of this sample runs. Pairs with `end_step`.

        If the coroutine blocks all others, the board names its sample. Between steps, the board
        names the sample that the main thread waits for. If the coroutine of that sample ignores its
        cancellation, the supervisor ends the worker.

        Returns:
            The earlier note, for `end_step`.
        """
        numbers = self._numbers
        before = numbers[self._started_field], numbers[self._index_field]
        self.note_thread(0, clock.monotonic_ns(), index)
        return before

    def end_step(self, before: tuple[int, int]) -> None:
        """Note that a coroutine waits. Pairs with `begin_step`."""
        self._numbers[self._started_field], self._numbers[self._index_field] = before

    def allow_for_cleanup(self) -> None:
        """Restart the time limit of the noted sample, because a coroutine is canceled now.

        Otherwise the supervisor would end the worker while the coroutine's `finally` blocks run.
        """
        self._numbers[self._started_field] = clock.monotonic_ns()

    @contextlib.contextmanager
    def calling(self, index: int) -> Iterator[None]:
        """Note that all samples of the item with source index `index` are made in the `with` block.

        After the block, the time limit of the current sample starts again.
        """
        numbers, block = self._numbers, self.cell + Field.BLOCK
        noted = numbers[self._index_field], numbers[block]
        self.note_thread(0, clock.monotonic_ns(), index)
        try:
            yield
        finally:
            numbers[self._started_field] = clock.monotonic_ns()
            numbers[self._index_field], numbers[block] = noted

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the `with` block waits for another process.

        The wait counts neither for this process's time limit nor as time of the sample's call.
        """
        numbers, begun_ns = self._numbers, clock.monotonic_ns()
        noted, numbers[self._index_field] = numbers[self._index_field], 0
        try:
            yield
        finally:
            now_ns = clock.monotonic_ns()
            numbers[self._started_field] = now_ns
            numbers[self._index_field] = noted
            if self._counted is not None:
                self._counted.subtract_time(now_ns - begun_ns)

    @contextlib.contextmanager
    def fetching(self, index: int, rows: int) -> Iterator[None]:
        """Note that the `with` block reads several rows of the source with one call.

        After the block, the time limit of the current sample starts again. The time of the read is
        not counted as time of that sample's call.

        Args:
            index: source index of the first row.
            rows: number of rows.
        """
        numbers, block = self._numbers, self.cell + Field.BLOCK
        noted, begun_ns = (numbers[self._index_field], numbers[block]), clock.monotonic_ns()
        numbers[self._started_field] = begun_ns
        numbers[self._index_field], numbers[block] = index + 1, rows
        try:
            yield
        finally:
            now_ns = clock.monotonic_ns()
            self.reading_ns += now_ns - begun_ns
            numbers[self._started_field] = now_ns
            numbers[self._index_field], numbers[block] = noted
            if self._counted is not None:
                self._counted.subtract_time(now_ns - begun_ns)

    def note_generator(self, run: int, position: int) -> None:
        """Note that a generator makes items from this position on.

        Raises:
            Abandoned: the run was abandoned.
        """
        if run and self._numbers[Board.mark(run)] == run:  # 0: the probe, which belongs to no run
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
        """Note that the `setup` hook runs in the block. If the hook ends the process, the field
        stays set.
        """
        self._numbers[self.cell + Field.IN_SETUP] = 1
        begun_ns = clock.monotonic_ns()
        try:
            yield
        finally:
            self._numbers[self.cell + Field.IN_SETUP] = 0
            if self._calls is not None:
                self._calls.recorder.note_call(begun_ns, clock.monotonic_ns(), 0, CallKind.SETUP)
