"""Handles that the user's code has left open in the supervisor, and which of them forked workers can have.

| handle | in a forked worker |
|---|---|
| file that can be read | is opened again, so that each worker has a position of its own |
| file that is only written, or written at its end | is shared: lines of all workers follow each other |
| file that is read and written; file that cannot be opened again | workers are not forked |
| SQLite database | workers are not forked |
| connection, pipe from another process | workers are not forked |
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import socket
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from loaderpool.system import open_files
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler
from loaderpool.system.open_files import OpenFile

_SQLITE_HEAD = b"SQLite format 3\0"
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

# Servers that any library may have a connection to, in parts of their sockets' paths: logs, and who users and hosts
# are. Their clients in the C library connect anew in a fork, and a log line is one message.
_HARMLESS_PEERS = (
    "/dev/log",
    "/systemd/",
    "/nscd/",
    "/sss/",
    "/nslcd/",
    "/winbindd/",
    "/avahi-daemon/",
)
# Their proxies keep a connection for each thread, and have a hook that closes it after a fork.
_MULTIPROCESSING = ("multiprocessing", "multiprocess")


class OpenHandles:
    """The handles of this process. Runs in: the supervisor.

    Attributes:
        files: those that each fork has to open again, as `obstacles` has found them.
    """

    def __init__(self) -> None:
        self.files: list[OpenFile] = []
        self._databases: dict[str, None] = {}  # paths, in the order found
        self._reopened: set[tuple[Any, ...]] = set()  # tried once, as 500 tries take 6 ms

    def note_load(self, private: Collection[int]) -> None:
        """Look through the objects that loading a payload has made. To be called before `gc.freeze` hides them.

        What file objects have not written yet is written, or each worker would write it once more.
        """
        files = open_files.find(open_files.descriptors(private))
        written = {file.descriptor for file in files if file.is_written}
        connection = getattr(sys.modules.get("sqlite3"), "Connection", None)
        if connection is not None and not any(map(_is_database, files)):
            connection = None
        if not written and connection is None:  # the objects of torch alone take 50 ms
            return
        for each in gc.get_objects():
            # Not by `isinstance`: some objects import more when they are asked for their class.
            if type(each) in _WRITERS:
                with FailuresIgnored():  # it is closed
                    if each.fileno() in written:
                        each.flush()
            elif connection is not None and issubclass(type(each), connection):
                self._databases.update(dict.fromkeys(_paths_of(each)))

    def obstacles(self, private: Collection[int]) -> dict[str, str]:
        """Return the handles with which this process must not be forked, and note the files to be opened again.

        The keys name them. The values are as `open_files.links` has them.
        """
        numbers = open_files.descriptors(private)
        self.files = [file for file in open_files.find(numbers) if file.is_read]
        found = {f"the SQLite database {path}": path for path in self._databases}
        for file in self.files:
            if why := self._why_not_reopened(file):
                path = open_files.path_of(file.descriptor)
                if not path.startswith((*self._databases,)):  # as their logs do
                    found[f"the file {path}, which {why}"] = path
        return {**found, **_connections(numbers)}

    def _why_not_reopened(self, file: OpenFile) -> str:
        if file[:3] not in self._reopened:
            if not open_files.can_be_reopened(file):
                return "cannot be opened a second time"
            if file.is_written and not file.is_append and not _is_shared_on_purpose(file):
                return "is open for reading and writing"
            self._reopened.add(file[:3])
        return ""


def _is_shared_on_purpose(file: OpenFile) -> bool:
    """Return whether a file that is read and written is memory or a lock, which no code reads by its position."""
    path = open_files.path_of(file.descriptor)
    return (
        path.startswith("/memfd:")
        or open_files.is_locked(file.descriptor)
        or path in open_files.mapped_paths()
    )


def _is_database(file: OpenFile) -> bool:
    with contextlib.suppress(OSError):  # a directory
        return file.is_read and os.pread(file.descriptor, len(_SQLITE_HEAD), 0) == _SQLITE_HEAD
    return False


def _paths_of(connection: Any) -> list[str]:
    """Return the paths of an SQLite connection's databases; none if it is closed, or in memory alone."""
    sqlite3: Any = sys.modules["sqlite3"]
    try:
        # Not by the connection's own methods, whose rows can have any form.
        rows = sqlite3.Cursor(connection).execute("PRAGMA database_list").fetchall()
        return [os.fsdecode(path) for _, _, path in rows if path]
    except Exception as error:  # its text_factory can be anything, too
        if is_of_a_handler(error):
            raise
        return (
            [] if "closed" in str(error) else ["of a connection that cannot be asked for its path"]
        )


# ---- connections ----


def forget_connections() -> None:
    """Drop the connections of `multiprocessing`'s proxies, which then connect again. Runs in: a fork, first thing.

    Its own hook for forks would also count the fork as one more user of each object, for ever.
    """
    for local in _locals_of_proxies():
        local.__dict__.clear()


def _locals_of_proxies() -> Iterator[Any]:
    """Yield the thread-local objects that keep the connections of proxies, one for each manager."""
    for package in _MULTIPROCESSING:
        proxy = getattr(sys.modules.get(f"{package}.managers"), "BaseProxy", None)
        for local, *_ in list(getattr(proxy, "_address_to_local", {}).values()):
            yield local


def _harmless_descriptors() -> set[int]:
    """Return the descriptors of connections and pipes that workers do not read."""
    owners = [(local, "connection") for local in _locals_of_proxies()]
    for handler in getattr(sys.modules.get("logging"), "_handlerList", ()):
        owners += [(handler(), "sock"), (handler(), "socket")]
    found = set()
    for owner, attribute in owners:
        with FailuresIgnored():  # there is none, or it is closed
            found.add(getattr(owner, attribute).fileno())
    for package in _MULTIPROCESSING:
        for child in getattr(sys.modules.get(f"{package}.process"), "_children", ()):
            with FailuresIgnored():  # it has ended
                found.add(child.sentinel)
    return found


def _connections(numbers: Iterable[int]) -> dict[str, str]:
    """Name the connections to other processes: of two workers that read one, each would get a part of the data."""
    found: dict[int, str] = {}
    pipes: dict[int, int] = {}  # ends that are read, by inode
    written = set()  # inodes
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since, or no connection
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                if peer := _peer(number):
                    found[number] = f"the connection to {peer}"
            elif stat.S_ISFIFO(status.st_mode):
                if open_files.is_writable(number):
                    written.add(status.st_ino)
                else:
                    pipes[status.st_ino] = number
    for inode, number in pipes.items():
        if inode not in written and not _has_ended(number):  # else both ends are this process's
            found[number] = "a pipe from another process"
    harmless = _harmless_descriptors() if found else set()
    return {
        text: open_files.path_of(number) for number, text in found.items() if number not in harmless
    }


def _peer(number: int) -> str:
    """Return the other end of a stream connection; "": it is none, or one that forked workers may have."""
    is_blocking = os.get_blocking(number)
    connection = socket.SocketType(fileno=number)  # proxies and test tools replace `socket.socket`
    try:
        if connection.type != socket.SOCK_STREAM:
            return ""
        peer = connection.getpeername()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK):
                return ""  # the other process has closed it
    finally:
        connection.detach()
        os.set_blocking(number, is_blocking)
    if isinstance(peer, tuple):
        host, port, *_ = peer
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    path = os.fsdecode(peer).replace(
        "\0", "@"
    )  # "": of a pair, as event loops have one for themselves
    return "" if any(part in path for part in _HARMLESS_PEERS) else path


def _has_ended(pipe: int) -> bool:
    """Return whether a pipe is empty and stays so."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return [event for _, event in poll.poll(0)] == [select.POLLHUP]
