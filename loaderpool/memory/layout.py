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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# TensorFlow aliases from 64 on; 128 keeps neighbours' adjacent-line prefetch apart. Smaller would cost a copy.
ALIGNMENT_BYTES = 128
_NUMBER_BYTES = 8
_COUNTS = 3  # at the beginning of a batch's header: its rows, and what `BatchCounts` says of padding


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
        return tuple(
            int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for shape, dtype in zip(self.row_shapes, self.dtypes, strict=True)
        )

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each component from the slot's start."""
        offsets, end = [], 0
        for row_bytes in self.row_bytes:
            offsets.append(end)
            end += aligned(row_bytes * self.capacity_rows)
        return tuple(offsets)

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return max(ALIGNMENT_BYTES, sum(aligned(row_bytes * self.capacity_rows) for row_bytes in self.row_bytes))

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any], int], ...]:
        return tuple(zip(self.row_shapes, self.dtypes, self.offsets, strict=True))

    def arrays(self, buffer: Any, base: int, rows: int) -> list[npt.NDArray[Any]]:
        """Return the components' first `rows` rows as arrays on `buffer`, whose byte `base` is the slot's start."""
        return [np.ndarray((rows, *shape), dtype, buffer, base + offset) for shape, dtype, offset in self._places]

    @functools.cached_property
    def _all_row_bytes(self) -> int:
        return sum(self.row_bytes)

    def used_bytes(self, rows: int) -> int:
        """Return the bytes of data in `rows` rows."""
        return rows * self._all_row_bytes


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
            padded = [(block.elements, block.unpadded) for block in blocks if block.unpadded is not None]
            elements = sum(each for each, _ in padded)
            numbers = [rows, elements, elements - sum(unpadded for _, unpadded in padded)]
            start = end
            end = aligned(start + _NUMBER_BYTES * (_COUNTS + sum(2 + len(block.shape) for block in blocks)))
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


def varying_nbytes(anchor: npt.NDArray[np.uint8]) -> int:
    """Return how many bytes of a slot the batches in it take."""
    return int(anchor[_NUMBER_BYTES : 2 * _NUMBER_BYTES].view(np.int64)[0])


def varying_counts(anchor: npt.NDArray[np.uint8]) -> list[BatchCounts]:
    """Return what each of the batches that a `VaryingLayout` wrote says of itself."""
    numbers = anchor[: anchor.nbytes // _NUMBER_BYTES * _NUMBER_BYTES].view(np.int64)
    starts = numbers[2 : 2 + int(numbers[0])].tolist()
    return [
        BatchCounts(*numbers[start // _NUMBER_BYTES : start // _NUMBER_BYTES + _COUNTS].tolist()) for start in starts
    ]


def is_empty(anchor: npt.NDArray[np.uint8]) -> bool:
    """Whether a slot holds no batch at all: the generator that it was for has ended."""
    return not anchor[:_NUMBER_BYTES].view(np.int64)[0]


def read_varying(
    anchor: npt.NDArray[np.uint8], block_dtypes: Sequence[np.dtype[Any]]
) -> Iterator[tuple[int, list[npt.NDArray[Any]]]]:
    """Read the batches that a `VaryingLayout` wrote: rows and blocks of each, as views of `anchor`."""
    numbers = anchor[: anchor.nbytes // _NUMBER_BYTES * _NUMBER_BYTES].view(np.int64)
    count = int(numbers[0])
    for start in numbers[2 : 2 + count].tolist():
        position = start // _NUMBER_BYTES
        rows = int(numbers[position])
        position += _COUNTS
        blocks = []
        for dtype in block_dtypes:
            offset, ndim = numbers[position : position + 2].tolist()
            shape = tuple(numbers[position + 2 : position + 2 + ndim].tolist())
            position += 2 + ndim
            blocks.append(np.ndarray(shape, dtype, anchor, offset))
        yield rows, blocks
