"""The work of one loader in the process that does it: from (epoch, batch, rows) to the bytes of a
slot.

The same code runs in a worker and, with `workers=0`, in the main process, so batches are
bit-identical. Inputs are positions of the plan, and results depend on nothing else. So any process
may make any part, and make it again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import SpecMismatchError
from loaderpool.memory.board import Board
from loaderpool.memory.layout import BatchForm, Block, Buffer, OwnMemory, VaryingLayout
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import read_order
from loaderpool.plan.order import kept
from loaderpool.sources.many_rows import MOST_ROWS, arrays_of
from loaderpool.sources.tables import Columns
from loaderpool.system import clock
from loaderpool.transport.messages import Ticket
from loaderpool.transport.payload.generators import with_imports
from loaderpool.transport.payload.record import Pair, WorkerPayload
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.calls import Calls, TimeLimit
from loaderpool.worker.concurrent_calls import ConcurrentCalls, Coroutines, Threads
from loaderpool.worker.contracts import Items, Runner
from loaderpool.worker.event_loop import EventLoop
from loaderpool.worker.handing_over import HandingOver
from loaderpool.worker.items import IndexedItems
from loaderpool.worker.own_process import GlobalsWatch, end_stray
from loaderpool.worker.rows import Converter, blocks_of_array, collate
from loaderpool.worker.tickets import (
    MadeRows,
    Opened,
    Progress,
    StreamedItems,
    WorkFailed,
    with_preface,
)

if TYPE_CHECKING:
    from loaderpool.worker.packing import Packing

# Rows are made one by one if a row is at least this large or slow, otherwise in blocks. The check
# for "abandoned", the note on the board and the write then cost a fraction of a percent.
_SINGLE_ROW_BYTES = 1 << 15
_SINGLE_ROW_NS = 20_000
_BLOCK_ROWS = 128
_PASSES = 4  # concurrent iterations over one loader whose drawn orders are kept

_Leaves = list[npt.NDArray[Any]]


def nothing_to_repeat(failed: WorkFailed) -> WorkFailed:
    """Return the failure of a batch in which no row is valid and could replace the others."""
    text = 'No row of this batch was valid, so on_error="replace" has nothing to repeat'
    return with_preface(failed, f"{text}. The last error")


class RowTimes:
    """Durations of a row in the two latest tickets. Two, because one may have been interrupted.

    Attributes:
        shorter_ns: the shorter one. At first so long that rows are made one by one.
    """

    def __init__(self) -> None:
        self.shorter_ns = self._latest_ns = _SINGLE_ROW_NS

    def note(self, row_ns: int) -> None:
        """Add the duration of a row in a ticket."""
        self.shorter_ns = min(row_ns, self._latest_ns)
        self._latest_ns = row_ns


class Work:
    """Calls the user's function for positions of the plan.

    Attributes:
        setup: the user's hook. None: there is none, or it has run.
        check: ends this process if the user's code has forked it or closed its descriptors.
        look_ahead: called while the worker waits for concurrent calls. It may call `begin` for more
            tickets, and returns True if more may come.

    Args:
        payload: the loader's pickled objects, loaded here, and its cache.
        progress: records what this process is doing.
        shared: the arena's mapping, which has a stream's items, or drawn orders. None in the main
            process.
        watch: watches the global generators. None: `Calls` makes its own if it needs one.
        loader: number of the loader's version. Classes of a stream's items are looked up under it.
        event_loop: runs coroutines. None: a new one, which `close` closes.
    """

    def __init__(
        self,
        payload: WorkerPayload,
        progress: Progress,
        shared: mmap.mmap | None = None,
        watch: GlobalsWatch | None = None,
        loader: int = 0,
        event_loop: EventLoop | None = None,
    ) -> None:
        config = payload.config
        self.config, self.progress = config, progress
        self.failures = failures = progress.failures
        self.plan = payload.plan
        self._shared = shared
        self._orders: dict[int, Plan] = {}
        self.unit = payload.unit
        self.setup = with_imports(payload.imports, payload.setup)
        self.check: Callable[[], None] = end_stray
        self.given_spec = payload.given_spec
        failures.timeout_s = config.limits.timeout_s or 0.0
        source = self._source = payload.source
        failures.columns = source.paths if isinstance(source, Columns) else ()
        if self.plan.lanes:
            # If no function is called for an item that a generator yields, the generator's time
            # counts.
            progress.counts_generated = payload.fn is payload.augment is payload.batch_fn is None
            # Generators draw outside the watched calls, so a shared snapshot would be outdated.
            watch = None
        # The main process gets no threads, because a debugger may be attached to it.
        threads = 1 if progress.worker is None else config.threads
        self.calls = calls = Calls(
            payload, progress.cell // Board.base(1), threads, watch, event_loop
        )
        if progress.worker is not None and config.limits.timeout_s is not None:
            calls.limit = TimeLimit(config.limits.timeout_s, progress)
        self.items: Items
        if self.plan.lanes:
            self.items = source
            source.attend(
                progress, config.limits.timeout_s is not None, self.calls.seeding.captured
            )
        elif isinstance(source, StreamedItems):
            self.items, source.shared, source.loader = source, shared, loader
        else:
            self.items = IndexedItems(calls.reader, looks_ahead=progress.worker is None)
        if progress.worker is not None:
            calls.reader.progress = progress
            # With concurrent calls, the main thread notes the call that it waits for.
            if threads == 1 and calls.reader.cached is not None:
                calls.reader.cached.noting_wait = progress.waiting
        if calls.reader.samples is not None:
            calls.reader.samples.attend(progress, calls.draws.alone)
        self._concurrent: ConcurrentCalls | None = None
        if threads > 1:
            executor = (
                Coroutines(calls.event_loop, threads, calls) if calls.is_async else Threads(threads)
            )
            self._concurrent = ConcurrentCalls(calls, executor, self.unit != "sample", progress)
        self.look_ahead: Callable[[], bool] | None = None
        self._handing_over = HandingOver()
        self._row_times = RowTimes()
        self.form: BatchForm | None = None
        self._converter: Converter
        self._block_rows = 1
        # True if each row of a block is written before the next one is made
        self._writes_at_once = False
        self._writes_rows = False
        # True if items become rows of a slot without a call of the user's functions
        self._copies_columns = False
        self._packing: Packing | None = None

    def seed_captured(self, pairs: list[Pair]) -> None:
        """Seed these random generators by these keys from now on."""
        self.calls.seeding.use(pairs)
        self.calls.kept.clear()
        if self.calls.reader.samples is not None:
            self.calls.reader.samples.forget()
        self.items.seed(self.calls.seeding.captured)

    def ensure_setup(self) -> None:
        """Call the user's `setup` hook, once in each process.

        Raises:
            WorkFailed: the hook raised.
        """
        setup, self.setup = self.setup, None
        if setup is None:
            return
        try:
            with self.progress.setup():
                self.calls.set_up(setup)
                self.check()
            self.calls.seeding.find_what_setup_made()
            self.items.add_generators(self.calls.seeding.captured)
        except self.failures.catches as error:
            self.setup = setup
            failed = self.failures.of(error, epoch=0)
            raise WorkFailed(failed.failure._replace(is_setup=True), error) from None

    def set_form(self, form: BatchForm, is_given: bool) -> None:
        """Set the form of the batches, which the main process has decided."""
        self.form = form
        config, calls = self.config, self.calls
        origin = calls.chain.origin
        # A sequence of batches may have no length.
        has_samples = self.unit == "sample" and isinstance(self.items, IndexedItems)
        size = len(self._source) if has_samples else 0
        self._converter = Converter(form, is_given, config.pad, config.ragged, origin, size)
        if form.item_spec is None:
            calls.chain.unflatten = form.spec.structure.unflatten
        else:
            # Imported here, because few loaders need it.
            from loaderpool.worker.packing import Packing

            self._packing = Packing(form, self._converter)
        # The last batch of a generator is shorter, so its batches vary in size. But no row of them
        # is ever left out.
        may_write_rows = form.fixed is not None or (form.has_plain_rows and self.plan.lanes > 0)
        has_row_each = may_write_rows and form.item_spec is None
        self._writes_rows = has_row_each and config.on_error.action == "raise"
        is_small = max(form.row_bytes, default=0) < _SINGLE_ROW_BYTES
        is_plain = not calls.chain.takes_out and not calls.is_async
        has_limit = config.limits.timeout_s is not None  # for each row
        in_blocks = is_small and is_plain and not has_limit
        self._block_rows = _BLOCK_ROWS if in_blocks else 1
        self._writes_at_once = form.item_spec is not None
        is_called = calls.chain.plain != [] or calls.reader.calls_fn
        self._copies_columns = (
            self._writes_rows and self.unit == "sample" and not (is_called or has_limit)
        )

    def close(self) -> None:
        """Close the generators that run here."""
        self.items.close()

    def call(self, epoch: int, positions: list[int], indices: list[int], row: int) -> object:
        """Return the unconverted result of one call: the sample of a row, or a batch of `batch_fn`.

        Called by `replay`. Raises the exceptions of the function.

        Args:
            epoch: the epoch.
            positions: position of each row of the batch.
            indices: source index of each row of the batch.
            row: row of the sample in the batch.
        """
        self.calls.kept.keep_only(epoch)
        opened = self.calls.reader.open(Ticket(epoch=epoch), np.array(positions), indices)
        if not self.calls.reader.seeds_reads:  # this row may succeed although another one failed
            opened.fetched = None
        fixed = None if self.form is None else self.form.fixed
        if self.calls.chain.takes_out and fixed is not None:
            shapes = zip(fixed.row_shapes, fixed.dtypes, strict=True)
            opened.arrays = [np.empty((len(indices), *shape), dtype) for shape, dtype in shapes]
        start = 0 if self.unit == "batch" else row
        return self.calls.draws.seeded(self.calls.unit, opened, start, len(indices))

    # ---- tickets ----

    def plan_of(self, ticket: Ticket) -> Plan:
        """Return the plan of a ticket's epoch: the loader's, with the order to which the ticket
        refers if orders are drawn.
        """
        if not (ticket.feed and self.plan.order.is_drawn):
            return self.plan

        def read() -> Plan:
            return read_order(self.plan, self._shared, ticket.feed)

        # The memory of the first sample's order may be used for another one later.
        return kept(self._orders, ticket.run, read, _PASSES) if ticket.run else read()

    def suspect(self, is_suspect: bool) -> None:
        """Run `check` after each call of the next ticket, if that ticket has ended workers.

        Otherwise one check follows the ticket, because its system call would slow tiny samples
        down.
        """
        self.calls.after_call = self.check if is_suspect else end_stray
        self.items.check_after_each(self.calls.after_call)

    def begin(self, ticket: Ticket, buffer: Buffer, base: int, capacity: int) -> bool:
        """Start the calls of a later ticket, while an earlier one is filled. Return True if they
        have started.

        They do not start if calls are not concurrent, or if a worker died with the ticket, because
        such a ticket runs alone.

        Called by `look_ahead`; `fill` or `drop` ends the ticket.
        """
        concurrent = self._concurrent
        if concurrent is None or ticket.deaths or self.setup is not None or self.form is None:
            return False
        try:
            concurrent.begin(self._open(ticket, buffer, base, capacity))
        except self.failures.catches:
            # The error is reported when `fill` gets the ticket.
            return False
        return True

    def drop(self, ticket: Ticket) -> None:
        """Start no more calls for an abandoned ticket. Blocks until running calls have ended."""
        if self._concurrent is not None and ticket in self._concurrent.begun:
            self._concurrent.end(ticket)

    def fill(
        self, ticket: Ticket, buffer: Buffer, base: int, capacity: int, plan: Plan | None = None
    ) -> MadeRows:
        """Make the ticket's rows in the slot at byte `base` of `buffer`, which has `capacity`
        bytes.

        Args:
            ticket: the ticket.
            buffer: memory that contains the slot.
            base: first byte of the slot.
            capacity: number of its bytes.
            plan: plan of the ticket's epoch, or of its remainder. None: as in `plan_of`.

        Raises:
            WorkFailed: the function raised, or returned a result that the spec does not allow.
            Abandoned: the board marks the run as abandoned.
        """
        progress, calls, started = self.progress, self.calls, clock.monotonic_ns()
        # If calls are made one by one, the board names the sample for certain.
        concurrent = None if ticket.deaths else self._concurrent
        if progress.worker is not None:
            progress.begin_ticket(
                started, ticket, are_told=concurrent is not None or progress.counts_generated
            )
        begun = None if concurrent is None else concurrent.begun.get(ticket)
        opened = self._open(ticket, buffer, base, capacity, plan) if begun is None else begun.opened
        if not opened.indices:  # the ticket's lane has ended
            VaryingLayout([]).write(buffer, base)
            return MadeRows(0)
        opened_ns = 0  # only tickets that may be handed over need it
        if ticket.may_hand_over:
            if read := self._handing_over.frame(opened):
                return MadeRows(0, items=len(opened.indices), read=read)
            opened_ns = clock.monotonic_ns()
        try:
            copies_columns = self._copies_columns and concurrent is None and not ticket.deaths
            if copies_columns and self._copy_columns(opened):
                filled = MadeRows(
                    len(opened.indices), oversize=opened.own, items=len(opened.indices)
                )
            elif concurrent is None:
                filled = calls.watched(self._fill, calls, opened)
            else:
                filled = concurrent.run(opened, self._fill, self.look_ahead)
        except self.failures.catches as error:
            raise self.failures.of(
                error, ticket.epoch, opened.indices, int(opened.positions[0])
            ) from None
        now = clock.monotonic_ns()
        if progress.worker is not None:
            progress.end_ticket(now)
        if opened_ns:
            self._handing_over.calls_ns = now - opened_ns
        return filled

    def _open(
        self, ticket: Ticket, buffer: Buffer, base: int, capacity: int, plan: Plan | None = None
    ) -> Opened:
        """Return the rows of a ticket. Their items can be read by index from now on."""
        if self.calls.kept:
            self.calls.kept.keep_only(ticket.epoch)
        plan = self.plan_of(ticket) if plan is None else plan
        try:
            opened = self.items.open(ticket, plan)
        except self.failures.catches as error:
            # The items of a stream cannot be unpickled here, or a generator raised.
            raise self.failures.of(error, ticket.epoch) from None
        opened.slot, opened.plan = (buffer, base, capacity), plan
        if self._writes_rows:
            assert self.form is not None
            rows = ticket.start + len(opened.indices)
            if self.form.fixed is not None:
                opened.arrays = self._arrays(opened, rows)
            else:
                opened.arrays = self.form.row_arrays(buffer, base, rows, capacity)
        return opened

    def _arrays(self, opened: Opened, rows: int) -> _Leaves:
        """Return arrays for the first `rows` rows of a fixed slot.

        If batches differ in their rows and do not fit into the slot, return other memory.
        """
        assert self.form is not None and self.form.fixed is not None
        (buffer, base, capacity), fixed = opened.slot, self.form.fixed
        if fixed.capacity_rows is None:
            rows = sum(opened.batch_rows)
            if fixed.bytes_of(rows) > capacity:
                opened.own = OwnMemory(fixed, rows)
                return opened.own.arrays
        return fixed.arrays(buffer, base, rows)

    def _fill(self, calls: Runner, opened: Opened) -> MadeRows:
        if opened.fetched is not None and calls is self.calls:
            opened.fetched.reset()
        if self._packing is not None and self.config.on_error.action == "raise":
            self._packing.open(opened)
            opened.arrays = ()
        # Not stored in `self`: a reference cycle would keep the files of a dropped loader open.
        fill = self._fill_batches if opened.arrays is None else self._fill_rows
        return fill(calls, opened)

    # ---- rows of arrays in memory ----

    def _copy_columns(self, opened: Opened) -> bool:
        """Copy the rows of a ticket from the source's arrays, with one call for each array.

        Returns False if rows must be made one by one.
        """
        assert self.form is not None and opened.arrays is not None
        columns = arrays_of(self._source, self.form.spec.structure)
        if not columns:
            return False
        start, rows = opened.ticket.start, np.asarray(opened.keys)
        slots = [array[start : start + len(rows)] for array in opened.arrays]
        are_alike = all(
            # `take` would copy the whole of another array first
            column.flags.c_contiguous
            and column.flags.aligned
            and (column.dtype, column.shape[1:]) == (slot.dtype, slot.shape[1:])
            and rows.max() < len(column)
            for column, slot in zip(columns, slots, strict=True)
        )
        if are_alike:
            if self.progress.worker is not None:
                self.progress.begin_blocks(len(rows))
                self.progress.note(opened.indices[0])
            for column, slot in zip(columns, slots, strict=True):
                # With another mode, `take` would write into a copy of the slot.
                np.take(column, rows, axis=0, out=slot, mode="clip")
        return are_alike

    # ---- rows that are written before the next ones are made ----

    def _fill_rows(self, calls: Runner, opened: Opened) -> MadeRows:
        """Write rows straight into the slot; in blocks if the function is fast."""
        ticket, indices, converter, progress = (
            opened.ticket,
            opened.indices,
            self._converter,
            self.progress,
        )
        target = self._packing or converter
        arrays = opened.arrays
        assert arrays is not None
        rows, is_noted = len(indices), progress.worker is not None
        # The source's items as they are, if no function is called.
        items = opened.fetched if self.calls.chain.plain == [] else None
        is_called = items is None or self.calls.reader.calls_fn
        is_quick = not is_called or self._row_times.shorter_ns < _SINGLE_ROW_NS
        block = self._block_rows
        if rows == 1 or not is_quick or ticket.deaths or calls is not self.calls:
            block = 1
        elif not is_called and block > 1:
            block = MOST_ROWS  # they are in memory already
        if block > 1 and is_noted:
            progress.begin_blocks(block)
        fetched = opened.fetched
        read_before_ns = 0 if fetched is None else fetched.spent_ns
        write: Callable[[object], object] | None = None  # writes results of single calls
        start = calls_ns = 0
        while start < rows:
            stop, row = min(start + block, rows), ticket.start + start
            if items is not None:  # the next call may refill the memory of this one's items
                stop = min(stop, items.part_end(start))
            results: list[object] = []
            # The main process skips this, because its notes are never read. Tiny batches would be
            # slower.
            if is_noted:
                progress.note(indices[start])
            at_once = block > 1 and self._writes_at_once
            begun_ns = clock.monotonic_ns()
            try:
                if block == 1:
                    result = calls.unit(opened, start, stop)
                    calls_ns += clock.monotonic_ns() - begun_ns
                    write = write or target.writer(arrays, row)
                    try:
                        write(result)
                    except SpecMismatchError:  # the result needs a conversion, or is wrong
                        target.write_row(arrays, row, result, indices[start])
                    if stop == rows > 1 and self._block_rows > 1 and not self._writes_at_once:
                        converter.watch(result)
                else:
                    take: Callable[[Any], object] | None
                    take = converter.take if items is None else None
                    if at_once:
                        take = target.writer(arrays, row)
                    elif converter.watched:
                        converter.begin_block()
                    self.calls.block(opened, start, stop, results, take)
                    calls_ns += clock.monotonic_ns() - begun_ns
                    are_items = items is not None
                    if not at_once and not converter.write_block(
                        arrays, row, results, are_items, opened.keys[start:stop]
                    ):
                        raise SpecMismatchError  # the rows are made again
                start = stop
            except self.failures.catches as error:
                if block == 1 or not isinstance(error, SpecMismatchError):
                    # A signal handler may raise after the last row. That row is named then.
                    failing = min(start + len(results), stop - 1)
                    where = [indices[failing]], int(opened.positions[failing])
                    opened.name_sample(error, failing)
                    raise self.failures.of(error, ticket.epoch, *where) from None
                # From now on each row is written before the next one is made.
                self._writes_at_once = True
                converter.watched.clear()
                if at_once:  # single calls find the wrong row
                    block = self._block_rows = 1
                    progress.begin_blocks(0)
        if fetched is not None:  # reads are not calls of the user's function
            calls_ns -= fetched.spent_ns - read_before_ns
        self._row_times.note(calls_ns // rows)
        return MadeRows(rows, oversize=opened.own, items=rows, arrays=arrays)

    # ---- whole batches: any row may fail, or rows are padded, ragged or text ----

    def _fill_batches(self, calls: Runner, opened: Opened) -> MadeRows:
        """Make whole batches and write them to the slot.

        Batches of varying size that do not fit are returned as `oversize`, and the caller writes
        them elsewhere.
        """
        assert self.form is not None, "rows before their shape is known"
        if self._packing is not None:
            return self._packing.fill(
                opened, lambda at, length: self._made(calls, opened, at, at + 1, length)
            )
        (buffer, base, capacity), fixed, count = opened.slot, self.form.fixed, len(opened.indices)
        arrays = [] if fixed is None else self._arrays(opened, count)
        batches: list[tuple[int, list[Block]]] = []
        failures: list[RowFailure] = []
        for number, (start, stop) in enumerate(opened.bounds()):
            if self.unit != "sample":
                batch, failed = self._of_one_call(calls, opened, start, stop)
                batches.append(batch)
            else:
                rows, good, failed = self._collect(calls, opened, start, stop)
                if fixed is None:
                    batches.append((len(rows), self._collated(rows, good)))
                else:
                    for row, leaves in enumerate(rows, start):
                        for array, leaf in zip(arrays, leaves, strict=True):
                            array[row] = leaf
            failures += [each._replace(batch=number) for each in failed]
        if fixed is not None:
            return MadeRows(count, tuple(failures), opened.own, count)
        layout = VaryingLayout(batches)
        filled = MadeRows(sum(rows for rows, _ in batches), tuple(failures), items=count)
        if layout.nbytes > capacity:
            return filled._replace(oversize=layout)
        layout.write(buffer, base)
        return filled

    def _collated(self, rows: list[_Leaves], good: list[int]) -> list[Block]:
        assert self.form is not None
        blocks: list[Block] = []
        for number, component in enumerate(self.form.spec.components):
            values = [leaves[number] for leaves in rows]
            blocks += collate(
                values, component, self._converter.paths[number], good, self.form.padding_at(number)
            )
        return blocks

    def _of_one_call(
        self, calls: Runner, opened: Opened, start: int, stop: int
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        """Return a whole batch (rows and blocks), made by one call, and its failures."""
        assert self.form is not None
        spec = self.form.spec
        try:
            arrays = self._made(calls, opened, start, stop)
        except WorkFailed as failed:
            if self.config.on_error.action == "raise":
                raise
            if self.config.on_error.action == "replace":
                raise nothing_to_repeat(failed) from None
            return (0, self._collated([], [])), [RowFailure(failed.failure, 0)]
        pairs = zip(arrays, spec.components, strict=True)
        blocks = [
            block for array, component in pairs for block in blocks_of_array(array, component)
        ]
        return (len(arrays[0]) if arrays[0].ndim else 1, blocks), []

    def _collect(
        self, calls: Runner, opened: Opened, start: int, stop: int
    ) -> tuple[list[_Leaves], list[int], list[RowFailure]]:
        """Return the rows of one batch, the indices they come from, and the failures.

        The error policy has been applied.
        """
        action = self.config.on_error.action
        rows: list[_Leaves | None] = []
        failures: list[RowFailure] = []
        for at in range(start, stop):
            try:
                rows.append(self._made(calls, opened, at, at + 1))
            except WorkFailed as failed:
                if action == "raise":
                    raise
                if action == "replace" and at == stop - 1 and not any(rows):
                    raise nothing_to_repeat(failed) from None
                failures.append(RowFailure(failed.failure, at - start))
                rows.append(None)
        good = [leaves for leaves in rows if leaves is not None]
        indices = opened.indices[start:stop]
        if action == "skip" or not failures:
            return (
                good,
                [index for leaves, index in zip(rows, indices, strict=True) if leaves is not None],
                failures,
            )
        stand_in, replaced = good[-1], []
        # the *next* good row is the replacement; at the end, the last one
        for leaves in reversed(rows):
            stand_in = leaves or stand_in
            replaced.append(stand_in)
        return replaced[::-1], indices, failures

    def _made(
        self, calls: Runner, opened: Opened, start: int, stop: int, length: int | None = None
    ) -> _Leaves:
        """Return the leaves that one call makes of these rows.

        Copy leaves that are written only after later calls, because the function may refill its
        arrays. With `length`, leaves are written at once, and must have this length.

        Raises:
            WorkFailed: the call failed, or ended workers before.
        """
        ticket, indices = opened.ticket, opened.indices[start:stop]
        excluded = self.failures.excluded(ticket.epoch, indices)
        if excluded is not None:
            raise WorkFailed(excluded, RuntimeError(excluded.text))
        self.progress.note(indices[0])
        try:
            leaves = self._converter.row(calls.unit(opened, start, stop), indices[0])
            if length is not None:
                self._converter.check_length(leaves, length, indices[0])
                return leaves
            return (
                [leaf.copy() for leaf in leaves]
                if self.unit == "sample" or ticket.batches > 1
                else leaves
            )
        except self.failures.catches as error:
            full_rows = 0 if self.plan.rows_vary else self.plan.most_rows
            if (
                isinstance(error, SpecMismatchError)
                and self.unit == "batch"
                and len(indices) < full_rows
            ):
                error = SpecMismatchError(
                    f"{error}. This batch is shorter, with {len(indices)} of {full_rows} items. "
                    "Set drop_remainder=True to drop it"
                )
            opened.name_sample(error, start)
            raise self.failures.of(
                error, ticket.epoch, indices, int(opened.positions[start])
            ) from None
