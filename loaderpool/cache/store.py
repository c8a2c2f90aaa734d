"""Entries in one file that is only appended to: a memory file that a loader's processes share, or one in a directory.

    [ head: what the entries are of, a line of JSON | table: where each item's entry begins | entries → ]

An entry is appended by one `write` to a descriptor opened with O_APPEND: the kernel finds its place, so that no two
processes get the same, and none holds a lock. Then its place is put into the table, as one number. A process
that dies before that leaves bytes that no process looks at; one that dies after it leaves a whole entry (CACHE-1). On
disk each entry has a checksum as well: what a failing disk or a loss of power has bent is made again.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import stat
import struct
import sys
import tempfile
import threading
import weakref
import zlib

from loaderpool.cache.setting import MEMORY, Cache, CachedOf, CachePlan, Count
from loaderpool.config import MAX_WORKERS
from loaderpool.errors import CacheError, brief, warn
from loaderpool.memory.arena import Arena, Extent, map_memory_file
from loaderpool.sources.varying import varying
from loaderpool.system import abilities, capacity, machine, ranks
from loaderpool.system.interrupts import InterruptsHeld, Undoing
from loaderpool.system.process import why_not_apart

FILE_NAME = "entries.log"
_FORM = 6
_PLACE = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")  # item, length of the pickle, its CRC32 (of a memory file 0)
_MOST_HEAD_BYTES = 64 << 20
_MOST_ENTRY_BYTES = 1 << 30  # one `write` takes no more than twice that
# What one item must be able to take of a bound for the table to have a number for it. Smaller, and the table of a
# source of billions would be most of the cache; larger, and of tiny entries some are not kept that would fit.
_BYTES_PER_ITEM = 64
# Memory is left alone below this, so that the trainer's next allocation does not wake the OOM killer.
_HEADROOM_BYTES = 128 << 20
# The share of what is free that one process fills before it looks again: so many of them may do so at the same time.
_LOOKS = 64
_FREE_SHARE = 20  # on disk without a bound: this part of it stays free
_READ_WRITE = (
    os.O_RDWR
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)
_MEMORY_SHARE = 2  # in memory without a bound: this part of what is free
_TEXTS = {
    Count.NO_ROOM: "does not store all items: memory or the disk is full, or its file was deleted or closed. Training "
    "continues, and fn is called in every epoch for the others. Set a smaller max_bytes, or another directory.",
    Count.DAMAGED: "is damaged: {} entries could not be read, so fn was called again for them. If this "
    "continues, delete the directory and check the disk.",
}

_COUNTS = 8  # of a worker, two of them unused: one line of the processor's cache
_COUNTER_BYTES = 8 * _COUNTS * MAX_WORKERS


class Store:
    """One process's way to the entries.

    Ownership: of descriptors of its own, until it is collected: forked processes would share the position of an
    inherited one.

    Args:
        plan: what the cache is. Of one on disk, `prepare` has made the file.
        memory_file: the path of one in memory.

    Raises:
        CacheError, OSError, ValueError: it is gone, damaged, or another's by now.
    """

    def __init__(self, plan: CachePlan, memory_file: str = "") -> None:
        self._plan, self._in_memory = plan, bool(memory_file)
        files: list[int] = []
        weakref.finalize(self, lambda: list(map(os.close, files))).atexit = False
        files += [_open(plan.where, memory_file)]
        files += [_open(plan.where, memory_file, os.O_APPEND)]
        self._file, self._log = files
        self._identity = machine.file_identity(self._log)
        fields, self._items, self._table_at, self._entries_at = _read_head(self._file)
        if fields != plan.fields or machine.file_identity(self._file) != self._identity:
            raise ValueError("the file has been replaced")
        self._reader, self._buffer = io.FileIO(self._file, closefd=False), bytearray()
        self._view: memoryview | None = None
        if memory_file and plan.max_bytes is not None:
            # Address space, of which nothing is looked at but entries that are there: they are copied once. Not on
            # disk, where a file that is cut short would end the process (SIGBUS).
            self._view = memoryview(map_memory_file(self._file, plan.max_bytes)).cast("B")
        self._spare_bytes = 0  # may be written before memory is looked at again

    def get(self, item: int) -> memoryview | None:
        """Return the item's pickle, which the next call may overwrite; None where it has none.

        Raises:
            OSError, ValueError, struct.error: it cannot be read, or is not what was written.
        """
        if item >= self._items:
            return None
        # SYNC: the entry was written before this number; pairs with Store.put.
        (place,) = _PLACE.unpack(self._read(self._table_at + _PLACE.size * item, _PLACE.size))
        if not place:
            return None
        found, nbytes, checksum = _ENTRY.unpack(self._read(place, _ENTRY.size))
        if found != item or checksum != self._checksum(
            pickled := self._read(place + _ENTRY.size, nbytes)
        ):
            raise ValueError(f"entry {item} is damaged")
        return pickled

    def put(self, item: int, pickled: bytes) -> Count | None:
        """Keep the item's pickle; returns why it is not kept."""
        nbytes = _ENTRY.size + len(pickled)
        try:
            status = os.fstat(self._log)
            # Deleted, or the function has closed our descriptors, and this is another file.
            if (status.st_dev, status.st_ino) != self._identity or not (
                status.st_nlink or self._in_memory
            ):
                return Count.NO_ROOM
            most = sys.maxsize if self._plan.max_bytes is None else self._plan.max_bytes
            if item >= self._items or nbytes > _MOST_ENTRY_BYTES or status.st_size + nbytes > most:
                return Count.OVER_BOUND
            if not self._has_room(nbytes):
                return Count.NO_ROOM
            entry = _ENTRY.pack(item, len(pickled), self._checksum(pickled))
            write = getattr(
                os, "writev", lambda file, parts: os.write(file, b"".join(parts))
            )  # Windows has no writev
            written = write(self._log, (entry, pickled))
            end = os.lseek(self._log, 0, os.SEEK_CUR)
            if written < nbytes or end > most:
                # There was no room, or another process has written since the look: the bytes are given back.
                machine.return_pages(self._file, end - written, written)
                return Count.NO_ROOM if written < nbytes else Count.OVER_BOUND
            # SYNC: stored last; pairs with Store.get.
            at, place = self._table_at + _PLACE.size * item, _PLACE.pack(end - nbytes)
            if self._view is not None:
                self._view[at : at + _PLACE.size] = place
            else:
                os.lseek(self._file, at, os.SEEK_SET)
                os.write(self._file, place)
        except (
            OSError
        ):  # no pages or disk are left, RLIMIT_FSIZE is reached, or our descriptors are closed
            return Count.NO_ROOM
        return None

    def _read(self, at: int, nbytes: int) -> memoryview:
        if self._view is not None:
            return self._view[at : at + nbytes]
        if nbytes > len(self._buffer):
            if at + nbytes > os.fstat(self._file).st_size:
                raise ValueError("the file is truncated")
            # Used again: the allocator gives large buffers back to the kernel each time, and that takes longer than
            # the reading.
            self._buffer = bytearray(nbytes)
        part = memoryview(self._buffer)[:nbytes]
        self._reader.seek(at)
        if self._reader.readinto(part) != nbytes:
            raise ValueError("the file is truncated")
        return part

    def _checksum(self, pickled: bytes | memoryview) -> int:
        return 0 if self._in_memory else zlib.crc32(pickled)

    def _has_room(self, nbytes: int) -> bool:
        if not self._in_memory:
            if self._plan.max_bytes is not None:
                return True
            disk = shutil.disk_usage(self._plan.where)
            return disk.free - nbytes >= disk.total // _FREE_SHARE
        if self._spare_bytes < nbytes:
            self._spare_bytes = (capacity.available_memory_bytes() - _HEADROOM_BYTES) // _LOOKS
        self._spare_bytes -= nbytes
        return self._spare_bytes >= 0


def prepare(plan: CachePlan) -> None:
    """Make the store on disk where there is none; else see that it is of the same function and source.

    Runs in: the trainer. Two at a time are fine.
    """
    named = f"cache: the directory {brief(plan.where)}"
    try:
        if problem := why_not_apart(plan.where, lambda name: name.startswith(FILE_NAME)):
            raise CacheError(f"cache: {problem}")
        os.makedirs(
            plan.where, 0o700, exist_ok=True
        )  # the last one; those above it are as the user's others
        if FILE_NAME not in os.listdir(plan.where):
            _make(plan)
        with open(_open(plan.where), "rb") as file:
            found = _read_head(file.fileno())[0]
    except OSError as error:
        raise CacheError(
            f"{named} cannot be used ({error}). Check that it is writable, on a local disk, and that the disk has room."
        ) from error
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(
            f"{named} {error}. Delete the directory; the cache is then rebuilt."
        ) from None
    if found != plan.fields:
        from loaderpool.cache.identity import difference  # few caches are of something else

        differs = difference(found, plan.fields)
        raise CacheError(
            f"{named} was filled with another function or source{differs}. Its entries would be wrong. Delete the "
            "directory, or pass another one."
        )


def write_head(file: int, plan: CachePlan) -> None:
    """Make a store of an empty file."""
    items = (
        plan.items if plan.max_bytes is None else min(plan.items, plan.max_bytes // _BYTES_PER_ITEM)
    )
    line = json.dumps({"form": _FORM, "items": items, "fields": plan.fields}).encode()
    line += (
        b" " * (-(len(line) + 1) % _PLACE.size) + b"\n"
    )  # so that no number of the table is in two pages
    os.write(file, line)
    os.ftruncate(file, len(line) + _PLACE.size * items)


def _make(plan: CachePlan) -> None:
    """Make the file, whole or not at all; of several processes the first one's stays."""
    file, path = tempfile.mkstemp(prefix=f"{FILE_NAME}.", dir=plan.where)
    try:
        write_head(file, plan)
        with contextlib.suppress(FileExistsError):
            os.link(path, os.path.join(plan.where, FILE_NAME))
    finally:
        os.close(file)
        os.unlink(path)


def _read_head(file: int) -> tuple[dict[str, str], int, int, int]:
    """Return what a store is of, how many items its table has numbers for, and where table and entries begin."""
    with open(file, "rb", closefd=False) as reader:
        line = reader.readline(_MOST_HEAD_BYTES)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        head = json.loads(line)
        entries_at = len(line) + _PLACE.size * head["items"]
        if head["form"] == _FORM and os.fstat(file).st_size >= entries_at:
            return dict(head["fields"]), head["items"], len(line), entries_at
    raise ValueError("is damaged, or was written by another version of loaderpool")


def _open(directory: str, memory_file: str = "", flags: int = 0) -> int:
    """Open a store's file, if it is there, and it and its directory are this user's alone."""
    if memory_file:
        return machine.above_standard(os.open(memory_file, os.O_RDWR | os.O_CLOEXEC | flags))
    name = os.path.join(directory, FILE_NAME)
    file = machine.above_standard(os.open(name, _READ_WRITE | flags))
    others = stat.S_IWGRP | stat.S_IWOTH
    for path, status in ((directory, os.stat(directory)), (name, os.fstat(file))):
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & others):
            os.close(file)
            raise CacheError(
                f"cache: {brief(path)} must belong to you, and only you may write to it, because reading a cache can "
                f"run code. Delete it; or, if all its files are yours, run: chmod -R go-w {directory}"
            )
    return file


# ---- what processes share ----


def counters_in(arena: Arena, plan: CachePlan) -> memoryview:
    """Return a cache's counters: a number a `Count` for each worker, which alone writes them."""
    return memoryview(arena.map)[plan.counters_at : plan.counters_at + _COUNTER_BYTES].cast("Q")


def make_cache(cache: Cache, made_of: CachedOf) -> SharedCache:
    """Return what the processes of a loader that is made now will share. Ownership: the caller closes it.

    Raises:
        CacheError: the directory is another function's or source's, or cannot be used.
    """
    of_epochs = varying(made_of.source)
    items = len(made_of.source) if of_epochs is None else of_epochs.records
    plan = CachePlan(cache.where, cache.max_bytes, items)
    if not cache.in_memory:
        from loaderpool.cache.identity import describe

        plan = plan._replace(fields=describe(*made_of))
    elif cache.max_bytes is None:
        plan = plan._replace(max_bytes=ranks.memory_bytes() // _MEMORY_SHARE)
    return SharedCache.create(plan)


class SharedCache:
    """A loader's cache as one process has it.

    Ownership: of the descriptor and of this process's store; the memory file is gone with its last holder.

    Args:
        plan: what it is.
        descriptor: of the memory file. -1: on disk.
        counters: as `counters_in` gives them; None: no other process counts.
    """

    _undoing: Undoing | None = None  # closes the descriptor
    _lent: tuple[Arena, Extent, threading.RLock] | None = (
        None  # where the counters are, if in an arena
    )

    def __init__(
        self, plan: CachePlan, descriptor: int = -1, counters: memoryview | None = None
    ) -> None:
        self.plan, self.descriptor = plan, descriptor
        if descriptor >= 0:
            self._undoing = Undoing(self, functools.partial(os.close, descriptor))
        self._counters = (
            memoryview(bytearray(_COUNTER_BYTES)).cast("Q") if counters is None else counters
        )
        self._store: Store | None = None
        self._store_pid = 0
        self._last: list[int] | None = None  # once it is closed
        self._of: dict[str, str] = {}  # what one in memory is of, if that was cheap to find out
        self._warned: set[Count] = set()

    @staticmethod
    def create(plan: CachePlan) -> SharedCache:
        """Return a new one, whose store is there now. Runs in: the trainer.

        Raises:
            CacheError: the directory is another function's or source's, or cannot be used; or there is no memory.
        """
        if plan.where != MEMORY:
            prepare(plan)
            return SharedCache(plan)
        if not abilities.can_fork_workers():
            raise CacheError(
                'cache="memory" needs memfd_create, which this system lacks or refuses. Pass a directory'
            )
        with InterruptsHeld():
            try:
                made = SharedCache(plan, machine.create_memory_file("cache"))
                write_head(made.descriptor, plan)
                return made
            except OSError as error:
                raise CacheError(f"cache: shared memory could not be created: {error}") from error

    def count_in(self, arena: Arena, lock: threading.RLock) -> None:
        """Count in an extent of the arena from now on, as workers do, until `close`. Runs in: the trainer.

        The lock is held while the arena's extents change.
        """
        with lock:
            extent = arena.put(bytes(_COUNTER_BYTES))
        self._lent = arena, extent, lock
        self.plan = self.plan._replace(counters_at=extent.offset)
        self._counters = counters_in(arena, self.plan)

    def identify(self, made_of: CachedOf) -> None:
        """Note what is kept is of; one on disk knows it. Blocks: as `describe`. Runs in: the trainer."""
        if self.plan.where == MEMORY:
            from loaderpool.cache.identity import describe

            self._of = describe(*made_of)

    def check(self, made_of: CachedOf) -> None:
        """See that what is kept is of these functions and this source. Blocks: as `describe`. Runs in: the trainer.

        Raises:
            CacheError: it is not, or that is not known.
        """
        from loaderpool.cache.identity import describe, difference

        fields = describe(*made_of)
        if self.plan.where != MEMORY:
            prepare(self.plan._replace(fields=fields))
        elif fields != self._of:
            differs = difference(self._of, fields) if self._of else ""
            raise CacheError(
                f"cache: the function or source has changed since results were stored{differs}. They would be wrong. "
                "Create a new loader: loader = loader.replace()"
            )

    def counts_of(self, worker: int) -> memoryview:
        """Return the counts of a worker."""
        return self._counters[_COUNTS * worker : _COUNTS * (worker + 1)]

    def counts(self) -> list[int]:
        """Return what all processes have counted, a number for each `Count`."""
        if self._last is not None:
            return self._last
        found = [sum(self._counters[count::_COUNTS].tolist()) for count in Count]
        with contextlib.suppress(OSError):  # it was deleted
            status = os.stat(
                os.path.join(self.plan.where, FILE_NAME) if self.descriptor < 0 else self.descriptor
            )
            found[Count.BYTES] += min(
                status.st_size, 512 * getattr(status, "st_blocks", status.st_size)
            )
        return found

    def warn(self) -> None:
        """Warn of what went wrong while workers used it, once for each kind. Runs in: the trainer, after a pass."""
        counts = self.counts()
        for count, text in _TEXTS.items():
            if counts[count] and count not in self._warned:
                self._warned.add(count)
                warn(f"cache={brief(self.plan.where)} {text.format(counts[count])}")

    def store(self) -> Store:
        """This process's own way to the entries, opened now if it was not."""
        if self._store is None or self._store_pid != os.getpid():
            self._store = Store(
                self.plan, f"/proc/self/fd/{self.descriptor}" if self.descriptor >= 0 else ""
            )
            self._store_pid = os.getpid()
        return self._store

    def close(self, clears: bool = False) -> None:
        """Let go of everything; twice is fine.

        Args:
            clears: the entries' memory is given back, also where others hold the file.
        """
        if self._last is not None:
            return
        self._last = self.counts()
        if clears and self.descriptor >= 0:
            # The head and the table first: who finds nothing there looks at no entry.
            machine.return_pages(self.descriptor, 0, os.fstat(self.descriptor).st_size)
        self._store = None
        self._counters = memoryview(b"")  # so that the mapping goes, even where this object is kept
        if self._undoing is not None:
            self._undoing.now()
        if self._lent is not None:
            arena, extent, lock = self._lent
            with lock:
                arena.give_back(extent)
