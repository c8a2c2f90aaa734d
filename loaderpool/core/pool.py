"""A pool of workers as the main process has it: a supervisor, and another one when that has died."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Protocol

from loaderpool.core.messages import Resize, WorkerChanged
from loaderpool.core.session import Session, SupervisorLost
from loaderpool.errors import closed_error, foreign_error
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Field
from loaderpool.memory.recorder import MarkKind

from loaderpool.system.interrupts import InterruptsHeld, checkpoint
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.session import session as old_session
from loaderpool.trainer.session.launch import ModuleFiles, Program, Surroundings
from loaderpool.trainer.session.running_workers import RunningWorkers
from loaderpool.trainer.session.supervisor_process import SupervisorDeaths
from loaderpool.trainer.session.warnings import PendingWarnings
from loaderpool.transport.messages import Notice


class Loads(Protocol):
    """A loader's share of a pool."""

    def load(self, session: Session) -> None:
        """Tell this supervisor, which is new, all that it must know. The pool's lock is held."""

    def on_load_died(self, how: str) -> None:
        """A supervisor died while it imported the function: the next one would, too."""

    def on_close(self) -> None:
        """The pool is closed."""


class Pool:
    """A supervisor and its workers.

    Attributes:
        arena: shared memory beside the slots; it outlives supervisors.
        workers: what is known of them.
        workers_wanted: how many there shall be.

    Args:
        workers: at least 1.
        restarts: deaths of workers, or of supervisors, that are made good, and within how many seconds; None: any.
        program: what is executed in the supervisor's place; None: the supervisor.
    """

    hosts = 0
    hands_over_files = True

    def __init__(self, workers: int, restarts: tuple[int, float] | None, program: Program | None = None) -> None:
        self.workers_wanted, self._restarts = workers, restarts
        self.arena = Arena.create()
        self.workers = RunningWorkers(self.arena.board)
        self.warnings, self.modules = PendingWarnings(), ModuleFiles()
        self.long_work: LongWork | None = None
        self.on_idle: Callable[[], None] | None = None
        self.is_closed = False
        self.supervisor_restarts = self.deliveries = 0
        self.loaders: dict[int, Loads] = {}
        self._numbers = itertools.count(1)
        self._deaths = SupervisorDeaths(restarts)
        self._how_broken = ""
        self._owner_pid = os.getpid()
        self._around = Surroundings.of_now()
        self.lock = threading.RLock()  # held while anything changes
        self._news = threading.Condition(self.lock)
        self.session = self._start()
        old_session.live.add(self)

    def _start(self) -> Session:
        session = Session(self.arena, self.workers_wanted, self._restarts, self._around, self._news)
        session.on_worker = self._on_worker
        return session

    def take_number(self) -> int:
        """Return a number that no loader or run of this pool has had."""
        return next(self._numbers)

    def resize(self, workers: int) -> None:
        """Have so many workers from now on."""
        self.check_usable()
        self.workers_wanted = workers
        self.arena.recorder.trainer.mark(MarkKind.WANTED, 0, workers)
        self.session.send(Resize(workers))

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Return when `is_ready()`; another supervisor goes on when one has died.

        Raises:
            ClosedError: the pool was closed.
            PoolBrokenError: no supervisor could go on.
        """
        self.check_owner()
        while True:
            session = self.session
            try:
                session.wait(lambda: self.is_closed or is_ready(), self._turn)
                return
            except SupervisorLost:
                with InterruptsHeld():
                    self.replace(session)

    def catch_up(self) -> None:
        """Take in what has arrived, without waiting."""
        if os.getpid() == self._owner_pid and not self.is_closed:
            self.session.catch_up()

    def replace(self, lost: Session) -> None:
        """Have another supervisor in the place of one that is lost, unless there is one by now."""
        with self.lock:
            if self.is_closed or self.session is not lost:
                return
            if self._how_broken:
                raise self._deaths.error(f"the supervisor process (pid {lost.pid})", self._how_broken)
            how = lost.reap()
            self.arena.board.abandon(0)
            indices = {self.arena.board.read(worker.cell, Field.INDEX) - 1 for worker in self.workers.values()}
            self.workers.all_ended()
            self._note_death(how, {index for index in indices if index >= 0})
            if self._deaths.are_too_many:
                self._how_broken = how
                raise self._deaths.error(f"the supervisor process (pid {lost.pid})", how)
            self.supervisor_restarts += 1
            self._warn_of_modules()
            session = self._start()
            session.loaders, session.runs = lost.loaders, {}
            self.session = session
            for loader in [*self.loaders.values()]:
                loader.load(session)
            self._news.notify_all()

    def _note_death(self, how: str, indices: set[int]) -> None:
        board = self.arena.board
        importing, board.loading = self.loaders.get(board.loading), 0
        if importing is not None:
            importing.on_load_died(how)  # the next one would die of that import, too; so it does not count
        else:
            self._deaths.note(indices, self.deliveries)

    def _on_worker(self, message: WorkerChanged) -> None:
        if message.cell >= 0:
            words = (Notice.WORKER_STARTED, message.worker, message.pid, message.cell, 0, 0, 0, 0)
            self.workers.started(words, None)
        else:
            self.workers.ended((Notice.WORKER_ENDED, message.worker, message.pid, int(message.was_lost), 0, 0, 0, 0))

    def _turn(self) -> None:
        """Done now and then by who waits, without a lock."""
        checkpoint()
        self.warnings.say()
        if (work := self.long_work) is not None:
            work.tell()
        if self.on_idle is not None:
            self.on_idle()

    def _warn_of_modules(self) -> None:
        if text := self.modules.changed():
            self.warnings.note(text)

    def wake(self) -> None:
        """Have all who wait look again whether they need to. The lock is held."""
        self.session.wake()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that has the pool."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """Raise in a fork."""
        if self.is_foreign:
            raise foreign_error(self._owner_pid)

    def check_usable(self) -> None:
        """Raise if no batch will ever come any more."""
        if self.is_closed:
            raise closed_error()
        self.check_owner()
        if self._how_broken:
            raise self._deaths.error("the supervisor process", self._how_broken)

    def close(self) -> None:
        """End supervisor and workers; wakes all who wait. Twice is fine, from any thread, in any finalizer."""
        if self.is_closed or self.is_foreign:
            return
        with InterruptsHeld():
            self.is_closed = True
            old_session.live.discard(self)
            for loader in [*self.loaders.values()]:
                loader.on_close()
            self.session.close()
            self.arena.close_descriptor()
            if self.lock.acquire(timeout=1.0):
                try:
                    self._news.notify_all()
                finally:
                    self.lock.release()


