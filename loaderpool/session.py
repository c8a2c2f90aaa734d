"""The trainer's end of the circle: one supervisor process, its pipes, and who reads them.

There is no receiver thread. Whichever consumer has to wait becomes the leader: it polls, drains, hands every message to
whom it concerns and wakes the others; when it has what it wanted it passes the lead on (rule 5 of the design).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from loaderpool import machine
from loaderpool.attachments import Attachment, Lost, receive_notice
from loaderpool.config import DEFAULT_MAX_RESTARTS
from loaderpool.errors import ClosedError, ForeignProcessError, PoolBrokenError, SupervisorLostError
from loaderpool.launch import launch
from loaderpool.memory.arena import Arena
from loaderpool.memory.lease import ReturnPipe
from loaderpool.messages import READ_BYTES, Control, Notice, Words, pack, unpack_all

__all__ = ["Listener", "Session", "WorkerRecord"]

# How long a close waits for the supervisor to end by itself before it is killed.
_CLOSE_TIMEOUT_S = 2.0


class Listener(Protocol):
    """Who takes notices about a loader: its engine."""

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this loader arrived. The session's lock is held."""


class WorkerRecord:
    """A worker as the trainer knows it."""

    __slots__ = ("cell", "number", "pid")

    def __init__(self, number: int, pid: int, cell: int) -> None:
        self.number, self.pid, self.cell = number, pid, cell


class Session:
    """A running supervisor and everything the trainer shares with it.

    Ownership: `close` ends the supervisor and with it the workers; arrays that are still lent stay valid.

    Args:
        workers: how many workers the supervisor shall have.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.

    Raises:
        PoolBrokenError: it could not be started; nothing of it is left.
        MemoryLimitError: no address space for the arena.
    """

    def __init__(self, workers: int, max_restarts: tuple[int, float] | None = DEFAULT_MAX_RESTARTS) -> None:
        self.workers_wanted = workers
        with contextlib.ExitStack() as undo:
            try:
                self.arena = Arena.create()
                undo.callback(self.arena.close_descriptor)
                link = launch(self.arena, workers, max_restarts)
                undo.callback(link.end)
                self._wake_read, self._wake_write = os.pipe()
            except OSError as error:  # no descriptor is left, say
                raise PoolBrokenError(f"the pool could not be started: {error}") from error
            undo.pop_all()
        self._process = link.process
        self.pipe = ReturnPipe(link.control)
        self._completions = link.completions
        self._socket = link.socket
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._owner_pid = os.getpid()
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self._has_leader = False
        self._how_broken = ""  # how the supervisor died
        self.is_closed = False
        self.listeners: dict[int, Listener] = {}  # by loader
        self.runs: dict[int, Listener] = {}  # whose run it is, by run
        self.slots: dict[int, Listener] = {}  # whose slot it is, by slot
        self.workers: dict[int, WorkerRecord] = {}
        self.restarts = 0
        self.todo: collections.deque[Callable[[], None]] = collections.deque()  # left by finalizers
        self._numbers = 0
        self._pidfd = machine.open_pidfd(self._process.pid)
        self._poll = select.poll()
        for descriptor in (self._completions, self._socket.fileno(), self._wake_read):
            self._poll.register(descriptor, select.POLLIN)
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)
        _live.add(self)

    # ---- talking ----

    def take_number(self) -> int:
        """A number never used before in this session: for loaders, runs and slots."""
        with self.lock:
            self._numbers += 1
            return self._numbers

    def order(self, kind: Control, *words: int) -> None:
        """Send a control message; earlier ones arrive first. Never blocks."""
        if self.is_foreign:
            return
        with self.lock:
            self.pipe.order(pack(kind, *words))

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Blocks until `is_ready()`, which is asked with the lock held, or until the session is closed or broken.

        Raises:
            ClosedError: the session was closed.
            SupervisorLostError: the supervisor died.
        """
        self.check_owner()
        with self._turn:
            while not is_ready():
                self.check_usable()
                if self._has_leader:
                    self._turn.wait()
                    continue
                self._has_leader = True
                try:
                    self._lead()
                finally:
                    self._has_leader = False
                    if self.is_closed:  # closed under us: who closed left the descriptors to the leader
                        self._close_descriptors()
                    self._turn.notify_all()

    def resize(self, workers: int) -> None:
        """Ask the supervisor for another number of workers."""
        with self.lock:
            self.check_usable()
            self.workers_wanted = workers
            self.order(Control.RESIZE, workers)

    def wake(self) -> None:
        """Have all who wait look again whether they need to. The lock is held."""
        if not self.is_closed:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"\0")
            self._turn.notify_all()

    def catch_up(self) -> None:
        """Handle what has arrived, without waiting."""
        if self.is_foreign:  # it would take the owner's messages
            return
        with self._turn:
            if not self._has_leader and not self.is_closed and not self._how_broken:
                self._drain()
                self._turn.notify_all()

    def check_usable(self) -> None:
        """Raise where nothing will ever arrive any more."""
        if self.is_closed:
            raise ClosedError("the loader's pool is closed; make a new Loader (or Pool)")
        self.check_owner()
        if self._how_broken:
            raise SupervisorLostError(
                f"the supervisor process (pid {self._process.pid}) died ({self._how_broken}); its workers ended too. "
                "If the machine ran out of memory, lower memory_limit or the number of workers"
            )

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that started the supervisor: it must not touch pipes and arena."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """Raise in a fork. Before any lock is taken: another thread may have held it when this process was forked."""
        if self.is_foreign:
            raise ForeignProcessError(
                f"this loader belongs to process {self._owner_pid}; in process {os.getpid()}, a fork of it, "
                "make a loader of its own"
            )

    def run_todo(self) -> None:
        """Do what finalizers left; the lock is held, or taken if it is free."""
        if not self.todo or not self.lock.acquire(blocking=False):
            return
        try:
            while self.todo:
                self.todo.popleft()()
        except IndexError:
            pass
        finally:
            self.lock.release()

    def _lead(self) -> None:
        """One turn: wait for news with the lock free, then take them in."""
        self.run_todo()
        timeout_ms = None if self._pidfd is not None else 200
        poll = self._poll
        if self.pipe.has_unsent and not self.pipe.flush():
            poll = select.poll()
            for descriptor in (self._completions, self._socket.fileno(), self._wake_read):
                poll.register(descriptor, select.POLLIN)
            poll.register(self.pipe.fileno(), select.POLLOUT)
            timeout_ms = 200
        self.lock.release()
        try:
            poll.poll(timeout_ms)
        finally:
            self.lock.acquire()
        if not self.is_closed:
            self._drain()

    def _drain(self) -> None:
        """Take in everything that has arrived."""
        is_gone = self._process.poll() is not None if self._pidfd is None else self._is_readable(self._pidfd)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                data = os.read(self._completions, READ_BYTES)
            except BlockingIOError:
                break
            for words in unpack_all(data):
                self._dispatch(words, None)
            if len(data) < READ_BYTES:
                break
        self._drain_socket()
        if self.pipe.has_unsent:
            self.pipe.flush()
        self.run_todo()
        if is_gone and not self.is_closed:
            self._end_group()
            self._process.wait()
            code = self._process.returncode
            self._how_broken = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @staticmethod
    def _is_readable(descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def _drain_socket(self) -> None:
        while (received := receive_notice(self._socket)) is not None:
            words, attachment = received
            if not isinstance(attachment, Lost):
                self._dispatch(words, attachment)
            elif words[0] == Notice.COMPLETION:
                self.order(Control.REDO, words[1], words[6])

    def _dispatch(self, words: Words, attachment: Attachment) -> None:
        kind = words[0]
        if kind == Notice.UNSURE:
            self._drain_socket()  # what was sent was sent before this
        if kind in (Notice.COMPLETION, Notice.UNSURE):
            listener = self.runs.get(words[2])
        elif kind == Notice.RUN_ENDED:
            # This may have overtaken the run's last completions with bytes, which were in the socket before it was in
            # the pipe: without them their slots would never be returned.
            self._drain_socket()
            listener = self.runs.pop(words[1], None)
        elif kind == Notice.SLOT_RETIRED:
            listener = self.slots.pop(words[1], None)
        elif kind == Notice.WORKER_STARTED:
            self.workers[words[1]] = WorkerRecord(words[1], words[2], words[3])
            return
        elif kind == Notice.WORKER_ENDED:
            self.workers.pop(words[1], None)
            self.restarts += words[3]
            return
        else:
            listener = self.listeners.get(words[1])
            if words[1] == 0:
                for every in list(self.listeners.values()):
                    every.on_notice(words, attachment)
                return
        if listener is not None:
            listener.on_notice(words, attachment)

    # ---- ending ----

    def close(self) -> None:
        """End supervisor and workers; wakes all who wait. May be called twice, from any thread, in any finalizer."""
        if self.is_closed or self.is_foreign:
            return
        self.is_closed = True
        _live.discard(self)
        self.pipe.release(pack(Control.CLOSE))
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")
        self._end_process()
        self.pipe.is_dead = True
        if self.lock.acquire(timeout=1.0):
            try:
                self._turn.notify_all()
                if not self._has_leader:
                    self._close_descriptors()
            finally:
                self.lock.release()

    def _end_process(self) -> None:
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._end_group()
            self._process.wait()

    def _end_group(self) -> None:
        """Kill the supervisor's process group; safe while it is not reaped, for until then its number is not reused."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close_descriptors(self) -> None:
        if self.arena.descriptor < 0:
            return
        for descriptor in (self._completions, self._wake_read, self._wake_write, self._pidfd):
            if descriptor is not None:
                os.close(descriptor)
        self._socket.close()
        self.arena.close_descriptor()


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def live_sessions() -> Iterator[Session]:
    """The sessions that are open in this process."""
    return iter(list(_live))


def _close_all() -> None:
    for session in list(_live):
        session.close()


# Before the interpreter is torn down: a tf.data thread that waits in one of our calls would hang the exit for ever.
atexit.register(_close_all)
