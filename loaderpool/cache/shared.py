"""What a loader's processes share of its cache: counters for all, and for one in memory the entries as well."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading

from loaderpool.cache.setting import CachePlan, Count
from loaderpool.cache.store import Store, file_in, prepare, write_head
from loaderpool.errors import CacheError
from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import Extent
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.system import machine
from loaderpool.system.interrupts import InterruptsHeld, Undoing

_COUNTS = 8  # of a worker, one of them unused: one line of the processor's cache
_COUNTER_BYTES = 8 * _COUNTS * MAX_WORKERS


def counters_in(arena: Arena, plan: CachePlan) -> memoryview:
    """Return the counters of a cache, which lie in an arena: for each worker, or each host, a number for each `Count`.

    Each worker's have one writer at a time: a worker, and after its death its successor, or the dispatcher of the host.
    """
    return memoryview(arena.map)[plan.counters_at : plan.counters_at + _COUNTER_BYTES].cast("Q")


def counts_of(counters: memoryview, number: int) -> memoryview:
    """Return the counts of a worker, or of a host."""
    return counters[_COUNTS * number : _COUNTS * (number + 1)]


class SharedCache:
    """A loader's cache as one process has it.

    Ownership: of a descriptor of the memory file, and of this process's store; the file is gone with its last holder.

    Args:
        plan: what it is.
        descriptor: of the memory file; a copy of it is kept. -1: there is none, for a cache on disk needs none.
        counters: as `counters_in` gives them; None: no other process counts.
    """

    _lent: tuple[Arena, Extent, threading.RLock] | None = None  # where the counters are, if in an arena

    def __init__(self, plan: CachePlan, descriptor: int = -1, counters: memoryview | None = None) -> None:
        self.plan, self.descriptor = plan, descriptor
        if descriptor >= 0:
            with InterruptsHeld():
                self.descriptor = machine.above_standard(os.dup(descriptor))
                self._undoing = Undoing(self, functools.partial(os.close, self.descriptor))
        self._identity = machine.file_identity(self.descriptor)
        self._counters = memoryview(bytearray(_COUNTER_BYTES)).cast("Q") if counters is None else counters
        self._store: Store | None = None
        self._store_pid = 0
        self._last: list[int] | None = None  # once it is closed

    @staticmethod
    def create(plan: CachePlan) -> SharedCache:
        """Return a new one, whose store is there now. Runs in: the trainer; and each host.

        Raises:
            CacheError: the directory is another function's or source's, or cannot be used; no descriptor or no memory
                is left, or this machine has no such memory files.
        """
        if not plan.in_memory:
            prepare(plan)
            return SharedCache(plan)
        if not machine.can_fork_workers():
            raise CacheError('cache="memory" needs Linux; give a directory')
        descriptor = -1
        with InterruptsHeld():
            try:
                descriptor = machine.create_memory_file("cache")
                write_head(descriptor, plan)
                return SharedCache(plan, descriptor)
            except OSError as error:
                raise CacheError(f"cache: no memory could be shared with the workers: {error}") from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def count_in(self, arena: Arena, lock: threading.RLock) -> None:
        """Count in an arena from now on, where workers do, too. Runs in: the trainer, and each host.

        Ownership: of an extent of it, until `close`.

        Args:
            arena: whose.
            lock: held while its extents change.
        """
        with lock:
            extent = arena.put(bytes(_COUNTER_BYTES))
        self._lent = arena, extent, lock
        self.plan = dataclasses.replace(self.plan, counters_at=extent.offset)
        self._counters = counters_in(arena, self.plan)

    def counts_of(self, worker: int) -> memoryview:
        """Return the counts of a worker, a number for each `Count`."""
        return counts_of(self._counters, worker)

    def counts(self) -> list[int]:
        """Return what all processes have counted, a number for each `Count`."""
        if self._last is not None:
            return self._last
        found = [sum(self._counters[count::_COUNTS].tolist()) for count in Count]
        found[Count.BYTES] += self._stored_bytes()
        return found

    def _stored_bytes(self) -> int:
        try:
            status = os.stat(file_in(self.plan.where)) if self.descriptor < 0 else os.fstat(self.descriptor)
        except OSError:  # it was deleted
            return 0
        return min(status.st_size, 512 * getattr(status, "st_blocks", status.st_size))

    def store(self) -> Store:
        """This process's own way to the entries, opened now if it was not.

        Raises:
            CacheError, OSError, ValueError: it cannot be.
        """
        if self._store is None or self._store_pid != os.getpid():
            if machine.file_identity(self.descriptor) != self._identity:
                raise OSError("the function has closed the descriptor, and its number may be another file's")
            self._store = Store(self.plan, f"/proc/self/fd/{self.descriptor}" if self.descriptor >= 0 else "")
            self._store_pid = os.getpid()
        return self._store

    def close(self) -> None:
        """Let go of everything; twice is fine."""
        if self._last is not None:
            return
        self._last = self.counts()
        if self._store is not None and self._store_pid == os.getpid():
            self._store.close()
        self._store = None
        self._counters = memoryview(b"")  # so that the mapping goes, even where this object is kept
        if self.descriptor >= 0:
            self._undoing.now()
        if self._lent is not None:
            arena, extent, lock = self._lent
            with lock:
                arena.give_back(extent)

    def clear(self) -> None:
        """Give the entries' memory back, also where others hold the file. Runs in: the trainer, before `close`."""
        if self._last is None and self.descriptor >= 0:
            # The head and the table first: who finds nothing there looks at no entry.
            machine.return_pages(self.descriptor, 0, os.fstat(self.descriptor).st_size)
