"""The arena: one anonymous shared memory file, mapped by all local processes of a pool.

The main process and the supervisor map it once; workers inherit the mapping through fork. The file
has no name, so no process death can leave it behind. It is large and sparse, so a mapping costs
address space only. The board is at its start. Call times and the flight recorder's rings follow.
The rest is divided into extents for payloads, stream items and counters of caches. Slots are not in
the arena: each supervisor has a `SlotFile`.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.board import BOARD_BYTES, Board
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import WorkerRecorder, worker_rings
from loaderpool.system import abilities, capacity, machine
from loaderpool.system.interrupts import InterruptsHeld, Undoing

PAGE_BYTES = 4096
_BYTE = np.dtype(np.uint8)


class Extent(NamedTuple):
    """A byte range of the arena."""

    offset: int  # distance from the arena's start, a multiple of PAGE_BYTES
    nbytes: int  # length, a multiple of PAGE_BYTES

    @property
    def end(self) -> int:
        """Offset of the first byte after the extent."""
        return self.offset + self.nbytes


class ExtentMap:
    """Free list of page-aligned extents in `[start, end)`. Free neighbours are merged.

    The main process has one for the arena, and the supervisor has one for its slots.
    """

    def __init__(self, start: int, end: int) -> None:
        self._free = [Extent(start, end - start)]  # sorted by offset, never adjacent
        self.size, self.taken_bytes = end - start, 0

    @property
    def largest(self) -> int:
        """Size of the largest free extent in bytes, or 0."""
        return max((hole.nbytes for hole in self._free), default=0)

    def holes(self) -> list[Extent]:
        """Return all free extents."""
        return list(self._free)

    def take(self, nbytes: int) -> Extent:
        """Reserve `nbytes`, rounded up to whole pages, in the first free extent that fits.

        Raises:
            MemoryLimitError: no free extent is large enough. The arena is sparse, so this happens
                only with terabytes in use, or if limits of the process made the arena small.
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
            f"no free range of {size:,} bytes is left. Set a smaller Limits.memory, or make "
            "batches smaller"
        )

    def give_back(self, extent: Extent) -> None:
        """Release an extent that `take` returned."""
        at = bisect.bisect(self._free, extent)
        before, after = self._free[max(at - 1, 0) : at], self._free[at : at + 1]
        if any(hole.offset < extent.end and extent.offset < hole.end for hole in (*before, *after)):
            raise ValueError(f"{extent} is free already")
        self.taken_bytes -= extent.nbytes
        before = [hole for hole in before if hole.end == extent.offset]
        after = [hole for hole in after if hole.offset == extent.end]
        start, end = (before or [extent])[0].offset, (after or [extent])[0].end
        self._free[at - len(before) : at + len(after)] = [Extent(start, end - start)]


# Sizes are rounded up to an eighth of a power of two, so that a spare extent fits requests of
# similar sizes.
_STEPS = 8


def room_bytes(nbytes: int) -> int:
    """Return the size of an extent that holds `nbytes`."""
    step = max(PAGE_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-max(nbytes, 1) // step) * step


class ExtentPool:
    """Cache of spare extents for the items of streams. The caller holds the pool's lock.

    Args:
        arena: source of new extents, and receiver of those that the cache releases.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._spare: list[tuple[int, Extent]] = []  # sizes and extents, sorted by size
        self.is_closed = False

    def take(self, nbytes: int) -> Extent:
        """Return an extent of at least `nbytes`: a spare one, or a new one of the arena.

        Raises:
            MemoryLimitError: the arena or the machine has too little memory free.
        """
        size = room_bytes(nbytes)
        at = bisect.bisect_left(self._spare, (size,))
        if at < len(self._spare) and self._spare[at][0] <= 2 * size:
            return self._spare.pop(at)[1]
        # No spare extent fits the present sizes, so one of them is released.
        if self._spare:
            self._arena.give_back(self._spare.pop(0 if at else -1)[1])
        return self._arena.take(size, "the items of a batch")

    def give(self, extent: Extent) -> None:
        """Keep an extent that no process reads any more; after `close`, release it."""
        if self.is_closed:
            self._arena.give_back(extent)
        else:
            bisect.insort(self._spare, (extent.nbytes, extent))

    def close(self) -> None:
        """Release all spare extents. Later calls of `give` release their extents at once."""
        self.is_closed = True
        while self._spare:
            self._arena.give_back(self._spare.pop()[1])


# Size of a file: address space, not memory. Smaller: fewer loaders fit a pool. Larger: no gain.
_FILE_BYTES = 1 << 40
_SMALLEST_FILE_BYTES = 1 << 30
_File = TypeVar("_File", bound="SparseFile")
# Memory that stays free after a reservation, so that the next allocation of the main process does
# not trigger the OOM killer.
HEADROOM_BYTES = 64 << 20


class SparseFile:
    """A memory file without a name, and its mapping. On Windows: a mapping with a name.

    Ownership: owns the descriptor until `close_descriptor`. The mapping is never closed explicitly,
    because arrays use it. The last of these arrays unmaps it.

    Attributes:
        kind: name of the contents, as /proc shows it.
        address: arguments with which a process that inherits the descriptor maps the memory.

    Args:
        descriptor: descriptor of the file; -1: there is no file.
        nbytes: length; 0: the length of the file.
        tag: name of the mapping on Windows; empty: the file is mapped.
    """

    kind = ""

    def __init__(self, descriptor: int, nbytes: int = 0, tag: str = "") -> None:
        self.descriptor, self.nbytes = descriptor, nbytes or os.fstat(descriptor).st_size
        self.address = descriptor, self.nbytes, tag
        self.map = _map_named(tag, nbytes) if tag else mmap.mmap(descriptor, self.nbytes)

    @classmethod
    def create(cls: type[_File]) -> _File:  # noqa: PYI019 - Self is in typing from 3.11 on
        """Create a sparse file: 1 TiB of address space, or less if the process's limits demand it.

        On a system without memory files, the memory is as large as the free memory, or a quarter of
        it on Windows.

        Raises:
            MemoryLimitError: not even the smallest size fits (`ulimit -v`, `ulimit -f`), or the
                process locks all memory that it maps, so that the file would not be sparse.
            OSError: any other failure, such as too many open files.
        """
        if not abilities.has_memory_files():
            return cls(*_shared_memory())
        descriptor, nbytes = machine.create_memory_file(cls.kind), _FILE_BYTES
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            before = os.fstat(descriptor).st_blocks
            with mmap.mmap(descriptor, PAGE_BYTES):
                # The page was not written to, and takes memory all the same.
                if os.fstat(descriptor).st_blocks > before:
                    raise MemoryLimitError(
                        "This process locks all memory that it maps (mlockall(MCL_FUTURE)). Call "
                        "munlockall() first, and do not lock memory while a loader exists."
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
                            f"Could not reserve shared memory ({error.strerror}): the limits on "
                            f"{limits} must allow at least {_SMALLEST_FILE_BYTES >> 30} GiB of "
                            "address space, which is reserved but not used."
                        ) from error
        except BaseException:
            os.close(descriptor)
            raise

    def close_descriptor(self) -> None:
        """Close the descriptor. The mapping stays for arrays that use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def write(self, offset: int, part: Any) -> None:
        """Copy bytes, or a contiguous array, to reserved pages of the file.

        If there is a memory file, the kernel copies into it. A copy into the mapping would take
        twice as long, because the kernel fills each page with zeros at its first fault.
        """
        if not len(part):
            return
        source = memoryview(part).cast("B")
        if self.descriptor >= 0 and abilities.has_memory_files():
            machine.write_file(self.descriptor, offset, source)
        else:
            with memoryview(self.map) as view:
                view[offset : offset + source.nbytes] = source

    def return_pages(self, offset: int, nbytes: int) -> None:
        """Return the pages of a range to the system. Without a descriptor, use the mapping."""
        if self.descriptor >= 0:
            machine.return_pages(self.descriptor, offset, nbytes)
        elif nbytes > 0 and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_REMOVE, offset, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


_BLOCK_BYTES = 64 << 20  # the size of shared memory without a memory file is a multiple of this


def _shared_memory() -> tuple[int, int, str]:
    """Create shared memory on a system without memory files.

    Returns:
        Descriptor, size and tag, as `SparseFile` takes them.
    """
    # Windows commits all of the memory when it is created, other systems only written pages.
    divisor = _BLOCK_BYTES * (4 if os.name == "nt" else 1)
    size = max(1, capacity.available_memory_bytes() // divisor) * _BLOCK_BYTES
    if os.name == "nt":
        return -1, size, f"loaderpool-{os.getpid()}-{os.urandom(8).hex()}"
    # Imported here, because few systems need it.
    from multiprocessing.shared_memory import SharedMemory

    with contextlib.closing(SharedMemory(create=True, size=size)) as block:
        block.unlink()  # no name is needed, because other processes inherit the descriptor
        descriptor = os.dup(block._fd)  # type: ignore[attr-defined]
        return machine.above_standard(descriptor), block.size, ""


class SlotFile(SparseFile):
    """All slots of one supervisor, mapped by the main process, the supervisor and its workers.

    Each supervisor has its own file, so that unfinished work of a dead supervisor never reaches the
    slots of the next one. The file is sparse: its size is address space, and pages are reserved
    with a slot's first batch. It is unmapped with the last array that uses it.
    """

    kind = "batches"

    def __init__(self, descriptor: int, nbytes: int = 0, tag: str = "") -> None:
        super().__init__(descriptor, nbytes, tag)
        self._entered: dict[int, int] = {}  # sizes of the slots in this process's page table

    def prepare(self, offset: int, nbytes: int, is_fresh: bool) -> None:
        """Reserve the pages of a slot, or enter them in this process's page table.

        A worker calls it before each batch that it writes. Otherwise pages that another worker has
        written would be entered one by one, at the first write to each. Reserved pages are still
        entered one by one, because the kernel fills each of them with zeros at the first write.

        Args:
            offset: Start of the slot.
            nbytes: Size of the slot.
            is_fresh: True if the slot has never had a batch, and needs pages.

        Raises:
            MemoryLimitError: The machine has no such memory.
        """
        if is_fresh:
            machine.reserve(self.descriptor, offset, nbytes)
        elif self._entered.get(offset, 0) < nbytes:
            machine.enter_pages(self.map, offset, nbytes)
        self._entered[offset] = nbytes

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`, built on the mapping itself.

        NumPy collapses the `.base` of views down to the first array that is not built on another
        array. The returned array is that base. It lives exactly as long as any view made from it
        (docs/internals/memory.md, "Anchors").
        """
        # With a dtype object and positional arguments, this call takes 5 us instead of 16 us after
        # a wait that has left the CPU caches cold.
        slot: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self.map, offset)
        return slot


class Arena(SparseFile):
    """The shared memory file with board, call times and recorder rings, and with extents.

    Only the main process reserves and releases extents.

    Attributes:
        arrays: Arrays of `array`, by their extents.
        reclaimed: Number of arrays whose extents have been released.
    """

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
        self.arrays: dict[Extent, weakref.ref[npt.NDArray[np.uint8]]] = {}
        self.reclaimed = 0

    def recorder(self, cell: int, number: int) -> WorkerRecorder:
        """Return the recorder of the worker with this cell.

        In a small arena, some workers have no rings. They get a recorder with private memory, which
        no other process reads.
        """
        has_rings = cell < len(self.rings)
        buffer, at = (self.map, self.rings[cell]) if has_rings else (bytearray(self.rings.step), 0)
        return WorkerRecorder(buffer, at, number)

    def take(self, nbytes: int, purpose: str) -> Extent:
        """Reserve an extent and its pages. Pairs with `give_back`.

        Raises:
            MemoryLimitError: the machine or its cgroup has too little memory free.
        """
        if self.arrays:
            self.reclaim()
        free = capacity.available_memory_bytes()
        if nbytes + HEADROOM_BYTES > free:
            raise MemoryLimitError(
                f"{purpose} needs {nbytes:,} bytes of shared memory, but the machine (or its "
                f"cgroup) has only {free:,} bytes free. Set a smaller Limits.memory, or make "
                "batches smaller"
            )
        extent = self.extents.take(nbytes)
        try:
            machine.reserve(self.descriptor, extent.offset, extent.nbytes)
        except BaseException:
            self.give_back(extent)
            raise
        return extent

    def give_back(self, extent: Extent) -> None:
        """Release an extent, and return its pages to the system."""
        self.return_pages(*extent)
        self.extents.give_back(extent)

    def array(self, nbytes: int, purpose: str) -> npt.NDArray[np.uint8]:
        """Return `uint8[nbytes]` on a new extent, for the main process to build data in.

        When the last view of the array is gone, `reclaim` releases the extent. So other processes
        may read it only while the main process keeps a view.

        Raises:
            MemoryLimitError: as `take`.
        """
        with InterruptsHeld():
            extent = self.take(nbytes, purpose)
            array: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self.map, extent.offset)
            self.arrays[extent] = weakref.ref(array)
        machine.enter_pages(self.map, *extent, is_fresh=True)
        return array

    def reclaim(self) -> None:
        """Release the extents of arrays that are gone."""
        for extent, array in [*self.arrays.items()]:
            if array() is None:
                # SYNC: the board's count is stored first, and a fork of this process has the other
                # one as it was. Pairs with StoredOrders.check_fork.
                self.board.reclaimed = self.reclaimed + 1
                self.reclaimed += 1
                del self.arrays[extent]
                self.give_back(extent)

    def put(self, blob: bytes) -> Extent:
        """Copy bytes into a new extent and return it. The caller releases it with `give_back`."""
        extent = self.take(len(blob), "a message to the workers")
        self.write(extent.offset, blob)
        return extent


def oversize_file(nbytes: int, write: Callable[[mmap.mmap], object]) -> int:
    """Create a memory file for a batch that does not fit its slot, and return its descriptor.

    Called in the process that made the batch. The caller sends and closes the descriptor.

    Args:
        nbytes: size of the batch.
        write: writes the batch into the mapping.

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


def map_memory_file(
    descriptor: int,
    nbytes: int,
    offset: int = 0,
    is_private: bool = False,
    is_read_only: bool = False,
) -> Any:
    """Map a part of a memory file as a buffer that unmaps itself.

    The caller may close the descriptor afterwards.

    The return type is `Any`, because NumPy's type hints do not accept a `ctypes` array as a buffer.

    Args:
        descriptor: descriptor of the file.
        nbytes: length of the part.
        offset: start of the part, a multiple of the page size.
        is_private: True to keep writes in this process. Then the file must not change while any
            array uses the buffer.
        is_read_only: True to forbid writes. A write ends the process.
    """
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    rights = mmap.PROT_READ | (0 if is_read_only else mmap.PROT_WRITE)
    with InterruptsHeld():
        address = machine.map_file(None, nbytes, flags, descriptor, offset, rights)
        # `mmap.mmap` is not used here: before Python 3.13 it keeps a duplicate of the descriptor,
        # and a consumer may keep thousands of these buffers.
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        Undoing(buffer, machine.unmapping(address, nbytes))  # runs after the last array over it
    return buffer


def _map_named(tag: str, nbytes: int) -> mmap.mmap:
    """Map memory by a name that another process has given it. Windows only."""
    make: Callable[..., mmap.mmap] = mmap.mmap
    return make(-1, nbytes, tagname=tag)
