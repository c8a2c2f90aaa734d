"""Whole batches: rows of which any may fail, or that are padded, ragged or text.

The error policy is applied here: a row that fails is left out or replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ArraySpec, fill_value, mismatch
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm, Block, VaryingLayout
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.calls import Calls
from loaderpool.worker.jobs import Abandoned, Exclusions, Filled, Job, Opened, WorkFailed
from loaderpool.worker.progress import Progress
from loaderpool.worker.rows import Converter

if TYPE_CHECKING:
    from loaderpool.worker.threads import TicketCalls

_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)
_Leaves = list[npt.NDArray[Any]]


class BatchMaker:
    """Makes a ticket's batches, each one whole before it is written.

    `full_rows` are the items that a batch has unless it is the last one; 0: they vary.
    """

    def __init__(
        self, config: LoaderConfig, unit: UnitKind, progress: Progress, exclusions: Exclusions, full_rows: int
    ) -> None:
        self._config, self._unit, self._progress, self._exclusions = config, unit, progress, exclusions
        self._full_rows = full_rows
        self._form: BatchForm
        self._converter: Converter

    def set_form(self, form: BatchForm, converter: Converter) -> None:
        """Take the batches' form, and what makes a result's leaves fit it."""
        self._form, self._converter = form, converter

    def fill(self, opened: Opened, buffer: Any, base: int, capacity: int, calls: Calls | TicketCalls) -> Filled:
        """Fill a slot with whole batches; of a varying one, what does not fit comes back to be written elsewhere."""
        job, positions, indices, _ = opened
        fixed = self._form.fixed
        arrays = None if fixed is None else fixed.arrays(buffer, base, len(indices))
        batches: list[tuple[int, list[Block]]] = []
        failures: list[RowFailure] = []
        make = self._of_samples if self._unit == "sample" else self._of_one_call
        for number, (start, stop) in enumerate(job.bounds(len(indices))):
            places, part = positions[start:stop], indices[start:stop]
            if arrays is None:
                batch, failed = make(calls, job, start, places, part)
                batches.append(batch)
            else:
                rows, _, failed = self._collect(calls, job, start, places, part)
                for row, leaves in enumerate(rows):
                    for array, leaf in zip(arrays, leaves, strict=True):
                        array[start + row] = leaf
            failures += [each._replace(batch=number) for each in failed]
        if arrays is not None:
            return Filled(len(indices), tuple(failures))
        layout = VaryingLayout(batches)
        filled = Filled(sum(rows for rows, _ in batches), tuple(failures))
        if layout.nbytes > capacity:
            return filled._replace(oversize=layout)
        layout.write(buffer, base)
        return filled

    def _of_samples(
        self, calls: Calls | TicketCalls, job: Job, first: int, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        rows, good, failures = self._collect(calls, job, first, positions, indices)
        blocks: list[Block] = []
        for number, component in enumerate(self._form.spec.components):
            values = [leaves[number] for leaves in rows]
            path, pad = self._converter.paths[number], self._form.padding_at(number)
            try:
                blocks += collate(values, component, path, good, pad)
            except self._progress.catches as error:
                raise self._progress.failed(error, job.epoch, indices, int(positions[0])) from None
        return (len(rows), blocks), failures

    def _of_one_call(
        self, calls: Calls | TicketCalls, job: Job, first: int, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[tuple[int, list[Block]], list[RowFailure]]:
        """Return a batch that one call makes whole."""
        excluded = self._exclusions.find(job.epoch, indices)
        if excluded is not None:
            return (0, self._empty_blocks()), [RowFailure(excluded, 0)]
        self._progress.note(job, indices[0])
        try:
            arrays = self._converter.row(calls.unit(job.epoch, positions.tolist(), indices, first), indices[0])
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
        for array, component in zip(arrays, self._form.spec.components, strict=True):
            blocks += _blocks_of_array(array, component)
        return (len(arrays[0]) if arrays[0].ndim else 1, blocks), []

    def _empty_blocks(self) -> list[Block]:
        shapes: list[tuple[int, ...]] = []
        for component in self._form.spec.components:
            shapes.append((0,) * max(1, len(component.shape)))
            shapes += [(0,)] * ((component.text is not None) + component.ragged)
        pairs = zip(shapes, self._form.block_dtypes, strict=True)
        return [Block(shape, dtype, lambda out: None) for shape, dtype in pairs]

    def _collect(
        self, calls: Calls | TicketCalls, job: Job, first: int, positions: npt.NDArray[np.int64], indices: list[int]
    ) -> tuple[list[_Leaves], list[int], list[RowFailure]]:
        """Return one batch's rows, the error policy applied, and the indices they came from. Its first row is `first`.

        Rows wait for their batch to be whole, so each is a copy: the function may fill its arrays again for the next.
        """
        action = self._config.on_error.action
        rows: list[_Leaves | None] = []
        failures: list[RowFailure] = []
        last_error: WorkFailed | None = None
        for row, (index, position) in enumerate(zip(indices, positions.tolist(), strict=True)):
            excluded = self._exclusions.find(job.epoch, [index])
            if excluded is not None:
                failures.append(RowFailure(excluded, row))
                rows.append(None)
                continue
            self._progress.note(job, index)
            try:
                results: list[Any] = []
                calls.samples(job.epoch, [position], [index], results, None, first + row)
                rows.append([leaf.copy() for leaf in self._converter.row(results[0], index)])
            except Abandoned:
                raise
            except self._progress.catches as error:
                last_error = self._progress.failed(error, job.epoch, [index], position)
                if action == "raise":
                    raise last_error from None
                failures.append(RowFailure(last_error.failure, row))
                rows.append(None)
        good = [leaves for leaves in rows if leaves is not None]
        if action == "skip" or not failures:
            return good, [index for leaves, index in zip(rows, indices, strict=True) if leaves is not None], failures
        if not good:
            raise last_error or WorkFailed(failures[-1].failure, RuntimeError(failures[-1].failure.text))
        stand_in, replaced = good[-1], []
        for leaves in reversed(rows):  # the *next* good row stands in; at the end, the last one
            stand_in = stand_in if leaves is None else leaves
            replaced.append(stand_in)
        return replaced[::-1], indices, failures


# ---- samples into the blocks of a varying batch: stacked, padded, ragged or text ----


def collate(
    values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int], pad: Any
) -> list[Block]:
    """Return the blocks of one component of a batch of samples.

    Args:
        values: one array per row, already of the component's dtype (text: object arrays) and shape.
        component: its spec, batch axis included.
        path: its path in the element, for errors.
        indices: source index of each row, for errors.
        pad: what fills it up, None for the default; False: rows have one shape.

    Raises:
        SpecMismatchError: shapes differ, and it is neither padded nor ragged.
    """
    if component.ragged:
        return _ragged(values, component, path, indices)
    if pad is not False:
        return _padded(values, component, path, pad)
    shape = values[0].shape if values else tuple(n or 0 for n in component.shape[1:])
    for value, index in zip(values, indices, strict=True):
        if value.shape != shape:
            expected = ArraySpec(shape, component.dtype, component.text)
            raise mismatch(path, index, expected, value.shape, value.dtype, "rows")
    if component.text is not None:
        return _text_blocks(_pieces(values), (len(values), *shape))

    def stack(out: npt.NDArray[Any]) -> None:
        for row, value in enumerate(values):
            out[row] = value

    return [Block((len(values), *shape), component.dtype, stack)]


def _blocks_of_array(value: npt.NDArray[Any], component: ArraySpec) -> list[Block]:
    """Return the blocks of a component that the function returned as a whole batch."""
    if component.text is not None:
        return _text_blocks(_pieces([value]), value.shape)

    def copy(out: npt.NDArray[Any]) -> None:
        out[...] = value

    return [Block(value.shape, component.dtype, copy)]


def _ragged(values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int]) -> list[Block]:
    """Return all rows' own rows end to end, and where each begins."""
    inner = values[0].shape[1:] if values else tuple(n or 0 for n in component.shape[2:])
    for value, index in zip(values, indices, strict=True):
        if value.ndim == 0 or value.shape[1:] != inner:
            expected = ArraySpec((None, *inner), component.dtype, component.text)
            raise mismatch(path, index, expected, value.shape, value.dtype, "ragged")
    lengths = [len(value) for value in values]
    shape = (sum(lengths), *inner)

    def splits(out: npt.NDArray[Any]) -> None:
        out[0] = 0
        np.cumsum(lengths, out=out[1:])

    def join(out: npt.NDArray[Any]) -> None:
        start = 0
        for value in values:
            out[start : start + len(value)] = value
            start += len(value)

    is_text = component.text is not None
    joined = _text_blocks(_pieces(values), shape) if is_text else [Block(shape, component.dtype, join)]
    return [*joined, Block((len(values) + 1,), _INT64, splits)]


def _padded(values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, pad: Any) -> list[Block]:
    """Pad rows to the shape that holds them all, or to the lengths that the spec has."""
    largest = tuple(
        max((value.shape[axis] for value in values), default=0) if length is None else length
        for axis, length in enumerate(component.shape[1:])
    )
    unpadded = sum(value.size for value in values)
    is_full = unpadded == len(values) * math.prod(largest)
    filler = None if is_full else fill_value(pad, component, path)

    def fill(out: npt.NDArray[Any]) -> None:
        if not is_full:
            out[...] = filler
        for row, value in enumerate(values):
            corner: tuple[Any, ...] = (row, *map(slice, value.shape))
            out[corner] = value

    if component.text is not None:
        texts = np.empty((len(values), *largest), object)
        fill(texts)
        return _text_blocks(_pieces([texts]), texts.shape)
    return [Block((len(values), *largest), component.dtype, fill, unpadded)]


def _pieces(values: Sequence[npt.NDArray[Any]]) -> list[Any]:
    return [piece for value in values for piece in value.ravel().tolist()]


def _text_blocks(texts: list[Any], shape: tuple[int, ...]) -> list[Block]:
    pieces = [piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogateescape") for piece in texts]
    blob = b"".join(pieces)
    lengths = [len(piece) for piece in pieces]

    def fill_lengths(out: npt.NDArray[Any]) -> None:
        out.reshape(-1)[:] = lengths

    def fill_blob(out: npt.NDArray[Any]) -> None:
        out[:] = np.frombuffer(blob, np.uint8)

    return [Block(shape, _INT64, fill_lengths), Block((len(blob),), _BYTE, fill_blob)]
