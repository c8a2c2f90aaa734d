"""Storage of a cache: one append-only file, which is a memory file or a file in a directory.

    [ head: fingerprint, a line of JSON | table: offset of each item's entry | entries → ]

An entry is appended by one `write` to a descriptor opened with O_APPEND. The kernel determines the
offset, so two processes never write to the same place, and no lock is needed. Then the offset is
written to the table, as one number. If a process dies before that, it leaves bytes that no process
reads. If it dies afterwards, it leaves a complete entry (CACHE-1). On disk, each entry also has a
checksum. An entry that a failing disk or a power loss has damaged is made again.

A process that makes an entry has a claim, so that others wait for the entry. A claim is the record
lock of one byte of the file. So the kernel releases the claims of a process that dies.
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
from collections.abc import Callable

from loaderpool.cache.setting import MEMORY, Cache, CachedOf, CachePlan, Count
from loaderpool.config import MAX_WORKERS
from loaderpool.errors import ArgumentError, CacheError, brief, closed_error, counted, warn
from loaderpool.memory.arena import Arena, Extent, map_memory_file
from loaderpool.system import abilities, capacity, machine, ranks
from loaderpool.system.interrupts import InterruptsHeld, Undoing
from loaderpool.system.process import why_not_apart

FILE_NAME = "entries.log"
_FORM = 6
_PLACE = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")  # item, length of the pickle, its CRC32 (0 in a memory file)
_MOST_HEAD_BYTES = 64 << 20
_MOST_ENTRY_BYTES = 1 << 30  # maximum size of an entry; one `write` is limited to twice that
# With a bound, the table has numbers for at most bound / this items. Smaller: the table of a source
# with billions of items would be most of the cache. Larger: some tiny entries are not stored
# although they would fit.
_BYTES_PER_ITEM = 64
# Memory that stays free, so that the next allocation of the main process does not trigger the OOM
# killer.
_HEADROOM_BYTES = 128 << 20
# A process stores 1/64 of the free memory before it checks again, so 64 processes may do this at
# the same time. Smaller: fewer processes are safe. Larger: more checks.
_LOOKS = 64
_FREE_SHARE = 20  # without a bound, 1/20 of the disk stays free
_READ_WRITE = (
    os.O_RDWR
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)
_MEMORY_SHARE = 2  # without a bound, a cache in memory may use 1/2 of the free memory
_TEXTS = {
    Count.NO_ROOM: "does not store all items: memory or the disk is full, or its file was deleted "
    "or closed. Training continues, and fn is called in every epoch for the others. Set a smaller "
    "max_bytes, or another directory.",
    Count.DAMAGED: "is damaged: fn was called again for {} that could not be read. If this "
    "continues, delete the directory and check the disk.",
}

_COUNTS = 8  # numbers of one worker: six counters and two unused, which fill one cache line
_COUNTER_BYTES = 8 * _COUNTS * MAX_WORKERS


class Store:
    """One process's access to the entries of a cache.

    Ownership: owns new descriptors, and closes them when it is collected. Inherited descriptors
    are not used, because forked processes would share their position.

    Args:
        plan: description of the cache. For a cache on disk, `prepare` has created the file.
        memory_file: path of the memory file; "": the cache is on disk.

    Raises:
        CacheError, OSError, ValueError: the file is gone or damaged, or was replaced.
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
            # The mapping is only address space, and saves a copy of each entry. Only stored entries
            # are accessed. A file on disk is not mapped: if it is truncated, an access ends the
            # process (SIGBUS).
            self._view = memoryview(map_memory_file(self._file, plan.max_bytes)).cast("B")
        self._spare_bytes = 0  # number of bytes to store before free memory is checked again
        self._claims: dict[int, object] = {}  # owners of this process's claims, by item

    def get(self, item: int) -> memoryview | None:
        """Return the item's pickle, or None if it has no entry. The next call may overwrite it.

        Called in the process that runs `fn`.

        Raises:
            OSError, ValueError, struct.error: the entry cannot be read, or is damaged.
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

    def has(self, item: int) -> bool:
        """Return True if the item has an entry. It may be damaged. Raises as `get`."""
        if item >= self._items:
            return False
        return any(self._read(self._table_at + _PLACE.size * item, _PLACE.size))

    def claim(self, item: int, owner: object) -> bool:
        """Claim an item, whose entry the caller makes. Pairs with `release`.

        Called in the process that runs `fn`. `owner` identifies the call of `fn`, because threads
        share the process's record locks.

        Returns:
            False if another process or thread has the claim: try again, and look for the entry.
            True also if the claim is not worth waiting for, as `lock_byte` says.
        """
        if item >= self._items:  # its entry cannot be stored
            return True
        if self._claims.setdefault(item, owner) is not owner:
            return False
        if machine.lock_byte(self._file, item):
            return True
        del self._claims[item]
        return False

    def release(self, item: int, owner: object) -> None:
        """Release an owner's claim. Do nothing if it does not have the claim."""
        if self._claims.get(item) is owner:
            machine.unlock_byte(self._file, item)
            del self._claims[item]

    def put(self, item: int, pickled: bytes) -> Count | None:
        """Store the item's pickle. Called in the process that runs `fn`.

        Returns:
            None if the pickle was stored, otherwise the counter to increase.
        """
        nbytes = _ENTRY.size + len(pickled)
        try:
            status = os.fstat(self._log)
            # The file was deleted. Or the user's function has closed this descriptor, and its
            # number belongs to another file.
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
            # Windows has no writev.
            write = getattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)))
            written = write(self._log, (entry, pickled))
            end = os.lseek(self._log, 0, os.SEEK_CUR)
            if written < nbytes or end > most:
                # The file is full, or another process has written since the check. The pages of the
                # written bytes are returned.
                machine.return_pages(self._file, end - written, written)
                return Count.NO_ROOM if written < nbytes else Count.OVER_BOUND
            # SYNC: stored last; pairs with Store.get.
            at, place = self._table_at + _PLACE.size * item, _PLACE.pack(end - nbytes)
            if self._view is not None:
                self._view[at : at + _PLACE.size] = place
            else:
                os.lseek(self._file, at, os.SEEK_SET)
                os.write(self._file, place)
        # Memory or disk is full, RLIMIT_FSIZE is reached, or the descriptors were closed.
        except OSError:
            return Count.NO_ROOM
        return None

    def _read(self, at: int, nbytes: int) -> memoryview:
        if self._view is not None:
            return self._view[at : at + nbytes]
        if nbytes > len(self._buffer):
            if at + nbytes > os.fstat(self._file).st_size:
                raise ValueError("the file is truncated")
            # The buffer is reused. The allocator returns large buffers to the kernel each time,
            # which takes longer than the read.
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
    """Create the store on disk, or check that it belongs to the same function and source.

    Called in the main process. Several processes may call this at once.

    Raises:
        CacheError: the directory cannot be used, or belongs to another function or source.
    """
    named = f"cache: the directory {brief(plan.where)}"
    try:
        if problem := why_not_apart(plan.where, lambda name: name.startswith(FILE_NAME)):
            raise CacheError(f"cache: {problem}")
        # The mode applies to the last directory only. Its parents have the user's default mode.
        os.makedirs(plan.where, 0o700, exist_ok=True)
        if FILE_NAME not in os.listdir(plan.where):
            _make(plan)
        with open(_open(plan.where), "rb") as file:
            found = _read_head(file.fileno())[0]
    except OSError as error:
        raise CacheError(
            f"{named} cannot be used ({error}). Check that it is writable, on a local disk, and "
            "that the disk has room."
        ) from error
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(
            f"{named} {error}. Delete the directory; the cache is then rebuilt."
        ) from None
    if found != plan.fields:
        # The import is here because few caches have a mismatch.
        from loaderpool.cache.identity import difference

        differs = difference(found, plan.fields)
        raise CacheError(
            f"{named} was filled with another function or source{differs}. Its entries would be "
            "wrong. Delete the directory, or pass another one."
        )


def write_head(file: int, plan: CachePlan) -> None:
    """Write head and empty table to an empty file."""
    items = (
        plan.items if plan.max_bytes is None else min(plan.items, plan.max_bytes // _BYTES_PER_ITEM)
    )
    line = json.dumps({"form": _FORM, "items": items, "fields": plan.fields}).encode()
    # The line is padded, so that no number of the table crosses a page boundary.
    line += b" " * (-(len(line) + 1) % _PLACE.size) + b"\n"
    os.write(file, line)
    os.ftruncate(file, len(line) + _PLACE.size * items)


def _make(plan: CachePlan) -> None:
    """Create the store's file atomically. If several processes do this, the first file stays."""
    file, path = tempfile.mkstemp(prefix=f"{FILE_NAME}.", dir=plan.where)
    try:
        write_head(file, plan)
        with contextlib.suppress(FileExistsError):
            os.link(path, os.path.join(plan.where, FILE_NAME))
    finally:
        os.close(file)
        os.unlink(path)


def _read_head(file: int) -> tuple[dict[str, str], int, int, int]:
    """Read the head of a store.

    Returns:
        Fingerprint, number of items in the table, offset of the table, and offset of the entries.

    Raises:
        ValueError: the head is damaged, or has another format.
    """
    with open(file, "rb", closefd=False) as reader:
        line = reader.readline(_MOST_HEAD_BYTES)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        head = json.loads(line)
        entries_at = len(line) + _PLACE.size * head["items"]
        if head["form"] == _FORM and os.fstat(file).st_size >= entries_at:
            return dict(head["fields"]), head["items"], len(line), entries_at
    raise ValueError("is damaged, or was written by another version of loaderpool")


def _open(directory: str, memory_file: str = "", flags: int = 0) -> int:
    """Open a store's existing file and return its descriptor.

    Args:
        directory: directory of a store on disk.
        memory_file: path of a memory file; "": the store is on disk.
        flags: more flags for `os.open`.

    Raises:
        CacheError: the file or its directory belongs to another user, or others may write to it.
    """
    if memory_file:
        return machine.above_standard(os.open(memory_file, os.O_RDWR | os.O_CLOEXEC | flags))
    name = os.path.join(directory, FILE_NAME)
    of_directory = os.stat(directory)
    file = machine.above_standard(os.open(name, _READ_WRITE | flags))
    others = stat.S_IWGRP | stat.S_IWOTH
    for path, status in ((directory, of_directory), (name, os.fstat(file))):
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & others):
            os.close(file)
            raise CacheError(
                f"cache: {brief(path)} must belong to you, and only you may write to it, because "
                "reading a cache can run code. Delete it; or, if all its files are yours, run: "
                f"chmod -R go-w {directory}"
            )
    return file


# ---- the cache of a loader ----


def counters_in(arena: Arena, plan: CachePlan) -> memoryview:
    """Return a cache's counters: for each worker a number per `Count`, which only it writes."""
    return memoryview(arena.map)[plan.counters_at : plan.counters_at + _COUNTER_BYTES].cast("Q")


def make_cache(cache: Cache, made_of: CachedOf) -> SharedCache:
    """Create the cache of a new loader. Called in the main process.

    Ownership: the caller owns the cache, and closes it.

    Raises:
        CacheError: the directory belongs to another function or source, or cannot be used.
    """
    items = len(made_of.source) * (made_of.samples or 1)
    plan = CachePlan(cache.where, cache.max_bytes, items)
    if not cache.in_memory:
        from loaderpool.cache.identity import describe

        plan = plan._replace(fields=describe(*made_of))
    elif ranks.are_here() and abilities.can_fork_workers():
        return _make_for_ranks(plan, made_of)
    elif cache.max_bytes is None:
        plan = plan._replace(max_bytes=ranks.memory_bytes() // _MEMORY_SHARE)
    return SharedCache.create(plan)


def _make_for_ranks(plan: CachePlan, made_of: CachedOf) -> SharedCache:
    """Return the cache in memory that all ranks with equal functions and source share."""
    from loaderpool.cache.identity import describe
    from loaderpool.memory.holders import Name, job_key, obtain

    plan = plan._replace(fields=describe(*made_of))
    key = job_key("cache", ranks.job(), repr(plan))
    if plan.max_bytes is None:  # not divided by the ranks, because they share one cache
        plan = plan._replace(max_bytes=capacity.available_memory_bytes() // _MEMORY_SHARE)

    def make() -> tuple[int, bytes]:
        return _memory_file(plan), str(plan.max_bytes).encode()

    with InterruptsHeld():
        try:
            held = obtain(Name(key, 'cache="memory"', ""), make)
        except ArgumentError as refusal:
            warn(f"The ranks do not share their caches. {refusal}")
            return SharedCache.create(plan)
        # Use the size that the rank that made the file has chosen.
        plan = plan._replace(max_bytes=int(held.info))
        return SharedCache(plan, held.descriptor, stop=held.stop)


def _memory_file(plan: CachePlan) -> int:
    """Create an empty store in memory and return its descriptor.

    Raises:
        CacheError: there is no memory.
    """
    with InterruptsHeld():
        try:
            file = machine.create_memory_file("cache")
            try:
                write_head(file, plan)
            except BaseException:
                os.close(file)
                raise
            return file
        except OSError as error:
            raise CacheError(f"cache: shared memory could not be created: {error}") from error


class SharedCache:
    """A loader's cache in one process.

    Ownership: owns the descriptor and this process's `Store`. The memory file is freed with its
    last descriptor or mapping.

    Args:
        plan: description of the cache.
        descriptor: descriptor of the memory file; -1: the cache is on disk.
        counters: result of `counters_in`; None: no other process counts.
        stop: stops serving the file to other ranks. None: other ranks do not share this cache.
    """

    _undoing: Undoing | None = None  # finalizer that closes the descriptor
    _serving: Undoing | None = None  # finalizer that stops serving the file to other ranks
    # Arena, extent and lock of the counters; None: the counters are not in an arena.
    _lent: tuple[Arena, Extent, threading.RLock] | None = None

    def __init__(
        self,
        plan: CachePlan,
        descriptor: int = -1,
        counters: memoryview | None = None,
        stop: Callable[[], object] | None = None,
    ) -> None:
        self.plan, self.descriptor = plan, descriptor
        if descriptor >= 0:
            self._undoing = Undoing(self, functools.partial(os.close, descriptor))
        if stop is not None:
            self._serving = Undoing(self, stop)
        self._counters = (
            memoryview(bytearray(_COUNTER_BYTES)).cast("Q") if counters is None else counters
        )
        self._store: Store | None = None
        self._store_pid = 0
        self._last: list[int] | None = None  # final counts, once the cache is closed
        # Fingerprint of the cache. A cache in memory has one if ranks share it, or after
        # `identify`.
        self._of = dict(plan.fields)
        self._warned: set[Count] = set()  # counters with a warning so far

    @staticmethod
    def create(plan: CachePlan) -> SharedCache:
        """Create a cache and its store. Called in the main process.

        Raises:
            CacheError: the directory belongs to another function or source, or cannot be used. Or
                there is no memory.
        """
        if plan.where != MEMORY:
            prepare(plan)
            return SharedCache(plan)
        if not abilities.can_fork_workers():
            raise CacheError(
                'cache="memory" needs memfd_create, which this system lacks or refuses. Pass a '
                "directory"
            )
        with InterruptsHeld():
            return SharedCache(plan, _memory_file(plan))

    def count_in(self, arena: Arena, lock: threading.RLock) -> None:
        """Move the counters to an extent of the arena, where workers count, until `close`.

        Called in the main process.

        Args:
            arena: arena of the pool.
            lock: the pool's lock, which is held while the arena's extents change.
        """
        with lock:
            extent = arena.put(bytes(_COUNTER_BYTES))
        self._lent = arena, extent, lock
        self.plan = self.plan._replace(counters_at=extent.offset)
        self._counters = counters_in(arena, self.plan)

    def identify(self, made_of: CachedOf) -> None:
        """Store the fingerprint of a cache in memory. A cache on disk stores it in its file.

        Called in the main process; pairs with `check`. Blocks: as `describe`.
        """
        if self.plan.where == MEMORY and not self._of:
            from loaderpool.cache.identity import describe

            self._of = describe(*made_of)

    def check(self, made_of: CachedOf) -> None:
        """Check that the entries belong to these functions and this source.

        Called in the main process. Blocks: as `describe`.

        Raises:
            CacheError: they belong to others, or the fingerprint is unknown.
        """
        from loaderpool.cache.identity import describe, difference

        fields = describe(*made_of)
        if self.plan.where != MEMORY:
            prepare(self.plan._replace(fields=fields))
        elif fields != self._of:
            differs = difference(self._of, fields) if self._of else ""
            raise CacheError(
                f"cache: the function or source has changed since results were stored{differs}. "
                "They would be wrong. Create a new loader: loader = loader.replace()"
            )

    def counts_of(self, worker: int) -> memoryview:
        """Return the counters that a worker writes."""
        return self._counters[_COUNTS * worker : _COUNTS * (worker + 1)]

    def counts(self) -> list[int]:
        """Return the sums over all processes, one for each `Count`."""
        if self._last is not None:
            return self._last
        found = [sum(self._counters[count::_COUNTS].tolist()) for count in Count]
        with contextlib.suppress(OSError):  # the file may have been deleted
            status = os.stat(
                os.path.join(self.plan.where, FILE_NAME) if self.descriptor < 0 else self.descriptor
            )
            found[Count.BYTES] += min(
                status.st_size, 512 * getattr(status, "st_blocks", status.st_size)
            )
        return found

    def warn(self) -> None:
        """Warn of failures in workers, once for each kind.

        Called in the main process after a pass.
        """
        counts = self.counts()
        for count, text in _TEXTS.items():
            if counts[count] and count not in self._warned:
                self._warned.add(count)
                warn(
                    f"cache={brief(self.plan.where)} {text.format(counted(counts[count], 'item'))}"
                )

    def store(self) -> Store:
        """Return this process's `Store`; open it at the first call, and again after a fork.

        Raises:
            ClosedError: `close` was called.
        """
        if self._last is not None:  # the descriptor's number may belong to another file by now
            raise closed_error("this cache")
        if self._store is None or self._store_pid != os.getpid():
            self._store = Store(
                self.plan, f"/proc/self/fd/{self.descriptor}" if self.descriptor >= 0 else ""
            )
            self._store_pid = os.getpid()
        return self._store

    def close(self, clears: bool = False) -> None:
        """Close the cache in this process. Idempotent.

        Args:
            clears: True to free the memory of the entries, even if other processes of this loader
                have the file open. Ignored if other ranks share the cache.
        """
        if self._last is not None:
            return
        self._last = self.counts()
        if self._serving is not None:
            self._serving.now()
        elif clears and self.descriptor >= 0:
            # Head and table are freed first, so that other processes find no entries.
            machine.return_pages(self.descriptor, 0, os.fstat(self.descriptor).st_size)
        self._store = None
        self._counters = memoryview(b"")  # releases the mapping, even if this object is kept
        if self._undoing is not None:
            self._undoing.now()
        if self._lent is not None:
            arena, extent, lock = self._lent
            with lock:
                arena.give_back(extent)
