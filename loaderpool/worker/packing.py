"""`Packing`: packs several samples into each row of a batch.

The plan of an epoch determines the place of each sample (`plan/packed.py`). So segment ids and
positions are written first, and each sample as soon as it is made. If a sample is skipped, its
place is padded, like the end of a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import fill_value
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm, Block, VaryingLayout
from loaderpool.plan.packed import PackedPlan
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.reports import RowFailure
from loaderpool.worker.rows import Converter
from loaderpool.worker.tickets import MadeRows, Opened, WorkFailed

_ADDED = 2  # number of components that are added to those of a sample: segment_ids and positions

_Arrays = list[npt.NDArray[Any]]
_Part = TypeVar("_Part")


class Packing:
    """Writes batches of packed rows into slots, one ticket at a time.

    Args:
        form: Form of the batches.
        converter: Converts and checks samples.
    """

    def __init__(self, form: BatchForm, converter: Converter) -> None:
        spec, self._converter = form.spec, converter
        self._added = slice(form.packed_at, form.packed_at + _ADDED)
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
        self._own_fillers = self._own(self._fillers)
        assert form.item_spec is not None
        self._flatten = form.item_spec.structure.flatten
        self._kinds = self._own([(dtype, shape[1:]) for shape, dtype in self._shapes])
        # For each batch of the ticket: all its components, with their rows joined.
        self._batches: list[_Arrays] = []
        # For each sample: its components, of the whole batch, and its range in them.
        self._places: list[tuple[_Arrays, int, int]] = []

    def _own(self, parts: list[_Part]) -> list[_Part]:
        """Return the parts of a sample's components, without those of the added ones."""
        return parts[: self._added.start] + parts[self._added.stop :]

    def open(self, opened: Opened) -> list[tuple[int, int, int]]:
        """Lay out the slot of a ticket. Fill it with padding, segment ids and positions.

        Returns:
            For each batch, the number of its rows, its items, and their total length.
        """
        ticket = opened.ticket
        assert opened.plan is not None
        plan = opened.plan.after(ticket.rest)
        assert isinstance(plan, PackedPlan) and plan.batch_size is not None
        length = plan.length
        lengths, counts = plan.row_items(ticket.epoch, ticket.batch, ticket.batches)
        row_stops = counts.cumsum()
        row_firsts = row_stops - counts
        begins = lengths.cumsum() - lengths
        tokens = np.add.reduceat(lengths, row_firsts)
        # The padding of a row counts as its last sample, with the segment id 0.
        numbers = np.arange(1, len(lengths) + 1) - np.repeat(row_firsts, counts)
        ids = np.insert(numbers, row_stops, 0).astype(np.int32)
        ranges = np.insert(lengths, row_stops, length - tokens)
        segments = np.repeat(ids, ranges)
        positions = np.arange(len(segments), dtype=np.int32)
        positions -= np.repeat((ranges.cumsum() - ranges).astype(np.int32), ranges)
        positions *= segments > 0
        rows = np.arange(len(counts))
        begins += np.repeat(rows % plan.batch_size * length - begins[row_firsts], counts)
        ends = begins + lengths

        firsts = rows[:: plan.batch_size]
        columns = [np.add.reduceat(each, firsts) for each in (np.ones_like(rows), counts, tokens)]
        batches = [*zip(*(column.tolist() for column in columns), strict=True)]
        arrays: _Arrays = []
        self._write(opened, [self._stored(each[0], each[2], arrays.append) for each in batches])
        self._batches, self._places = [], []
        token, item = 0, 0
        for number, (batch_rows, items, _) in enumerate(batches):
            parts = arrays[number * len(self._shapes) : (number + 1) * len(self._shapes)]
            joined = [part.reshape(-1, *part.shape[2:]) for part in parts]
            added, own = joined[self._added], self._own(joined)
            for part, filler in zip(own, self._own_fillers, strict=True):
                part[...] = filler
            stop = token + batch_rows * length
            added[0][:], added[1][:] = segments[token:stop], positions[token:stop]
            self._batches.append(joined)
            bounds = begins[item : item + items].tolist(), ends[item : item + items].tolist()
            self._places += zip(itertools.repeat(own), *bounds)
            token, item = stop, item + items
        return batches

    def writer(self, arrays: object, row: int) -> Callable[[object], object]:
        """Return a function that writes one result after the other, from the item `row` on.

        As `Converter.writer`; `arrays` is unused, because `open` has found the places.
        """
        places = itertools.islice(self._places, row, None)
        flatten, convert, kinds = self._flatten, self._converter.leaf, self._kinds

        def write(result: object) -> None:
            own, begin, end = next(places)
            try:
                for component, (leaf, array, kind) in enumerate(
                    zip(flatten(result), own, kinds, strict=True)
                ):
                    is_plain = type(leaf) is np.ndarray and (leaf.dtype, leaf.shape[1:]) == kind
                    value = leaf if is_plain else convert(leaf, component, 0)
                    if len(value) != end - begin:
                        raise SpecMismatchError
                    array[begin:end] = value
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                if is_of_a_handler(error):
                    raise
                raise SpecMismatchError from None

        return write

    def write_row(self, arrays: object, row: int, result: object, index: int) -> None:
        """Write the result of one call. `row` is the number of the item in the ticket.

        As `Converter.write_row`; `arrays` is unused.

        Raises:
            SpecMismatchError: The result differs from the spec, or has another length.
        """
        own, begin, end = self._places[row]
        leaves = self._converter.row(result, index)
        self._converter.check_length(leaves, end - begin, index)
        for array, leaf in zip(own, leaves, strict=True):
            array[begin:end] = leaf

    def fill(self, opened: Opened, make: Callable[[int, int], _Arrays]) -> MadeRows:
        """Make all batches of a ticket, without the samples that fail.

        Args:
            opened: The ticket.
            make: Returns the components of a sample. Called with the number of the item in the
                ticket, and the length that its sample must have.
        """
        at, failures, left = 0, list[RowFailure](), list[tuple[int, int, int]]()
        for number, (rows, items, tokens) in enumerate(self.open(opened)):
            first, good = at, items
            for at in range(first, first + items):
                own, begin, end = self._places[at]
                try:
                    for array, leaf in zip(own, make(at, end - begin), strict=True):
                        array[begin:end] = leaf
                except WorkFailed as failed:
                    failures.append(RowFailure(failed.failure, at - first, number))
                    for part, filler in zip(self._batches[number], self._fillers, strict=True):
                        part[begin:end] = filler
                    good, tokens = good - 1, tokens - (end - begin)
            at = first + items
            left.append((rows, tokens, good))
        if failures:
            self._write(
                opened,
                [
                    self._stored(rows, tokens, _keep, has_rows=good > 0)
                    for rows, tokens, good in left
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
