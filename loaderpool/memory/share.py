"""Arrays that stand in shared memory from the start, so that no loader has to copy or move them."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentTypeError, MemoryLimitError
from loaderpool.memory.adoption import address_of
from loaderpool.memory.arena import map_whole_file
from loaderpool.memory.data_file import DataFile, freeze_at_forks
from loaderpool.system import capacity, machine
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.system.undoing import Undoing


def share(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return a copy of an array in shared memory: loaders that use it, or a part of it, map it and copy nothing.

    It is an array as any other, and may be written to. A loader sees it as it is when the loader is made; what is
    written to it later is seen in this process only, and by loaders that are made then (for which it is copied once
    more). So it is with a fork of this process, which has its own, as of any array. The memory is free when the last
    array and the last loader that look at it are gone.

    Args:
        array: an array, or what NumPy makes one of; a `numpy.memmap` is read a piece at a time.

    Returns:
        A `numpy.ndarray` of the same shape, dtype, values and order (C where it is neither C nor Fortran).

    Raises:
        ArgumentTypeError: it holds Python objects.
        MemoryLimitError: the machine or its cgroup has too little memory free.
    """
    source = np.asarray(array)
    if source.dtype.hasobject:
        raise ArgumentTypeError(f"array holds Python objects (dtype {source.dtype}), which no processes can share")
    if not machine.can_fork_workers():  # each pool copies it once, as any array
        return np.array(source)
    nbytes = -(-max(source.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    free = capacity.available_memory_bytes()
    if nbytes > free:
        raise MemoryLimitError(
            f"sharing an array needs {nbytes:,} bytes of shared memory, but the machine (or its cgroup) has only "
            f"{free:,} bytes free; use a numpy.memmap of a file, or share a part of it"
        )
    is_fortran = source.flags.f_contiguous and not source.flags.c_contiguous
    shared: npt.NDArray[Any]
    with InterruptsHeld():
        file = DataFile(0, nbytes)
        with InterruptsAllowed():  # the kernel takes a second for gigabytes
            machine.reserve(file.descriptor, 0, nbytes)
        buffer = map_whole_file(file.descriptor, nbytes)
        Undoing(buffer, functools.partial(_hold, file))
        shared = np.ndarray(source.shape, source.dtype, buffer=buffer, order="F" if is_fortran else "C")
        file.address, file.is_shared = address_of(np.frombuffer(buffer, np.uint8)), True
        file.note()
        freeze_at_forks()
    np.copyto(shared, source)
    return shared


def _hold(file: DataFile) -> None:
    """Until this is called, the file is referred to."""
