"""Entries in one file that is only appended to: a memory file that a loader's processes share, or one in a directory.

    [ head: what the entries are of, a line of JSON | table: where each item's entry begins | entries → ]

An entry is appended by one `write` to a descriptor opened with O_APPEND: the kernel finds its place, so that no two
processes get the same, and none holds a lock. Then its place is put into the table, as one number. A process
that dies before that leaves bytes that no process looks at; one that dies after it leaves a whole entry (CACHE-1). On
disk each entry has a checksum as well: what a failing disk or a loss of power has bent is made again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import pickle
import shutil
import stat
import struct
import sys
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from cloudpickle import cloudpickle as internals

from loaderpool.cache.setting import CachePlan, Count
from loaderpool.errors import CacheError, brief
from loaderpool.memory.arena import map_whole_file
from loaderpool.system import capacity, machine

FILE_NAME = "entries.log"
_FORM = 4
_PLACE = struct.Struct("<Q")
_ENTRY = struct.Struct("<8sQQQ")  # mark, item, length of the pickle, its CRC32 (of a memory file 0)
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
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_WRITE = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


class _Head(NamedTuple):
    form: int
    mark: str  # in hexadecimal digits
    items: int  # that the table has numbers for
    fields: dict[str, str]


class Store:
    """One process's way to the entries.

    Ownership: of descriptors of its own: forked processes would share the position of an inherited one.

    Args:
        plan: what the cache is. Of one on disk, `prepare` has made the file.
        memory_file: the path of one in memory.

    Raises:
        CacheError, OSError, ValueError: it is gone, damaged, or another's by now.
    """

    def __init__(self, plan: CachePlan, memory_file: str = "") -> None:
        self._plan, self._in_memory = plan, bool(memory_file)
        files: list[int] = []
        self._closing = weakref.finalize(self, _close, files)
        self._closing.atexit = False
        files += [_open(plan.where, memory_file)]
        files += [_open(plan.where, memory_file, os.O_APPEND)]
        self._file, self._log = files
        self._identity = machine.file_identity(self._log)
        head, self._table_at, self._entries_at = _read_head(self._file)
        if head.mark != plan.mark.hex() or machine.file_identity(self._file) != self._identity:
            raise ValueError("the file is another one by now")
        self._items = head.items
        self._buffer = bytearray()
        self._view: memoryview | None = None
        if memory_file and plan.max_bytes is not None:
            # Address space, of which nothing is looked at but entries that are there: they are copied once. Not on
            # disk, where a file that is cut short would end the process (SIGBUS).
            with contextlib.suppress(OSError):  # a limit on it (ulimit -v)
                self._view = memoryview(map_whole_file(self._file, plan.max_bytes)).cast("B")
        self._ended: Count | None = None  # why nothing is written any more
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
        mark, found, nbytes, checksum = _ENTRY.unpack(self._read(place, _ENTRY.size))
        if mark != self._plan.mark or found != item:
            raise ValueError(f"entry {item} is damaged")
        pickled = self._read(place + _ENTRY.size, nbytes)
        if checksum != self._checksum(item, pickled):
            raise ValueError(f"entry {item} is damaged")
        return pickled

    def put(self, item: int, pickled: bytes) -> Count | None:
        """Keep the item's pickle; returns why it is not kept."""
        if self._ended is not None:
            return self._ended
        try:
            return self._put(item, pickled)
        except OSError as error:
            if self._in_memory:  # the machine has no pages left, or RLIMIT_FSIZE is reached
                return Count.NO_ROOM
            self._ended = Count.NO_ROOM if error.errno in _FULL_ERRORS else Count.BROKEN
            return self._ended

    def _put(self, item: int, pickled: bytes) -> Count | None:
        nbytes = _ENTRY.size + len(pickled)
        status = os.fstat(self._log)
        # Deleted, or the function has closed our descriptors, and this is another file.
        if (status.st_dev, status.st_ino) != self._identity or not (status.st_nlink or self._in_memory):
            return Count.BROKEN
        most = sys.maxsize if self._plan.max_bytes is None else self._plan.max_bytes
        if item >= self._items or nbytes > _MOST_ENTRY_BYTES or status.st_size + nbytes > most:
            return Count.OVER_BOUND
        if not self._has_room(nbytes):
            return Count.NO_ROOM
        entry = _ENTRY.pack(self._plan.mark, item, len(pickled), self._checksum(item, pickled))
        write = getattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)))  # Windows has no writev
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
        return None

    def close(self) -> None:
        """Let go of the descriptors and the mapping."""
        self._view = None
        self._closing()

    def _read(self, at: int, nbytes: int) -> memoryview:
        if self._view is not None:
            return self._view[at : at + nbytes]
        if nbytes > len(self._buffer):
            if at + nbytes > os.fstat(self._file).st_size:
                raise ValueError("the file ends early")
            # Used again: the allocator gives large buffers back to the kernel each time, and that takes longer than
            # the reading.
            self._buffer = bytearray(nbytes)
        part = memoryview(self._buffer)[:nbytes]
        if hasattr(os, "preadv"):
            found = os.preadv(self._file, [part], at)
        else:
            os.lseek(self._file, at, os.SEEK_SET)
            data = os.read(self._file, nbytes)
            found, part[: len(data)] = len(data), data
        if found < nbytes:
            raise ValueError("the file ends early")
        return part

    def _checksum(self, item: int, pickled: bytes | memoryview) -> int:
        return 0 if self._in_memory else zlib.crc32(pickled, zlib.crc32(self._plan.mark + item.to_bytes(8, "little")))

    def _has_room(self, nbytes: int) -> bool:
        if not self._in_memory:
            if self._plan.max_bytes is not None:
                return True
            disk = shutil.disk_usage(self._plan.where)
            return disk.free - nbytes >= disk.total // _FREE_SHARE
        if self._spare_bytes < nbytes:
            spare = capacity.available_memory_bytes() - _HEADROOM_BYTES
            if spare < nbytes:
                return False
            self._spare_bytes = max(nbytes, spare // _LOOKS)
        self._spare_bytes -= nbytes
        return True


def prepare(plan: CachePlan) -> None:
    """Make the store on disk where there is none; else see that it is of the same function and source.

    Runs in: the trainer. Two at a time are fine.

    Raises:
        CacheError: it is another user's or others may write it, it is of another function, it is damaged, or it cannot
            be made.
    """
    named = f"cache: the directory {brief(plan.where)}"
    try:
        os.makedirs(plan.where, 0o700, exist_ok=True)  # the last one; those above it are as the user's others
        names = os.listdir(plan.where)
        strangers = sorted(name for name in names if not name.startswith(FILE_NAME))
        if strangers:
            raise CacheError(
                f"{named} has files that are no cache's ({', '.join(strangers[:3])}); give a directory of its own, "
                "which is made where there is none"
            )
        if FILE_NAME not in names:
            _make(plan)
        file = _open(plan.where)
        try:
            found = _read_head(file)[0].fields
        finally:
            os.close(file)
    except OSError as error:
        raise CacheError(
            f"{named} cannot be used ({error}): is it writable, on a local disk, and is there room?"
        ) from error
    except CacheError:
        raise
    except ValueError as error:
        raise CacheError(f"{named} {error}: delete it, and it is filled again") from None
    if found != plan.fields:
        raise CacheError(
            f"{named} was filled by another function or from another source: {_differences(found, plan.fields)}. "
            "What it keeps would be wrong now: delete the directory, or give another one"
        )


def file_in(directory: str) -> str:
    """Return the path of the file that has a directory's entries."""
    return os.path.join(directory, FILE_NAME)


def write_head(file: int, plan: CachePlan) -> None:
    """Make a store of an empty file.

    Raises:
        OSError: there is no room for it.
    """
    items = plan.items if plan.max_bytes is None else min(plan.items, plan.max_bytes // _BYTES_PER_ITEM)
    head = _Head(_FORM, plan.mark.hex(), items, dict(plan.fields))
    line = json.dumps(head._asdict()).encode() + b"\n"
    os.write(file, line)
    os.ftruncate(file, _places(line, items)[1])


def _make(plan: CachePlan) -> None:
    """Make the file, whole or not at all; of several processes the first one's stays."""
    file, path = tempfile.mkstemp(prefix=f"{FILE_NAME}.", dir=plan.where)
    try:
        write_head(file, plan)
        with contextlib.suppress(FileExistsError):
            os.link(path, file_in(plan.where))
    finally:
        os.close(file)
        os.unlink(path)


def _read_head(file: int) -> tuple[_Head, int, int]:
    """Read what a store is of, and where its table and its entries begin.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    with open(file, "rb", closefd=False) as reader:
        line = reader.readline(_MOST_HEAD_BYTES)
    try:
        found = json.loads(line)
        if found["form"] != _FORM:
            raise ValueError(f"is of another version of loaderpool (form {found['form']}, here {_FORM})")
        head = _Head(**found)
        table_at, entries_at = _places(line, head.items)
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError):
        entries_at = sys.maxsize
    if os.fstat(file).st_size < entries_at:
        raise ValueError("is damaged")
    return head, table_at, entries_at


def _places(line: bytes, items: int) -> tuple[int, int]:
    """Where the table and the entries begin, after a head and for so many items."""
    table_at = -(-len(line) // mmap.PAGESIZE) * mmap.PAGESIZE
    return table_at, table_at + -(-_PLACE.size * items // mmap.PAGESIZE) * mmap.PAGESIZE


def _differences(found: Mapping[str, str], fields: Mapping[str, str]) -> str:
    names = [name for name in fields if found.get(name) != fields[name]]
    names += [name for name in found if name not in fields]
    parts = [f"{name} (then {found.get(name, 'none')}, now {fields.get(name, 'none')})" for name in names[:4]]
    if len(names) > 4:
        parts.append(f"and {len(names) - 4} more")
    return "; ".join(parts)


def _open(directory: str, memory_file: str = "", flags: int = 0) -> int:
    """Open a store's file, if it is there.

    Raises:
        CacheError: it, or its directory, is not this user's alone: reading a pickle runs what its writer wants.
        OSError: it cannot be opened.
    """
    if memory_file:
        return machine.above_standard(os.open(memory_file, os.O_RDWR | os.O_CLOEXEC | flags))
    file = machine.above_standard(os.open(file_in(directory), _READ_WRITE | flags))
    others = stat.S_IWGRP | stat.S_IWOTH
    for path, status in ((directory, os.stat(directory)), (file_in(directory), os.fstat(file))):
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & others):
            os.close(file)
            raise CacheError(
                f"cache: {brief(path)} must belong to the user who reads it (uid {os.geteuid()}), and no other user "
                "may write to it, as reading it runs what its writer wants; it belongs to uid "
                f"{status.st_uid} with mode {stat.filemode(status.st_mode)}. Delete it, or say chmod -R go-w "
                f"{directory} if all in it is yours"
            )
    return file


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


# ---- values as pickles ----


def dump(value: Any) -> bytes:
    """Return the value's pickle, which any process of this loader, or of a later training, reads back by `load`.

    A class of `__main__`, or of a module that traveled by value, goes by its name and is found again among those that
    this process has. `pickle` alone finds none of these in a worker. cloudpickle would put the class itself into each
    entry, and another training would read a copy of it.

    Raises:
        Exception: it cannot be pickled, or not read back elsewhere; whatever pickle raises.
    """
    parts = _Parts()
    pickler = _Pickler(parts, protocol=5)  # which keeps what it has met
    pickler.dump(value)
    return b"".join(parts)


load = pickle.loads  # into memory of its own
_by_value = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS  # classes that came to this process by value


class _Parts(list[Any]):
    """A pickle as it is written; large arrays are copied once, when the parts are joined."""

    def write(self, part: Any) -> None:
        self.append(part.raw() if isinstance(part, pickle.PickleBuffer) else part)


class _Pickler(pickle.Pickler):
    def reducer_override(self, part: Any) -> Any:
        if not isinstance(part, type) or (part.__module__ != "__main__" and part not in _by_value):
            return NotImplemented
        if _find_class(part.__module__, part.__qualname__) is not part:
            raise pickle.PicklingError(
                f"the class {part.__module__}.{part.__qualname__} has no name by which another process finds it; "
                "define it at the top of the script or of a module"
            )
        return _find_class, (part.__module__, part.__qualname__)


def _find_class(module: str, name: str) -> Any:
    """Return the one class of this name that came to this process by value, else what the module has by it."""
    found = [cls for cls in list(_by_value) if cls.__module__ == module and cls.__qualname__ == name]
    named: Any = sys.modules.get(module)
    for part in name.split("."):
        named = getattr(named, part, None)
    return found[0] if len(found) == 1 else named
