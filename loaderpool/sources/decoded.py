"""Blocks of rows that are decoded together, and kept for the rows that follow.

HDF5, zarr and Parquet compress a block of rows at once. To read one row, the whole block is decoded.
`KeptBlocks` keeps decoded blocks, so that the other rows of a block need no decoding. `ChunkedRows`
reads an array by row with them.

The number of kept blocks comes from the window of the orders in this process (`reserve`). All kept
blocks of a process share a limit in bytes (`_most_bytes`).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaderpool.sources.arrays import Array, ArrayRows, is_of
from loaderpool.system import capacity, ranks
from loaderpool.system.interrupts import FailuresIgnored

# Bytes that a process keeps in any case. Smaller: small columns, such as labels, are decoded again.
# Larger: a process without an order of blocks keeps more blocks that it does not need.
_FREE_BYTES = 64 << 20
# Most bytes that one call reads of several blocks. Smaller: more calls, which cost up to a
# millisecond each. Larger: more memory for a read in order.
_RUN_BYTES = 4 << 20
# Number of blocks that each source keeps without an order. Smaller: threads that read two batches
# decode the blocks at their border for each row. Larger: more memory.
_LEAST_BLOCKS = 2
_BYTES_PER_OBJECT = 64  # size of a Python string or array without its data


class _Block:
    __slots__ = ("nbytes", "rows", "used")

    def __init__(self, rows: Any, nbytes: int) -> None:
        self.rows, self.nbytes = rows, nbytes
        self.used = next(_uses)  # number of the latest use; larger numbers are more recent


class _Window(NamedTuple):
    """Blocks that an order shuffles together."""

    blocks: int
    rows: int  # rows of a block


# Windows of the orders in this process, by the object that reads in this order.
_windows: weakref.WeakKeyDictionary[object, _Window] = weakref.WeakKeyDictionary()
_stores: weakref.WeakSet[KeptBlocks] = weakref.WeakSet()
_lock = threading.RLock()
_uses = itertools.count()
_owner = os.getpid()


def reserve(reader: object, order: Any) -> None:
    """Keep the blocks of an order's window, as long as `reader` exists.

    Args:
        reader: Object that reads in this order.
        order: A `BlockOrder`.
    """
    _windows[reader] = _Window(order.window, order.most_rows)


@functools.cache
def _most_bytes() -> int:
    """Return the limit of all kept blocks in this process.

    Half of the free memory is divided among as many processes as there are CPUs. The memory is read
    when the process first needs the limit.
    """
    return max(_FREE_BYTES, ranks.memory_bytes() // (2 * capacity.usable_cpu_count()))


def _locked() -> threading.RLock:
    """Return the lock of all stores.

    In a forked process, all blocks are dropped first. Another thread may have held the lock.
    """
    global _lock, _owner
    if _owner != os.getpid():
        _lock, _owner = threading.RLock(), os.getpid()
        for store in list(_stores):
            store.clear()
    return _lock


class KeptBlocks:
    """The most recently used blocks of one source, in this process. It is pickled empty.

    The blocks of `lp.Blocks`' window are kept, and at least two blocks. If all sources of the
    process together exceed the limit in bytes, each keeps its latest block, and further ones by
    their latest use. Several threads may call all methods.

    Attributes:
        nbytes: Bytes of all kept blocks.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._rows = 1  # rows of the largest block
        self._blocks: OrderedDict[Hashable, _Block] = OrderedDict()
        # Locks of the blocks that threads decode now.
        self._decoding: dict[Hashable, threading.Lock] = {}
        with _locked():
            _stores.add(self)

    def clear(self) -> None:
        """Drop all blocks."""
        with _locked():
            self._blocks, self._decoding = OrderedDict(), {}
            self.nbytes = 0

    def find(self, key: Hashable) -> Any:
        """Return a kept block, or None."""
        with _locked():
            block = self._blocks.get(key)
            if block is None:
                return None
            self._blocks.move_to_end(key)
            block.used = next(_uses)
            return block.rows

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int, int]]) -> Any:
        """Return a block, decoded if it is not kept.

        Args:
            key: Name of the block in this source.
            decode: Returns the block, its number of rows, and its bytes. While it runs, other
                threads wait for this block only.
        """
        if (found := self.find(key)) is not None:
            return found
        with _locked():
            turn = self._decoding.setdefault(key, threading.Lock())
        with turn:
            try:
                if (found := self.find(key)) is None:
                    found, rows, nbytes = decode()
                    self.put(key, found, rows, nbytes)
                return found
            finally:
                self._decoding.pop(key, None)

    def put(self, key: Hashable, block: object, rows: int, nbytes: int) -> None:
        """Keep a block, and drop those that are not needed any more."""
        with _locked():
            self._rows = max(self._rows, rows)
            if key in self._blocks:
                self.nbytes -= self._blocks.pop(key).nbytes
            self._blocks[key] = _Block(block, nbytes)
            self.nbytes += nbytes
            _drop_old()

    def drop_oldest(self) -> None:
        """Drop the block whose latest use is the oldest one."""
        _, block = self._blocks.popitem(last=False)
        self.nbytes -= block.nbytes

    @property
    def needed(self) -> int:
        """Number of blocks that the rows of a window of any order are in."""
        counts = (window.blocks * _touched(window.rows, self._rows) for window in _windows.values())
        return max(_LEAST_BLOCKS, *counts, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptBlocks, ()


def _touched(rows: int, of: int) -> int:
    """Return the most blocks of `of` rows that consecutive `rows` of an order's block can be in."""
    if rows % of == 0:
        return rows // of
    return 1 if of % rows == 0 else (rows - 2) // of + 2


def _drop_old() -> None:
    """Drop the least recently used blocks while there are too many. Holds the lock."""
    stores = list(_stores)
    while (total := sum(store.nbytes for store in stores)) > _FREE_BYTES:
        is_within = total <= _most_bytes()
        over = [s for s in stores if len(s._blocks) > (s.needed if is_within else 1)]
        if not over:
            return
        min(over, key=lambda store: next(iter(store._blocks.values())).used).drop_oldest()


# ---- arrays ----


class ChunkedRows(ArrayRows):
    """Rows of an array that is stored in chunks. A row is a separate object, as `array[i]` is.

    Args:
        items: Array of h5py, zarr, dask, tensorstore or xarray.
        kept: Keeps decoded blocks; several arrays may share it. None: a new one.
        name: Name of this array among those that share `kept`.
        check: Called before a block is read. It raises if the array may have changed.

    Attributes:
        stored_rows: Rows of a chunk; 0: the array has no chunks.
        row_bytes: Bytes of a row, without those of its strings and inner arrays.
    """

    __slots__ = ("_check", "_gives_scalars", "_kept", "_name", "_rows", "row_bytes", "stored_rows")

    def __init__(
        self,
        items: Array,
        kept: KeptBlocks | None = None,
        name: Hashable = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(items)
        self._kept, self._name, self._check = kept or KeptBlocks(), name, check
        self.row_bytes, self.stored_rows = row_bytes(items), chunk_rows(items)
        self._rows = _rows_to_keep(items)
        # True if an element of an array with one axis is a scalar, not an array without axes.
        self._gives_scalars: bool | None = None if is_of(items, "zarr") else not self._is_lazy

    def __getitem__(self, index: int) -> object:
        rows = self._rows
        if rows == 1 or index < 0:
            return super().__getitem__(index)
        number, at = divmod(index, rows)
        block = self._kept.get((self._name, number), lambda: self._decoded(number))
        return self._row(block, at)

    def read_rows(self, indices: Sequence[int]) -> list[object]:
        """Return the rows of these indices. Each block of them is decoded once.

        Consecutive blocks are read with one call.
        """
        if len(indices) == 1:
            return [self[indices[0]]]
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number, at = divmod(index, self._rows)
            wanted.setdefault(number, []).append((place, at))
        found: list[object] = [None] * len(indices)

        def take(number: int, block: Any) -> None:
            for place, at in wanted[number]:
                found[place] = self._row(block, at)

        missing: list[int] = []
        for number in sorted(wanted):
            block = None if self._rows == 1 else self._kept.find((self._name, number))
            if block is None:
                missing.append(number)
            else:
                take(number, block)
        most = max(1, _RUN_BYTES // max(1, self._rows * self.row_bytes))
        for first, stop in _runs(missing, most):
            for number, block in self._read_blocks(first, stop):
                take(number, block)
        return found

    def forget_blocks(self) -> None:
        """Drop all kept blocks. Called when a pass begins, because the array may have changed."""
        self._kept.clear()

    def _decoded(self, number: int) -> tuple[Any, int, int]:
        """Return a block, its number of rows, and its bytes."""
        first = number * self._rows
        block = self._read(first, first + self._rows)
        return block, self._rows, _bytes_of(block)

    def _read_blocks(self, first: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Read consecutive blocks with one call. Yield their numbers and rows."""
        rows = self._rows
        if stop == first + 1 and rows == 1:
            yield first, [super().__getitem__(first)]
            return
        read = self._read(first * rows, stop * rows)
        for number in range(first, stop):
            start = (number - first) * rows
            block = read[start : start + rows]
            if rows > 1:
                # Not a view, because it would keep the other blocks.
                block = block if stop == first + 1 else block.copy()
                self._kept.put((self._name, number), block, rows, _bytes_of(block))
            yield number, block

    def _read(self, start: int, stop: int) -> Any:
        if self._check is not None:
            self._check()
        array: Any = self.items
        return self._in_memory(array[start : min(stop, len(self))])

    def _row(self, block: Any, at: int) -> object:
        if type(block) is list:
            return _own(block[at])  # the row may be needed twice
        if self._gives_scalars is None:
            # The type of `array[i]` differs between versions of zarr.
            self._gives_scalars = len(self.items.shape) == 1 and not isinstance(
                self.items[0], np.ndarray
            )
        return _own(block[at] if self._gives_scalars else block[at, ...])

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkedRows, (self.items,)


def _runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of each run of consecutive ascending numbers, of at most `most`."""
    first = stop = -1
    for number in numbers:
        if number != stop or stop - first >= most:
            if stop > first:
                yield first, stop
            first = number
        stop = number + 1
    if stop > first:
        yield first, stop


def row_bytes(array: Any) -> int:
    """Return the bytes of a row of an array, without those of its strings and inner arrays."""
    dtype = array.dtype
    if not hasattr(dtype, "itemsize"):  # tensorstore
        dtype = dtype.numpy_dtype
    return math.prod(map(int, array.shape[1:])) * int(dtype.itemsize)


def chunk_rows(array: Any) -> int:
    """Return the rows of a chunk of an array, or of the inner chunk of a shard.

    0 if the array has no chunks, or chunks of unequal rows.
    """
    rows: Any = None
    with FailuresIgnored():  # zarr raises if the chunks have no regular grid
        if is_of(array, "tensorstore"):
            rows = array.chunk_layout.read_chunk.shape[0]
        elif chunks := getattr(array, "chunks", None):
            rows = chunks[0]
        elif is_of(array, "xarray"):
            rows = array.encoding["preferred_chunks"][array.dims[0]]
    if isinstance(rows, tuple):  # dask has the rows of each chunk
        rows = rows[0] if len(set(rows[:-1])) < 2 else 0
    return int(rows or 0)


def _rows_to_keep(array: Any) -> int:
    """Return the rows of the blocks in which an array is read. 1: rows are read one by one.

    A block is a chunk, unless it is too large to be kept.
    """
    rows = max(1, chunk_rows(array)) if _can_be_kept(array) else 1
    nbytes = rows * row_bytes(array)
    return 1 if nbytes > _FREE_BYTES and nbytes > _most_bytes() else rows


def _can_be_kept(array: Any) -> bool:
    """Return True if the rows of a block can be copied: numbers, strings, or arrays of numbers."""
    dtype = array.dtype
    if not getattr(dtype, "hasobject", False) or dtype.kind == "T":
        return True
    if not is_of(array, "h5py"):
        return False
    import h5py

    inner = h5py.check_vlen_dtype(dtype)
    return h5py.check_string_dtype(dtype) is not None or (inner is not None and not inner.hasobject)


def _own(row: Any) -> object:
    """Return a row as an object that shares no memory with its block."""
    if type(row) is np.void:
        return row.copy()
    if type(row) is not np.ndarray:
        return row
    own = row.copy()
    if own.dtype.kind == "O":
        places = own.reshape(-1)
        for at, value in enumerate(places):
            places[at] = _own(value)
    return own


def _bytes_of(block: Any) -> int:
    """Return the bytes of a block, with those of its strings and inner arrays."""
    total = int(block.nbytes)
    if block.dtype.kind in "OT":
        for value in block.reshape(-1):
            total += getattr(value, "nbytes", 0) or len(value)
        total += block.size * _BYTES_PER_OBJECT
    return total
