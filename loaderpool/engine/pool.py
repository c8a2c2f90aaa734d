"""A pool of workers: starts the supervisor, and another one after its death.

Runs in: the main process.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from loaderpool.engine.session import Listener, Session
from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error, foreign_error, warn
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Board, Field, NodePlace
from loaderpool.plan.item_names import item_name
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import InterruptsHeld, checkpoint, note_exit
from loaderpool.system.process import RestartLimit
from loaderpool.transport.channel import Received
from loaderpool.transport.child_process import Program, Surroundings, not_begun_error
from loaderpool.transport.messages import Ended, Resize, Warn
from loaderpool.transport.modules import ModuleStore
from loaderpool.transport.payload.record import LoaderSettings

# Time until a warning that the first supervisor has not started. Its start takes 0.1 s. Smaller:
# false warnings if the interpreter is on a slow network. Larger: the warning comes later.
_BEGINS_S = 60.0
# Time for killed workers to end. They take milliseconds, or longer in an uninterruptible system
# call.
_WORKERS_END_S = 5.0

SUPERVISOR = Program("loaderpool.supervisor.supervisor")
live: weakref.WeakSet[WorkerPool] = weakref.WeakSet()  # open pools of this process


def close_all() -> None:
    """Close every pool, in one step that Ctrl-C does not interrupt. Called at interpreter exit."""
    with InterruptsHeld():
        note_exit()
        for pool in list(live):
            pool.close()


# A tf.data thread may be waiting in a call of this package. If the pool were not closed before the
# interpreter shuts down, that thread would block the exit forever.
atexit.register(close_all)


class LoaderListener(Listener, Protocol):
    """A version of a loader, as its pool uses it. A new supervisor has to load it again.

    Attributes:
        settings: Settings for a supervisor that does not load the payload.
        was_loaded: True if a supervisor has loaded this version or an earlier one before.
    """

    settings: LoaderSettings
    was_loaded: bool

    def load(self, session: Session) -> None:
        """Send the version to a supervisor that has just started. Called under the lock."""

    def on_load_died(self, how: str) -> None:
        """Fail all runs: the import of its modules crashed a supervisor. Called under the lock."""

    def on_close(self) -> None:
        """Stop reading the stream, because the pool is being closed. Called without the lock."""


class RunningWorker(NamedTuple):
    """A worker or node on the board."""

    number: int
    pid: int
    cell: int  # number of the worker's cell on the board
    place: NodePlace | None = None  # the node; None: the worker is a process of this machine


class PoolWorkers:
    """Workers of a pool, or its nodes: those on the board, and the number that there should be.

    Called under the pool's lock, except `running`.

    Attributes:
        are_nodes: True if these are nodes, which have their own workers.

    Args:
        board: Board of the pool. The present supervisor writes the workers to it.
        wanted: Number of workers that there should be.
    """

    def __init__(self, board: Board, wanted: int, are_nodes: bool) -> None:
        self._board, self._wanted, self.are_nodes = board, wanted, are_nodes
        # Number of `Resize` messages that were sent. Those that the last supervisor has not read
        # are lost.
        self._resizes = 0

    def begin(self) -> None:
        """Prepare for a new supervisor."""
        self._resizes = self._board.resizes

    @property
    def wanted(self) -> int:
        """Requested number of workers. With nodes, the latest number of their workers."""
        return self._board.node_workers or self._wanted

    def running(self) -> list[RunningWorker]:
        """Return the workers or nodes that are on the board."""
        board = self._board
        return [
            RunningWorker(*each, board.place(each[2]) if self.are_nodes else None)
            for each in board.workers()
        ]

    def resize(self, workers: int) -> bool:
        """Write the number to the board; return True if the supervisor needs a `Resize` message."""
        if not self.are_nodes:  # with nodes, `workers` is the number of nodes
            self._wanted = workers
        # SYNC: the size is stored before the count is read. Pairs with Supervisor._on_main,
        # which counts a message before it reads the size. So a message that is not read yet
        # covers this size, too, and the channel never holds more than one.
        self._board.size = 1 + workers
        if self._board.resizes != self._resizes:
            return False
        self._resizes += 1
        return True

    def bury(self) -> set[int]:
        """Remove the workers of a lost supervisor; return the source indices they had in work."""
        # Wait until killed workers are gone. Otherwise they could write to the cells of new ones.
        pids = [worker.pid for worker in self.running() if worker.pid]
        clock.wait_until(lambda: not any(map(machine.start_time, pids)), _WORKERS_END_S)
        indices = {self._board.read(worker.cell, Field.INDEX) - 1 for worker in self.running()}
        self._board.clear_workers()
        return {index for index in indices if index >= 0}


class PoolWarnings:
    """Warnings of a pool that are due. Each is raised once, in a line of the user's code.

    Attributes:
        due: Texts of warnings from other processes. Any thread may take one.
        imports_anew: True if workers are not forked, and import modules themselves. The warning of
            that is then no longer due.

    Args:
        board: Board of the pool. It shows whether a supervisor has started.
        is_forked: True if the pool has a supervisor process, which forks the workers.
    """

    def __init__(self, board: Board, is_forked: bool) -> None:
        self._board = board
        self.due: collections.deque[str] = collections.deque()
        self.imports_anew = not is_forked
        # time of the warning that no supervisor has started; None: that is no longer due
        self._begins_by_s: float | None = clock.monotonic_s() + _BEGINS_S if is_forked else None

    def hear(self, message: Warn) -> None:
        """Note a warning from another process. Called under the pool's lock."""
        # The warning that workers are not forked is shown for the first machine only.
        if not (message.are_not_forked and self.imports_anew):
            self.due.append(message.text)
        self.imports_anew |= message.are_not_forked

    def say(self) -> None:
        """Warn in the line of the user's code that led to this call. The caller holds no lock.

        Raises:
            Warning: A warnings filter turns the warning into an error.
        """
        while self.due:
            with contextlib.suppress(IndexError):  # another thread has taken the text
                warn(self.due.popleft())

    def check_start(self) -> None:
        """Warn if no supervisor has started in time. The caller holds no lock.

        An executable that is not Python may run without an end.
        """
        by_s = self._begins_by_s  # read once, because another thread may set it to None
        if by_s is None:
            return
        if self._board.begun:
            self._begins_by_s = None
        elif clock.monotonic_s() > by_s:
            self._begins_by_s = None
            warn(str(not_begun_error(f"has not begun for {_BEGINS_S:g} s")))


class Launcher(NamedTuple):
    """Starts the supervisors of a pool, all with the same program, environment and memory."""

    make_session: type[Session]
    arena: Arena
    around: Surroundings
    news: threading.Condition  # on the pool's lock
    program: Program

    def launch(
        self, workers: int, max_restarts: tuple[int, float] | None, is_first: bool
    ) -> Session:
        """Start a supervisor. Called under the pool's lock, except for the first one.

        Raises:
            PoolBrokenError: No process could be started.
        """
        settings = {
            "workers": workers,
            "max_restarts": max_restarts,
            "is_first": is_first,
            **self.program.settings,
        }
        program = self.program._replace(settings=settings)
        return self.make_session(self.arena, self.around, self.news, program)


class WorkerPool:
    """A supervisor and its workers.

    Attributes:
        arena: Shared memory beside the slots. It outlives supervisors.
        modules: The user's modules, in the versions that the pool's processes imported first.
        workers: The workers, or nodes.
        warnings: Warnings that are due.
        deaths: Deaths of supervisors, and the error if the last one is not replaced.
        owner_pid: Pid of the process that made the pool. It differs in forks of that process.

    Args:
        workers: Number of workers, at least 1.
        restarts: Limit (deaths, seconds) for workers, and for supervisors: more deaths within these
            seconds break the pool; None: no limit.
        program: Program that is executed in the supervisor's place; None: the supervisor. It gets
            its channel, the arena and the slots as descriptors, and must exit when its channel
            ends.

    Raises:
        PoolBrokenError: The pool cannot be started.
    """

    hands_over_files = True  # False: the processes do not pass descriptors to one another
    _make_arena: Callable[[], Arena] = staticmethod(Arena.create)
    _make_modules: Callable[[], ModuleStore] = staticmethod(ModuleStore.create)
    _make_session: type[Session] = Session

    def __init__(
        self, workers: int, restarts: tuple[int, float] | None, program: Program | None = None
    ) -> None:
        try:
            with contextlib.ExitStack() as undo:
                self.modules = self._make_modules()
                undo.callback(self.modules.close)
                self.arena = self._make_arena()
                undo.pop_all()
        except OSError as error:  # for example, too many open files
            raise PoolBrokenError(f"Could not start the worker pool: {error}") from error
        self.workers = PoolWorkers(self.arena.board, workers, program is not None)
        self.warnings = PoolWarnings(self.arena.board, self.hands_over_files)
        if program is None and (advice := capacity.openmp_advice()):
            self.warnings.due.append(advice)
        self.on_idle: Callable[[], None] | None = None
        self.is_closed = False
        self.loaders: dict[int, LoaderListener] = {}  # open versions of loaders, by number
        self._numbers = itertools.count(1)
        self.deaths = SupervisorDeaths(restarts)
        self.owner_pid = os.getpid()
        self.lock = threading.RLock()  # guards all state of the pool, its sessions and its runs
        self._launcher = Launcher(
            self._make_session,
            self.arena,
            Surroundings.of_now(self.modules),
            threading.Condition(self.lock),
            program or SUPERVISOR,
        )
        try:
            self.session = self._start()
        except BaseException:
            self.arena.close_descriptor()
            self.modules.close()
            raise
        live.add(self)

    def _start(self) -> Session:
        self.workers.begin()
        deaths = self.deaths
        session = self._launcher.launch(
            self.workers.wanted, deaths.max_restarts, is_first=not deaths.replaced
        )
        session.owner, session.listeners = self, {**self.loaders}
        return session

    def take_number(self) -> int:
        """Return a new number for a loader or run. The pool never uses it again."""
        return next(self._numbers)

    def resize(self, workers: int) -> None:
        """Set the number of workers. Does not wait until the supervisor has changed it."""
        self.check_usable()
        with self.lock:  # otherwise another session could replace this one meanwhile
            if self.workers.resize(workers):
                self.session.send(Resize(workers))

    def catch_up(self) -> None:
        """Process the messages that have arrived, without waiting. Replace a lost supervisor.

        Does nothing in a fork, or after `close`.
        """
        session = self.session
        if os.getpid() == self.owner_pid and not self.is_closed:
            with InterruptsHeld():
                session.catch_up()
                # Under the lock, because another thread may be processing messages.
                with self.lock:
                    is_usable = session.is_usable
                if not is_usable and not self.deaths.why_broken:
                    self.replace(session)

    def replace(self, lost: Session) -> None:
        """Start another supervisor in place of a lost one, unless another thread has done so.

        Args:
            lost: Session of the lost supervisor.

        Raises:
            PoolBrokenError: The pool is broken: another supervisor would fail, too.
        """
        with InterruptsHeld(), self.lock:
            if self.is_closed or self.session is not lost:
                return
            self.check_usable()
            how = lost.reap()
            indices = self.workers.bury()
            if lost.lacks_descriptors:
                soft, _ = machine.descriptor_limits()
                self.deaths.why_broken = (
                    f"This process ran out of file descriptors (limit: {soft}), so a batch or "
                    "error could not be received. Create a new loader, and close files, keep fewer "
                    "batches, or raise the limit (ulimit -n)."
                )
                self.check_usable()
            # exited by itself, not by a signal
            has_exited = lost.exit_code is not None and lost.exit_code >= 0
            if has_exited and not self.arena.board.begun:
                self.deaths.why_broken = str(not_begun_error(f"ended before it began ({how})"))
                self.check_usable()
            self._note_death(how, indices)
            if self.deaths.are_too_many:
                self.deaths.why_broken = self.deaths.text(lost.name, how)
                self.check_usable()
            self.deaths.replaced += 1
            try:
                session = self._start()
            except (LoaderpoolError, OSError, ValueError) as error:
                if self.is_closed:  # another thread has closed the pool, and its arena
                    return
                how = f"{how}, and it could not be restarted: {error}"
                text = self.deaths.text(lost.name, how)
                self.deaths.why_broken = text
                raise PoolBrokenError(text) from error
            # Only after a successful start: if the pool is broken, runs still deliver the batches
            # that they have.
            lost.lender.keep_only_lent()
            for number, listener in [*lost.listeners.items()]:
                # No process uses this run or closed loader any more.
                if number not in self.loaders:
                    listener.hear(Received(Ended(number)))
            lost.listeners = {}
            self.session = session
            if self.is_closed:  # another thread has closed the pool, with the lost session
                session.close()
                return
            for loader in [*self.loaders.values()]:
                loader.load(session)
            self._launcher.news.notify_all()

    def _note_death(self, how: str, indices: set[int]) -> None:
        board = self.arena.board
        importing, board.loading = self.loaders.get(board.loading), 0
        if importing is not None and not importing.was_loaded:
            # The import is not repeated, so this death does not count.
            importing.on_load_died(how)
        else:
            self.deaths.note(indices)

    def hear(self, message: Warn) -> None:
        """Process a message about the pool. Called by the session, with the lock held."""
        self.warnings.hear(message)

    def turn(self, came: bool) -> None:
        """Do periodic work. Called by waiting threads after each wait, without a lock.

        Args:
            came: True if a message has arrived since the last call.
        """
        checkpoint()
        self.warnings.say()
        if self.on_idle is not None and not came:
            self.on_idle()
        self.warnings.check_start()

    @property
    def is_foreign(self) -> bool:
        """True if this process is a fork of the one that made the pool."""
        return os.getpid() != self.owner_pid

    def check_owner(self) -> None:
        """Raise an error if this process is a fork of the one that made the pool."""
        if os.getpid() != self.owner_pid:
            raise foreign_error(self.owner_pid)

    def check_usable(self) -> None:
        """Raise an error if the pool is closed or broken, or belongs to another process."""
        if self.is_closed:
            raise closed_error()
        self.check_owner()
        if self.deaths.why_broken:
            raise PoolBrokenError(self.deaths.why_broken)

    def close(self) -> None:
        """Stop the supervisor and the workers, and wake all waiting threads. Idempotent.

        Called from any thread, and from finalizers.
        """
        if self.is_closed or self.is_foreign:
            return
        with InterruptsHeld():
            self.is_closed = True
            live.discard(self)
            for loader in [*self.loaders.values()]:
                loader.on_close()
            self.session.close()
            self.arena.close_descriptor()
            self.modules.close()
            if self.lock.acquire(timeout=1.0):
                try:
                    self._launcher.news.notify_all()
                finally:
                    self.lock.release()


# Supervisors that may die in a row without a delivery to a consumer. Smaller: a few kills from
# outside during a start break the pool. Larger: a sample that kills its supervisor is retried for
# longer.
_WITHOUT_PROGRESS = 8


class SupervisorDeaths:
    """Deaths of a pool's supervisors. Each is replaced, unless the pool is closed, or broken by it.

    Called under the pool's lock.

    Attributes:
        max_restarts: The limit.
        replaced: Number of supervisors that were started in place of a lost one.
        deliveries: Number of deliveries to consumers so far.
        why_broken: Text of the error of a broken pool; empty: the pool is usable.

    Args:
        max_restarts: Limit (deaths, seconds): more deaths within these seconds are too many; None:
            no limit.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._limit, self.max_restarts = RestartLimit(max_restarts), max_restarts
        self.replaced = self.deliveries = 0
        self.why_broken = ""
        self._without_progress = 0  # deaths since the latest delivery to a consumer
        self._deliveries_before = 0  # number of deliveries at the latest death
        # Source indices of the samples in work at the latest death.
        self._indices: tuple[int, ...] = ()

    def note(self, indices: Iterable[int]) -> None:
        """Count the death of a supervisor.

        If there were deliveries since the latest death, the earlier deaths did not stop the
        training for good.

        Args:
            indices: Source indices of the samples that its workers had in work.
        """
        self._limit.note(clock.monotonic_ns())
        has_progress = self.deliveries != self._deliveries_before
        self._without_progress = 1 if has_progress else self._without_progress + 1
        self._deliveries_before = self.deliveries
        self._indices = tuple(sorted(indices))

    @property
    def are_too_many(self) -> bool:
        """True if so many supervisors have died that the next one would probably die, too."""
        is_stuck = self._without_progress > _WITHOUT_PROGRESS
        return self._limit.is_exceeded or (self.max_restarts is not None and is_stuck)

    def text(self, name: str, how: str) -> str:
        """Return the text of the error for a supervisor that is not replaced.

        Args:
            name: Name of the supervisor in messages.
            how: Phrase for its end.
        """
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers."
        if self._limit.is_exceeded and self.max_restarts is not None:
            most, seconds = self.max_restarts
            advice = (
                f" Crashes within {seconds:g} s: {self._limit.count}, but "
                f"restarts=({most}, {seconds:g}) allows {most}.{advice}"
            )
        if self._without_progress > _WITHOUT_PROGRESS and self._indices:
            at_work = ", ".join(map(item_name, self._indices)).replace(", source index", ",")
            advice = (
                f" It was crash {self._without_progress} in a row without a batch in between. Its "
                f"workers were at {at_work} or shortly after. Check whether your function ends "
                "other processes, as os.killpg does."
            )
        return f"{name[0].upper()}{name[1:]} crashed ({how}), and its workers ended.{advice}"
