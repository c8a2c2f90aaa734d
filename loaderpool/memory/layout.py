"""Where the rows of a batch lie in a slot. The only module that knows byte offsets.

Two forms, chosen once per loader:

- `FixedLayout`: every row of every component has one known shape. Component c is one C-contiguous array
  `dtype[rows, ...]` at a fixed, aligned offset, so workers write rows straight into place, several workers may fill
  different rows of one slot, and several batches in a row (a chunk) are one longer array.
- varying: shapes vary, or there is text. Each batch is a header of int64 numbers and aligned blocks behind it; a slot
  holds a table of batches. It describes itself, so an oversize batch in a memory file of its own reads the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import UnitKind
from loaderpool.element.spec import ElementSpec, RaggedArray

# TensorFlow aliases from 64 on; 128 keeps neighbours' adjacent-line prefetch apart. Smaller would cost a copy.
ALIGNMENT_BYTES = 128
_NUMBER_BYTES = 8
_COUNTS = (
    3  # at the beginning of a batch's header: its rows, and what `BatchCounts` says of padding
)


def aligned(nbytes: int) -> int:
    """Rounded up to the alignment of components."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True)
class FixedLayout:
    """Components of one known shape per row."""

    row_shapes: tuple[tuple[int, ...], ...]  # of one row of each component
    dtypes: tuple[np.dtype[Any], ...]
    capacity_rows: int  # rows that a slot holds: batch_size times the largest chunk

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one row of each component."""
        pairs = zip(self.row_shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each component from the slot's start."""
        sizes = (aligned(row_bytes * self.capacity_rows) for row_bytes in self.row_bytes)
        return tuple(itertools.accumulate(sizes, initial=0))[:-1]

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return max(
            ALIGNMENT_BYTES,
            sum(aligned(row_bytes * self.capacity_rows) for row_bytes in self.row_bytes),
        )

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any], int], ...]:
        return tuple(zip(self.row_shapes, self.dtypes, self.offsets, strict=True))

    def arrays(self, buffer: Any, base: int, rows: int) -> list[npt.NDArray[Any]]:
        """Return the components' first `rows` rows as arrays on `buffer`, whose byte `base` is the slot's start."""
        arrays = []  # a loop: in Python 3.11 a list in one line is a call
        for shape, dtype, offset in self._places:
            arrays.append(np.ndarray((rows, *shape), dtype, buffer, base + offset))
        return arrays


class Block(NamedTuple):
    """One contiguous array that a component of a varying batch brings."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[npt.NDArray[Any]], None]  # writes the data into the array it is given
    unpadded: int | None = None  # of a padded array: how many of its elements are no padding

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.elements * self.dtype.itemsize


class BatchCounts(NamedTuple):
    """What a varying batch says of itself."""

    rows: int
    padded: int  # elements of its padded components
    padding: int  # how many of these are padding


class VaryingLayout:
    """Plans where the blocks of some batches lie, tells the size, and writes them.

    Args:
        batches: for each batch its rows and its blocks, in the order the reader expects.
    """

    def __init__(self, batches: Sequence[tuple[int, Sequence[Block]]]) -> None:
        self._batches = batches
        self._table: list[int] = [len(batches), 0]
        self._headers: list[tuple[int, list[int]]] = []
        self._places: list[tuple[int, Block]] = []
        end = aligned((2 + len(batches)) * _NUMBER_BYTES)
        for rows, blocks in batches:
            padded = [
                (block.elements, block.unpadded) for block in blocks if block.unpadded is not None
            ]
            elements = sum(each for each, _ in padded)
            numbers = [rows, elements, elements - sum(unpadded for _, unpadded in padded)]
            start = end
            end = aligned(
                start + _NUMBER_BYTES * (_COUNTS + sum(2 + len(block.shape) for block in blocks))
            )
            for block in blocks:
                numbers += [end, len(block.shape), *block.shape]
                self._places.append((end, block))
                end = aligned(end + block.nbytes)
            self._table.append(start)
            self._headers.append((start, numbers))
        self.nbytes = self._table[1] = end

    def write(self, buffer: Any, base: int) -> None:
        """Write table, headers and blocks; the buffer must hold `nbytes` from `base` on."""
        self._write_numbers(buffer, base, self._table)
        for start, numbers in self._headers:
            self._write_numbers(buffer, base + start, numbers)
        for offset, block in self._places:
            block.fill(np.ndarray(block.shape, block.dtype, buffer, base + offset))

    @staticmethod
    def _write_numbers(buffer: Any, offset: int, numbers: list[int]) -> None:
        np.ndarray((len(numbers),), np.int64, buffer, offset)[:] = numbers


def is_empty(anchor: npt.NDArray[np.uint8]) -> bool:
    """Whether a slot holds no batch at all: the generator that it was for has ended."""
    return not anchor[:_NUMBER_BYTES].view(np.int64)[0]


def _headers(anchor: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return all of a slot as numbers, and where among them each batch's header begins."""
    numbers = anchor[: anchor.nbytes // _NUMBER_BYTES * _NUMBER_BYTES].view(np.int64)
    return numbers, [start // _NUMBER_BYTES for start in numbers[2 : 2 + int(numbers[0])].tolist()]


def varying_counts(anchor: npt.NDArray[np.uint8]) -> list[BatchCounts]:
    """Return what each of the batches that a `VaryingLayout` wrote says of itself."""
    numbers, headers = _headers(anchor)
    return [BatchCounts(*numbers[at : at + _COUNTS].tolist()) for at in headers]


def read_varying(
    anchor: npt.NDArray[np.uint8], block_dtypes: Sequence[np.dtype[Any]]
) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
    """Read the batches that a `VaryingLayout` wrote: rows and blocks of each, as views of `anchor`."""
    numbers, headers = _headers(anchor)
    for header in headers:
        at, blocks = header + _COUNTS, []
        for dtype in block_dtypes:
            offset, ndim = numbers[at : at + 2].tolist()
            blocks.append(
                np.ndarray(numbers[at + 2 : at + 2 + ndim].tolist(), dtype, anchor, offset)
            )
            at += 2 + ndim
        yield int(numbers[header]), blocks


# A chunk is at most this large: smaller makes tiny batches pay per batch again, larger leaves the cache.
_CHUNK_BYTES = 1 << 20
CHUNK_BATCHES = 64
# Of batches that small and all of one size there may be more in it, in half as much memory.
_SMALL_CHUNK_BYTES = 1 << 19
_SMALL_CHUNK_BATCHES = 1024
_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class BatchForm:
    """Spec and storage of one loader's batches; made in the trainer, read in every worker."""

    spec: ElementSpec  # of a batch, batch axis included
    unit: UnitKind  # what one call of the function makes
    batch_rows: int  # rows of a full batch; 1 for units that are whole elements
    fixed: FixedLayout | None  # None: varying
    max_chunk: int  # most batches that one ticket may cover
    can_split: bool  # whether a ticket may cover some rows of a batch
    slot_bytes: int  # bytes of a slot; a varying batch may outgrow it
    padding: tuple[
        Any, ...
    ] = ()  # what fills up each component, as `padding_of` has it; False: its rows are alike
    classes: Any = (
        None  # of the function's own: `OwnClasses` in the trainer, pickled in other processes
    )

    @functools.cached_property
    def rebuild(self) -> Callable[[Sequence[Any]], Any]:
        """Make a batch of its components, in the classes of the function's results. In the trainer."""
        return self.spec.structure.rebuilder(self.classes or None)

    def padding_at(self, component: int) -> Any:
        """Return what fills up rows of this component; None: the default. False: they have one shape."""
        return self.padding[component] if self.padding else False

    @functools.cached_property
    def block_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes of the blocks of a varying batch, in order."""
        dtypes: list[np.dtype[Any]] = []
        for component in self.spec.components:
            dtypes += [_INT64, _BYTE] if component.text is not None else [component.dtype]
            if component.ragged:
                dtypes.append(_INT64)
        return tuple(dtypes)

    @functools.cached_property
    def may_be_padded(self) -> bool:
        """Whether any component may have padding in it that is counted: text is stored without."""
        return any(
            component.text is None and self.padding_at(number) is not False
            for number, component in enumerate(self.spec.components)
        )

    @functools.cached_property
    def has_plain_rows(self) -> bool:
        """Whether each row has one known shape and size, so that it can be written before the next one is made."""
        return (
            self.unit == "sample"
            and _are_plain(self.spec)
            and all(pad is False for pad in self.padding)
        )

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a plain row in each component."""
        return FixedLayout(*_row_layout(self.spec), 1).row_bytes

    def row_arrays(
        self, buffer: Any, base: int, rows: int, capacity: int
    ) -> list[npt.NDArray[Any]] | None:
        """Components of a batch of plain rows, not of a fixed form, to be written on a slot; None: it has no room.

        Args:
            buffer: the arena, or a slot's memory.
            base: the slot's first byte in it.
            rows: of the batch, from its first row on.
            capacity: bytes of the slot.
        """
        arrays: list[npt.NDArray[Any]] = []
        shapes, dtypes = _row_layout(self.spec)
        blocks = [
            Block((rows, *shape), dtype, arrays.append)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        layout = VaryingLayout([(rows, blocks)])
        if layout.nbytes > capacity:
            return None
        layout.write(buffer, base)
        return arrays

    def used_bytes(self, anchor: npt.NDArray[np.uint8], rows: int) -> int:
        """Return the bytes from the slot's start to the end of the data in it, `rows` rows of a fixed form."""
        if self.fixed is None:
            return int(anchor[_NUMBER_BYTES : 2 * _NUMBER_BYTES].view(np.int64)[0])
        return self.fixed.offsets[-1] + self.fixed.row_bytes[-1] * rows

    def read(
        self, anchor: npt.NDArray[np.uint8], rows: int, count: int
    ) -> Iterator[tuple[int, Sequence[Any]]]:
        """Read the batches in a slot: for each its rows and its components, as views of `anchor` (text is copied out).

        Args:
            anchor: the slot's bytes.
            rows: rows of each batch in it (varying slots tell themselves).
            count: how many batches a fixed slot holds.
        """
        if self.fixed is None:
            return (
                (own, self._components(blocks))
                for own, blocks in read_varying(anchor, self.block_dtypes)
            )
        arrays = self.fixed.arrays(anchor, 0, rows * count)
        if count == 1:
            return iter([(rows, arrays)])
        # All in C, for a tiny batch costs hardly more than its turn here.
        by_batch = [array.reshape(count, rows, *array.shape[1:]) for array in arrays]
        return zip(itertools.repeat(rows), zip(*by_batch, strict=True))

    def _components(self, blocks: list[npt.NDArray[Any]]) -> list[Any]:
        components: list[Any] = []
        rest = iter(blocks)
        for component in self.spec.components:
            values = next(rest)
            if component.text is not None:
                values = read_text(values, next(rest), component.text)
            components.append(RaggedArray(values, next(rest)) if component.ragged else values)
        return components


def read_text(
    lengths: npt.NDArray[np.int64], blob: npt.NDArray[np.uint8], text: Literal["str", "bytes"]
) -> npt.NDArray[np.object_]:
    """Return an object array of str or bytes from lengths of the array's shape and the UTF-8 data end to end."""
    data = blob.tobytes()
    out = np.empty(lengths.size, object)
    start = 0
    for position, length in enumerate(lengths.ravel().tolist()):
        piece = data[start : start + length]
        out[position] = piece.decode("utf-8", "surrogateescape") if text == "str" else piece
        start += length
    return out.reshape(lengths.shape)


def batch_form(
    spec: ElementSpec,
    unit: UnitKind,
    *,
    batch_size: int | None,
    batch_bytes_seen: int,
    may_leave_rows_out: bool,
    may_replace_rows: bool,
    rows_vary: bool = False,
    padding: tuple[Any, ...] = (),
) -> BatchForm:
    """The form for a batch spec: fixed where every row has one known shape and no row may be missing, else varying.

    Args:
        spec: of a batch.
        unit: what one call of the function makes.
        batch_size: most rows of a batch, None for whole elements.
        batch_bytes_seen: what a batch like the sample seen would take; sizes varying slots.
        may_leave_rows_out: `on_error="skip"`.
        may_replace_rows: `on_error="replace"`: the next good row must be in the same ticket.
        rows_vary: not all batches but the last have `batch_size` rows.
        padding: as `BatchForm` has it.
    """
    is_alike = _are_plain(spec) and all(pad is False for pad in padding)
    rows = batch_size or 1
    if unit == "sample" and is_alike and not may_leave_rows_out and not rows_vary:
        row_shapes, dtypes = _row_layout(spec)
        batch_bytes = max(1, rows * sum(FixedLayout(row_shapes, dtypes, rows).row_bytes))
        few = min(CHUNK_BATCHES, _CHUNK_BYTES // batch_bytes)
        many = min(_SMALL_CHUNK_BATCHES, _SMALL_CHUNK_BYTES // batch_bytes)
        max_chunk = max(1, few, many)
        fixed = FixedLayout(row_shapes, dtypes, rows * max_chunk)
        return BatchForm(
            spec, unit, rows, fixed, max_chunk, not may_replace_rows and rows > 1, fixed.slot_bytes
        )
    # Half as much again for batches larger than the one seen, and for headers; what outgrows it still arrives.
    batch_bytes = aligned(
        batch_bytes_seen + batch_bytes_seen // 2 + 512 * (1 + len(spec.components))
    )
    max_chunk = max(1, min(CHUNK_BATCHES, _CHUNK_BYTES // batch_bytes))
    return BatchForm(spec, unit, rows, None, max_chunk, False, batch_bytes * max_chunk, padding)


def _are_plain(spec: ElementSpec) -> bool:
    return all(c.text is None and not c.ragged and None not in c.shape[1:] for c in spec.components)


def _row_layout(spec: ElementSpec) -> tuple[tuple[tuple[int, ...], ...], tuple[np.dtype[Any], ...]]:
    """Return the shapes and dtypes of the components of a plain row."""
    shapes = tuple(tuple(int(n) for n in c.shape[1:] if n is not None) for c in spec.components)
    return shapes, tuple(c.dtype for c in spec.components)
