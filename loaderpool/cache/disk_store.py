"""Entries in a SQLite database: a directory that survives its loader, and the death of any process.

SQLite in WAL mode, for these properties of it: a transaction is there whole or not at all, whatever dies in the middle
of it; its locks are the kernel's own (`fcntl`), which end with the process that holds them; readers never wait;
and damaged pages are an error, not a crash. What it does not notice, a checksum of each entry does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from loaderpool.cache.counters import Trouble
from loaderpool.cache.ownership import refuse_others_files
from loaderpool.errors import CacheError
from loaderpool.system import clock

FILE_NAME = "entries.sqlite3"
_FILES = frozenset({FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", f"{FILE_NAME}-journal"})
_APPLICATION_ID = 0x4C504341  # "LPCA"
_VERSION = 2
# Larger pages waste half of one for each entry, smaller ones take longer to read.
_PAGE_BYTES = 16 << 10
# The log of latest writes is copied into the database when it has this many bytes; a larger one is more to redo after
# a crash, and a smaller one is more waiting for the disk.
_LOG_BYTES = 16 << 20
_LOG_SHARE = 16  # of a bound: no more than this part of it
_INDEX_BYTES = 64 << 10  # of the log
# How long a write waits for those of other processes. Longer, and a process that was stopped in the middle of one
# (SIGSTOP) holds up the others; shorter, and a slow disk has items made twice.
_BUSY_S = 2.0
_OPEN_BUSY_S = 20.0
_FREE_SHARE = 20  # without a bound: this part of the disk stays free


class DiskStore:
    """One process's way to the entries.

    Ownership: of its connection, which a fork must not use.

    Args:
        directory: as `prepare` has left it.
        max_bytes: of all files; None: as the disk allows.
        mark: eight bytes that stand for the function and the source that entries are of.

    Raises:
        sqlite3.Error: the database is gone, or cannot be read.
        CacheError, OSError: it may have come to be another user's since.
    """

    def __init__(self, directory: str, max_bytes: int | None, mark: bytes) -> None:
        self._directory, self._max_bytes, self._mark = directory, max_bytes, mark
        log_bytes = _LOG_BYTES if max_bytes is None else min(_LOG_BYTES, max_bytes // _LOG_SHARE)
        refuse_others_files(directory)
        self._connection = _connect(directory, "rw", log_bytes)
        self._finalizer = weakref.finalize(self, _close, self._connection, os.getpid())
        self._log = os.path.join(directory, f"{FILE_NAME}-wal")
        self._most_log_bytes = 2 * log_bytes
        self._too_large: float = float("inf")  # entries from this size on did not fit
        self._ended = Trouble.NONE  # why nothing is written any more

    def get(self, item: int) -> bytes | None:
        """Return the item's pickle; None where it has none.

        Raises:
            ValueError: it is not what was written.
            sqlite3.Error: the database is damaged, or cannot be read now.
        """
        try:
            found = self._connection.execute("SELECT checksum, value FROM entries WHERE item = ?", (item,)).fetchone()
        except sqlite3.OperationalError as error:
            if not _is_busy(error):  # another process repairs the log, say
                raise
            return None
        if found is None:
            return None
        checksum, value = found
        if not isinstance(value, bytes) or checksum != self._checksum(item, value):
            raise ValueError(f"entry {item} is damaged")
        return value

    def put(self, item: int, pickled: bytes) -> Trouble:
        """Keep the item's pickle, if there is room."""
        nbytes = len(pickled)
        if self._ended != Trouble.NONE:
            return self._ended
        if nbytes >= self._too_large:
            return Trouble.BOUND
        try:
            with _transaction(self._connection):
                trouble = self._why_not(nbytes)
                if trouble == Trouble.NONE:
                    entry = (item, self._checksum(item, pickled), pickled)
                    self._connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", entry)
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                return Trouble.BUSY
            is_full = "full" in str(error) or self._free_bytes() < nbytes + _INDEX_BYTES
            self._ended = Trouble.NO_SPACE if is_full else Trouble.BROKEN
            return self._ended
        except (sqlite3.Error, OSError, OverflowError):  # OSError: the directory is gone
            self._ended = Trouble.BROKEN
            return self._ended
        if trouble != Trouble.NONE:
            self._too_large = nbytes
        self._shorten_log()
        return trouble

    def close(self) -> None:
        """Close the connection."""
        self._finalizer()

    def _why_not(self, nbytes: int) -> Trouble:
        """Within a transaction: no other process writes meanwhile."""
        if self._max_bytes is None:
            reserve = self._disk_bytes() // _FREE_SHARE
            return Trouble.NO_SPACE if self._free_bytes() - 2 * nbytes < reserve else Trouble.NONE
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        # What the log has is in the count already and comes into the database later; until then it is there twice.
        needed = pages * _PAGE_BYTES + 2 * (nbytes + _PAGE_BYTES) + _size(self._log) + _INDEX_BYTES
        return Trouble.BOUND if needed > self._max_bytes else Trouble.NONE

    def _shorten_log(self) -> None:
        """SQLite copies a long log by itself, but starts it over only when no process reads; readers are many here."""
        if _size(self._log) > self._most_log_bytes:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _checksum(self, item: int, value: bytes) -> int:
        return zlib.crc32(value, zlib.crc32(self._mark + item.to_bytes(8, "little")))

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._directory).free

    def _disk_bytes(self) -> int:
        return shutil.disk_usage(self._directory).total


def prepare(directory: str, fields: Mapping[str, str]) -> None:
    """Make the store where there is none; else see that it is of the same function and source.

    Runs in: the trainer. Two at a time are fine.

    Args:
        directory: where.
        fields: what the function and the source are, in words and numbers, by name.

    Raises:
        CacheError: it is another user's or others may write it, it is of another function, it is damaged, or it cannot
            be made.
    """
    try:
        os.makedirs(directory, 0o700, exist_ok=True)  # the last one; those above it are as the user's others
        strangers = sorted(set(os.listdir(directory)) - _FILES)
    except OSError as error:
        raise CacheError(f"cache: the directory {directory!r} cannot be used: {error}") from error
    if strangers:
        raise CacheError(
            f"cache: the directory {directory!r} has files that are no cache's ({', '.join(strangers[:3])}); give a "
            "directory of its own, which is made where there is none"
        )
    try:
        refuse_others_files(directory)
    except OSError as error:
        raise CacheError(f"cache: the directory {directory!r} cannot be used: {error}") from error
    try:
        with contextlib.closing(_connect(directory, "rwc", _LOG_BYTES, _OPEN_BUSY_S)) as connection:
            _set_mode(connection)
            with _transaction(connection):
                found = _read_or_write(connection, fields)
    except CacheError as error:
        raise CacheError(f"cache: {directory!r} {error}") from None
    except sqlite3.OperationalError as error:
        raise CacheError(
            f"cache: {directory!r} cannot be opened ({error}): is it writable, on a local disk, and is there room?"
        ) from error
    except (sqlite3.DatabaseError, OSError) as error:
        raise CacheError(f"cache: {directory!r} is damaged ({error}): delete it, and it is filled anew") from error
    differing = _differences(found, fields)
    if differing:
        raise CacheError(
            f"cache: {directory!r} was filled by another function or from another source: {differing}. What it keeps "
            "would be wrong now: delete the directory, or give another one"
        )


def stored_bytes(directory: str) -> int:
    """Return the bytes that the files of a store take."""
    return sum(_size(os.path.join(directory, name)) for name in _FILES)


def _differences(found: Mapping[str, str], fields: Mapping[str, str]) -> str:
    names = [name for name in fields if found.get(name) != fields[name]]
    names += [name for name in found if name not in fields]
    parts = [f"{name} (then {found.get(name, 'none')}, now {fields.get(name, 'none')})" for name in names[:4]]
    if len(names) > 4:
        parts.append(f"and {len(names) - 4} more")
    return "; ".join(parts)


def _read_or_write(connection: sqlite3.Connection, fields: Mapping[str, str]) -> dict[str, str]:
    """Return what the store is of; `fields` where it is new."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not application and not tables:
        connection.execute("CREATE TABLE fingerprint (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        connection.execute("CREATE TABLE entries (item INTEGER PRIMARY KEY, checksum INTEGER, value BLOB)")
        connection.executemany("INSERT INTO fingerprint VALUES (?, ?)", list(fields.items()))
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        return dict(fields)
    if application != _APPLICATION_ID:
        raise CacheError("has a database of some other program; give another directory")
    if version != _VERSION:
        raise CacheError(
            f"is of another version of loaderpool (form {version}, here {_VERSION}): delete it, and it is filled anew"
        )
    return dict(connection.execute("SELECT name, value FROM fingerprint").fetchall())


def _connect(directory: str, mode: str, log_bytes: int, busy_s: float = _BUSY_S) -> sqlite3.Connection:
    """Return a connection of this process's own; "rw" makes no file, so that a store that was deleted stays deleted."""
    path = quote(os.path.join(directory, FILE_NAME))
    connection = sqlite3.connect(
        f"file:{path}?mode={mode}", uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # of a new one
        connection.execute("PRAGMA synchronous = NORMAL")  # whole after a loss of power, but for the latest writes
        connection.execute("PRAGMA mmap_size = 0")  # a file that is cut short is an error then, no SIGBUS
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(1, log_bytes // _PAGE_BYTES)}").fetchone()
        connection.execute(f"PRAGMA journal_size_limit = {log_bytes}").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _close(connection: sqlite3.Connection, pid: int) -> None:
    """Close a connection, but not in a fork of the process whose it is."""
    if os.getpid() == pid:
        connection.close()


def _set_mode(connection: sqlite3.Connection) -> None:
    deadline_s = clock.monotonic_s() + _OPEN_BUSY_S
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:  # two that make it at once: SQLite does not wait for this one
            if not _is_busy(error) or clock.monotonic_s() > deadline_s:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise CacheError("is on a disk where SQLite's write-ahead log does not work; give a directory on a local disk")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _is_busy(error: sqlite3.Error) -> bool:
    return "locked" in str(error) or "busy" in str(error)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
