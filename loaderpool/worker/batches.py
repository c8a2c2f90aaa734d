"""Whole batches: rows that wait for one another, because any may fail, be padded or have a size of its own.

The error policy is applied here: a row that fails is left out or replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.batch_form import BatchForm
from loaderpool.memory.layout import Block, VaryingLayout
from loaderpool.plan.base import bounds_of
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.calls import Maker
from loaderpool.worker.collate import blocks_of_array, collate
from loaderpool.worker.jobs import Abandoned, Exclusions, Filled, Job, Opened, WorkFailed
from loaderpool.worker.progress import Progress
from loaderpool.worker.reuse import share_arrays
from loaderpool.worker.rows import Converter


class BatchMaker:
    """Makes a ticket's batches, each one whole before it is written.

    Args:
        config: the loader's settings; of these the error policy matters.
        unit: what one call of the function makes.
        progress: where each sample is noted, and what failures are.
        exclusions: what is not run.
        full_rows: items that a batch has unless it is the last one; 0: they vary.
    """

    def __init__(
        self, config: LoaderConfig, unit: UnitKind, progress: Progress, exclusions: Exclusions, full_rows: int
    ) -> None:
        self._config, self._unit, self._progress, self._exclusions = config, unit, progress, exclusions
        self._full_rows = full_rows
        self._copies_rows = False
        self._form: BatchForm | None = None
        self._converter: Converter

    def set_form(self, form: BatchForm, converter: Converter) -> None:
        """Take the batches' form, and what makes a result's leaves fit it."""
        self._form, self._converter = form, converter

    def fill_fixed(self, opened: Opened, buffer: Any, base: int, capacity: int, calls: Maker) -> Filled:
        """Fill rows of a fixed slot, the next good row of the batch standing in for one that fails."""
        assert self._form is not None and self._form.fixed is not None
        job, positions, indices, _ = opened
        layout = self._form.fixed
        arrays = layout.arrays(buffer, base, len(indices))
        failures: list[RowFailure] = []
        for number, (start, stop) in enumerate(bounds_in(job, len(indices))):
            rows, _, failed = self._collect(calls, job, start, positions[start:stop], indices[start:stop])
            failures += _of_batch(number, failed)
            for row, leaves in enumerate(rows):
                for array, leaf in zip(arrays, leaves, strict=True):
                    array[start + row] = leaf
        return Filled(len(indices), tuple(failures))

    def fill_varying(self, opened: Opened, buffer: Any, base: int, capacity: int, calls: Maker) -> Filled:
        """Fill a varying slot with whole batches; what does not fit comes back to be written elsewhere."""
        job, positions, indices, _ = opened
        batches: list[tuple[int, list[Block]]] = []
        failures: list[RowFailure] = []
        waiting: list[list[npt.NDArray[Any]]] = []  # samples of all batches, until the chunk is written
        for number, (start, stop) in enumerate(bounds_in(job, len(indices))):
            if self._unit == "sample":
                batch, failed = self._varying_samples(
                    calls, job, start, positions[start:stop], indices[start:stop], waiting
                )
            else:
                batch, failed = self._varying_unit(calls, job, start, positions[start:stop], indices[start:stop])
            batches.append(batch)
            failures += _of_batch(number, failed)
        if job.count > 1 and not self._copies_rows and share_arrays(waiting):
            self._copies_rows = True  # an array came back in another batch of the chunk
            return self.fill_varying(opened, buffer, base, capacity, calls)
        layout = VaryingLayout(batches)
        rows = sum(rows for rows, _ in batches)
        if layout.nbytes > capacity:
            return Filled(rows, tuple(failures), layout)
        layout.write(buffer, base)
        return Filled(rows, tuple(failures))

    def _varying_samples(
        self,
        calls: Maker,
        job: Job,
        first: int,
        positions: npt.NDArray[np.int64],
        indices: list[int],
        waiting: list[list[npt.NDArray[Any]]],
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        assert self._form is not None
        rows, good, failures = self._collect(calls, job, first, positions, indices)
        waiting += rows
        blocks: list[Block] = []
        for number, component in enumerate(self._form.spec.components):
            values = [leaves[number] for leaves in rows]
            pad = self._form.padding_at(number)
            try:
                blocks += collate(values, component, self._converter.paths[number], good, pad)
            except self._progress.catches as error:
                raise self._progress.failed(error, job.epoch, indices, int(positions[0])) from None
        return (len(rows), blocks), failures

    def _varying_unit(
        self, calls: Maker, job: Job, first: int, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        """Return a batch that one call makes whole."""
        assert self._form is not None
        excluded = self._exclusions.find(job.epoch, indices)
        if excluded is not None:
            return (0, self._empty_blocks()), [RowFailure(excluded, 0)]
        self._progress.note(job, indices[0])
        components = self._form.spec.components
        try:
            result = calls.unit(job.epoch, positions.tolist(), indices, first)
            arrays = self._converter.row(result, indices[0])
            if job.count > 1:  # they wait for the chunk's other batches
                arrays = [array.copy() for array in arrays]
        except Abandoned:
            raise
        except self._progress.catches as error:
            if isinstance(error, SpecMismatchError) and self._unit == "batch" and len(indices) < self._full_rows:
                error = SpecMismatchError(
                    f"{error}. This batch is shorter, with {len(indices)} of {self._full_rows} items. "
                    "Set drop_remainder=True to drop it"
                )
            failed = self._progress.failed(error, job.epoch, indices, int(positions[0]))
            if self._config.on_error.action != "skip":
                raise failed from None
            return (0, self._empty_blocks()), [RowFailure(failed.failure, 0)]
        blocks: list[Block] = []
        for array, component in zip(arrays, components, strict=True):
            blocks += blocks_of_array(array, component)
        rows = len(arrays[0]) if arrays[0].ndim else 1
        return (rows, blocks), []

    def _empty_blocks(self) -> list[Block]:
        assert self._form is not None
        shapes: list[tuple[int, ...]] = []
        for component in self._form.spec.components:
            shapes.append((0,) * max(1, len(component.shape)))
            shapes += [(0,)] * ((component.text is not None) + component.ragged)
        pairs = zip(shapes, self._form.block_dtypes, strict=True)
        return [Block(shape, dtype, lambda out: None) for shape, dtype in pairs]

    def _collect(
        self, calls: Maker, job: Job, first: int, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[list[list[npt.NDArray[Any]]], list[int], list[RowFailure]]:
        """Return one batch's rows as converted components, the error policy applied; and the indices they came from.

        Its first row is the job's `first`.
        """
        action = self._config.on_error.action
        rows: list[list[npt.NDArray[Any]] | None] = []
        failures: list[RowFailure] = []
        last_error: WorkFailed | None = None
        note = self._progress.note
        for row, (index, position) in enumerate(zip(indices, positions.tolist(), strict=True)):
            excluded = self._exclusions.find(job.epoch, [index])
            if excluded is not None:
                failures.append(RowFailure(excluded, row))
                rows.append(None)
                continue
            note(job, index)
            try:
                results: list[Any] = []
                calls.samples(job.epoch, [position], [index], results, None, first + row)
                # Rows wait for their batch to be whole: one that looks at memory that is not its own is copied out now.
                converted = self._converter.row(results[0], index)
                rows.append([leaf.copy() if leaf.base is not None or self._copies_rows else leaf for leaf in converted])
            except Abandoned:
                raise
            except self._progress.catches as error:
                last_error = self._progress.failed(error, job.epoch, [index], position)
                if action == "raise":
                    raise last_error from None
                failures.append(RowFailure(last_error.failure, row))
                rows.append(None)
        if not self._copies_rows and share_arrays(rows):
            self._copies_rows = True  # the function returns one array again and again
            return self._collect(calls, job, first, positions, indices)
        if not failures:
            return rows, indices, []  # type: ignore[return-value]
        if action == "skip":
            good = [(leaves, index) for leaves, index in zip(rows, indices, strict=True) if leaves is not None]
            return [leaves for leaves, _ in good], [index for _, index in good], failures
        stand_in = next((leaves for leaves in reversed(rows) if leaves is not None), None)
        if stand_in is None:  # no good row in the whole batch
            raise last_error or WorkFailed(failures[-1].failure, RuntimeError(failures[-1].failure.text))
        replaced: list[list[npt.NDArray[Any]]] = []
        for leaves in reversed(rows):  # the *next* good row stands in; at the end, the last one
            if leaves is not None:
                stand_in = leaves
            replaced.append(stand_in)
        return replaced[::-1], indices, failures


def bounds_in(job: Job, rows: int) -> list[tuple[int, int]]:
    """Return where each batch of a job begins and ends among its rows."""
    if job.count == 1:
        return [(0, rows)]
    if job.batch_rows:
        return bounds_of(job.batch_rows)
    size = rows // job.count  # a chunk is of full batches only
    return [(start, start + size) for start in range(0, rows, size)]


def _of_batch(number: int, failures: list[RowFailure]) -> list[RowFailure]:
    return [each._replace(batch=number) for each in failures]
