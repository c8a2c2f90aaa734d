"""A large array of the trainer's moves into a file that workers map, and stays where it is: adopted in place.

Piece by piece it is copied into the file, and the piece of the file takes the place of the array's own pages in one
step. So the array keeps its address and its contents, what the trainer writes later stays the trainer's, and at no time
is more than a piece in memory twice (docs/internals/memory.md, "Adoption").
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, MemoryLimitError
from loaderpool.memory.arena import map_memory_file
from loaderpool.system import abilities, capacity, machine
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing, checkpoint

# How such files are named, so that they are found in a list of mappings.
NAME = "data"


class DataFile:
    """A memory file with the contents of a range of this process's memory.

    Ownership: of the descriptor, which is closed with the last reference to this; mappings stay.

    Args:
        address: of the memory, a multiple of the page size.
        nbytes: its length, whole pages.

    Attributes:
        is_shared: the memory still is a shared mapping of the file, so that writes to it are writes to the file.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.is_shared = False
        with InterruptsHeld():
            self.descriptor = machine.create_memory_file(NAME)
            Undoing(self, functools.partial(os.close, self.descriptor))
        os.ftruncate(self.descriptor, nbytes)

    def note(self) -> None:
        """Have `find_file` find it from now on."""
        with _lock:
            _files.append(weakref.ref(self))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the file holds what a range of memory holds now."""
        offset = address - self.address
        if offset < 0 or offset + nbytes > self.nbytes:
            return False
        return self.is_shared or self.is_equal(address, nbytes, offset)

    def freeze(self) -> None:
        """Have what the trainer writes from now on stay its own: the file is what workers were promised."""
        if self.is_shared:
            machine.map_over(self.address, self.nbytes, self.descriptor, 0)
            self.is_shared = False

    def is_equal(self, address: int, nbytes: int, offset: int) -> bool:
        """Return whether a part of the file has the same bytes as a range of memory."""
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        with mmap.mmap(
            self.descriptor, self.nbytes, mmap.MAP_PRIVATE
        ) as view:  # private, so that its address is had
            start = ctypes.c_char.from_buffer(view)
            try:
                return bool(compare(address, ctypes.addressof(start) + offset, nbytes) == 0)
            finally:
                del start


_files: list[weakref.ref[DataFile]] = []
_lock = threading.Lock()


def find_file(address: int, nbytes: int) -> DataFile | None:
    """Return a file that holds what this range of memory holds now; None where there is none.

    By contents, not by what lay there once: the array may have been written to, or freed and its place given away.
    """
    with _lock:
        _files[:] = [each for each in _files if each() is not None]
        found = [each() for each in _files]
    return next((file for file in found if file is not None and file.holds(address, nbytes)), None)


@functools.cache
def freeze_at_forks() -> None:
    """Have forks of this process and itself not see each other's writes to arrays of `share`, from now on."""
    machine.at_forks(before=_freeze_all)


def _freeze_all() -> None:
    for each in list(_files):
        file = each()
        if file is not None:
            file.freeze()


# Smaller arrays are copied: their second copy is little, and each file takes a descriptor in trainer and supervisor,
# and a mapping in every worker. Larger: more stands in memory twice.
LEAST_BYTES = 16 << 20
# What is in memory twice for a moment. Smaller: more system calls; larger: that much more memory.
_PIECE_BYTES = 4 << 20
# A piece that is written to meanwhile is copied again so often; then the array is left alone.
_MOST_TURNS = 3


def place_of(buffer: memoryview, adopts: bool = True) -> tuple[DataFile, int]:
    """The file that holds an array's bytes, and where in it.

    The array is adopted now if it can be; if not all of it could be, what was is as good as before. Runs in: the
    trainer, while no thread writes to the array.

    Args:
        buffer: the array's bytes, contiguous.
        adopts: else only a file serves that has the bytes already. A training may have told a driver of the memory.

    Raises:
        OSError: it has to be copied, as the text says (`why_copied`); or there is no memory, or no descriptor.
    """
    address = address_of(buffer)
    file = find_file(address, buffer.nbytes)
    if file is None:
        reason = why_copied(buffer) if adopts else "it has changed since the loader was made"
        if reason is not None:
            raise OSError(reason)
        owner = _owner(buffer)
        # All of it where it is much of it, so that its other parts find it there, too: moving it takes no more memory.
        is_most = 2 * buffer.nbytes >= owner.nbytes
        file = (
            _adopt(address_of(owner), owner.nbytes) if is_most else _adopt(address, buffer.nbytes)
        )
    file.freeze()
    return file, address - file.address


def why_copied(buffer: memoryview) -> str | None:
    """Return why an array has to be copied into shared memory; None where it can be adopted. Changes nothing."""
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
    """Whether the bytes were made on the way, as packed items are, and are gone when they have been copied."""
    return type(_owner(buffer)).__name__ == "_BytesIOBuffer"


def address_of(buffer: Any) -> int:
    """Return where a buffer's or an array's bytes begin."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(array.__array_interface__["data"][0])


def _owner(buffer: memoryview) -> Any:
    """Return the object in whose memory the bytes lie."""
    owner: Any = buffer
    while True:
        if isinstance(owner, memoryview):
            owner = owner.obj
        elif isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        else:
            return owner


def _handler_name(array: Any) -> str | None:
    try:
        from numpy._core.multiarray import get_handler_name
    except ImportError:  # NumPy 1
        from numpy.core.multiarray import get_handler_name  # type: ignore[no-redef]
    name: str | None = get_handler_name(array)
    return name


def _other_thread() -> str | None:
    """The name of a Python thread that may be in the middle of something; daemons and timers are taken to wait."""
    for thread in threading.enumerate():
        is_idle = thread.daemon or isinstance(thread, threading.Timer)
        if thread is not threading.current_thread() and not is_idle:
            return thread.name
    return None


def _adopt(address: int, nbytes: int) -> DataFile:
    """Move memory into a file of its own, page by page; the ends that fill no page are copied into it."""
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
    source = np.asarray(array)
    if source.dtype.hasobject:
        raise ArgumentError(
            f"array holds Python objects (dtype {source.dtype}), which processes cannot share"
        )
    shared: npt.NDArray[Any] = np.ndarray(
        source.shape, source.dtype, buffer=shared_block(source.nbytes)
    )
    np.copyto(shared, source)
    return shared


def shared_block(least_bytes: int) -> Any:
    """Return a buffer of so many bytes, or a few more, in a memory file of its own, of zeros.

    Raises:
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    nbytes = -(-max(least_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    if not abilities.can_fork_workers():  # each pool copies it once, as any array
        return np.zeros(nbytes, np.uint8)
    free = capacity.available_memory_bytes()
    if nbytes > free:
        raise MemoryLimitError(
            f"share() needs {nbytes:,} bytes of shared memory, but the machine (or its cgroup) has only "
            f"{free:,} bytes free. Use a numpy.memmap of a file, or share a part of the data"
        )
    with InterruptsHeld():
        file = DataFile(0, nbytes)
        with InterruptsAllowed():  # the kernel takes a second for gigabytes
            machine.reserve(file.descriptor, 0, nbytes)
        buffer = map_memory_file(file.descriptor, nbytes)
        Undoing(buffer, functools.partial(_hold, file))
        file.address, file.is_shared = address_of(np.frombuffer(buffer, np.uint8)), True
        file.note()
        freeze_at_forks()
    return buffer


def _hold(file: DataFile) -> None:
    """Until this is called, the file is referred to."""
