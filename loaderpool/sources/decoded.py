"""Blocks of rows that are decoded together, and kept for the rows that follow.

HDF5, zarr and Parquet compress a block of rows at once. To read one row, the whole block must be
decoded. `KeptBlocks` keeps decoded blocks, so that the other rows of a block need no decoding.
`ChunkedRows` reads the rows of an array from kept blocks.

The windows of the orders in this process determine how many blocks are kept (`reserve`). All kept
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.sources.arrays import Array, ArrayRows, is_of
from loaderpool.system import capacity, ranks
from loaderpool.system.interrupts import FailuresIgnored

if TYPE_CHECKING:
    from loaderpool.plan.block_order import BlockOrder

# Size of blocks that a process keeps even if no window needs them. Smaller: small columns, such as
# labels, are decoded again. Larger: without `lp.Blocks`, a process keeps more blocks without need.
_FREE_BYTES = 64 << 20
# Largest size of consecutive blocks that one call reads. Smaller: more calls, which cost up to a
# millisecond each. Larger: a read in order takes more memory.
_RUN_BYTES = 4 << 20
# Number of blocks that each source keeps without `lp.Blocks`. Smaller: two threads that read two
# batches in turns decode a block for each row. Larger: more memory.
_LEAST_BLOCKS = 2
_BYTES_PER_OBJECT = 64  # size of a Python string or array without its data

_Rows = npt.NDArray[Any]


class _Block:
    __slots__ = ("nbytes", "rows", "used")

    def __init__(self, rows: object, nbytes: int) -> None:
        self.rows, self.nbytes = rows, nbytes
        self.used = next(_uses)  # number of the latest use; larger numbers are more recent


class _Window(NamedTuple):
    """Size of an order's windows. An order shuffles the rows of a window together."""

    blocks: int  # number of blocks
    rows: int  # rows of the order's largest block


# Sizes of the windows in this process, by the object that reads in this order.
_windows: weakref.WeakKeyDictionary[object, _Window] = weakref.WeakKeyDictionary()
_stores: weakref.WeakSet[KeptBlocks] = weakref.WeakSet()
_lock = threading.RLock()
_uses = itertools.count()
_owner = os.getpid()


def reserve(reader: object, order: BlockOrder) -> None:
    """Keep as many blocks as a window of an order needs, as long as `reader` exists.

    Args:
        reader: Object that reads in this order.
        order: The order.
    """
    _windows[reader] = _Window(order.window, order.most_rows)


@functools.cache
def _most_bytes() -> int:
    """Return the limit in bytes of all kept blocks in this process.

    It is half of the free memory, divided by the number of CPUs. The free memory is measured once,
    at the first call.
    """
    return max(_FREE_BYTES, ranks.memory_bytes() // (2 * capacity.usable_cpu_count()))


def _locked() -> threading.RLock:
    """Return the lock of all `KeptBlocks`.

    At the first call in a forked process, replace the lock and drop all blocks. Another thread may
    have held the lock during the fork, so blocks may be half changed.
    """
    global _lock, _owner
    if _owner != os.getpid():
        _lock, _owner = threading.RLock(), os.getpid()
        for store in list(_stores):
            store.clear()
    return _lock


class KeptBlocks:
    """The most recently used blocks of one source, in this process. It is pickled empty.

    Each source keeps at least two blocks, and with `lp.Blocks` those of a window. If the blocks of
    all sources exceed the limit in bytes, the least recently used ones are dropped. Each source
    always keeps its latest block. Thread-safe, except `drop_oldest`.

    Attributes:
        nbytes: Bytes of all kept blocks.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._rows = 1  # rows of the largest block
        self._blocks: OrderedDict[Hashable, _Block] = OrderedDict()
        # Locks of the blocks that threads are decoding.
        self._decoding: dict[Hashable, threading.Lock] = {}
        with _locked():
            _stores.add(self)

    def clear(self) -> None:
        """Drop all blocks."""
        with _locked():
            self._blocks, self._decoding = OrderedDict(), {}
            self.nbytes = 0

    def find(self, key: Hashable) -> Any:
        """Return a block, or None if it is not kept."""
        with _locked():
            block = self._blocks.get(key)
            if block is None:
                return None
            self._blocks.move_to_end(key)
            block.used = next(_uses)
            return block.rows

    def get(self, key: Hashable, decode: Callable[[], tuple[Any, int, int]]) -> Any:
        """Return a block. If it is not kept, decode and keep it.

        Args:
            key: Name of the block in this source.
            decode: Returns the block, its number of rows, and its size in bytes. While it runs,
                other threads wait only if they need the same block.
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
        """Keep a block, and drop old blocks above the limits."""
        with _locked():
            self._rows = max(self._rows, rows)
            if key in self._blocks:
                self.nbytes -= self._blocks.pop(key).nbytes
            self._blocks[key] = _Block(block, nbytes)
            self.nbytes += nbytes
            _drop_old()

    def drop_oldest(self) -> None:
        """Drop the least recently used block. The caller holds the lock."""
        _, block = self._blocks.popitem(last=False)
        self.nbytes -= block.nbytes

    @property
    def needed(self) -> int:
        """Number of blocks that contain the rows of a window, for the order that needs most."""
        counts = (
            window.blocks * _most_overlapped(window.rows, self._rows)
            for window in _windows.values()
        )
        return max(_LEAST_BLOCKS, *counts, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptBlocks, ()


def _most_overlapped(rows: int, of: int) -> int:
    """Return how many stored blocks a block of `lp.Blocks` overlaps at most.

    Args:
        rows: Rows of the order's block.
        of: Rows of a stored block.
    """
    if rows % of == 0:
        return rows // of
    return 1 if of % rows == 0 else (rows - 2) // of + 2


def _drop_old() -> None:
    """Drop the least recently used blocks while there are too many. The caller holds the lock."""
    stores = list(_stores)
    while (total := sum(store.nbytes for store in stores)) > _FREE_BYTES:
        is_within = total <= _most_bytes()
        over = [s for s in stores if len(s._blocks) > (s.needed if is_within else 1)]
        if not over:
            return
        min(over, key=lambda store: next(iter(store._blocks.values())).used).drop_oldest()


# ---- arrays ----


class ChunkedRows(ArrayRows):
    """Rows of an array that is stored in chunks. Each row is a separate object, like `array[i]`.

    Args:
        items: Array of h5py, zarr, dask, tensorstore or xarray.
        kept: Store of decoded blocks, which several arrays may share. None: a new one.
        name: Name of this array among those that share `kept`.
        check: Called before a block is read. It raises if the array may have changed.

    Attributes:
        stored_rows: Rows of a chunk; 0 if the array has no chunks.
        row_bytes: Size of a row in bytes, without its strings and inner arrays.
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
        # True if `array[i]` of an array with one axis is a scalar. False if it is an array without
        # axes. None: not known yet.
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

        def take(number: int, block: _Rows | list[object]) -> None:
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

    def _decoded(self, number: int) -> tuple[_Rows, int, int]:
        """Decode a block. Return it, its number of rows, and its size in bytes."""
        first = number * self._rows
        block = self._read(first, first + self._rows)
        return block, self._rows, _bytes_of(block)

    def _read_blocks(self, first: int, stop: int) -> Iterator[tuple[int, _Rows | list[object]]]:
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
                # Copy, because a view would keep the memory of all blocks of this read.
                block = block if stop == first + 1 else block.copy()
                self._kept.put((self._name, number), block, rows, _bytes_of(block))
            yield number, block

    def _read(self, start: int, stop: int) -> _Rows:
        if self._check is not None:
            self._check()
        array: Any = self.items
        rows: _Rows = self._in_memory(array[start : min(stop, len(self))])
        return rows

    def _row(self, block: _Rows | list[object], at: int) -> object:
        if isinstance(block, list):
            return _own(block[at])  # a copy, because the caller may change the row
        if self._gives_scalars is None:
            # Versions of zarr differ in the type of `array[i]`.
            self._gives_scalars = len(self.items.shape) == 1 and not isinstance(
                self.items[0], np.ndarray
            )
        return _own(block[at] if self._gives_scalars else block[at, ...])

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkedRows, (self.items,)


def _runs(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of consecutive numbers, with at most `most` each."""
    first = stop = -1
    for number in numbers:
        if number != stop or stop - first >= most:
            if stop > first:
                yield first, stop
            first = number
        stop = number + 1
    if stop > first:
        yield first, stop


def row_bytes(array: Array) -> int:
    """Return the size in bytes of a row of an array, without its strings and inner arrays."""
    dtype = array.dtype
    if not hasattr(dtype, "itemsize"):  # dtype of tensorstore
        dtype = dtype.numpy_dtype
    return math.prod(map(int, array.shape[1:])) * int(dtype.itemsize)


def chunk_rows(array: Any) -> int:
    """Return the number of rows in a chunk of an array, or in an inner chunk if it has shards.

    Return 0 if the array has no chunks, or if chunks differ in their rows.
    """
    rows: Any = None
    with FailuresIgnored():  # zarr raises if chunks differ in size
        if is_of(array, "tensorstore"):
            rows = array.chunk_layout.read_chunk.shape[0]
        elif chunks := getattr(array, "chunks", None):
            rows = chunks[0]
        elif is_of(array, "xarray"):
            rows = array.encoding["preferred_chunks"][array.dims[0]]
    if isinstance(rows, tuple):  # dask lists the rows of each chunk
        rows = rows[0] if len(set(rows[:-1])) < 2 else 0
    return int(rows or 0)


def _rows_to_keep(array: Array) -> int:
    """Return the number of rows in a block that is read and kept together.

    A block is a chunk. If a chunk cannot be kept, or is too large, return 1: rows are read one by
    one.
    """
    rows = max(1, chunk_rows(array)) if _can_be_kept(array) else 1
    nbytes = rows * row_bytes(array)
    return 1 if nbytes > _FREE_BYTES and nbytes > _most_bytes() else rows


def _can_be_kept(array: Array) -> bool:
    """Return True if rows can be copied: they have only numbers, strings or arrays of numbers."""
    dtype = array.dtype
    if not getattr(dtype, "hasobject", False) or dtype.kind == "T":
        return True
    if not is_of(array, "h5py"):
        return False
    import h5py

    inner = h5py.check_vlen_dtype(dtype)
    return h5py.check_string_dtype(dtype) is not None or (inner is not None and not inner.hasobject)


def _own(row: object) -> object:
    """Return a copy of a row that shares no memory with its block."""
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


def _bytes_of(block: _Rows) -> int:
    """Return the size in bytes of a block, with its strings and inner arrays."""
    total = int(block.nbytes)
    if block.dtype.kind in "OT":
        for value in block.reshape(-1):
            total += getattr(value, "nbytes", 0) or len(value)
        total += block.size * _BYTES_PER_OBJECT
    return total
