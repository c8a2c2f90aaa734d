"""One loader's work in the process that does it: from (epoch, batch, rows) to the bytes of a slot.

The same code runs in a worker and, with `workers=0`, in the caller's process, so the bits are the same. What it is
given are positions of the plan; what it makes depends on nothing else, so any process may do any part, and again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind, unit_of
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.board import Board
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.layout import BatchForm, VaryingLayout
from loaderpool.plan.order import Plan, Start
from loaderpool.system import clock
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.batches import BatchMaker
from loaderpool.worker.calls import Calls
from loaderpool.worker.items import PlannedItems, StreamedItems
from loaderpool.worker.jobs import Abandoned, Exclusions, Filled, Job, Opened, Probe, WorkFailed
from loaderpool.worker.lanes import GeneratorRaised, LaneItems
from loaderpool.worker.probe import Prober
from loaderpool.worker.progress import Progress
from loaderpool.worker.rows import Converter

if TYPE_CHECKING:
    from loaderpool.worker.threads import ThreadCalls, TicketCalls

# Rows that are looked up at once. Fewer: tiny batches pay for it again; more: the first batch waits for them.
_ROWS = 1024
# Passes side by side, each of which goes on where it is. More are right, too, and slow.
_PASSES = 4
# Rows are made one by one where a row is at least this large or slow, else in blocks: the look at "abandoned", the note
# on the board and the write then cost a share of a percent.
_SINGLE_ROW_BYTES = 1 << 15
_SINGLE_ROW_NS = 20_000
_BLOCK_ROWS = 128
# A ticket over which so many workers have died is made without threads, so that the board names the sample for certain.
_WITHOUT_THREADS_FROM = 2

_Positions = npt.NDArray[np.int64]


class OrderAhead:
    """Looks up the rows of many batches at once: in the caller's process a tiny batch has no time for it.

    Args:
        plan: whose batches all have the same rows, but for the last.
    """

    def __init__(self, plan: Plan) -> None:
        self._rows = plan.most_rows
        self._at_once = max(1, _ROWS // self._rows)
        self._look_up = functools.lru_cache(_PASSES)(functools.partial(_look_up, plan, self._at_once))

    def rows_of(self, epoch: int, batch: int, after: Start) -> tuple[_Positions, list[int]]:
        """Return the positions of a batch's rows, int64[rows], and the source's index at each.

        Args:
            epoch: which epoch, from 0.
            batch: which batch of this shard, from 0.
            after: the start from which batches are counted.

        Raises:
            IndexError: the epoch has no such batch.
        """
        positions, indices = self._look_up(epoch, batch // self._at_once, after)
        start = batch % self._at_once * self._rows
        stop = start + self._rows
        if start >= len(indices):
            raise IndexError(batch)
        return positions[start:stop], indices[start:stop]


def _look_up(plan: Plan, at_once: int, epoch: int, block: int, after: Start) -> tuple[_Positions, list[int]]:
    plan = plan.after(after)
    batch = block * at_once
    positions = plan.positions(epoch, batch, min(at_once, plan.batches_per_epoch - batch))
    return positions, plan.indices(epoch, positions)


class Work:
    """Calls the user's function for the plan's positions.

    Args:
        payload: what `Loader` shipped, and its cache.
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
        config: LoaderConfig = payload["config"]
        self.config, self._catches = config, catches
        self.plan: Plan = payload["plan"]
        self.unit: UnitKind = unit_of(config, payload["batch_fn"])
        self._setup: Callable[[], Any] | None = payload["setup"]
        self._progress = Progress(numbers, cell, worker, catches, call_clock)
        self._exclusions = Exclusions(worker, config.limits.timeout_s)
        self.items: PlannedItems | StreamedItems | LaneItems
        source, watch = payload["source"], None
        if isinstance(source, LaneItems):
            self.items, watch = source, source.watch
            # Where nothing is called for an item that a generator yields, it is the generator's time that counts.
            self._progress.counts_generated = all(payload[name] is None for name in ("fn", "augment", "batch_fn"))
            source.attend(self._progress, times_items=config.limits.timeout_s is not None)
        elif isinstance(source, StreamedItems):
            self.items = source
            source.shared = shared
        else:
            self.items = PlannedItems(self.plan)
        # Without a worker's number this is the caller's process, which shall have no threads: a debugger may be there.
        threads = 1 if worker is None else config.threads
        is_ahead = worker is None and isinstance(self.items, PlannedItems) and not self.plan.rows_vary
        self._ahead = OrderAhead(self.plan) if is_ahead else None
        self._calls = calls = Calls(payload, cell // Board.base(1), threads, watch)
        shown = self._progress, self._exclusions
        self._prober = Prober(calls, config, self.plan, self.items, self.unit, payload["given_spec"], *shown)
        self._batches = BatchMaker(config, self.unit, *shown, 0 if self.plan.rows_vary else self.plan.most_rows)
        self._thread_calls: ThreadCalls | None = None
        # Called while threads are waited for: it may `begin` more tickets, and tells whether more may come.
        self.look_ahead: Callable[[], bool] | None = None
        if threads > 1:
            from loaderpool.worker.threads import ThreadCalls

            self._thread_calls = ThreadCalls(calls, threads, self.unit != "sample", *shown)
        # Of the latest two tickets: one may have been interrupted. The first one's rows are made one by one.
        self._row_ns = self._earlier_row_ns = _SINGLE_ROW_NS
        self.form: BatchForm | None = None
        self._converter: Converter
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
            failed = self._progress.failed(error, epoch=0)
            raise WorkFailed(failed.failure._replace(is_setup=True), error) from None

    def set_form(self, form: BatchForm, is_given: bool) -> None:
        """Take the batches' form, as the main process decided it."""
        self.form = form
        self._calls.unflatten = form.spec.structure.unflatten
        self._converter = Converter(
            form.spec,
            is_given=is_given,
            has_batch_axis=self.unit != "sample",
            config=self.config,
            padding=form.padding,
        )
        self._batches.set_form(form, self._converter)
        # Of a generator's batches the last is shorter, so they are varying; but no row of them is ever left out.
        may_write_rows = form.fixed is not None or (form.has_plain_rows and self.plan.lanes > 0)
        self._writes_rows = may_write_rows and self.config.on_error.action == "raise"
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

    def forget_probe(self) -> None:
        """The source has changed: the probe's results are not what their turns would give now."""
        self._calls.forget()

    @property
    def origin(self) -> str:
        """Who makes the samples, to begin a message with."""
        return self._calls.origin

    def call(self, epoch: int, positions: list[int], indices: list[int]) -> Any:
        """Return what one call gives for these positions, as the function returned it; raises whatever it raises."""
        if self.unit == "batch":
            return self._calls.unit(epoch, positions, indices)
        arrays, fixed = None, None if self.form is None else self.form.fixed
        if self._calls.takes_out and fixed is not None:
            arrays = [np.empty((1, *shape), dtype) for shape, dtype in zip(fixed.row_shapes, fixed.dtypes, strict=True)]
        results: list[Any] = []
        self._calls.samples(epoch, positions, indices, results, arrays)
        return results[0]

    # ---- tickets ----

    def begin(self, job: Job, buffer: Any, base: int, capacity: int) -> bool:
        """Have threads begin with a ticket that is not to be filled before others were; False: they do not.

        There are none, or a worker that had the ticket has died, so that nothing shall be made beside it.
        """
        threads = self._thread_calls
        if threads is None or threads.is_one_by_one or job.attempt or self._setup is not None or self.form is None:
            return False
        try:
            opened = self._open(job)
            threads.begin(opened, self._out_arrays(opened, buffer, base, capacity))
        except self._catches:  # its turn will tell
            return False
        return True

    def close(self) -> None:
        """End the threads, if there are any. A worker ends without this."""
        if self._thread_calls is not None:
            self._thread_calls.close()

    def fill(self, job: Job, buffer: Any, base: int, capacity: int) -> Filled:
        """Make the job's rows in the slot that starts at byte `base` of `buffer` and holds `capacity` bytes.

        Raises:
            WorkFailed: the function raised or returned what the spec does not allow.
            Abandoned: the run's mark was seen on the board.
        """
        assert self.form is not None, "a task before its layout"
        progress = self._progress
        threads = None if job.attempt >= _WITHOUT_THREADS_FROM else self._thread_calls
        if progress.counts_generated:  # items are made as the job is opened
            progress.begin_ticket(clock.monotonic_ns(), job.epoch, are_told=True)
        opened = (None if threads is None else threads.opened(job)) or self._open(job)
        if not opened.indices:  # its lane has ended
            VaryingLayout([]).write(buffer, base)
            return Filled(0)
        # Not kept in `self`: that would be a cycle, and the files of a dropped loader would stay open.
        fill = self._fill_rows if self._writes_rows else self._batches.fill
        make = functools.partial(fill, opened, buffer, base, capacity)
        started = clock.monotonic_ns()
        if not progress.counts_generated:
            progress.begin_ticket(started, job.epoch, are_told=threads is not None)
        try:
            if threads is None:
                filled = self._calls.watched(make)
            else:
                arrays = self._out_arrays(opened, buffer, base, capacity)
                filled = threads.run(opened, make, arrays, self.look_ahead)
        except (Abandoned, WorkFailed):
            raise
        except self._catches as error:
            raise progress.failed(error, job.epoch, opened.indices, int(opened.positions[0])) from None
        now = clock.monotonic_ns()
        progress.end_ticket(now)
        self._earlier_row_ns, self._row_ns = self._row_ns, (now - started) // len(opened.indices)
        return Filled(filled.rows, filled.row_failures, filled.oversize, len(opened.indices))

    def _open(self, job: Job) -> Opened:
        """Return which rows the job has; their items can be had by index from now on."""
        if job.after:  # the probe looks at the beginning of an epoch, which was taken
            self._calls.forget()
        self._calls.keep_only(job.epoch)
        if self._ahead is not None and job.row_stop is None:
            return Opened(job, *self._ahead.rows_of(job.epoch, job.batch, job.after))
        try:
            positions = self.items.positions(job)
        except Abandoned:
            raise
        except GeneratorRaised as raised:
            raise self._progress.failed(raised.error, job.epoch, [raised.position], raised.position) from None
        except self._catches as error:  # a stream's items cannot be unpickled here; or a generator ends its process
            raise self._progress.failed(error, job.epoch) from None
        if not len(positions):
            return Opened(job, positions, [])
        if self.plan.rows_vary and job.count > 1:
            plan = self.plan.after(job.after)
            rows = tuple(plan.rows(job.epoch, batch) for batch in range(job.batch, job.batch + job.count))
            job = dataclasses.replace(job, batch_rows=rows)
        return Opened(job, positions, self.plan.indices(job.epoch, positions), self.items.reader)

    def _out_arrays(self, opened: Opened, buffer: Any, base: int, capacity: int) -> list[npt.NDArray[Any]] | None:
        """Return the slot's arrays, where a function shall write into them itself."""
        if not (self._writes_rows and self._calls.takes_out):
            return None
        assert self.form is not None
        return self.form.row_arrays(buffer, base, opened.job.row_start + len(opened.indices), capacity)

    def _fill_rows(self, opened: Opened, buffer: Any, base: int, capacity: int, calls: Calls | TicketCalls) -> Filled:
        """Write rows straight into the slot, of quick functions in blocks."""
        assert self.form is not None
        job, positions, indices, _ = opened
        rows = len(indices)
        arrays = self.form.row_arrays(buffer, base, job.row_start + rows, capacity)
        if arrays is None:
            return self._batches.fill(opened, buffer, base, capacity, calls)
        are_fast = self._row_ns < _SINGLE_ROW_NS or self._earlier_row_ns < _SINGLE_ROW_NS
        block = self._block_rows if are_fast and not job.attempt and calls is self._calls else 1
        if block > 1:
            self._progress.begin_blocks(block)
        block = min(block, rows)
        converter, start = self._converter, 0
        places = positions.tolist() if calls.needs_positions else indices
        while start < rows:
            self._progress.note(job, indices[start])
            stop, row = start + block, job.row_start + start
            part, results = indices[start:stop], []  # type: tuple[list[int], list[Any]]
            try:
                if block == 1:
                    calls.samples(job.epoch, places[start:stop], part, results, arrays, row)
                    converter.write_row(arrays, row, results.pop(), part[0])
                    is_written = True
                else:
                    calls.samples(job.epoch, places[start:stop], part, results, arrays, row, converter.take)
                    is_written = converter.write_block(arrays, row, results, part)
            except Abandoned:
                raise
            except self._catches as error:
                if block == 1 or not isinstance(error, SpecMismatchError):
                    failing = start + min(len(results), len(part) - 1)  # a handler may raise after the last
                    where = [indices[failing]], int(positions[failing])
                    raise self._progress.failed(error, job.epoch, *where) from None
                is_written = False  # the row that is wrong is told by its own call
            if is_written:
                start = stop
            else:  # from now on each row is written before the next one is made
                block = self._block_rows = 1
                self._progress.begin_blocks(0)
        return Filled(rows)
