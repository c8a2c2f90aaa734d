"""One loader's work in the process that does it: from (epoch, batch, rows) to the bytes of a slot.

The same code runs in a worker and, with `workers=0`, in the caller's process, so the bits are the same. What it is
given are positions of the plan; what it makes depends on nothing else, so any process may do any part, and again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool import clock
from loaderpool.config import LoaderConfig
from loaderpool.memory.board import Board, Field
from loaderpool.memory.form import BatchForm, UnitKind, unit_of
from loaderpool.memory.layout import Block, Packing
from loaderpool.plan.order import Plan
from loaderpool.spec import ElementSpec, sample_spec
from loaderpool.worker.calls import Calls
from loaderpool.worker.collate import blocks_of_array, collate
from loaderpool.worker.failures import Failure, RowFailure, describe_failure, describe_timeout
from loaderpool.worker.jobs import Abandoned, Filled, Job, Probe, WorkFailed
from loaderpool.worker.rows import Converter, ReusedBuffer, RowWriter

__all__ = ["Work"]

_Result = TypeVar("_Result")

# Rows are made one by one where a row is at least this large or slow, else in blocks: the look at "abandoned", the note
# on the board and the write then cost a share of a percent.
_SINGLE_ROW_BYTES = 1 << 15
_SINGLE_ROW_NS = 20_000
_BLOCK_ROWS = 128
# Samples that the probe tries where errors may be skipped: fewer give up on a bad start, more delay an error that all
# samples have.
_PROBES = 64


class _RowError(Exception):
    """A row of a block failed when it was written."""

    def __init__(self, row: int, error: BaseException) -> None:
        self.row = row
        self.error = error


class Work:
    """Calls the user's function for the plan's positions.

    Args:
        payload: what `Loader` shipped: source, fn, batch_fn, setup, config, plan, given_spec, takes_rng, takes_out.
        words: the board (or a stand-in) to note progress on.
        cell: first word of this worker's cell.
        worker: this worker's number, None in the caller's process.
        catches: what is taken for an error of the function; BaseException in a worker, which has no user at its keys.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        words: memoryview,
        cell: int,
        worker: int | None,
        catches: type[BaseException] = BaseException,
    ) -> None:
        self.config: LoaderConfig = payload["config"]
        self.plan: Plan = payload["plan"]
        self._calls = Calls(payload)
        self._setup: Callable[[], Any] | None = payload["setup"]
        self.unit: UnitKind = unit_of(self.config, payload["batch_fn"])
        self._given_spec: ElementSpec | None = payload["given_spec"]
        self._words, self._cell, self._worker = words, cell, worker
        self._catches = catches
        self._row_ns = self._latest_row_ns = 0
        self._copies_rows = False
        self._excluded: dict[tuple[int, int], Failure] = {}
        self.form: BatchForm | None = None
        self._converter: Converter
        self._writer: RowWriter
        self._block_rows = 1

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
            setup()
        except self._catches as error:
            self._setup = setup
            raise WorkFailed(
                dataclasses.replace(
                    describe_failure(error, epoch=0, worker=self._worker), is_setup=True
                ),
                error,
            ) from None

    def set_form(self, form: BatchForm, is_given: bool) -> None:
        """Take the batches' form, as the trainer decided it."""
        self.form = form
        self._calls.pack_out = form.spec.structure.pack
        self._converter = Converter(form.spec, is_given=is_given, has_batch_axis=self.unit != "sample")
        if form.fixed is not None:
            self._writer = RowWriter(self._converter)
            is_small = max(form.fixed.row_bytes, default=0) < _SINGLE_ROW_BYTES
            in_blocks = is_small and not self._calls.takes_out and self.config.timeout_s is None
            self._block_rows = _BLOCK_ROWS if in_blocks else 1

    def exclude(self, epoch: int, index: int, ran_s: float) -> None:
        """Count a sample as failed without running it: it hung a worker."""
        self._excluded[epoch, index] = describe_timeout(
            index=index,
            epoch=epoch,
            worker=self._worker,
            ran_s=ran_s,
            timeout_s=self.config.timeout_s or 0.0,
            stacks="",
        )

    def probe(self, epoch: int) -> Probe:
        """Call the function for the epoch's first sample (or batch), keep the result, and tell what it is like.

        Where failing samples are left out or replaced, the first good one of a few.

        Raises:
            WorkFailed: the function raised, or returned what no batch can be made of.
        """
        action = self.config.on_error.action
        may_try_more = action == "skip" or (action == "replace" and self.unit == "sample")
        first_error: WorkFailed | None = None
        for positions in self._probe_positions(_PROBES if may_try_more else 1):
            try:
                return self._probe_at(epoch, positions)
            except WorkFailed as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _probe_positions(self, most: int) -> Iterator[npt.NDArray[np.int64]]:
        for batch in range(min(most, self.plan.batches_per_epoch)):
            positions = self.plan.positions(batch)
            if self.unit == "batch":
                yield positions
                continue
            for row in range(min(most, len(positions))):
                yield positions[row : row + 1]
            most -= len(positions)
            if most <= 0:
                return

    def _probe_at(self, epoch: int, positions: npt.NDArray[np.int64]) -> Probe:
        indices = self.plan.indices(epoch, positions)
        started = clock.monotonic_ns()
        self._words[self._cell + Field.STARTED_NS] = started
        self._words[self._cell + Field.INDEX] = indices[0] + 1
        result = self._guarded(lambda: self._calls.unit(epoch, positions.tolist(), indices), epoch, indices, positions)
        elapsed = clock.monotonic_ns() - started
        self._words[self._cell + Field.INDEX] = 0
        try:
            spec = sample_spec(result, self._given_spec)
            leaves = spec.structure.flatten(result)
        except Exception as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None
        # A copy: the function may fill the same buffer again before this result's turn.
        kept = spec.structure.pack([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])
        self._calls.keep(epoch, indices[0], kept)
        return Probe(spec, sum(_nbytes(leaf) for leaf in leaves), len(indices), elapsed)

    def forget_probe(self) -> None:
        """The source has changed: the probe's result is not what its turn would give now."""
        self._calls.forget()

    def _guarded(
        self, work: Callable[[], _Result], epoch: int, indices: list[int], positions: npt.NDArray[np.int64]
    ) -> _Result:
        """Run `work`, with whatever it raises as a WorkFailed about these items."""
        try:
            return self._calls.watched(work)
        except (Abandoned, WorkFailed):
            raise
        except self._catches as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None

    # ---- tickets ----

    def fill(self, job: Job, buffer: Any, base: int, capacity: int) -> Filled:
        """Make the job's rows in the slot that starts at byte `base` of `buffer` and holds `capacity` bytes.

        Raises:
            WorkFailed: the function raised or returned what the spec does not allow.
            Abandoned: the run's mark was seen on the board.
        """
        form = self.form
        assert form is not None, "a ticket before the layout"
        if job.count == 1:
            positions = self.plan.positions(job.batch, job.row_start, job.row_stop)
        else:
            positions = self.plan.positions_of(job.batch, job.count)
        indices = self.plan.indices(job.epoch, positions)
        if form.fixed is None:
            make = self._fill_packed
        elif self.config.on_error.action == "raise":
            make = self._fill_rows
        else:
            make = self._fill_collected
        started = clock.monotonic_ns()
        filled = self._guarded(
            lambda: make(job, positions, indices, buffer, base, capacity), job.epoch, indices, positions
        )
        latest, self._latest_row_ns = self._latest_row_ns, (clock.monotonic_ns() - started) // max(1, len(indices))
        self._row_ns = min(latest, self._latest_row_ns)  # of two: one may have been interrupted
        return filled

    def _fill_rows(
        self, job: Job, positions: npt.NDArray[np.int64], indices: list[int], buffer: Any, base: int, capacity: int
    ) -> Filled:
        """Rows straight into a fixed slot."""
        assert self.form is not None and self.form.fixed is not None
        layout = self.form.fixed
        arrays = layout.arrays(buffer, base, job.row_start + len(indices))
        block = self._block_rows if self._row_ns < _SINGLE_ROW_NS and not job.attempt else 1
        words, index_word, started_word = self._words, self._cell + Field.INDEX, self._cell + Field.STARTED_NS
        mark, run = Board.mark(job.run), job.run
        places = positions.tolist() if self._calls.needs_positions else indices
        for start in range(0, len(indices), block):
            if words[mark] == run:
                raise Abandoned
            words[index_word] = indices[start] + 1
            words[started_word] = clock.monotonic_ns()
            stop = start + block
            part, row = indices[start:stop], job.row_start + start
            results: list[Any] = []
            try:
                self._calls.samples(job.epoch, places[start:stop], part, results, arrays, row)
                self._write(arrays, row, results, part, job, places[start:stop])
            except _RowError as error:
                failing = start + error.row
                raise self._failed(error.error, job.epoch, [indices[failing]], int(positions[failing])) from None
            except self._catches as error:
                failing = start + len(results)
                raise self._failed(error, job.epoch, [indices[failing]], int(positions[failing])) from None
        return Filled(len(indices), layout.used_bytes(len(indices)))

    def _write(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        row: int,
        results: list[Any],
        indices: Sequence[int],
        job: Job,
        places: Sequence[int],
    ) -> None:
        """Write a block of results; raises _RowError for the first one that does not fit."""
        try:
            self._writer.write(arrays, row, results, indices)
            return
        except ReusedBuffer:
            self._block_rows = 1  # from now on each row is written before the next one is made
        except self._catches as error:
            if len(results) == 1:
                raise _RowError(0, error) from None
            for at, result in enumerate(results):
                try:
                    self._writer.write(arrays, row + at, [result], indices[at : at + 1])
                except self._catches as one_error:
                    raise _RowError(at, one_error) from None
            return
        for at in range(len(results)):
            again: list[Any] = []
            try:
                self._calls.samples(job.epoch, places[at : at + 1], indices[at : at + 1], again, arrays, row + at)
                self._writer.write(arrays, row + at, again, indices[at : at + 1])
            except self._catches as error:
                raise _RowError(at, error) from None

    def _fill_collected(
        self, job: Job, positions: npt.NDArray[np.int64], indices: list[int], buffer: Any, base: int, capacity: int
    ) -> Filled:
        """Rows into a fixed slot, the next good row of the batch standing in for one that fails."""
        assert self.form is not None and self.form.fixed is not None
        layout = self.form.fixed
        arrays = layout.arrays(buffer, base, len(indices))
        failures: list[RowFailure] = []
        for start, stop in self._batch_bounds(job, len(indices)):
            rows, _, failed = self._collect(job, positions[start:stop], indices[start:stop])
            failures += failed
            for row, leaves in enumerate(rows):
                for array, leaf in zip(arrays, leaves, strict=True):
                    array[start + row] = leaf
        return Filled(len(indices), layout.used_bytes(len(indices)), tuple(failures))

    def _fill_packed(
        self, job: Job, positions: npt.NDArray[np.int64], indices: list[int], buffer: Any, base: int, capacity: int
    ) -> Filled:
        """Whole batches, packed; what does not fit comes back to be written elsewhere."""
        batches: list[tuple[int, list[Block]]] = []
        failures: list[RowFailure] = []
        waiting: list[list[npt.NDArray[Any]]] = []  # samples of all batches, until the chunk is written
        for start, stop in self._batch_bounds(job, len(indices)):
            if self.unit == "sample":
                batch, failed = self._packed_samples(job, positions[start:stop], indices[start:stop], waiting)
            else:
                batch, failed = self._packed_unit(job, positions[start:stop], indices[start:stop])
            batches.append(batch)
            failures += failed
        if job.count > 1 and not self._copies_rows and _share_arrays(waiting):
            self._copies_rows = True  # an array came back in another batch of the chunk
            return self._fill_packed(job, positions, indices, buffer, base, capacity)
        packing = Packing(batches)
        rows = sum(rows for rows, _ in batches)
        if packing.nbytes > capacity:
            return Filled(rows, packing.data_bytes, tuple(failures), packing)
        packing.write(buffer, base)
        return Filled(rows, packing.data_bytes, tuple(failures))

    def _batch_bounds(self, job: Job, rows: int) -> list[tuple[int, int]]:
        if job.count == 1:
            return [(0, rows)]
        size = rows // job.count  # a chunk is of full batches only
        return [(start, start + size) for start in range(0, rows, size)]

    def _packed_samples(
        self,
        job: Job,
        positions: npt.NDArray[np.int64],
        indices: list[int],
        waiting: list[list[npt.NDArray[Any]]],
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        assert self.form is not None
        rows, good, failures = self._collect(job, positions, indices)
        waiting += rows
        blocks: list[Block] = []
        for number, component in enumerate(self.form.spec.components):
            values = [leaves[number] for leaves in rows]
            try:
                blocks += collate(values, component, self._converter.paths[number], good, self.config.pad)
            except self._catches as error:
                raise self._failed(error, job.epoch, indices, int(positions[0])) from None
        return (len(rows), blocks), failures

    def _packed_unit(
        self, job: Job, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        """A batch that one call makes whole."""
        assert self.form is not None
        self._note(job, indices[0])
        components = self.form.spec.components
        try:
            result = self._calls.unit(job.epoch, positions.tolist(), indices)
            arrays = self._converter.row(result, indices[0])
            if job.count > 1:  # they wait for the chunk's other batches
                arrays = [array.copy() for array in arrays]
        except Abandoned:
            raise
        except self._catches as error:
            failed = self._failed(error, job.epoch, indices, int(positions[0]))
            if self.config.on_error.action != "skip":
                raise failed from None
            empty = [Block((0,) * len(d), t, lambda out: None) for d, t in self._empty_blocks()]
            return (0, empty), [RowFailure(failed.failure, 0)]
        blocks: list[Block] = []
        for array, component in zip(arrays, components, strict=True):
            blocks += blocks_of_array(array, component)
        rows = len(arrays[0]) if arrays[0].ndim else 1
        return (rows, blocks), []

    def _empty_blocks(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        assert self.form is not None
        shapes: list[tuple[int, ...]] = []
        for component in self.form.spec.components:
            shapes.append((0,) * max(1, len(component.shape)))
            if component.text is not None or component.ragged:
                shapes.append((0,))
        return list(zip(shapes, self.form.block_dtypes, strict=True))

    def _collect(
        self, job: Job, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[list[list[npt.NDArray[Any]]], list[int], list[RowFailure]]:
        """One batch's rows as converted components, the error policy applied; and the indices they came from."""
        action = self.config.on_error.action
        rows: list[list[npt.NDArray[Any]] | None] = []
        failures: list[RowFailure] = []
        last_error: WorkFailed | None = None
        for row, (index, position) in enumerate(zip(indices, positions.tolist(), strict=True)):
            if (job.epoch, index) in self._excluded:
                failures.append(RowFailure(self._excluded[job.epoch, index], row))
                rows.append(None)
                continue
            self._note(job, index)
            try:
                results: list[Any] = []
                self._calls.samples(job.epoch, [position], [index], results)
                # Rows wait for their batch to be whole: one that looks at memory of somebody else's is copied out now.
                converted = self._converter.row(results[0], index)
                rows.append([leaf.copy() if leaf.base is not None or self._copies_rows else leaf for leaf in converted])
            except self._catches as error:
                last_error = self._failed(error, job.epoch, [index], position)
                if action == "raise":
                    raise last_error from None
                failures.append(RowFailure(last_error.failure, row))
                rows.append(None)
        if not self._copies_rows and _share_arrays(rows):
            self._copies_rows = True  # the function returns one array again and again
            return self._collect(job, positions, indices)
        if not failures:
            return rows, indices, []  # type: ignore[return-value]
        if action == "skip":
            good = [(leaves, index) for leaves, index in zip(rows, indices, strict=True) if leaves is not None]
            return [leaves for leaves, _ in good], [index for _, index in good], failures
        stand_in = next((leaves for leaves in reversed(rows) if leaves is not None), None)
        if stand_in is None and last_error is not None:  # no good row in the whole batch
            raise last_error
        replaced: list[list[npt.NDArray[Any]]] = []
        for leaves in reversed(rows):  # the *next* good row stands in; at the end, the last one
            if leaves is not None:
                stand_in = leaves
            assert stand_in is not None
            replaced.append(stand_in)
        return replaced[::-1], indices, failures

    def _note(self, job: Job, index: int) -> None:
        words = self._words
        if words[Board.mark(job.run)] == job.run:
            raise Abandoned
        words[self._cell + Field.INDEX] = index + 1
        words[self._cell + Field.STARTED_NS] = clock.monotonic_ns()

    def _failed(self, error: BaseException, epoch: int, indices: list[int], position: int | None) -> WorkFailed:
        one = len(indices) == 1
        failure = describe_failure(
            error,
            epoch=epoch,
            worker=self._worker,
            index=indices[0] if one else None,
            indices=() if one else tuple(indices),
            position=position,
        )
        return WorkFailed(failure, error)


def _share_arrays(rows: Sequence[Sequence[npt.NDArray[Any]] | None]) -> bool:
    distinct = {id(leaves): leaves for leaves in rows if leaves is not None}  # one row may stand in for others
    arrays = [id(leaf) for leaves in distinct.values() for leaf in leaves]
    return len(set(arrays)) < len(arrays)


def _nbytes(leaf: Any) -> int:
    array = np.asarray(leaf)
    if array.dtype != object:
        return array.nbytes
    return sum(len(piece) + 8 for piece in array.ravel().tolist() if isinstance(piece, (str, bytes)))
