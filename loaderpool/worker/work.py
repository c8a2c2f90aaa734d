"""One loader's work in the process that does it: from (epoch, batch, rows) to the bytes of a slot.

The same code runs in a worker and, with `workers=0`, in the caller's process, so the bits are the same. What it is
given are positions of the plan; what it makes depends on nothing else, so any process may do any part, and again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind, unit_of
from loaderpool.memory.batch_form import BatchForm
from loaderpool.memory.board import Board
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.layout import VaryingLayout
from loaderpool.plan.base import BasePlan, Start, bounds_of
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.batches import BatchMaker
from loaderpool.worker.calls import Calls, Maker
from loaderpool.worker.items import PlannedItems, StreamedItems, WorkItems, rows_in_chunk
from loaderpool.worker.jobs import Abandoned, Exclusions, Filled, Job, Opened, Probe, WorkFailed
from loaderpool.worker.lanes import GeneratorRaised, LaneItems
from loaderpool.worker.probe import Prober
from loaderpool.worker.progress import Progress
from loaderpool.worker.rows import Converter, ReusedBuffer, RowWriter

if TYPE_CHECKING:
    from loaderpool.worker.thread_calls import ThreadCalls

# Rows that are looked up at once. Fewer: tiny batches pay for it again; more: the first batch waits for them.
_ROWS = 1024
# Passes side by side, each of which goes on where it is. More are right, too, and slow.
_PASSES = 4


_Rows = tuple[npt.NDArray[np.int64], list[int]]  # positions and indices of a batch
_NOTHING: tuple[int, list[_Rows]] = 0, []


class OrderAhead:
    """Gives positions and indices of one batch after the other, as the plan has them.

    Args:
        plan: whose batches all have the same rows, but for the last.
    """

    def __init__(self, plan: BasePlan) -> None:
        self._plan = plan
        # By epoch and start, of consecutive batches: the first one's number, and the rows of each.
        self._ranges: dict[tuple[int, Start], tuple[int, list[_Rows]]] = {}

    def rows_of(self, epoch: int, batch: int, after: Start) -> _Rows:
        """Return the positions of a batch's rows, int64[rows], and the source's index at each.

        Args:
            epoch: which epoch, from 0.
            batch: which batch of this shard, from 0.
            after: the start from which batches are counted.

        Raises:
            IndexError: the epoch has no such batch.
        """
        first, batches = self._ranges.get((epoch, after), _NOTHING)
        if not first <= batch < first + len(batches):
            first, batches = self._look_up(epoch, batch, after)
        return batches[batch - first]

    def _look_up(self, epoch: int, batch: int, after: Start) -> tuple[int, list[_Rows]]:
        plan = self._plan.after(after)
        rows = plan.most_rows
        count = max(1, min(_ROWS // rows, plan.batches_per_epoch - batch))
        positions = plan.positions_of(epoch, batch, count)
        indices = plan.indices(epoch, positions)
        starts = range(0, count * rows, rows)  # the last batch may have fewer rows
        found = batch, [(positions[start : start + rows], indices[start : start + rows]) for start in starts]
        self._ranges.pop((epoch, after), None)
        while len(self._ranges) >= _PASSES:
            del self._ranges[next(iter(self._ranges))]  # the oldest
        self._ranges[epoch, after] = found
        return found


class Trial:
    """Runs the calls that a ticket has, one of them at a time, and drops what comes of it.

    Args:
        calls: the function.
        plan: says which item is when.
        items: says which positions a job has.
        unit: what one call of the function makes.
        progress: where each sample is noted.
        exclusions: what is not run.
    """

    def __init__(
        self, calls: Calls, plan: BasePlan, items: WorkItems, unit: UnitKind, progress: Progress, exclusions: Exclusions
    ) -> None:
        self._calls, self._plan, self._items, self._unit = calls, plan, items, unit
        self._progress, self._exclusions = progress, exclusions

    def run(self, job: Job, which: int, begin_with: int | None, form: BatchForm | None) -> int:
        """Call the function once.

        Args:
            job: what the ticket is about.
            which: which of its calls, counted from 0.
            begin_with: a source index whose call counts as the first.
            form: of the batches, for a function that writes into `out`.

        Returns:
            How many calls the job has.

        Raises:
            Abandoned: the job's run was abandoned.
        """
        calls = self._calls_of(job)
        if which >= len(calls):  # the generator has ended before
            return len(calls)
        calls.sort(key=lambda positions: begin_with not in self._plan.indices(job.epoch, positions))
        positions = calls[which]
        indices = self._plan.indices(job.epoch, positions)
        if self._exclusions.find(job.epoch, indices) is None:
            self._progress.note(job, indices[0])
            try:
                self._calls.watched(lambda _: self.call(job.epoch, positions.tolist(), indices, form))
            except Abandoned:
                raise
            except self._progress.catches as error:  # an exception kills no worker
                end_stray(error)
            end_stray()
        return len(calls)

    def _calls_of(self, job: Job) -> list[npt.NDArray[np.int64]]:
        """Return the positions of each call."""
        positions = self._items.positions(job)
        rows = rows_in_chunk(self._plan, job)
        if rows:
            batches = [positions[start:stop] for start, stop in bounds_of(rows)]
        else:
            batches = np.split(positions, job.count)
        if self._unit == "batch":
            return batches
        return [positions[row : row + 1] for positions in batches for row in range(len(positions))]

    def call(self, epoch: int, positions: list[int], indices: list[int], form: BatchForm | None) -> Any:
        """Return what one call gives, as the function returned it; raises whatever it raises.

        Args:
            epoch: keys the random streams, with the positions.
            positions: one, or all of a batch where a call makes a batch.
            indices: source index of each.
            form: of the batches, for a function that writes into `out`.
        """
        if self._unit == "batch":
            return self._calls.unit(epoch, positions, indices)
        arrays = None
        if self._calls.takes_out and form is not None and form.fixed is not None:
            fixed = form.fixed
            arrays = [np.empty((1, *shape), dtype) for shape, dtype in zip(fixed.row_shapes, fixed.dtypes, strict=True)]
        results: list[Any] = []
        self._calls.samples(epoch, positions, indices, results, arrays)
        return results[0]


Rows = Sequence[npt.NDArray[Any]]

# Rows are made one by one where a row is at least this large or slow, else in blocks: the look at "abandoned", the note
# on the board and the write then cost a share of a percent.
_SINGLE_ROW_BYTES = 1 << 15
_SINGLE_ROW_NS = 20_000
_BLOCK_ROWS = 128
# A ticket over which so many workers have died is made without threads, so that the board names the sample for certain.
_WITHOUT_THREADS_FROM = 2


class _RowError(Exception):
    """A row of a block failed when it was written."""

    def __init__(self, row: int, error: BaseException) -> None:
        self.row = row
        self.error = error


class Work:
    """Calls the user's function for the plan's positions.

    Args:
        payload: what `Loader` shipped: source, fn, augment, batch_fn, setup, config, plan, given_spec,
            takes_rng, takes_out; and the loader's cache.
        numbers: the board (or a stand-in) to note progress on.
        cell: first field of this worker's cell.
        worker: this worker's number, None in the caller's process.
        catches: what is taken for an error of the function; BaseException in a worker, which has no user at its keys.
        shared: the arena's mapping, in which a stream's items lie; None in the caller's process.
        call_clock: takes how long calls take; None: it is not wanted.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        numbers: memoryview,
        cell: int,
        worker: int | None,
        catches: type[BaseException] = BaseException,
        shared: Any = None,
        call_clock: CallClock | None = None,
    ) -> None:
        self.config: LoaderConfig = payload["config"]
        self.plan: BasePlan = payload["plan"]
        source = payload["source"]
        is_iterated = isinstance(source, (StreamedItems, LaneItems))
        self.items: WorkItems = source if is_iterated else PlannedItems(self.plan)
        if isinstance(source, StreamedItems):
            source.shared = shared
        # Without a worker's number this is the caller's process, which shall have no threads: a debugger may be there.
        threads = 1 if worker is None else self.config.threads
        # There most batches are jobs by themselves, however tiny.
        is_ahead = worker is None and not is_iterated and not self.plan.rows_vary
        self._ahead = OrderAhead(self.plan) if is_ahead else None
        self._calls = Calls(payload, cell // Board.base(1), threads)
        self._setup: Callable[[], Any] | None = payload["setup"]
        self.unit: UnitKind = unit_of(self.config, payload["batch_fn"])
        self._catches = catches
        self._progress = Progress(numbers, cell, worker, catches, call_clock)
        if isinstance(source, LaneItems):
            # Where nothing is called for an item that a generator yields, it is the generator's time that counts.
            self._progress.counts_generated = all(payload[name] is None for name in ("fn", "augment", "batch_fn"))
            source.attend(self._progress, times_items=self.config.limits.timeout_s is not None)
        self._exclusions = Exclusions(worker, self.config.limits.timeout_s)
        self._prober = Prober(
            self._calls,
            self.config,
            self.plan,
            self.items,
            self.unit,
            payload["given_spec"],
            self._progress,
            self._exclusions,
        )
        full_rows = 0 if self.plan.rows_vary else self.plan.most_rows
        self._batches = BatchMaker(self.config, self.unit, self._progress, self._exclusions, full_rows)
        self._trial = Trial(self._calls, self.plan, self.items, self.unit, self._progress, self._exclusions)
        self._thread_calls: ThreadCalls | None = None
        if threads > 1:
            from loaderpool.worker.thread_calls import ThreadCalls

            self._thread_calls = ThreadCalls(
                self._calls, threads, self.config, self.unit, self._progress, self._exclusions
            )
        # Of the latest two tickets: one may have been interrupted. The first one's rows are made one by one.
        self._row_ns = self._earlier_row_ns = _SINGLE_ROW_NS
        self.form: BatchForm | None = None
        self._fill: Callable[[Opened, Any, int, int, Maker], Filled]
        self._writer: RowWriter
        self._block_rows = 1
        self._writes_rows = False

    # ---- before the first ticket ----

    def ensure_setup(self) -> None:
        """Call the user's `setup` hook, once in each process.

        Raises:
            WorkFailed: it raised.
        """
        setup, self._setup = self._setup, None
        if setup is None:
            return
        try:
            with self._progress.setup():
                setup()
                end_stray()
        except self._catches as error:
            end_stray(error)
            self._setup = setup
            if is_of_a_handler(error):
                raise
            failure = describe_failure(error, epoch=0, worker=self._progress.worker)
            raise WorkFailed(failure._replace(is_setup=True), error) from None

    def set_form(self, form: BatchForm, is_given: bool) -> None:
        """Take the batches' form, as the trainer decided it."""
        self.form = form
        self._calls.unflatten = form.spec.structure.unflatten
        converter = Converter(
            form.spec,
            is_given=is_given,
            has_batch_axis=self.unit != "sample",
            config=self.config,
            padding=form.padding,
        )
        self._batches.set_form(form, converter)
        # Of a generator's batches the last is shorter, so they are varying; but no row of them is ever left out.
        may_write_rows = form.fixed is not None or (form.has_plain_rows and self.plan.lanes > 0)
        self._writes_rows = may_write_rows and self.config.on_error.action == "raise"
        self._fill = self._batches.fill_varying if form.fixed is None else self._batches.fill_fixed
        if self._writes_rows:
            self._writer = RowWriter(converter)
            is_small = max(form.row_bytes, default=0) < _SINGLE_ROW_BYTES
            in_blocks = is_small and not self._calls.takes_out and self.config.limits.timeout_s is None
            self._block_rows = _BLOCK_ROWS if in_blocks else 1

    def exclude(self, epoch: int, index: int, ran_s: float, exit_code: int) -> None:
        """Count a sample as failed without running it: it hung a worker (for `ran_s`), or (0) ended one."""
        self._exclusions.add(epoch, index, ran_s, exit_code)

    def probe(self, epoch: int, feed: int = 0, batch: int = 0) -> Probe:
        """Call the function for an epoch's first sample (or batch), keep the result, and tell what it is like.

        Args:
            epoch: the epoch.
            feed: where a stream's table lies.
            batch: another one than the first, where a call makes a whole one.

        Raises:
            WorkFailed: the function raised, or returned what no batch can be made of.
        """
        return self._prober.probe_batch(epoch, batch) if batch else self._prober.probe(epoch, feed)

    def make_early(self, epoch: int, batch: int, call: int) -> int | None:
        """Make one call before there is a form, and keep its result, as `Prober.make_early` does."""
        return self._prober.make_early(epoch, batch, call)

    def forget_probe(self) -> None:
        """The source has changed: the probe's results are not what their turns would give now."""
        self._calls.forget()

    def close(self) -> None:
        """End the threads, if there are any. A worker ends without this."""
        if self._thread_calls is not None:
            self._thread_calls.close()

    # ---- tickets ----

    def begin(self, job: Job, buffer: Any, base: int, capacity: int) -> bool:
        """Have threads begin with a ticket that is not to be filled before others were; False: they do not.

        There are none, or a worker that had the ticket has died, so that nothing shall be made beside it.
        """
        if self._thread_calls is None or job.is_isolated or self._setup is not None or self.form is None:
            return False
        try:
            opened = self._open(job)
        except self._catches:  # its turn will tell
            return False
        self._thread_calls.begin(opened, self._rows_of(opened, buffer, base, capacity))
        return True

    @property
    def look_ahead(self) -> Callable[[], bool] | None:
        """What is called while threads are waited for: it may `begin` more, and tells whether more may come."""
        return None if self._thread_calls is None else self._thread_calls.look_ahead

    @look_ahead.setter
    def look_ahead(self, look: Callable[[], bool]) -> None:
        if self._thread_calls is not None:
            self._thread_calls.look_ahead = look

    def fill(self, job: Job, buffer: Any, base: int, capacity: int) -> Filled:
        """Make the job's rows in the slot that starts at byte `base` of `buffer` and holds `capacity` bytes.

        Raises:
            WorkFailed: the function raised or returned what the spec does not allow.
            Abandoned: the run's mark was seen on the board.
        """
        assert self.form is not None, "a task before its layout"
        thread_calls = None if job.is_isolated and job.attempt >= _WITHOUT_THREADS_FROM else self._thread_calls
        if self._progress.counts_generated:  # items are made as the job is opened
            self._progress.begin_ticket(clock.monotonic_ns(), job.epoch, are_told=True)
        opened = (None if thread_calls is None else thread_calls.opened(job)) or self._open(job)
        if not opened.indices:  # its lane has ended
            VaryingLayout([]).write(buffer, base)
            return Filled(0)
        # Not kept in `self._fill`: that would be a cycle, and the files of a dropped loader would stay open.
        make = functools.partial(self._fill_rows if self._writes_rows else self._fill, opened, buffer, base, capacity)
        started = clock.monotonic_ns()
        if not self._progress.counts_generated:
            self._progress.begin_ticket(started, job.epoch, are_told=thread_calls is not None)
        try:
            if thread_calls is not None:
                rows = self._rows_of(opened, buffer, base, capacity)
                bytes_of = functools.partial(self._bytes_of, opened, buffer, base, capacity)
                filled = thread_calls.run(opened, make, rows, bytes_of)
            else:
                filled = self._calls.watched(make)
        except (Abandoned, WorkFailed):
            self._progress.stop_counting()
            raise
        except self._catches as error:
            self._progress.stop_counting()
            raise self._progress.failed(error, job.epoch, opened.indices, int(opened.positions[0])) from None
        now = clock.monotonic_ns()
        self._progress.end_ticket(now)
        self._earlier_row_ns, self._row_ns = self._row_ns, (now - started) // len(opened.indices)
        return filled._replace(items=len(opened.indices))

    def _open(self, job: Job) -> Opened:
        """Return which rows the job has; their items can be had by index from now on."""
        if job.after:  # the probe looks at the beginning of an epoch, which was taken
            self._calls.forget()
        self._calls.keep_only(job.epoch)
        if self._ahead is not None and job.row_stop is None:
            positions, indices = self._ahead.rows_of(job.epoch, job.batch, job.after)
            return Opened(job, positions, indices)
        try:
            positions = self.items.positions(job)
        except Abandoned:
            raise
        except GeneratorRaised as raised:
            raise self._progress.failed(raised.error, job.epoch, [raised.position], raised.position) from None
        except self._catches as error:  # a stream's items cannot be unpickled here; or a generator ends its process
            if is_of_a_handler(error):
                raise
            raise WorkFailed(describe_failure(error, epoch=job.epoch, worker=self._progress.worker), error) from None
        if not len(positions):
            return Opened(job, positions, [])
        rows = rows_in_chunk(self.plan, job)
        if rows:
            job = dataclasses.replace(job, batch_rows=rows)
        return Opened(job, positions, self.plan.indices(job.epoch, positions), self.items.reader)

    def _rows_of(self, opened: Opened, buffer: Any, base: int, capacity: int) -> Rows | None:
        """Return the slot's arrays, where a function shall write into them itself."""
        if not (self._writes_rows and self._calls.takes_out):
            return None
        assert self.form is not None
        return self.form.row_arrays(buffer, base, opened.job.row_start + len(opened.indices), capacity)

    def _bytes_of(self, opened: Opened, buffer: Any, base: int, capacity: int) -> bytes:
        """Return what is in the slot now of the job's rows; others may be writing the rows beside them."""
        if not self._writes_rows:
            return bytes(memoryview(buffer)[base : base + capacity])
        assert self.form is not None
        start, stop = opened.job.row_start, opened.job.row_start + len(opened.indices)
        arrays = self.form.row_arrays(buffer, base, stop, capacity)
        return b"".join(array[start:stop].tobytes() for array in arrays or ())

    @property
    def origin(self) -> str:
        """Who makes the samples, to begin a message with."""
        return self._calls.origin

    def try_alone(self, job: Job, which: int, begin_with: int | None) -> int:
        """Run one of a job's calls alone and drop its result; returns how many the job has."""
        return self._trial.run(job, which, begin_with, self.form)

    def call(self, epoch: int, positions: list[int], indices: list[int]) -> Any:
        """Make one call of the function, and nothing around it; raises whatever it raises."""
        return self._trial.call(epoch, positions, indices, self.form)

    def _fill_rows(self, opened: Opened, buffer: Any, base: int, capacity: int, calls: Maker) -> Filled:
        """Write rows straight into the slot."""
        assert self.form is not None
        job, positions, indices, _ = opened
        rows = len(indices)
        arrays = self.form.row_arrays(buffer, base, job.row_start + rows, capacity)
        if arrays is None:
            return self._batches.fill_varying(opened, buffer, base, capacity, calls)
        are_fast = self._row_ns < _SINGLE_ROW_NS or self._earlier_row_ns < _SINGLE_ROW_NS
        in_blocks = are_fast and not job.attempt and calls is self._calls
        block = self._block_rows if in_blocks else 1
        if block > 1:
            self._progress.begin_blocks(block)
        places = positions.tolist() if calls.needs_positions else indices
        for start in range(0, rows, block):
            self._progress.note(job, indices[start])
            stop, row = start + block, job.row_start + start
            part = indices[start:stop]
            results: list[Any] = []
            try:
                calls.samples(job.epoch, places[start:stop], part, results, arrays, row)
                try:
                    self._writer.write(arrays, row, results, part)
                except self._catches as error:
                    self._write_one_by_one(error, arrays, row, results, part, job.epoch, places[start:stop])
            except Abandoned:
                raise
            except _RowError as error:
                failing = start + error.row
                raise self._progress.failed(
                    error.error, job.epoch, [indices[failing]], int(positions[failing])
                ) from None
            except self._catches as error:
                if is_of_a_handler(error):
                    raise
                failing = start + len(results)
                raise self._progress.failed(error, job.epoch, [indices[failing]], int(positions[failing])) from None
        return Filled(rows)

    def _write_one_by_one(
        self,
        error: BaseException,
        arrays: Sequence[npt.NDArray[Any]],
        row: int,
        results: list[Any],
        indices: Sequence[int],
        epoch: int,
        places: Sequence[int],
    ) -> None:
        """Write a block that was refused with this error; raises _RowError for the first row that does not fit."""
        if is_of_a_handler(error):
            raise error
        is_reused = isinstance(error, ReusedBuffer)
        if is_reused:
            self._block_rows = 1  # from now on each row is written before the next one is made
        elif len(results) == 1:
            raise _RowError(0, error) from None
        for at, index in enumerate(indices):
            one = results[at : at + 1]
            try:
                if is_reused:
                    one = []
                    self._calls.samples(epoch, places[at : at + 1], [index], one, arrays, row + at)
                self._writer.write(arrays, row + at, one, [index])
            except self._catches as one_error:
                raise _RowError(at, one_error) from None
