"""The arena: one anonymous shared memory file, mapped once by trainer, supervisor and (through fork) every worker.

It has no name, so nothing is left behind by any death, and it is large and sparse, so mapping it costs address space
and nothing else. The board lies at its start, then what workers tell of calls, and the flight recorder's rings; slots
and blobs are extents behind them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.board import BOARD_BYTES, Board
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import WorkerRecorder, worker_rings
from loaderpool.system import capacity, machine
from loaderpool.system.interrupts import InterruptsHeld, Undoing

PAGE_BYTES = 4096
_BYTE = np.dtype(np.uint8)


class Extent(NamedTuple):
    """A byte range of the arena."""

    offset: int  # from the arena's start, a multiple of PAGE_BYTES
    nbytes: int  # a multiple of PAGE_BYTES

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.nbytes


class ExtentMap:
    """Hands out page-aligned extents of `[start, end)` and takes them back, merging neighbours."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [Extent(start, end - start)]  # by offset, never adjacent
        self.size, self.taken_bytes = end - start, 0

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((hole.nbytes for hole in self._free), default=0)

    def holes(self) -> list[Extent]:
        """Return all free parts."""
        return list(self._free)

    def take(self, nbytes: int) -> Extent:
        """Return the first free extent of at least `nbytes`, rounded up to whole pages.

        Raises:
            MemoryLimitError: no hole is large enough; the arena is sparse, so this means terabytes.
        """
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        for at, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[at : at + 1] = (
                    [Extent(offset + size, free - size)] if free > size else []
                )
                self.taken_bytes += size
                return Extent(offset, size)
        raise MemoryLimitError(
            f"no free range of {size:,} bytes is left; set a smaller Limits.memory or batch_size"
        )

    def give_back(self, extent: Extent) -> None:
        """Make the extent free again."""
        at = bisect.bisect(self._free, extent)
        before, after = self._free[max(at - 1, 0) : at], self._free[at : at + 1]
        if any(hole.offset < extent.end and extent.offset < hole.end for hole in (*before, *after)):
            raise ValueError(f"{extent} is free already")
        self.taken_bytes -= extent.nbytes
        before = [hole for hole in before if hole.end == extent.offset]
        after = [hole for hole in after if hole.offset == extent.end]
        start, end = (before or [extent])[0].offset, (after or [extent])[0].end
        self._free[at - len(before) : at + len(after)] = [Extent(start, end - start)]


# Sizes are rounded up to an eighth of a power of two, so that what varies a little fits what is there.
_STEPS = 8


def room_bytes(nbytes: int) -> int:
    """Return the size of an extent for so many bytes."""
    step = max(PAGE_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-max(nbytes, 1) // step) * step


class ExtentPool:
    """The extents that are not in use now. The caller holds the pool's lock.

    Args:
        arena: where from.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._spare: list[tuple[int, Extent]] = []  # by size
        self.is_closed = False

    def take(self, nbytes: int) -> Extent:
        """Reserve an extent for so many bytes.

        Raises:
            MemoryLimitError: there is none.
        """
        size = room_bytes(nbytes)
        at = bisect.bisect_left(self._spare, (size,))
        if at < len(self._spare) and self._spare[at][0] <= 2 * size:
            return self._spare.pop(at)[1]
        if self._spare:  # of other sizes than what comes now
            self._arena.give_back(self._spare.pop(0 if at else -1)[1])
        return self._arena.take(size, "the items of a batch")

    def give(self, extent: Extent) -> None:
        """Take back an extent that is not looked at any more."""
        if self.is_closed:
            self._arena.give_back(extent)
        else:
            bisect.insort(self._spare, (extent.nbytes, extent))

    def close(self) -> None:
        """Give all memory back, and extents that come later at once."""
        self.is_closed = True
        while self._spare:
            self._arena.give_back(self._spare.pop()[1])


# Address space, not memory. Smaller would bound how many loaders a pool can hold; larger gains nothing.
_FILE_BYTES = 1 << 40
_SMALLEST_FILE_BYTES = 1 << 30
_File = TypeVar("_File", bound="SparseFile")
# What must stay free beside our own reservation, so that the trainer's next allocation does not wake the OOM killer.
HEADROOM_BYTES = 64 << 20


class SparseFile:
    """A memory file without a name, and its mapping. Or, for spawned workers, a block of memory with a name.

    Ownership: of the descriptor and the name, until `close_descriptor`. The mapping is never closed by hand: arrays
    look at it, and it goes with the last of them.

    Attributes:
        kind: of what it has, as /proc shows it.
        name: by which others map it; empty: there is none.
        unlink: gives up the name.

    Args:
        descriptor: of the file; -1: there is none.
        nbytes: its length; 0: that is to be found out.
        tag: of the mapping, where Windows knows it by a name.
    """

    kind = ""
    name = ""
    unlink: Callable[[], object] | None = None

    def __init__(self, descriptor: int, nbytes: int = 0, tag: str = "") -> None:
        self.descriptor, self.nbytes = descriptor, nbytes or os.fstat(descriptor).st_size
        self.map = _map_named(tag, nbytes) if tag else mmap.mmap(descriptor, self.nbytes)

    @classmethod
    def create(cls: type[_File]) -> _File:  # noqa: PYI019 - Self is in typing from 3.11 on
        """Return a new one, as large in address space as the process's limits allow.

        Raises:
            MemoryLimitError: not even the smallest fits (`ulimit -v`, `ulimit -f`), or all of it would take memory.
            OSError: neither limit is the cause (too many open files, say).
        """
        descriptor, nbytes = machine.create_memory_file(cls.kind), _FILE_BYTES
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            before = os.fstat(descriptor).st_blocks
            with mmap.mmap(descriptor, PAGE_BYTES):
                if os.fstat(descriptor).st_blocks > before:  # a page that was not written to
                    raise MemoryLimitError(
                        "This process locks all memory that it maps (mlockall(MCL_FUTURE)). Call munlockall() first, "
                        "and do not lock memory while a loader exists."
                    )
            while True:
                try:
                    os.ftruncate(descriptor, nbytes)
                    return cls(descriptor)
                except OSError as error:
                    if error.errno not in (errno.ENOMEM, errno.EFBIG):
                        raise
                    nbytes //= 4
                    if nbytes < _SMALLEST_FILE_BYTES:
                        limits = "virtual memory (ulimit -v) and the size of a file (ulimit -f)"
                        raise MemoryLimitError(
                            f"Could not reserve shared memory ({error.strerror}): the limits on {limits} must allow at "
                            f"least {_SMALLEST_FILE_BYTES >> 30} GiB of address space, which is reserved but not used."
                        ) from error
        except BaseException:
            os.close(descriptor)
            raise

    def close_descriptor(self) -> None:
        """Drop the file descriptor; the mapping stays for those who look at it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            if self.unlink is not None:
                self.unlink()

    def return_pages(self, offset: int, nbytes: int) -> None:
        """Give the pages of a range back to the machine; without a descriptor by the mapping alone."""
        if self.descriptor >= 0:
            machine.return_pages(self.descriptor, offset, nbytes)
        elif nbytes > 0 and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_REMOVE, offset, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


class SlotFile(SparseFile):
    """All slots, mapped once by the main process, the supervisor and its workers.

    A supervisor has one of its own, so that what its death leaves half done is in no slot of the next one. It is
    sparse: its size is address space, and pages are taken with a slot's first batch. It goes with the last array that
    looks at it.
    """

    kind = "batches"

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`, built on the mapping itself.

        NumPy collapses `.base` of views down to the first array that is not built on another array: this one. So it
        lives exactly as long as any view made from it (docs/internals/memory.md, "Anchors").
        """
        # A dtype, not its type, and no argument by name: that is 5 us, not 16, after a wait that left no cache warm.
        slot: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self.map, offset)
        return slot


class Arena(SparseFile):
    """The shared memory file with board, counts and recorders; the trainer hands out extents of the rest."""

    kind = "arena"

    def __init__(self, descriptor: int, nbytes: int = 0, tag: str = "") -> None:
        super().__init__(descriptor, nbytes, tag)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self.map.madvise(mmap.MADV_DONTDUMP)
        self.board = Board(self.map)
        self.call_times: memoryview = memoryview(self.map)[
            BOARD_BYTES : BOARD_BYTES + CALL_TIMES_BYTES
        ].cast("Q")
        self.rings = worker_rings(BOARD_BYTES + CALL_TIMES_BYTES, self.nbytes)
        self.extents = ExtentMap(self.rings.stop, self.nbytes)

    def recorder(self, cell: int, number: int) -> WorkerRecorder:
        """Return what records for the worker of this cell; in a small arena it may write to where no other looks."""
        has_rings = cell < len(self.rings)
        buffer, at = (self.map, self.rings[cell]) if has_rings else (bytearray(self.rings.step), 0)
        return WorkerRecorder(buffer, at, number)

    def take(self, nbytes: int, purpose: str) -> Extent:
        """Reserve an extent with its pages.

        Raises:
            MemoryLimitError: the machine or its cgroup has too little free.
        """
        free = capacity.available_memory_bytes()
        if nbytes + HEADROOM_BYTES > free:
            raise MemoryLimitError(
                f"{purpose} needs {nbytes:,} bytes of shared memory, but the machine (or its cgroup) has only "
                f"{free:,} bytes free; set a smaller Limits.memory or batch_size"
            )
        extent = self.extents.take(nbytes)
        try:
            machine.reserve(self.descriptor, extent.offset, extent.nbytes)
        except BaseException:
            self.give_back(extent)
            raise
        return extent

    def give_back(self, extent: Extent) -> None:
        """Return an extent and its pages."""
        self.return_pages(*extent)
        self.extents.give_back(extent)

    def put(self, blob: bytes) -> Extent:
        """Copy bytes into an extent of their own."""
        extent = self.take(len(blob), "a message to the workers")
        self.map[extent.offset : extent.offset + len(blob)] = blob
        return extent


def oversize_file(nbytes: int, write: Callable[[mmap.mmap], object]) -> int:
    """Return a memory file of its own for a batch that does not fit its slot, as `write` writes it.

    Raises:
        OSError: there is no memory, or no descriptor.
    """
    file = machine.create_memory_file("oversize")
    try:
        os.ftruncate(file, nbytes)
        machine.reserve(file, 0, nbytes)
        with mmap.mmap(file, nbytes) as view:
            write(view)
    except BaseException:
        os.close(file)
        raise
    return file


def map_memory_file(descriptor: int, nbytes: int, offset: int = 0, is_private: bool = False) -> Any:
    """Map a part of a memory file, as a buffer that unmaps itself; the descriptor may be closed afterwards.

    Args:
        descriptor: the file.
        nbytes: the part's length.
        offset: where it begins, a multiple of the page size.
        is_private: writes are this process's own; the file's contents must stay as they are while any array looks here.
    """
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    with InterruptsHeld():
        address = machine.map_file(None, nbytes, flags, descriptor, offset)
        # `mmap.mmap` keeps a duplicate of the descriptor (before Python 3.13); a consumer may keep thousands of these.
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        Undoing(buffer, machine.unmapping(address, nbytes))  # when the last array over it has died
    return buffer


def _map_named(tag: str, nbytes: int) -> mmap.mmap:
    """Map memory that another process has named. Windows only."""
    make: Any = mmap.mmap
    named: mmap.mmap = make(-1, nbytes, tagname=tag)
    return named
