"""Memory files that the processes of one machine find by name. The first process makes the file.

    newcomer ──connects to──▶ holder 0 … 63    all at once; the first answer has the descriptor
        └────binds──────────▶ lock 0 … 7       without a holder: one process makes, others wait

A *holder* is a process that has the file. It listens at the first free address of its name before
`obtain` returns the file. It sends the file's descriptor to each process that connects. So a holder
may end at any time. If there is no holder, a process acquires the lock, checks the holders again,
and makes the file.

Addresses are abstract Unix sockets. The kernel frees an address with its last socket, so a process
that dies leaves nothing behind. Each side of a connection gets the user and the pid of the other
one from the kernel. A child that C code forks keeps copies of listening sockets. So a listener
counts only while the process that created it is alive, and not stopped for long.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import marshal
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from loaderpool.errors import ArgumentError, PoolBrokenError, warn
from loaderpool.memory.adoption import final_block
from loaderpool.system import machine
from loaderpool.system.hashes import checksum
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.system.process import role

# Largest number of holders of a name. Smaller: if these die, no other process serves the file.
# Larger: a newcomer tries more addresses, at 5 us each.
_MOST_HOLDERS = 64
# Number of addresses of the lock. An address is skipped if its owner is dead, but a child forked by
# C code still has the socket. Smaller: fewer such children suffice to block all addresses. Then
# several processes may make the same file.
_MOST_LOCKS = 8
# Backlog of a listening socket: newcomers that wait for its process at the same time.
_MOST_WAITING = 1024
_MOST_MESSAGE_BYTES = 1 << 16
_FORMAT = 1  # version of messages and files
# Time between two checks that the other processes are alive. Without such a check, a socket that a
# child forked by C code keeps open would make a newcomer wait for a dead process.
_CHECK_MS = 100
# Pause of a holder that cannot accept a connection, because its descriptors are used up.
_PAUSE_S = 0.1
# Time that the exit of a process waits for a thread that serves. It ends in microseconds, unless a
# newcomer does not read its answer.
_LONGEST_END_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED)


class Held(NamedTuple):
    """A memory file that was found or made. Ownership: the caller closes `descriptor`."""

    descriptor: int
    info: bytes  # second result of `make`, in the process that made the file
    stop: Callable[[], object]  # stops serving the file; never blocks, may run in a finalizer


class Name(NamedTuple):
    """A name under which processes of one user on one machine find a file."""

    key: str  # hexadecimal digits that identify the name
    shown: str  # beginning of error messages
    made_by: str  # text that identifies the function that makes the value; it must be equal

    def address(self, kind: str, number: int) -> bytes:
        """Return an abstract address of this name. `kind` is "lock", or "" for holders."""
        return f"\0loaderpool/{os.geteuid()}/{self.key}/{kind}{number}".encode()


def job_key(kind: str, job: str, name: str) -> str:
    """Return the key of a name within a job.

    Other versions of Python, or of the files' format, have other keys.
    """
    return checksum([repr((_FORMAT, sys.version_info[:2], kind, job, name)).encode()])


def obtain(name: Name, make: Callable[[], tuple[int, bytes]]) -> Held:
    """Return the file of a name. If no process has it, make the file.

    Blocks: while another process makes the file. Signal handlers run meanwhile, and during `make`.

    Args:
        name: the name.
        make: returns the descriptor of the complete file, and its `info`, at most 32 KiB. Called
            only while no other process has the file or makes it.

    Raises:
        ArgumentError: another function made the value of this name, a process of another user or
            PID namespace has the address, or `make` obtains the name that it makes.
    """
    with InterruptsHeld():
        while True:
            found = _request(name)
            if found is not None:
                return _become_holder(name, *found)
            lock = _acquire_lock(name)
            if lock is None:
                continue
            try:
                found = _request(name)
                if found is None:
                    found = _make(name, make)
                # Listen before the lock is released, so that the next owner finds this holder.
                return _become_holder(name, *found)
            finally:
                _release(lock)


# ---- files: data, followed by a header ----


def finish(descriptor: int, nbytes: int, header: bytes) -> bytes:
    """Write a header behind the data of a memory file, and make the file final.

    Args:
        descriptor: descriptor of the file. No process has mapped it for shared writes.
        nbytes: size of the data, a multiple of the page size.
        header: description of the data, for the processes that read them.

    Returns:
        The `info` that `make` returns to `obtain`.
    """
    end = nbytes
    while end < nbytes + len(header):  # one call writes 2 GiB at most
        end += os.pwrite(descriptor, memoryview(header)[end - nbytes :], end)
    machine.seal(descriptor)
    return marshal.dumps((nbytes, len(header), checksum([header])))


def read_final(held: Held) -> tuple[memoryview, bytes]:
    """Return the data of a final file, mapped read-only, and its header.

    Ownership: the data own the file. When they are garbage-collected, serving stops.

    Raises:
        PoolBrokenError: the header is damaged.
    """
    nbytes, header_bytes, expected = marshal.loads(held.info)
    block = final_block(held.descriptor, nbytes, held.stop)
    # Use `pread`, because all processes share the file's position.
    header = b""
    while part := os.pread(held.descriptor, header_bytes - len(header), nbytes + len(header)):
        header += part
    if checksum([header]) != expected:
        raise PoolBrokenError("shared data of another process are damaged")
    return block, header


def _make(name: Name, make: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
    _makers[name.key] = os.getpid(), threading.get_ident()
    try:
        with InterruptsAllowed():
            return make()
    finally:
        del _makers[name.key]


# ---- newcomers ----

# Pid and thread of each `make` that runs, by key of its name. A child forked during `make` keeps
# the parent's pid, so that a call of `obtain` in this child is recognized.
_makers: dict[str, tuple[int, int]] = {}
# Watches of the processes to which this one has connected, by pid and start time. They are kept, so
# that a stopped process stays lost when it is met again.
_watches: dict[tuple[int, int], machine.StopWatch] = {}
_reported: set[tuple[int, int]] = set()  # stopped processes that a warning has named


class _Peer:
    """A connection to the process that listens at an address. `close` closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid, self.uid = machine.peer_of(connection)
        self._began = machine.start_time(self.pid)
        self.close = connection.close

    def is_lost(self) -> bool:
        """Return True if the process is dead, or stopped for long (SIGSTOP, or Ctrl-Z in a shell).

        A forked child may keep the socket open.
        """
        if not machine.start_time(os.getpid()):  # the system has no /proc
            return False
        if not self._began or machine.start_time(self.pid) != self._began:
            return True
        process = self.pid, self._began
        watch = _watches.setdefault(process, machine.StopWatch())
        if not machine.is_stopped(self.pid):
            watch.runs()
            return False
        is_lost = watch.is_too_long()
        if is_lost and process not in _reported:
            _reported.add(process)
            warn(
                f"Process {self.pid} makes or has data that this process needs, but it is stopped "
                "(SIGSTOP or Ctrl-Z). This process does not wait for it, and makes the data again "
                f"if no other process has them. To continue or end it: kill -CONT {self.pid}, or "
                f"kill -KILL {self.pid}."
            )
        return is_lost

    def why_refused(self, name: Name) -> str:
        """Return an error message if the process cannot be trusted, otherwise "".

        It is trusted if it has the same user, and its pid is visible here.
        """
        if self.uid != os.geteuid():
            return (
                f"{name.shown}: process {self.pid} of user {self.uid} listens at its address, but "
                f"this process belongs to user {os.geteuid()}. End that process, or pass another "
                "name."
            )
        if not self.pid:
            return _refusal_of_namespace(name)
        return ""

    def receive(self) -> tuple[Any, list[int]]:
        """Return the answer and its descriptors; None and [] if the process is dead."""
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            answer, files, _, _ = socket.recv_fds(self.connection, _MOST_MESSAGE_BYTES, 1, flags)
        except OSError:  # the connection is reset, or the process has died without an answer
            return None, []
        return marshal.loads(answer) if answer else None, files


def _refusal_of_namespace(name: Name) -> str:
    return (
        f"{name.shown}: a process in another container (PID namespace) has the data. "
        "Containers with one network share names only if they share the PID namespace, too "
        "(docker run --pid, shareProcessNamespace of a Pod). Do that, or pass another name in "
        "each container."
    )


def _connect(address: bytes) -> _Peer | None:
    """Connect to the process that listens at an address. Return None if no living one does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(address)
        peer = _Peer(connection)
    except OSError:  # ECONNREFUSED: nobody listens. EAGAIN: the backlog is full.
        connection.close()
        return None
    if peer.pid and peer.is_lost():
        connection.close()
        return None
    return peer


def _first_ready(peers: list[_Peer]) -> _Peer:
    """Return the first process that answers, closes its socket, or is lost. Blocks until then."""
    poll, of = select.poll(), dict[int, _Peer]()
    for peer in peers:
        of[peer.connection.fileno()] = peer
        poll.register(peer.connection, select.POLLIN)
    with InterruptsAllowed():
        while True:
            for number, _ in poll.poll(_CHECK_MS):
                return of[number]
            for peer in peers:
                if peer.is_lost():
                    return peer


def _request(name: Name) -> tuple[int, bytes] | None:
    """Return descriptor and info from the first holder that answers. None if there is no holder."""
    refused = ""
    with contextlib.ExitStack() as stack:
        peers = list[_Peer]()
        for number in range(_MOST_HOLDERS):
            peer = _connect(name.address("", number))
            if peer is not None:
                stack.callback(peer.close)
                reason = peer.why_refused(name)
                refused = refused or reason
                if not reason:
                    peers.append(peer)
        while peers:
            peer = _first_ready(peers)
            peers.remove(peer)
            answer, files = peer.receive()
            if answer == _FROM_ELSEWHERE:
                refused = refused or _refusal_of_namespace(name)
            elif answer is not None:
                made_by, info = answer
                if made_by == name.made_by and files:
                    return machine.above_standard(files[0]), info
                for file in files:
                    os.close(file)
                if made_by == name.made_by:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                raise ArgumentError(
                    f"{name.shown}: process {peer.pid} has the data of {made_by}, but this process "
                    f"passed {name.made_by}. Pass another name, or the same function in all "
                    "processes."
                )
    if refused:
        raise ArgumentError(refused)
    return None


# ---- the lock ----


def _acquire_lock(name: Name) -> socket.socket | None:
    """Return the lock's socket, which `_release` closes. None: check the holders again.

    A process has the lock if it listens at one of the addresses and then finds no living process at
    any other. So only one living process has the lock: of two, the one that listens later finds the
    other. If the other one has a lower number, this process stops listening, and then waits for it.
    If the other one has a higher number, this process waits until the other one stops listening for
    the same reason, or releases the lock. There is no deadlock, because a process that listens
    waits only for higher numbers.
    """
    number, own = 0, None
    while own is None:
        if number == _MOST_LOCKS:  # dead owners' children, forked by C code, keep all of them
            return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = _listen(name.address("lock", number))
        if own is None:
            if _wait_for(name, number):
                return None
            number += 1
    try:
        for other in range(_MOST_LOCKS):
            if other < number and (peer := _connect(name.address("lock", other))):
                with contextlib.closing(peer):
                    _release(own)
                    _wait(name, peer)
                    return None
            if other > number:
                _wait_for(name, other)
    except BaseException:
        _release(own)
        raise
    return own


def _release(lock: socket.socket) -> None:
    """Close the lock's socket, and the connections of all processes that wait for it.

    If a child forked by C code has a copy of the socket, only this closes the connections.
    """
    with lock, contextlib.suppress(OSError):
        lock.shutdown(socket.SHUT_RDWR)
        lock.setblocking(False)
        while True:
            lock.accept()[0].close()


def _wait_for(name: Name, number: int) -> bool:
    """Wait for the process that listens at an address of the lock. Return False if none does."""
    peer = _connect(name.address("lock", number))
    if peer is None:
        return False
    with contextlib.closing(peer):
        _wait(name, peer)
    return True


def _wait(name: Name, peer: _Peer) -> None:
    reason = peer.why_refused(name)
    if reason:
        raise ArgumentError(reason)
    pid, thread = _makers.get(name.key, (0, 0))
    if peer.pid == pid and (pid != os.getpid() or thread == threading.get_ident()):
        raise ArgumentError(
            f"{name.shown}: the function that makes the data asks for them itself. Pass another "
            "name inside of it."
        )
    _first_ready([peer])


# ---- holders ----

_FROM_ELSEWHERE = "elsewhere"  # answer to a process of another PID namespace
# Listening sockets of this process, each with the descriptor that it serves; -1 for the lock.
_listeners: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that serve


def _listen(address: bytes) -> socket.socket | None:
    """Return a socket that listens at an abstract address, or None if the address is in use.

    Raises:
        OSError: the system refuses the socket, or no descriptor is left.
    """
    _prepare()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _listeners[listener] = -1
    try:
        listener.bind(address)
        listener.listen(_MOST_WAITING)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


@functools.cache
def _prepare() -> None:
    machine.at_forks(after_in_child=_after_fork)
    # Stop listening before the interpreter exits, because its daemon threads then no longer answer.
    atexit.register(_shut_all)


def _after_fork() -> None:
    for each in list(_listeners):
        _end(each)
    for key, (_, thread) in list(_makers.items()):
        if thread != threading.get_ident():  # another thread of the parent runs `make`
            del _makers[key]


def _shut_all() -> None:
    """Stop serving at the exit of the process, and wait for the threads that serve."""
    for each in list(_listeners):
        _shut(each, os.getpid())
    for thread in list(_threads):
        thread.join(_LONGEST_END_S)


def _shut(listener: socket.socket, pid: int) -> None:
    """Stop a listening socket of this process, and the thread that serves there, if there is one.

    Args:
        listener: the socket.
        pid: pid of the process that created the socket. In a forked child, do nothing.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _become_holder(name: Name, descriptor: int, info: bytes) -> Held:
    """Serve the file to other processes, until `stop` of the result is called.

    The supervisor serves nothing, because a thread would keep it from forking workers.
    """
    if role() == "supervisor":
        return Held(descriptor, info, bool)
    listener = None
    try:
        addresses = (name.address("", number) for number in range(_MOST_HOLDERS))
        listener = next(filter(None, map(_listen, addresses)), None)
        if listener is None:
            return Held(descriptor, info, bool)
        _listeners[listener] = machine.above_standard(os.dup(descriptor))
        message = marshal.dumps((name.made_by, info))
        thread = threading.Thread(
            target=_serve, args=(listener, message), name="loaderpool-holder", daemon=True
        )
        thread.start()
        _threads.add(thread)
    except BaseException:
        if listener is not None:
            _end(listener)
        os.close(descriptor)
        raise
    return Held(descriptor, info, functools.partial(_shut, listener, os.getpid()))


def _end(listener: socket.socket) -> None:
    descriptor = _listeners.pop(listener, -1)
    # If the user has closed all descriptors (`os.closerange`), another file may have the number.
    with contextlib.suppress(OSError):
        listener.close()
        if descriptor >= 0:
            os.close(descriptor)


def _serve(listener: socket.socket, message: bytes) -> None:
    """Send the file's descriptor to each process that connects, until the socket is shut down.

    Then close the socket. Runs in: a daemon thread, which blocks all signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(_PAUSE_S)
                continue
            break
        with connection, contextlib.suppress(OSError):  # the newcomer is dead
            connection.setblocking(False)
            pid, uid = machine.peer_of(connection)
            flags = socket.MSG_NOSIGNAL
            if uid == os.geteuid() and pid:
                socket.send_fds(connection, [message], [_listeners[listener]], flags)
            elif uid == os.geteuid():
                connection.send(marshal.dumps(_FROM_ELSEWHERE), flags)
    _end(listener)
