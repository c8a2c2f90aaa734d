"""Memory that loaders map as it is: arrays that stand in it from the start are neither copied nor moved."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, MemoryLimitError
from loaderpool.memory.adoption import DataFile, address_of, freeze_at_forks
from loaderpool.memory.arena import map_whole_file
from loaderpool.system import capacity, machine
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing


def share_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return a copy of an array in shared memory; see `share`.

    Raises:
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    source = np.asarray(array)
    if source.dtype.hasobject:
        raise ArgumentError(f"array holds Python objects (dtype {source.dtype}), which processes cannot share")
    is_fortran = source.flags.f_contiguous and not source.flags.c_contiguous
    shared: npt.NDArray[Any] = np.ndarray(
        source.shape, source.dtype, buffer=shared_block(source.nbytes), order="F" if is_fortran else "C"
    )
    np.copyto(shared, source)
    return shared


def shared_block(least_bytes: int) -> Any:
    """Return a buffer of so many bytes, or a few more, in a memory file of its own, of zeros.

    Raises:
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    nbytes = -(-max(least_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    if not machine.can_fork_workers():  # each pool copies it once, as any array
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
        buffer = map_whole_file(file.descriptor, nbytes)
        Undoing(buffer, functools.partial(_hold, file))
        file.address, file.is_shared = address_of(np.frombuffer(buffer, np.uint8)), True
        file.note()
        freeze_at_forks()
    return buffer


def _hold(file: DataFile) -> None:
    """Until this is called, the file is referred to."""
