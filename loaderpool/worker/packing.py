"""`Packing`: packs several samples into each row of a batch.

The plan of an epoch determines the place of each sample (`plan/packed.py`). So each sample is
written as soon as it is made. If a sample is skipped, its place is padded, like the end of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import fill_value
from loaderpool.memory.layout import BatchForm, Block, VaryingLayout
from loaderpool.plan.packed import PackedPlan
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.tickets import MadeRows, Opened, WorkFailed

_ADDED = 2  # number of components that are added to those of a sample: segment_ids and positions


class Packing:
    """Writes batches of packed rows into slots.

    Args:
        form: Form of the batches.
        skips: True to leave out samples that fail.
    """

    def __init__(self, form: BatchForm, skips: bool) -> None:
        spec, self._place, self._skips = form.spec, form.packed_at, skips
        self._shapes = [
            (tuple(int(size) for size in component.shape[1:] if size is not None), component.dtype)
            for component in spec.components
        ]
        self._fillers = [
            fill_value(form.padding_at(number), component, path)
            for number, (component, path) in enumerate(
                zip(spec.components, spec.paths, strict=True)
            )
        ]
        self._counting = np.arange(self._shapes[0][0][0], dtype=np.int32)

    def fill(
        self, opened: Opened, make: Callable[[int, int], Sequence[npt.NDArray[Any]]]
    ) -> MadeRows:
        """Make all batches of a ticket, and write them to its slot.

        Args:
            opened: The ticket.
            make: Returns the components of a sample. Called with the number of the item in the
                ticket, and the length that its sample must have.

        Raises:
            WorkFailed: A sample failed, and `skips` is False.
        """
        ticket, count = opened.ticket, len(self._shapes)
        assert opened.plan is not None
        plan = opened.plan.after(ticket.rest)
        assert isinstance(plan, PackedPlan)
        numbers = range(ticket.batch, ticket.batch + ticket.batches)
        batches = [plan.row_lengths(ticket.epoch, number) for number in numbers]
        arrays: list[npt.NDArray[Any]] = []
        self._write(
            opened,
            [self._stored(len(each), sum(map(sum, each)), arrays.append) for each in batches],
        )
        failures: list[RowFailure] = []
        # For each batch: number of good samples, and their total length.
        made: list[tuple[int, int]] = []
        at = 0
        for number, rows in enumerate(batches):
            parts = arrays[number * count : (number + 1) * count]
            for part, filler in zip(parts, self._fillers, strict=True):
                part[...] = filler
            segments, positions = parts[self._place : self._place + _ADDED]
            del parts[self._place : self._place + _ADDED]
            first, good, tokens = at, 0, 0
            for row, lengths in enumerate(rows):
                end = 0
                for segment, length in enumerate(lengths, 1):
                    start, end = end, end + length
                    try:
                        leaves = make(at, length)
                    except WorkFailed as failed:
                        if not self._skips:
                            raise
                        failures.append(RowFailure(failed.failure, at - first, number))
                    else:
                        for part, leaf in zip(parts, leaves, strict=True):
                            part[row, start:end] = leaf
                        segments[row, start:end] = segment
                        positions[row, start:end] = self._counting[:length]
                        good, tokens = good + 1, tokens + length
                    at += 1
            made.append((good, tokens))
        if failures:
            pairs = zip(batches, made, strict=True)
            self._write(
                opened,
                [
                    self._stored(len(rows), tokens, _keep, has_rows=good > 0)
                    for rows, (good, tokens) in pairs
                ],
            )
        return MadeRows(at - len(failures), tuple(failures), items=at)

    def _stored(
        self,
        rows: int,
        tokens: int,
        fill: Callable[[npt.NDArray[Any]], None],
        has_rows: bool = True,
    ) -> tuple[int, list[Block]]:
        """Return a batch for `VaryingLayout`.

        Args:
            rows: Number of rows.
            tokens: Total length of all samples.
            fill: Called with the array of each component.
            has_rows: False if all samples were skipped. The batch then counts as empty.
        """
        blocks = [
            Block((rows, *shape), dtype, fill, tokens * math.prod(shape[1:]))
            for shape, dtype in self._shapes
        ]
        return rows if has_rows else 0, blocks

    def _write(self, opened: Opened, batches: Sequence[tuple[int, list[Block]]]) -> None:
        buffer, base, capacity = opened.slot
        layout = VaryingLayout(batches)
        assert layout.nbytes <= capacity, "a packed batch is larger than its buffer"
        layout.write(buffer, base)


def _keep(array: npt.NDArray[Any]) -> None:
    """Do nothing, because the array was filled before."""
