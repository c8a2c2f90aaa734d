"""Layout of the rows of a batch in a slot. No other module knows byte offsets.

There are two forms. One is chosen for each loader:

- Fixed (`FixedLayout`): every row of a component has the same known shape. Each component is one
  C-contiguous array `dtype[rows, ...]` at a known, aligned offset. So workers write rows directly
  into place, and several workers may fill different rows of one slot. Several consecutive batches
  (a chunk) are one longer array. If batches differ in their rows, messages have the numbers.
- Varying (`VaryingLayout`): shapes vary, or there is text. A slot starts with a table of its
  batches. Each batch is a header of int64 numbers, followed by aligned blocks. The data describes
  itself, so an oversize batch in a memory file of its own is read in the same way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import UnitKind
from loaderpool.element.spec import ElementSpec, RaggedArray
from loaderpool.element.structure import OwnClasses
from loaderpool.plan.batches import bounds_of

# TensorFlow uses an array without a copy if it is aligned to 64 bytes. With 128, the adjacent-line
# prefetch of one component does not reach the next. Smaller: TensorFlow copies.
_BYTE_TYPE = ctypes.c_byte
ALIGNMENT_BYTES = 128
_NUMBER_BYTES = 8
_COUNTS = 3  # numbers at the start of a batch's header: the fields of `BatchCounts`


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialized `uint8[nbytes]` at an address that TensorFlow aliases, not copies."""
    raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -address_of(raw) % ALIGNMENT_BYTES
    return raw[start : start + nbytes]


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of a nonempty array.

    Equals `array.ctypes.data`, and takes a quarter of the time.
    """
    # NumPy's type hints do not say that an array is a buffer.
    return ctypes.addressof(_BYTE_TYPE.from_buffer(array))  # type: ignore[arg-type]


# Writable memory that contains slots.
Buffer = bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to the alignment of components."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.lru_cache(maxsize=256)
def _ends(row_bytes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the ends of all components in a slot for `rows` rows, after a leading 0."""
    return tuple(itertools.accumulate((aligned(size * rows) for size in row_bytes), initial=0))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FixedLayout:
    """Layout of components with one known shape per row."""

    row_shapes: tuple[tuple[int, ...], ...]  # shape of one row, per component
    dtypes: tuple[np.dtype[Any], ...]
    # Number of rows in a slot: batch_size times the largest chunk. None: batches differ in their
    # rows. Then the offsets of components depend on the number of rows in the slot.
    capacity_rows: int | None

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Size of one row in bytes, per component."""
        pairs = zip(self.row_shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)

    def offsets_of(self, rows: int) -> tuple[int, ...]:
        """Return the offsets of the components in a slot that contains `rows` rows."""
        return _ends(self.row_bytes, self.capacity_rows or rows)[:-1]

    def bytes_of(self, rows: int) -> int:
        """Return the size in bytes of a slot for `rows` rows."""
        return max(ALIGNMENT_BYTES, _ends(self.row_bytes, rows)[-1])

    @functools.cached_property
    def _same_places(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any], int], ...]:
        """Shape, dtype and offset of each component; empty if offsets differ between slots."""
        offsets = self.offsets_of(0) if self.capacity_rows is not None else ()
        return tuple(zip(self.row_shapes, self.dtypes, offsets, strict=False))

    def rows_in(self, nbytes: int) -> int:
        """Return a number of rows that fit into `nbytes` bytes, at least 1."""
        free = nbytes - ALIGNMENT_BYTES * len(self.row_bytes)
        return max(1, free // max(1, sum(self.row_bytes)))

    def arrays(self, buffer: Buffer, base: int, rows: int) -> list[npt.NDArray[Any]]:
        """Return the first `rows` rows of each component, as arrays on a buffer.

        Args:
            buffer: memory that contains the slot.
            base: offset of the slot's start in the buffer.
            rows: number of rows. If batches differ in their rows: number of all rows in the slot.
        """
        arrays = []  # a loop, because a list comprehension costs a call before Python 3.12
        for shape, dtype, offset in self._same_places or zip(
            self.row_shapes, self.dtypes, self.offsets_of(rows), strict=True
        ):
            arrays.append(np.ndarray((rows, *shape), dtype, buffer, base + offset))
        return arrays


class Block(NamedTuple):
    """One contiguous array of a component of a varying batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[npt.NDArray[Any]], None]  # writes the data into an array of this shape
    unpadded: int | None = None  # number of elements without padding; None: not a padded array

    @property
    def elements(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.elements * self.dtype.itemsize


class BatchCounts(NamedTuple):
    """Numbers of rows and of padding elements, from the header of a varying batch."""

    rows: int
    padded: int  # number of elements of the padded components
    padding: int  # number of these elements that are padding


class VaryingLayout:
    """Layout of some batches in one slot or file: plans offsets, then writes the blocks.

    Args:
        batches: number of rows and blocks of each batch. Readers return blocks in this order.

    Attributes:
        nbytes: size of table, headers and blocks in bytes.
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

    def write(self, buffer: Buffer, base: int) -> None:
        """Write table, headers and blocks to `nbytes` bytes of the buffer, from `base` on.

        Called in the worker; pairs with `read_varying`.
        """
        self._write_numbers(buffer, base, self._table)
        for start, numbers in self._headers:
            self._write_numbers(buffer, base + start, numbers)
        for offset, block in self._places:
            block.fill(np.ndarray(block.shape, block.dtype, buffer, base + offset))

    @staticmethod
    def _write_numbers(buffer: Buffer, offset: int, numbers: list[int]) -> None:
        np.ndarray((len(numbers),), np.int64, buffer, offset)[:] = numbers


class OwnMemory:
    """Memory of a worker for rows of a fixed layout that do not fit into their slot.

    Args:
        layout: layout of the rows.
        rows: number of rows.

    Attributes:
        nbytes: size of the rows in bytes.
        arrays: array of each component, into which the worker writes rows.
    """

    def __init__(self, layout: FixedLayout, rows: int) -> None:
        self.nbytes = layout.bytes_of(rows)
        self._memory = np.empty(self.nbytes, np.uint8)
        self.arrays = layout.arrays(self._memory, 0, rows)

    def write(self, buffer: Buffer, base: int) -> None:
        """Copy the rows to the buffer, from `base` on. Implements `VaryingLayout.write`."""
        np.ndarray((self.nbytes,), np.uint8, buffer, base)[:] = self._memory


def is_empty(anchor: npt.NDArray[np.uint8]) -> bool:
    """True if a slot holds no batch, because its generator has ended."""
    return not anchor[:_NUMBER_BYTES].view(np.int64)[0]


def _headers(anchor: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return a slot as an array of int64, and the index of each batch's header in this array."""
    numbers = anchor[: anchor.nbytes // _NUMBER_BYTES * _NUMBER_BYTES].view(np.int64)
    return numbers, [start // _NUMBER_BYTES for start in numbers[2 : 2 + int(numbers[0])].tolist()]


def varying_counts(anchor: npt.NDArray[np.uint8]) -> list[BatchCounts]:
    """Return the counts of each batch that a `VaryingLayout` wrote."""
    numbers, headers = _headers(anchor)
    return [BatchCounts(*numbers[at : at + _COUNTS].tolist()) for at in headers]


def read_varying(
    anchor: npt.NDArray[np.uint8], block_dtypes: Sequence[np.dtype[Any]]
) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
    """Yield the number of rows and the blocks of each batch that a `VaryingLayout` wrote.

    The blocks are views of `anchor`.
    """
    numbers, headers = _headers(anchor)
    for header in headers:
        # A header ends before its first block.
        words = numbers[header : int(numbers[header + _COUNTS]) // _NUMBER_BYTES].tolist()
        at, blocks = _COUNTS, []
        for dtype in block_dtypes:
            offset, ndim = words[at : at + 2]
            blocks.append(np.ndarray(words[at + 2 : at + 2 + ndim], dtype, anchor, offset))
            at += 2 + ndim
        yield words[0], blocks


# Maximum size of a chunk. Smaller: tiny batches cost more, because there are more tickets. Larger:
# a chunk does not fit the CPU cache.
_CHUNK_BYTES = 1 << 20
CHUNK_BATCHES = 64
# Maximum size of a chunk with more than `CHUNK_BATCHES` batches. Only fixed layouts have such
# chunks.
_SMALL_CHUNK_BYTES = 1 << 19
_SMALL_CHUNK_BATCHES = 1024


def fixed_chunk(batch_bytes: int) -> int:
    """Return the maximum number of batches in a ticket. A batch has `batch_bytes` bytes."""
    few = min(CHUNK_BATCHES, _CHUNK_BYTES // max(1, batch_bytes))
    return max(1, few, min(_SMALL_CHUNK_BATCHES, _SMALL_CHUNK_BYTES // max(1, batch_bytes)))


_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BatchForm:
    """Spec and storage of one loader's batches; made in the main process, read in every worker."""

    spec: ElementSpec  # spec of a batch, with the batch axis
    unit: UnitKind  # result of one function call
    batch_rows: int  # number of rows of a full batch; 1 for units that are whole elements
    fixed: FixedLayout | None  # fixed layout; None: the layout varies
    max_chunk: int  # maximum number of batches in a ticket
    can_split: bool  # True if a ticket may cover a part of a batch's rows
    slot_bytes: int  # size of a slot; a varying batch may be larger
    # Fill value of each component, as `padding_of` returns it; False: the rows have one shape.
    padding: tuple[object, ...] = ()
    # Spec of a batch of single samples, if several are packed into a row; None: a row is a sample.
    item_spec: ElementSpec | None = None
    packed_at: int = 0  # place of the two components that packed rows have in addition
    # Classes of the function's results: `OwnClasses` in the main process, pickled in others.
    classes: OwnClasses | bytes | None = None

    @property
    def has_equal_batches(self) -> bool:
        """True if all batches of a slot have the same number of rows, and so form one array."""
        return self.fixed is not None and self.fixed.capacity_rows is not None

    @functools.cached_property
    def rebuild(self) -> Callable[[Sequence[Any]], Any]:
        """Function that makes a batch of its components, in the classes of the function's results.

        Used in the main process only.
        """
        classes = self.classes if isinstance(self.classes, OwnClasses) else None
        return self.spec.structure.rebuilder(classes)

    def padding_at(self, component: int) -> object:
        """Return a component's fill value. None: the default. False: its rows have one shape."""
        return self.padding[component] if self.padding else False

    @functools.cached_property
    def block_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes of the blocks of a varying batch, in the order of `read_varying`."""
        dtypes: list[np.dtype[Any]] = []
        for component in self.spec.components:
            dtypes += [_INT64, _BYTE] if component.text is not None else [component.dtype]
            if component.ragged:
                dtypes.append(_INT64)
        return tuple(dtypes)

    @functools.cached_property
    def may_be_padded(self) -> bool:
        """True if a component may have padding that is counted. Text is stored without padding."""
        return any(
            component.text is None and self.padding_at(number) is not False
            for number, component in enumerate(self.spec.components)
        )

    @functools.cached_property
    def has_plain_rows(self) -> bool:
        """True if each row has one known shape and size.

        Then a row can be written to the slot before the next one is made.
        """
        return (
            self.unit == "sample"
            and _are_plain(self.spec)
            and all(pad is False for pad in self.padding)
        )

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Size of a plain row in bytes, per component."""
        return FixedLayout(*_row_layout(self.spec), 1).row_bytes

    def row_arrays(
        self, buffer: Buffer, base: int, rows: int, capacity: int
    ) -> list[npt.NDArray[Any]] | None:
        """Return the components of a varying batch of plain rows as arrays on a slot.

        Called in the worker, which then writes the rows one by one. Table and header are written
        at once.

        Args:
            buffer: memory that contains the slot.
            base: offset of the slot's first byte in the buffer.
            rows: number of rows of the batch.
            capacity: size of the slot in bytes.

        Returns:
            One array for each component; None: the batch does not fit the slot.
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
        """Return the number of bytes from the slot's start to the end of its data.

        Args:
            anchor: the slot's bytes.
            rows: number of rows in the slot; only fixed layouts need it.
        """
        if self.fixed is None:
            return int(anchor[_NUMBER_BYTES : 2 * _NUMBER_BYTES].view(np.int64)[0])
        return self.fixed.offsets_of(rows)[-1] + self.fixed.row_bytes[-1] * rows

    def read(
        self,
        anchor: npt.NDArray[np.uint8],
        rows: int,
        count: int,
        batch_rows: Sequence[int] = (),
    ) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the number of rows and the components of each batch in a slot.

        Called in the main process. Components are views of `anchor`, except text, which is copied.

        Args:
            anchor: the slot's bytes.
            rows: number of rows of each batch. Varying slots describe themselves.
            count: number of batches in a fixed slot.
            batch_rows: number of rows of each batch in a fixed slot, if batches differ.
        """
        if self.fixed is None:
            return (
                (own, self._components(blocks))
                for own, blocks in read_varying(anchor, self.block_dtypes)
            )
        if batch_rows:
            arrays = self.fixed.arrays(anchor, 0, sum(batch_rows))
            parts = list(itertools.starmap(slice, bounds_of(batch_rows)))
            columns = [map(array.__getitem__, parts) for array in arrays]
            return zip(batch_rows, zip(*columns, strict=True), strict=True)
        arrays = self.fixed.arrays(anchor, 0, rows * count)
        if count == 1:
            return iter([(rows, arrays)])
        # All of this runs in C, because a step of a Python loop would double the cost of a tiny
        # batch.
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
    """Return an object array of str or bytes.

    Args:
        lengths: length of each text in bytes; the result has the same shape.
        blob: the UTF-8 data of all texts, joined.
        text: type of the elements.
    """
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
    padding: tuple[object, ...] = (),
) -> BatchForm:
    """Return the form of a loader's batches.

    The layout is fixed if every row has one known shape and no row can be missing. Otherwise it
    varies.

    Args:
        spec: spec of a batch.
        unit: result of one function call.
        batch_size: maximum number of rows of a batch; None for whole elements.
        batch_bytes_seen: size of a batch, estimated from the samples of the probe. It determines
            the size of varying slots.
        may_leave_rows_out: True for `on_error="skip"`.
        may_replace_rows: True for `on_error="replace"`. Then the next good row must be in the same
            ticket, so batches are not split.
        rows_vary: True if batches may differ in their numbers of rows.
        padding: fill values, as in `BatchForm`.
    """
    is_alike = _are_plain(spec) and all(pad is False for pad in padding)
    rows = batch_size or 1
    if unit == "sample" and is_alike and not may_leave_rows_out:
        row_shapes, dtypes = _row_layout(spec)
        max_chunk = fixed_chunk(rows * sum(FixedLayout(row_shapes, dtypes, rows).row_bytes))
        capacity = None if rows_vary else rows * max_chunk
        fixed = FixedLayout(row_shapes, dtypes, capacity)
        can_split = not may_replace_rows and (rows > 1 or rows_vary)
        slot_bytes = fixed.bytes_of(rows * max_chunk)
        return BatchForm(spec, unit, rows, fixed, max_chunk, can_split, slot_bytes)
    # A reserve of one half for batches larger than the one seen, and room for headers. A batch that
    # does not fit is sent in a file of its own.
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
