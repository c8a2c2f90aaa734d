"""Adoption: move the memory of a large array into a file that workers can map, at the same address.

The array belongs to the main process. It is copied into the file piece by piece. After each copy,
the piece of the file atomically replaces the array's own pages. The array keeps its address and its
contents. Later writes by the main process stay private. At most one piece is in memory twice at any
time (docs/internals/memory.md, "Adoption").
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, MemoryLimitError, brief
from loaderpool.memory.arena import map_memory_file
from loaderpool.system import abilities, capacity, machine
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing, checkpoint

try:
    from numpy._core.multiarray import get_handler_name
except ImportError:  # NumPy 1 has the function elsewhere
    from numpy.core.multiarray import get_handler_name  # type: ignore[no-redef]

# Name of the memory files of adopted arrays, as it appears in a list of mappings.
NAME = "data"


class DataFile:
    """A memory file with the contents of a range of this process's memory.

    Ownership: owns the descriptor, and closes it when the object is collected. Mappings stay.

    Args:
        address: start of the memory range, a multiple of the page size.
        nbytes: length of the range, a multiple of the page size.
        descriptor: an existing file whose content is final; None: a new file.

    Attributes:
        is_shared: True while the range is a shared mapping of the file, so that writes to the range
            change the file.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        self.address, self.nbytes = address, nbytes
        self.is_shared, self._is_final = False, descriptor is not None
        with InterruptsHeld():
            self.descriptor = machine.create_memory_file(NAME) if descriptor is None else descriptor
            Undoing(self, functools.partial(os.close, self.descriptor))
        if descriptor is None:
            os.ftruncate(self.descriptor, nbytes)

    def note(self) -> None:
        """Register the file, so that `find_file` can return it."""
        with _lock:
            _files.append(weakref.ref(self))

    def holds(self, address: int, nbytes: int) -> bool:
        """Return True if the file contains the range of memory, with its present contents."""
        offset = address - self.address
        if offset < 0 or offset + nbytes > self.nbytes:
            return False
        return self.is_shared or self.is_equal(address, nbytes, offset)

    def freeze(self) -> None:
        """Make later writes of the main process private.

        Workers read the file, and its contents must not change any more.
        """
        if self.is_shared:
            machine.map_over(self.address, self.nbytes, self.descriptor, 0)
            self.is_shared = False

    def is_equal(self, address: int, nbytes: int, offset: int) -> bool:
        """Return True if a part of the file has the same bytes as a range of memory."""
        if self._is_final and address - self.address == offset:
            return True  # a read-only mapping of this part
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        # A private mapping is writable, and `from_buffer` needs that to return the address.
        with mmap.mmap(self.descriptor, self.nbytes, mmap.MAP_PRIVATE) as view:
            start = ctypes.c_char.from_buffer(view)
            try:
                return bool(compare(address, ctypes.addressof(start) + offset, nbytes) == 0)
            finally:
                del start


_files: list[weakref.ref[DataFile]] = []
_lock = threading.Lock()


def find_file(address: int, nbytes: int) -> DataFile | None:
    """Return a file with the present contents of this range of memory, or None if there is none.

    The contents are compared, because addresses are not enough. The array may have been modified.
    Or it was freed, and its memory has been reused.
    """
    with _lock:
        _files[:] = [each for each in _files if each() is not None]
        found = [each() for each in _files]
    return next((file for file in found if file is not None and file.holds(address, nbytes)), None)


@functools.cache
def freeze_at_forks() -> None:
    """Freeze all registered files before each later fork of this process.

    After a fork, parent and child do not see each other's writes to arrays from `share`.
    """
    machine.at_forks(before=_freeze_all)


def _freeze_all() -> None:
    for each in list(_files):
        file = each()
        if file is not None:
            file.freeze()


# Arrays from this size on are adopted. Smaller arrays are copied, because each file costs a
# descriptor in the main process and in the supervisor, and a mapping in every worker. Smaller: more
# files. Larger: more data is in memory twice.
LEAST_BYTES = 16 << 20
# Bytes that are in memory twice while they are moved. Smaller: more system calls. Larger: more
# memory.
_PIECE_BYTES = 4 << 20
# Attempts to copy a piece that another thread modifies meanwhile. After them, adoption fails.
_MOST_TURNS = 3


def place_of(buffer: memoryview, adopts: bool = True) -> tuple[DataFile, int]:
    """Return the file that holds an array's bytes, and the offset of the bytes in the file.

    Adopt the array if no file holds its bytes yet. A partial failure leaves the array intact.
    Called by `transport.payload.sent`, in the main process, while no thread writes to the array.

    Args:
        buffer: the array's bytes, contiguous.
        adopts: False to use existing files only. A running training may have registered the memory
            with a driver, so its pages must stay.

    Raises:
        OSError: the array has to be copied; the text is the reason (`why_copied`). Or there is no
            memory, or no descriptor.
    """
    address = address_of(buffer)
    file = find_file(address, buffer.nbytes)
    if file is None:
        reason = why_copied(buffer) if adopts else "it has changed since the loader was made"
        if reason is not None:
            raise OSError(reason)
        owner = _owner(buffer)
        assert isinstance(owner, np.ndarray)  # `why_copied` has a reason for others
        # If the buffer is at least half of its owner's memory, adopt all of that memory. Then other
        # parts of the owner are in the file as well. Adoption needs no additional memory.
        is_most = 2 * buffer.nbytes >= owner.nbytes
        file = (
            _adopt(address_of(owner), owner.nbytes) if is_most else _adopt(address, buffer.nbytes)
        )
    file.freeze()
    return file, address - file.address


def why_copied(buffer: memoryview) -> str | None:
    """Return the reason why an array has to be copied into shared memory; None: it can be adopted.

    Only inspects the array.
    """
    if buffer.nbytes < LEAST_BYTES:
        return f"it is smaller than {LEAST_BYTES >> 20} MiB"
    owner = _owner(buffer)
    if type(owner) is not np.ndarray or not owner.flags.owndata:
        return f"its memory is owned by a {type(owner).__name__}, not by NumPy"
    if _handler_name(owner) != "default_allocator":
        return "its memory comes from another allocator than NumPy's default"
    other = _other_thread()
    if other is not None:
        return f"another thread ({other}) is running and might write to it"
    return machine.why_not_replaceable(address_of(owner), owner.nbytes, NAME)


def is_in_passing(buffer: memoryview) -> bool:
    """True for temporary buffers, such as packed items, which are freed once they are copied."""
    return type(_owner(buffer)).__name__ == "_BytesIOBuffer"


def address_of(buffer: memoryview | npt.NDArray[Any]) -> int:
    """Return the address of the first byte of a buffer or an array."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(array.__array_interface__["data"][0])


def _owner(buffer: memoryview) -> object:
    """Return the object that owns the memory of the bytes."""
    owner: object = buffer
    while True:
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        else:
            return owner


def _handler_name(array: npt.NDArray[Any]) -> str | None:
    name: str | None = get_handler_name(array)
    return name


def _other_thread() -> str | None:
    """Return the name of another Python thread that may be running, or None if there is none.

    Daemon threads and timers are assumed to be waiting.
    """
    for thread in threading.enumerate():
        is_idle = thread.daemon or isinstance(thread, threading.Timer)
        if thread is not threading.current_thread() and not is_idle:
            return thread.name
    return None


def _adopt(address: int, nbytes: int) -> DataFile:
    """Move a range of memory into a new file.

    Whole pages are replaced by pages of the file. Partial pages at the ends are only copied.
    """
    page = mmap.PAGESIZE
    base, end = address // page * page, address + nbytes
    first, last = -(-address // page) * page, end // page * page
    file = DataFile(base, -(-end // page) * page - base)
    machine.write_memory(file.descriptor, address - base, address, first - address)
    for at in range(first, last, _PIECE_BYTES):
        checkpoint()
        _move(file, at, min(_PIECE_BYTES, last - at), at - base)
    machine.write_memory(file.descriptor, last - base, last, end - last)
    file.note()
    return file


def _move(file: DataFile, address: int, nbytes: int, offset: int) -> None:
    with mmap.mmap(file.descriptor, nbytes, prot=mmap.PROT_READ, offset=offset) as view:
        seen = address_of(memoryview(view))
        for _ in range(_MOST_TURNS):
            machine.write_memory(file.descriptor, offset, address, nbytes)
            if machine.map_over(address, nbytes, file.descriptor, offset, seen):
                return
    raise OSError(errno.EBUSY, "another thread writes to it")


def share_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return a copy of an array in shared memory; see `share`.

    Raises:
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    if np.ma.is_masked(array):
        raise ArgumentError(
            "share: a masked array would lose its mask. Pass array.filled(value), or share the "
            "mask, too: share(array.data), share(array.mask)"
        )
    source = np.asarray(array)
    is_scalar = not (source.ndim or hasattr(array, "shape"))
    if is_scalar or (source.dtype.hasobject and not isinstance(array, np.ndarray)):
        is_iterated = isinstance(array, (Iterator, AbstractSet))
        raise ArgumentError(
            f"share needs an array, list, tuple or dict, got {brief(array)} of type "
            f"{type(array).__name__}{'. Convert it with list(...)' * is_iterated}"
        )
    if source.dtype.hasobject:
        raise ArgumentError(
            f"array holds Python objects (dtype {source.dtype}), which processes cannot share"
        )
    block = shared_block(source.nbytes)
    shared: npt.NDArray[Any] = np.ndarray(source.shape, source.dtype, buffer=block)
    np.copyto(shared, source)
    return shared


def shared_block(least_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes in a new memory file: `least_bytes`, rounded up to whole pages.

    Raises:
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    nbytes = -(-max(least_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    # Without forked workers, each pool copies the buffer once, as it copies any array.
    if not abilities.can_fork_workers():
        return np.zeros(nbytes, np.uint8)
    free = capacity.available_memory_bytes()
    if nbytes > free:
        raise MemoryLimitError(
            f"share() needs {nbytes:,} bytes of shared memory, but the machine (or its cgroup) has "
            f"only {free:,} bytes free. Use a numpy.memmap of a file, or share a part of the data"
        )
    with InterruptsHeld():
        file = DataFile(0, nbytes)
        with InterruptsAllowed():  # the kernel needs about a second for gigabytes
            machine.reserve(file.descriptor, 0, nbytes)
        buffer = map_memory_file(file.descriptor, nbytes)
        Undoing(buffer, functools.partial(_hold, file))
        block = np.frombuffer(buffer, np.uint8)
        file.address, file.is_shared = address_of(block), True
        file.note()
        freeze_at_forks()
    return block


def final_block(descriptor: int, nbytes: int, undo: Callable[[], object]) -> memoryview:
    """Map a file with final content read-only, and register it for `find_file`.

    Ownership: when the last view of the block is gone, the file is closed and `undo` is called.

    Args:
        descriptor: descriptor of the file.
        nbytes: number of bytes to map, a multiple of the page size.
        undo: must not block, because it may run in a finalizer.
    """
    with InterruptsHeld():
        file = DataFile(0, nbytes, descriptor)
        buffer = map_memory_file(descriptor, nbytes, is_private=True, is_read_only=True)
        Undoing(buffer, functools.partial(_hold, file))
        Undoing(buffer, undo)
        view = memoryview(buffer).cast("B").toreadonly()
        file.address = address_of(view)
        file.note()
    return view


def _hold(file: DataFile) -> None:
    """Keep `file` alive until the finalizer calls this function."""
