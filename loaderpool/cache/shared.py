"""What a loader's processes share of its cache: counters for all, and for one in memory the entries as well."""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import threading
from collections.abc import Mapping
from typing import Protocol

from loaderpool.cache.counters import COUNTER_BYTES, CacheCell, CacheCounts, Trouble, count
from loaderpool.cache.memory_store import MOST_BYTES, MemoryStore, table_items
from loaderpool.cache.setting import MEMORY, Cache
from loaderpool.errors import CacheError
from loaderpool.memory.arena import Arena, map_whole_file
from loaderpool.memory.extents import Extent
from loaderpool.system import capacity, machine
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.system.undoing import Undoing

_FREE_SHARE = 2  # in memory without a bound: this part of what is free


class Store(Protocol):
    """One process's way to the entries."""

    def get(self, item: int) -> bytes | memoryview | None:
        """Return the item's pickle; None where it has none. Raises where it is damaged, or cannot be read now."""

    def put(self, item: int, pickled: bytes) -> Trouble:
        """Keep the item's pickle, if there is room."""

    def close(self) -> None:
        """Let go of what it holds."""


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What every process of a loader must know of its cache; travels in the payload."""

    where: str  # "memory", or a directory
    max_bytes: int | None
    items: int  # of the source
    mark: bytes  # eight bytes that stand for the function and the source
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what these are, of a cache on disk
    counters_at: int = 0  # where the counters are in the arena; 0: in a memory file, at its beginning

    @property
    def in_memory(self) -> bool:
        """Whether entries are in the memory file."""
        return self.where == MEMORY

    @property
    def table_items(self) -> int:
        """Words of the table."""
        return table_items(self.items, self.max_bytes or 0) if self.in_memory else 0

    @property
    def start(self) -> int:
        """Where entries begin in the memory file."""
        return -(-(COUNTER_BYTES + 8 * self.table_items) // mmap.PAGESIZE) * mmap.PAGESIZE


def plan_in_memory(cache: Cache, items: int) -> CachePlan:
    """Make the plan of a cache in memory for a loader that is made now. Runs in: the trainer."""
    bound = cache.max_bytes or capacity.available_memory_bytes() // _FREE_SHARE
    return CachePlan(cache.where, min(bound, MOST_BYTES - COUNTER_BYTES), items, os.urandom(8))


def plan_on_disk(cache: Cache, items: int, mark: bytes, fields: Mapping[str, str]) -> CachePlan:
    """Make the plan of a cache on disk."""
    return CachePlan(cache.where, cache.max_bytes, items, mark, fields)


def counters_in(arena: Arena, at: int) -> memoryview:
    """Return the counters that lie in an arena."""
    return memoryview(arena.map)[at : at + COUNTER_BYTES].cast("Q")


class SharedCache:
    """A loader's cache as one process has it.

    Ownership: of a descriptor of the memory file, and of this process's store; the file is gone with its last holder.

    Args:
        plan: what it is.
        descriptor: of the memory file; a copy of it is kept. -1: there is none, for a cache on disk needs none.
        counters: zeros in its place, u64.
    """

    _lent: tuple[Arena, Extent, threading.RLock] | None = None  # where the counters are, if in an arena

    def __init__(self, plan: CachePlan, descriptor: int, counters: memoryview | None = None) -> None:
        self.plan, self.descriptor = plan, descriptor
        if counters is not None:
            self._counters, self._table = counters, memoryview(b"")
        else:
            with InterruptsHeld():
                self.descriptor = machine.above_standard(os.dup(descriptor))
                self._undoing = Undoing(self, functools.partial(os.close, self.descriptor))
            self._identity = machine.file_identity(self.descriptor)
            whole = memoryview(map_whole_file(self.descriptor, plan.start)).cast("B")
            self._counters = whole[:COUNTER_BYTES].cast("Q")
            self._table = whole[COUNTER_BYTES : COUNTER_BYTES + 8 * plan.table_items].cast("Q")
        self._store: Store | None = None
        self._store_pid = 0
        self._last = CacheCounts()
        self._is_closed = False

    @staticmethod
    def create(plan: CachePlan) -> SharedCache:
        """Return a new one, whose store is there now. Runs in: the trainer; and each host.

        Raises:
            CacheError: the directory is another function's or source's, or cannot be used; no descriptor or no address
                space is left, or this machine has no such memory files.
        """
        if not plan.in_memory:
            from loaderpool.cache.disk_store import prepare

            prepare(plan.where, plan.fields)
        if not machine.can_fork_workers():
            if plan.in_memory:
                raise CacheError('cache="memory" needs Linux; give a directory')
            return SharedCache(plan, -1, memoryview(bytearray(COUNTER_BYTES)).cast("Q"))
        descriptor = -1
        with InterruptsHeld():
            try:
                descriptor = machine.create_memory_file("cache")
                os.ftruncate(descriptor, plan.start)
                return SharedCache(plan, descriptor)
            except OSError as error:
                raise CacheError(f"cache: no memory could be shared with the workers: {error}") from error
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def count_in(self, arena: Arena, lock: threading.RLock) -> None:
        """Count in an arena from now on, for workers that cannot have the memory file. Runs in: the trainer.

        Ownership: of an extent of it, until `close`.

        Args:
            arena: whose.
            lock: held while its extents change.
        """
        with lock:
            extent = arena.put(bytes(COUNTER_BYTES))
        self._lent = arena, extent, lock
        self.plan = dataclasses.replace(self.plan, counters_at=extent.offset)
        self._counters = counters_in(arena, extent.offset)

    def cell(self, number: int) -> CacheCell:
        """Return the counters of a worker, or, in a dispatcher, of a host."""
        return CacheCell(self._counters, number)

    def counts(self) -> CacheCounts:
        """Return what all processes have counted."""
        plan = self.plan
        if self._is_closed:
            return self._last
        if plan.in_memory:
            nbytes = os.fstat(self.descriptor).st_size - plan.start
        else:
            from loaderpool.cache.disk_store import stored_bytes

            nbytes = stored_bytes(plan.where)
        return count(self._counters, nbytes)

    def store(self) -> Store:
        """This process's own way to the entries, opened now if it was not.

        Raises:
            OSError, sqlite3.Error: it cannot be.
        """
        if self._store is None or self._store_pid != os.getpid():
            # A connection from before a fork is left as it is: to close it would end locks that are its owner's.
            plan = self.plan
            if plan.in_memory:
                end = COUNTER_BYTES + (plan.max_bytes or 0)
                self._store = MemoryStore(self.descriptor, self._table, end, plan.mark)
            else:
                from loaderpool.cache.disk_store import DiskStore

                self._store = DiskStore(plan.where, plan.max_bytes, plan.mark)
            self._store_pid = os.getpid()
        return self._store

    @property
    def is_intact(self) -> bool:
        """Whether the descriptor is still ours: a function that closes all leaves the numbers to other files."""
        return self.descriptor < 0 or machine.file_identity(self.descriptor) == self._identity

    def close(self) -> None:
        """Let go of everything; twice is fine."""
        if self._is_closed:
            return
        self._last = self.counts()
        self._is_closed = True
        if self._store is not None and self._store_pid == os.getpid():
            self._store.close()
        self._store = None
        self._counters = self._table = memoryview(b"")  # so that the mapping goes, even where this object is kept
        if self.descriptor >= 0:
            self._undoing.now()
        if self._lent is not None:
            arena, extent, lock = self._lent
            with lock:
                arena.give_back(extent)

    def clear(self) -> None:
        """Give the entries' memory back, also where others hold the file. Runs in: the trainer, before `close`."""
        if not self._is_closed and self.plan.in_memory:
            size = os.fstat(self.descriptor).st_size
            # The table first: who finds nothing there looks at no entry.
            machine.return_pages(self.descriptor, COUNTER_BYTES, self.plan.start - COUNTER_BYTES)
            machine.return_pages(self.descriptor, self.plan.start, size - self.plan.start)
