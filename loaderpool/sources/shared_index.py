"""Indexes of files that the ranks of one job on a machine make once, and share in memory."""

from __future__ import annotations

import marshal
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.memory.holders import Name, finish, job_key, obtain, read_final
from loaderpool.system import abilities, machine, ranks
from loaderpool.system.interrupts import InterruptsHeld

Index = tuple[tuple[int, ...], npt.NDArray[Any] | None]


def shared_index(facts: str, kind: str, make: Callable[[], Index]) -> Index:
    """Return an index. If no other rank has it or makes it, call `make`.

    Args:
        facts: text that differs if the index could differ.
        kind: name of the format, for messages.
        make: returns the first record of each file, followed by the number of all records; and the
            offsets.
    """
    if not abilities.can_fork_workers():
        return make()
    name = Name(job_key("index", ranks.job(), facts), f"index of {kind} files", "")
    try:
        with InterruptsHeld():
            block, header = read_final(obtain(name, lambda: _write(*make())))
    except ArgumentError:
        return make()  # a process of another user or container has the address
    first_records, dtype, count = marshal.loads(header)
    starts = None if dtype is None else np.frombuffer(block, np.dtype(dtype), count)
    return first_records, starts


def _write(first_records: tuple[int, ...], starts: npt.NDArray[Any] | None) -> tuple[int, bytes]:
    dtype, count, data = None, 0, memoryview(b"")
    if starts is not None:
        dtype, count, data = starts.dtype.str, len(starts), starts.data.cast("B")
    nbytes = -(-max(data.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    file = machine.create_memory_file("index")
    try:
        machine.reserve(file, 0, nbytes)
        done = 0
        while done < data.nbytes:
            done += os.pwrite(file, data[done:], done)
        return file, finish(file, nbytes, marshal.dumps((first_records, dtype, count)))
    except BaseException:
        os.close(file)
        raise
