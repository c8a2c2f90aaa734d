"""`Packing`: packs several samples into each row of a batch.

The plan of an epoch determines the place of each sample (`plan/packed.py`). So segment ids and
positions are written first, and each sample as soon as it is made. If a sample is skipped, its
place is padded, like the end of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import fill_value
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm
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
        self._fillers = [
            fill_value(form.padding_at(number), component, path)
            for number, (component, path) in enumerate(
                zip(spec.components, spec.paths, strict=True)
            )
        ]
        assert form.item_spec is not None and form.fixed is not None
        self._layout = layout = form.fixed
        self._flatten = form.item_spec.structure.flatten
        shapes = [shape[1:] for shape in layout.row_shapes]
        self._kinds = self._own([*zip(layout.dtypes, shapes, strict=True)])
        # All components of the ticket, with their rows joined.
        self._joined: _Arrays = []
        # The same without the added components.
        self._parts: _Arrays = []
        self._places: list[tuple[int, int]] = []  # range of each sample in these arrays

    def _own(self, parts: list[_Part]) -> list[_Part]:
        """Return the parts of a sample's components, without those of the added ones."""
        return parts[: self._added.start] + parts[self._added.stop :]

    def open(self, opened: Opened) -> None:
        """Find the places of a ticket's samples. Write padding, segment ids and positions."""
        ticket = opened.ticket
        buffer, base, capacity = opened.slot
        assert opened.plan is not None
        plan = opened.plan.after(ticket.rest)
        assert isinstance(plan, PackedPlan)
        length = plan.length
        lengths, counts = plan.row_items(ticket.epoch, ticket.batch, ticket.batches)
        assert self._layout.bytes_of(len(counts)) <= capacity, "packed rows exceed their buffer"
        self._joined = joined = [
            array.reshape(-1, *array.shape[2:])
            for array in self._layout.arrays(buffer, base, len(counts))
        ]
        self._parts = self._own(joined)
        # Ranges of samples in these arrays, with the padding after the last sample of each row.
        stops = counts.cumsum() + np.arange(len(counts))
        firsts = stops - counts
        is_sample = np.ones(len(lengths) + len(counts), bool)
        is_sample[stops] = False
        ranges = np.zeros(len(is_sample), np.int64)
        ranges[is_sample] = lengths
        ranges[stops] = length - np.add.reduceat(ranges, firsts)
        begins = ranges.cumsum() - ranges
        ids = np.arange(1, 1 + len(ranges)) - np.repeat(firsts, counts + 1)
        ids[stops] = 0
        own = begins[is_sample]
        self._places = [*zip(own.tolist(), (own + lengths).tolist(), strict=True)]
        segments, positions = joined[self._added]
        segments[:] = np.repeat(ids.astype(np.int32), ranges)
        positions[:] = np.arange(len(positions), dtype=np.int32)
        positions -= np.repeat(begins.astype(np.int32), ranges)
        padding = np.flatnonzero(segments == 0)
        for part, filler in zip(joined, self._fillers, strict=True):
            part[padding] = filler

    def writer(self, arrays: object, row: int) -> Callable[[object], object]:
        """Return a function that writes one result after the other, from the item `row` on.

        As `Converter.writer`; `arrays` is unused, because `open` has found the places.
        """
        places, parts = itertools.islice(self._places, row, None), self._parts
        flatten, convert, kinds = self._flatten, self._converter.leaf, self._kinds

        def write(result: object) -> None:
            begin, end = next(places)
            try:
                for component, (leaf, array, kind) in enumerate(
                    zip(flatten(result), parts, kinds, strict=True)
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
        begin, end = self._places[row]
        leaves = self._converter.row(result, index)
        self._converter.check_length(leaves, end - begin, index)
        for array, leaf in zip(self._parts, leaves, strict=True):
            array[begin:end] = leaf

    def fill(self, opened: Opened, make: Callable[[int, int], _Arrays]) -> MadeRows:
        """Make all batches of a ticket, without the samples that fail.

        Args:
            opened: The ticket.
            make: Returns the components of a sample. Called with the number of the item in the
                ticket, and the length that its sample must have.
        """
        self.open(opened)
        failures: list[RowFailure] = []
        for number, (start, stop) in enumerate(opened.bounds()):
            for at in range(start, stop):
                begin, end = self._places[at]
                try:
                    for array, leaf in zip(self._parts, make(at, end - begin), strict=True):
                        array[begin:end] = leaf
                except WorkFailed as failed:
                    failures.append(RowFailure(failed.failure, at - start, number))
                    for part, filler in zip(self._joined, self._fillers, strict=True):
                        part[begin:end] = filler
        items = len(self._places)
        return MadeRows(items - len(failures), tuple(failures), items=items)
