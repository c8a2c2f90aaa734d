"""Handles that the user's code has left open in the supervisor, and their treatment in forked
workers.

| handle | in a forked worker |
|---|---|
| readable file | opened again, so that each worker has its own position |
| file that is only written, or written at its end | shared: all workers append lines |
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

from loaderpool.system import open_files
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler
from loaderpool.system.open_files import OpenFile

_SQLITE_HEAD = b"SQLite format 3\0"
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

# Parts of socket paths of servers that any library may be connected to: logs, and user and host
# names. Their clients in the C library connect again after a fork, and a log line is one message.
_HARMLESS_PEERS = (
    "/dev/log",
    "/systemd/",
    "/nscd/",
    "/sss/",
    "/nslcd/",
    "/winbindd/",
    "/avahi-daemon/",
)
# Packages whose proxies keep a connection for each thread, and have a hook that closes it after a
# fork.
_MULTIPROCESSING = ("multiprocessing", "multiprocess")


class OpenHandles:
    """The open handles of this process. Runs in: the supervisor.

    Attributes:
        files: files that each fork has to open again. Set by `obstacles`.
    """

    def __init__(self) -> None:
        self.files: list[OpenFile] = []
        self._databases: dict[str, None] = {}  # paths, in the order in which they were found
        # files that were tried once: 500 tries take 6 ms
        self._reopened: set[tuple[object, ...]] = set()

    def note_load(self, private: Collection[int]) -> None:
        """Check the objects that loading a payload has created.

        Call it before `gc.freeze` hides them. It also flushes file objects, because otherwise each
        worker would write their buffers again.
        """
        files = open_files.find(open_files.descriptors(private))
        written = {file.descriptor for file in files if file.is_written}
        connection = getattr(sys.modules.get("sqlite3"), "Connection", None)
        if connection is not None and not any(map(_is_database, files)):
            connection = None
        if not written and connection is None:  # torch's objects alone would take 50 ms
            return
        for each in gc.get_objects():
            # Not by `isinstance`: some objects import more when their class is read.
            if type(each) in _WRITERS:
                with FailuresIgnored():  # the handle is closed
                    if each.fileno() in written:
                        each.flush()
            elif connection is not None and issubclass(type(each), connection):
                self._databases.update(dict.fromkeys(_paths_of(each)))

    def obstacles(self, private: Collection[int]) -> dict[str, str]:
        """Return the handles with which this process must not be forked, and set `files`.

        The keys name the handles. The values are paths as in `open_files.links`.
        """
        numbers = open_files.descriptors(private)
        self.files = [file for file in open_files.find(numbers) if file.is_read]
        found = {f"the SQLite database {path}": path for path in self._databases}
        for file in self.files:
            if why := self._why_not_reopened(file):
                path = open_files.path_of(file.descriptor)
                # log files of a database start with its path
                if not path.startswith((*self._databases,)):
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
    """Return True if a file that is read and written is a memory file, mapped to memory, or locked.

    No code reads such files by position.
    """
    path = open_files.path_of(file.descriptor)
    return (
        path.startswith("/memfd:")
        or open_files.is_locked(file.descriptor)
        or path in open_files.mapped_paths()
    )


def _is_database(file: OpenFile) -> bool:
    with contextlib.suppress(OSError):  # directories cannot be read
        return file.is_read and os.pread(file.descriptor, len(_SQLITE_HEAD), 0) == _SQLITE_HEAD
    return False


def _paths_of(connection: object) -> list[str]:
    """Return the paths of an SQLite connection's databases; empty if it is closed, or only in
    memory.
    """
    sqlite3 = sys.modules["sqlite3"]
    try:
        # Not by the connection's own methods, whose rows can have any form.
        rows = sqlite3.Cursor(connection).execute("PRAGMA database_list").fetchall()
        return [os.fsdecode(path) for _, _, path in rows if path]
    except Exception as error:  # the connection's text_factory may raise anything
        if is_of_a_handler(error):
            raise
        return (
            [] if "closed" in str(error) else ["of a connection that cannot be asked for its path"]
        )


# ---- connections ----


def forget_connections() -> None:
    """Drop the connections of `multiprocessing`'s proxies, which then connect again. Called first
    in a fork.

    The proxies' own hook for forks would also count the fork as one more user of each object,
    forever.
    """
    for local in _locals_of_proxies():
        local.__dict__.clear()


def _locals_of_proxies() -> Iterator[object]:
    """Yield the thread-local objects with the connections of proxies, one for each manager."""
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
            with FailuresIgnored():  # the child has ended
                found.add(child.sentinel)
    return found


def _connections(numbers: Iterable[int]) -> dict[str, str]:
    """Return names and paths of the connections to other processes.

    They are unsafe, because two workers that read one connection would each get a part of the data.
    """
    found: dict[int, str] = {}
    pipes: dict[int, int] = {}  # read ends, by inode
    written = set()  # inodes of write ends
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since, or not a connection
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
        # otherwise both ends are in this process
        if inode not in written and not _has_ended(number):
            found[number] = "a pipe from another process"
    harmless = _harmless_descriptors() if found else set()
    return {
        text: open_files.path_of(number) for number, text in found.items() if number not in harmless
    }


def _peer(number: int) -> str:
    """Return the other end of a stream connection.

    "": it is not a stream connection, or forked workers may share it.
    """
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
    # "": a socket pair, which event loops have for themselves.
    path = os.fsdecode(peer).replace("\0", "@")
    return "" if any(part in path for part in _HARMLESS_PEERS) else path


def _has_ended(pipe: int) -> bool:
    """Return True if a pipe is empty and has no writer any more."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return [event for _, event in poll.poll(0)] == [select.POLLHUP]
