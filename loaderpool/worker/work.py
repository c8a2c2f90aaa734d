"""One loader's work in the process that does it: from (epoch, batch, rows) to the bytes of a slot.

The same code runs in a worker and, with `workers=0`, in the caller's process, so the bits are the same. What it is
given are positions of the plan; what it makes depends on nothing else, so any process may do any part, and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind, unit_of
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.board import Board
from loaderpool.memory.layout import BatchForm, Block, VaryingLayout
from loaderpool.plan.order import Plan, Start, Ticket
from loaderpool.system import clock
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.calls import Calls, ThreadCalls
from loaderpool.worker.own_process import GlobalsWatch, end_stray
from loaderpool.worker.probe import Prober
from loaderpool.worker.rows import Converter, blocks_of_array, collate, empty_blocks
from loaderpool.worker.tickets import MadeRows, Opened, PlannedItems, Probe, Progress, StreamedItems, WorkFailed

if TYPE_CHECKING:
    from loaderpool.worker.lanes import LaneItems

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
_Leaves = list[npt.NDArray[Any]]


class OrderAhead:
    """Looks up the rows of many batches at once: in the caller's process a tiny batch has no time for it.

    All batches of the plan must have the same rows, but for the last.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._rows = plan, plan.most_rows
        self._at_once = max(1, _ROWS // self._rows)
        self._look_up = functools.lru_cache(_PASSES)(self._looked_up)

    def rows_of(self, epoch: int, batch: int, after: Start) -> tuple[_Positions, list[int]]:
        """Return the positions of a batch's rows, int64[rows], and the source's index at each.

        Batches are counted from the start `after`; IndexError: the epoch has no such batch.
        """
        positions, indices = self._look_up(epoch, batch // self._at_once, after)
        start = batch % self._at_once * self._rows
        stop = start + self._rows
        if start >= len(indices):
            raise IndexError(batch)
        return positions[start:stop], indices[start:stop]

    def _looked_up(self, epoch: int, block: int, after: Start) -> tuple[_Positions, list[int]]:
        plan, batch = self._plan.after(after), block * self._at_once
        positions = plan.positions(epoch, batch, min(self._at_once, plan.batches_per_epoch - batch))
        return positions, plan.indices(epoch, positions)


class Work:
    """Calls the user's function for the plan's positions.

    Attributes:
        setup: the user's hook; None: there is none, or it has run.
        look_ahead: called while threads are waited for: it may `begin` more tickets, and tells whether more may come.

    Args:
        payload: what `Loader` shipped, and its cache.
        progress: is told what this process is at.
        shared: the arena's mapping, in which a stream's items lie; None in the caller's process.
        watch: looks at the global generators; None: nothing else does.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        progress: Progress,
        shared: Any = None,
        watch: GlobalsWatch | None = None,
    ) -> None:
        config: LoaderConfig = payload["config"]
        self.config, self.progress, self._catches = config, progress, progress.catches
        self.plan: Plan = payload["plan"]
        self.unit: UnitKind = unit_of(config, payload["batch_fn"])
        self.setup: Callable[[], Any] | None = payload["setup"]
        progress.timeout_s = config.limits.timeout_s or 0.0
        source = payload["source"]
        self.items: PlannedItems | StreamedItems | LaneItems = PlannedItems(self.plan)
        self._ahead: OrderAhead | None = None
        if self.plan.lanes:
            # Where nothing is called for an item that a generator yields, it is the generator's time that counts.
            progress.counts_generated = all(payload[name] is None for name in ("fn", "augment", "batch_fn"))
            source.attend(progress, times_items=config.limits.timeout_s is not None)
            self.items, watch = source, None  # its generators draw before the watch in `Calls` looks
        elif isinstance(source, StreamedItems):
            self.items, source.shared = source, shared
        elif progress.worker is None and not self.plan.rows_vary:
            self._ahead = OrderAhead(self.plan)
        # The caller's process shall have no threads: a debugger may be there.
        threads = 1 if progress.worker is None else config.threads
        self.calls = Calls(payload, progress.cell // Board.base(1), threads, watch)
        self._prober = Prober(payload, self.calls, self.items, progress)
        self._threads = ThreadCalls(self.calls, threads, self.unit != "sample", progress) if threads > 1 else None
        self.look_ahead: Callable[[], bool] | None = None
        # Of the latest two tickets: one may have been interrupted. The first one's rows are made one by one.
        self._row_ns = self._earlier_row_ns = _SINGLE_ROW_NS
        self.form: BatchForm | None = None
        self._converter: Converter
        self._block_rows = 1
        self._writes_rows = False

    def ensure_setup(self) -> None:
        """Call the user's `setup` hook, once in each process; WorkFailed: it raised."""
        setup, self.setup = self.setup, None
        if setup is None:
            return
        try:
            with self.progress.setup():
                setup()
                end_stray()
        except self._catches as error:
            end_stray(error)
            self.setup = setup
            failed = self.progress.failed(error, epoch=0)
            raise WorkFailed(failed.failure._replace(is_setup=True), error) from None

    def set_form(self, form: BatchForm, is_given: bool) -> None:
        """Take the batches' form, as the main process decided it."""
        self.form = form
        self.calls.unflatten = form.spec.structure.unflatten
        self._converter = Converter(
            form.spec,
            is_given=is_given,
            has_batch_axis=self.unit != "sample",
            config=self.config,
            padding=form.padding,
        )
        # Of a generator's batches the last is shorter, so they are varying; but no row of them is ever left out.
        may_write_rows = form.fixed is not None or (form.has_plain_rows and self.plan.lanes > 0)
        self._writes_rows = may_write_rows and self.config.on_error.action == "raise"
        is_small = max(form.row_bytes, default=0) < _SINGLE_ROW_BYTES
        in_blocks = is_small and not self.calls.takes_out and self.config.limits.timeout_s is None
        self._block_rows = _BLOCK_ROWS if in_blocks else 1

    def close(self) -> None:
        """End the generators that run here."""
        if self.plan.lanes:
            items: Any = self.items
            items.close()

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

    def call(self, epoch: int, positions: list[int], indices: list[int]) -> Any:
        """Return what one call gives for these positions, as the function returned it; raises whatever it raises."""
        self.calls.keep_only(epoch)
        opened = Opened(Ticket(epoch=epoch), np.array(positions), indices)
        fixed = None if self.form is None else self.form.fixed
        if self.calls.takes_out and fixed is not None:
            shapes = zip(fixed.row_shapes, fixed.dtypes, strict=True)
            opened.arrays = [np.empty((1, *shape), dtype) for shape, dtype in shapes]
        return self.calls.unit(opened, 0, len(indices))

    # ---- tickets ----

    def begin(self, ticket: Ticket, buffer: Any, base: int, capacity: int) -> bool:
        """Have threads begin with a ticket that is not to be filled before others were; False: they do not.

        There are none, or a worker that had the ticket has died, so that nothing shall be made beside it.
        """
        threads = self._threads
        if threads is None or threads.is_one_by_one or ticket.deaths or self.setup is not None or self.form is None:
            return False
        try:
            threads.begin(self._open(ticket, buffer, base, capacity))
        except self._catches:  # its turn will tell
            return False
        return True

    def fill(self, ticket: Ticket, buffer: Any, base: int, capacity: int) -> MadeRows:
        """Make the ticket's rows in the slot that starts at byte `base` of `buffer` and holds `capacity` bytes.

        Raises:
            WorkFailed: the function raised or returned what the spec does not allow.
            Abandoned: the run's mark was seen on the board.
        """
        progress, calls, started = self.progress, self.calls, clock.monotonic_ns()
        threads = self._threads if ticket.deaths < _WITHOUT_THREADS_FROM else None
        if progress.worker is not None:
            progress.begin_ticket(started, ticket, are_told=threads is not None or progress.counts_generated)
        opened = (None if threads is None else threads.opened(ticket)) or self._open(ticket, buffer, base, capacity)
        if not opened.indices:  # its lane has ended
            VaryingLayout([]).write(buffer, base)
            return MadeRows(0)
        # Not kept in `self`: that would be a cycle, and the files of a dropped loader would stay open.
        fill = self._fill_rows if self._writes_rows else self._fill_batches
        try:
            if threads is None:
                filled = calls.watched(fill, calls, opened, buffer, base, capacity)
            else:
                filled = threads.run(opened, lambda by: fill(by, opened, buffer, base, capacity), self.look_ahead)
        except self._catches as error:
            raise progress.failed(error, ticket.epoch, opened.indices, int(opened.positions[0])) from None
        now = clock.monotonic_ns()
        if progress.worker is not None:
            progress.end_ticket(now)
        self._earlier_row_ns, self._row_ns = self._row_ns, (now - started) // len(opened.indices)
        return filled

    def _open(self, ticket: Ticket, buffer: Any, base: int, capacity: int) -> Opened:
        """Return which rows the ticket has; their items can be had by index from now on."""
        if self.calls.kept:
            self.calls.keep_only(ticket.epoch)
            if ticket.rest:  # the probe looks at the beginning of an epoch, which was taken
                self.calls.kept.clear()
        if self._ahead is not None and ticket.stop < 0:
            opened = Opened(ticket, *self._ahead.rows_of(ticket.epoch, ticket.batch, ticket.rest))
        else:
            try:
                positions = self.items.positions(ticket)
            except self._catches as error:  # a stream's items cannot be unpickled here; or a generator raised
                raise self.progress.failed(error, ticket.epoch) from None
            indices = self.plan.indices(ticket.epoch, positions) if len(positions) else []
            opened = Opened(ticket, positions, indices, self.items.reader)
            if self.plan.rows_vary and ticket.batches > 1:
                plan = self.plan.after(ticket.rest)
                opened.batch_rows = tuple(plan.rows(ticket.epoch, ticket.batch + at) for at in range(ticket.batches))
        if self.calls.takes_out and self._writes_rows:
            assert self.form is not None
            opened.arrays = self.form.row_arrays(buffer, base, ticket.start + len(opened.indices), capacity)
        return opened

    # ---- rows that are written before the next ones are made ----

    def _fill_rows(self, calls: Calls | ThreadCalls, opened: Opened, buffer: Any, base: int, capacity: int) -> MadeRows:
        """Write rows straight into the slot, of quick functions in blocks."""
        ticket, indices, converter, progress = opened.ticket, opened.indices, self._converter, self.progress
        assert self.form is not None, "a task before its layout"
        rows, is_noted = len(indices), progress.worker is not None
        fixed, end = self.form.fixed, ticket.start + rows
        arrays = self.form.row_arrays(buffer, base, end, capacity) if fixed is None else fixed.arrays(buffer, base, end)
        if arrays is None:
            return self._fill_batches(calls, opened, buffer, base, capacity)
        is_quick = min(self._row_ns, self._earlier_row_ns) < _SINGLE_ROW_NS
        block = self._block_rows if rows > 1 and is_quick and not ticket.deaths and calls is self.calls else 1
        if block > 1 and is_noted:
            progress.begin_blocks(block)
        start = 0
        while start < rows:
            stop, row = min(start + block, rows), ticket.start + start
            results: list[Any] = []
            if is_noted:  # in the caller's process a tiny batch has no time for what is never looked at
                progress.note(indices[start])
            try:
                if block == 1:
                    converter.write_row(arrays, row, calls.unit(opened, start, stop), indices[start])
                else:
                    self.calls.block(opened, start, stop, results, converter.take)
                    if not converter.write_block(arrays, row, results):
                        raise SpecMismatchError  # the row that is wrong is told by its own call
                start = stop
            except self._catches as error:
                if block == 1 or not isinstance(error, SpecMismatchError):
                    failing = min(start + len(results), stop - 1)  # a handler may raise after the last
                    where = [indices[failing]], int(opened.positions[failing])
                    raise progress.failed(error, ticket.epoch, *where) from None
                block = self._block_rows = 1  # from now on each row is written before the next one is made
                progress.begin_blocks(0)
        return MadeRows(rows, items=rows)

    # ---- whole batches: rows of which any may fail, or that are padded, ragged or text ----

    def _fill_batches(
        self, calls: Calls | ThreadCalls, opened: Opened, buffer: Any, base: int, capacity: int
    ) -> MadeRows:
        """Write batches that are whole; of a varying one, what does not fit comes back to be written elsewhere."""
        assert self.form is not None, "a task before its layout"
        fixed, count = self.form.fixed, len(opened.indices)
        batches: list[tuple[int, list[Block]]] = []
        failures: list[RowFailure] = []
        for number, (start, stop) in enumerate(opened.bounds()):
            if self.unit != "sample":
                batch, failed = self._of_one_call(calls, opened, start, stop)
                batches.append(batch)
            else:
                rows, good, failed = self._collect(calls, opened, start, stop)
                if fixed is None:
                    batches.append((len(rows), self._collated(rows, good, opened, start, stop)))
                else:
                    arrays = fixed.arrays(buffer, base, count)
                    for row, leaves in enumerate(rows, start):
                        for array, leaf in zip(arrays, leaves, strict=True):
                            array[row] = leaf
            failures += [each._replace(batch=number) for each in failed]
        if fixed is not None:
            return MadeRows(count, tuple(failures), items=count)
        layout = VaryingLayout(batches)
        filled = MadeRows(sum(rows for rows, _ in batches), tuple(failures), items=count)
        if layout.nbytes > capacity:
            return filled._replace(oversize=layout)
        layout.write(buffer, base)
        return filled

    def _collated(self, rows: list[_Leaves], good: list[int], opened: Opened, start: int, stop: int) -> list[Block]:
        assert self.form is not None
        blocks: list[Block] = []
        for number, component in enumerate(self.form.spec.components):
            values = [leaves[number] for leaves in rows]
            try:
                blocks += collate(values, component, self._converter.paths[number], good, self.form.padding_at(number))
            except self._catches as error:
                where = opened.indices[start:stop], int(opened.positions[start])
                raise self.progress.failed(error, opened.ticket.epoch, *where) from None
        return blocks

    def _of_one_call(
        self, calls: Calls | ThreadCalls, opened: Opened, start: int, stop: int
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        """Return a batch that one call makes whole."""
        assert self.form is not None
        ticket, indices, spec = opened.ticket, opened.indices[start:stop], self.form.spec
        failure = self.progress.excluded(ticket.epoch, indices)
        if failure is None:
            self.progress.note(indices[0])
            try:
                arrays = self._converter.row(calls.unit(opened, start, stop), indices[0])
                if ticket.batches > 1:  # they wait for the chunk's other batches
                    arrays = [array.copy() for array in arrays]
            except self._catches as error:
                full_rows = 0 if self.plan.rows_vary else self.plan.most_rows
                if isinstance(error, SpecMismatchError) and self.unit == "batch" and len(indices) < full_rows:
                    error = SpecMismatchError(
                        f"{error}. This batch is shorter, with {len(indices)} of {full_rows} items. "
                        "Set drop_remainder=True to drop it"
                    )
                failed = self.progress.failed(error, ticket.epoch, indices, int(opened.positions[start]))
                if self.config.on_error.action != "skip":
                    raise failed from None
                failure = failed.failure
                del failed  # as in `_collect`
        if failure is not None:
            return (0, empty_blocks(spec, self.form.block_dtypes)), [RowFailure(failure, 0)]
        pairs = zip(arrays, spec.components, strict=True)
        blocks = [block for array, component in pairs for block in blocks_of_array(array, component)]
        return (len(arrays[0]) if arrays[0].ndim else 1, blocks), []

    def _collect(
        self, calls: Calls | ThreadCalls, opened: Opened, start: int, stop: int
    ) -> tuple[list[_Leaves], list[int], list[RowFailure]]:
        """Return one batch's rows, the error policy applied, and the indices they came from.

        Rows wait for their batch to be whole, so each is a copy: the function may fill its arrays again for the next.
        """
        ticket, action = opened.ticket, self.config.on_error.action
        rows: list[_Leaves | None] = []
        failures: list[RowFailure] = []
        last_error: WorkFailed | None = None
        for at in range(start, stop):
            index = opened.indices[at]
            failure = self.progress.excluded(ticket.epoch, [index])
            if failure is None:
                self.progress.note(index)
                try:
                    made = calls.unit(opened, at, at + 1)
                    rows.append([leaf.copy() for leaf in self._converter.row(made, index)])
                    continue
                except self._catches as raised:
                    last_error = self.progress.failed(raised, ticket.epoch, [index], int(opened.positions[at]))
                    if action == "raise":
                        raise last_error from None
                    failure = last_error.failure
            failures.append(RowFailure(failure, at - start))
            rows.append(None)
        good = [leaves for leaves in rows if leaves is not None]
        indices = opened.indices[start:stop]
        if action != "skip" and failures and not good:
            raise last_error or WorkFailed(failures[-1].failure, RuntimeError(failures[-1].failure.text))
        del last_error  # its traceback has this frame: what the function held would stay until a collection
        if action == "skip" or not failures:
            return good, [index for leaves, index in zip(rows, indices, strict=True) if leaves is not None], failures
        stand_in, replaced = good[-1], []
        for leaves in reversed(rows):  # the *next* good row stands in; at the end, the last one
            stand_in = stand_in if leaves is None else leaves
            replaced.append(stand_in)
        return replaced[::-1], indices, failures
