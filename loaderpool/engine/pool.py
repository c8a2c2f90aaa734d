"""A pool of workers: starts the supervisor, and another one after its death.

Runs in: the main process.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from loaderpool.engine.session import Listener, Session
from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error, foreign_error, warn
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Field
from loaderpool.plan.item_names import item_name
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import InterruptsHeld, checkpoint, note_exit
from loaderpool.system.process import RestartLimit
from loaderpool.transport.channel import Received
from loaderpool.transport.child_process import Program, Surroundings, not_begun_error
from loaderpool.transport.messages import Ended, NodeIs, Resize, Warn
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


class NodePlace(NamedTuple):
    """A node of a cluster, as the dispatcher has reported it by `NodeIs`."""

    node: str  # Ray's ID of the node; empty: not chosen yet
    address: str
    workers: int  # number of its workers; 0 while the node starts


class RunningWorker(NamedTuple):
    """A worker or node on the board."""

    number: int
    pid: int
    cell: int  # number of the worker's cell on the board
    place: NodePlace | None = None  # the node; None: the worker is a process of this machine


class WorkerPool:
    """A supervisor and its workers.

    Attributes:
        arena: Shared memory beside the slots. It outlives supervisors.
        modules: The user's modules, in the versions that the pool's processes imported first.
        places: Nodes by number.
        has_nodes: True if the workers are nodes, which have their own workers.
        workers_wanted: Number of workers that there should be.
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
        self.workers_wanted, self._restarts = workers, restarts
        self._program = program or SUPERVISOR
        try:
            with contextlib.ExitStack() as undo:
                self.modules = self._make_modules()
                undo.callback(self.modules.close)
                self.arena = self._make_arena()
                undo.pop_all()
        except OSError as error:  # for example, too many open files
            raise PoolBrokenError(f"Could not start the worker pool: {error}") from error
        self.has_nodes = program is not None
        self.places: dict[int, NodePlace] = {}
        # Warnings from other processes. They are raised in a line of the user's code.
        advice = "" if self.has_nodes else capacity.openmp_advice()
        self.due_warnings: collections.deque[str] = collections.deque([advice] if advice else ())
        self._begins_by_s: float | None = (
            clock.monotonic_s() + _BEGINS_S if self.hands_over_files else None
        )
        # True if workers are not forked, and import modules themselves.
        self.imports_anew = not self.hands_over_files
        self.on_idle: Callable[[], None] | None = None
        self.is_closed = False
        self.supervisor_restarts = self.deliveries = 0
        self.loaders: dict[int, LoaderListener] = {}  # open versions of loaders, by number
        self._numbers = itertools.count(1)
        self._deaths = SupervisorDeaths(restarts)
        # Makes the error of a broken pool; None: the pool is usable.
        self._broken: Callable[[], LoaderpoolError] | None = None
        self.owner_pid = os.getpid()
        self._around = Surroundings.of_now(self.modules)
        self.lock = threading.RLock()  # guards all state of the pool, its sessions and its runs
        self._news = threading.Condition(self.lock)
        try:
            self.session = self._start()
        except BaseException:
            self.arena.close_descriptor()
            self.modules.close()
            raise
        live.add(self)

    def _start(self) -> Session:
        workers, is_first = self.workers_wanted, not self.supervisor_restarts
        # Number of `Resize` messages that were sent. Those that the last supervisor has not read
        # are lost.
        self._resizes = self.arena.board.resizes
        settings = {
            "workers": workers,
            "max_restarts": self._restarts,
            "is_first": is_first,
            **self._program.settings,
        }
        program = self._program._replace(settings=settings)
        session = self._make_session(self.arena, self._around, self._news, program)
        session.owner, session.listeners = self, {**self.loaders}
        return session

    def running(self) -> list[RunningWorker]:
        """Return the workers or nodes that are on the board."""
        nowhere = NodePlace("", "", 0) if self.has_nodes else None
        return [
            RunningWorker(*each, self.places.get(each[0], nowhere))
            for each in self.arena.board.workers()
        ]

    def take_number(self) -> int:
        """Return a new number for a loader or run. The pool never uses it again."""
        return next(self._numbers)

    def resize(self, workers: int) -> None:
        """Set the number of workers. Does not wait until the supervisor has changed it."""
        self.check_usable()
        if self._program is SUPERVISOR:  # otherwise nodes report the numbers of their workers
            self.workers_wanted = workers
        board = self.arena.board
        with self.lock:  # otherwise another session could replace this one meanwhile
            # SYNC: the size is stored before the count is read. Pairs with Supervisor._on_main,
            # which counts a message before it reads the size. So a message that is not read yet
            # covers this size, too, and the channel never holds more than one.
            board.size = 1 + workers
            if board.resizes == self._resizes:
                self._resizes += 1
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
                if not is_usable and self._broken is None:
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
            # Wait until killed workers are gone. Otherwise they could write to the cells of new
            # ones.
            pids = [worker.pid for worker in self.running() if worker.pid]
            clock.wait_until(lambda: not any(map(machine.start_time, pids)), _WORKERS_END_S)
            indices = {
                self.arena.board.read(worker.cell, Field.INDEX) - 1 for worker in self.running()
            }
            self.arena.board.clear_workers()
            self.places.clear()
            if lost.lacks_descriptors:
                soft, _ = machine.descriptor_limits()
                text = (
                    f"This process ran out of file descriptors (limit: {soft}), so a batch or "
                    "error could not be received. Create a new loader, and close files, keep fewer "
                    "batches, or raise the limit (ulimit -n)."
                )
                self._broken = functools.partial(PoolBrokenError, text)
                self.check_usable()
            # exited by itself, not by a signal
            has_exited = lost.exit_code is not None and lost.exit_code >= 0
            if has_exited and not self.arena.board.begun:
                self._broken = functools.partial(not_begun_error, f"ended before it began ({how})")
                self.check_usable()
            self._note_death(how, {index for index in indices if index >= 0})
            if self._deaths.are_too_many:
                self._broken = functools.partial(self._deaths.error, lost.name, how)
                self.check_usable()
            self.supervisor_restarts += 1
            try:
                session = self._start()
            except (LoaderpoolError, OSError, ValueError) as error:
                if self.is_closed:  # another thread has closed the pool, and its arena
                    return
                how = f"{how}, and it could not be restarted: {error}"
                self._broken = functools.partial(self._deaths.error, lost.name, how)
                raise self._broken() from error
            # Not earlier: if the pool is broken, runs still deliver the batches that they have.
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
            self._news.notify_all()

    def _note_death(self, how: str, indices: set[int]) -> None:
        board = self.arena.board
        importing, board.loading = self.loaders.get(board.loading), 0
        if importing is not None and not importing.was_loaded:
            # The import is not repeated, so this death does not count.
            importing.on_load_died(how)
        else:
            self._deaths.note(indices, self.deliveries)

    def hear(self, message: NodeIs | Warn) -> None:
        """Process a message about the pool. Called by the session, with the lock held."""
        if isinstance(message, Warn):
            # The warning that workers are not forked is shown for the first machine only.
            if not (message.are_not_forked and self.imports_anew):
                self.due_warnings.append(message.text)
            self.imports_anew |= message.are_not_forked
            return
        self.places.pop(message.number, None)
        if message.workers >= 0:
            self.places[message.number] = NodePlace(message.node, message.address, message.workers)
        self.workers_wanted = (
            sum(place.workers for place in self.places.values()) or self.workers_wanted
        )

    def turn(self, came: bool) -> None:
        """Do periodic work. Called by waiting threads after each wait, without a lock.

        Args:
            came: True if a message has arrived since the last call.
        """
        checkpoint()
        self.say_warnings()
        if self.on_idle is not None and not came:
            self.on_idle()
        if self._begins_by_s is not None:
            self._look_whether_it_began(self._begins_by_s)

    def _look_whether_it_began(self, by_s: float) -> None:
        """Warn if no supervisor has started in time.

        An executable that is not Python may run without an end.
        """
        if self.arena.board.begun:
            self._begins_by_s = None
        elif clock.monotonic_s() > by_s:
            self._begins_by_s = None
            warn(str(not_begun_error(f"has not begun for {_BEGINS_S:g} s")))

    def say_warnings(self) -> None:
        """Warn in the line of the user's code that led to this call. The caller holds no lock.

        Raises:
            Warning: A warnings filter turns the warning into an error.
        """
        while self.due_warnings:
            with contextlib.suppress(IndexError):  # another thread has taken the text
                warn(self.due_warnings.popleft())

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
        if self._broken is not None:
            raise self._broken()

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
                    self._news.notify_all()
                finally:
                    self.lock.release()


# Supervisors that may die in a row without a delivery to a consumer. Smaller: a few kills from
# outside during a start break the pool. Larger: a sample that kills its supervisor is retried for
# longer.
_WITHOUT_PROGRESS = 8


class SupervisorDeaths:
    """Counts the deaths of a pool's supervisors. The caller holds the pool's lock.

    Args:
        max_restarts: Limit (deaths, seconds): more deaths within these seconds are too many; None:
            no limit.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._limit, self._max_restarts = RestartLimit(max_restarts), max_restarts
        self._without_progress = 0  # deaths since the latest delivery to a consumer
        self._deliveries = 0  # number of deliveries to consumers at the latest death
        # Source indices of the samples in work at the latest death.
        self._indices: tuple[int, ...] = ()

    def note(self, indices: Iterable[int], deliveries: int) -> None:
        """Count the death of a supervisor.

        Args:
            indices: Source indices of the samples that its workers had in work.
            deliveries: Number of deliveries to consumers so far. If it has grown since the latest
                death, the earlier deaths did not stop the training for good.
        """
        self._limit.note(clock.monotonic_ns())
        self._without_progress = self._without_progress + 1 if deliveries == self._deliveries else 1
        self._deliveries = deliveries
        self._indices = tuple(sorted(indices))

    @property
    def are_too_many(self) -> bool:
        """True if so many supervisors have died that the next one would probably die, too."""
        is_stuck = self._without_progress > _WITHOUT_PROGRESS
        return self._limit.is_exceeded or (self._max_restarts is not None and is_stuck)

    def error(self, name: str, how: str) -> PoolBrokenError:
        """Return the error for a supervisor that is not replaced.

        Args:
            name: Name of the supervisor in messages.
            how: Phrase for its end.
        """
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers."
        if self._limit.is_exceeded and self._max_restarts is not None:
            most, seconds = self._max_restarts
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
        return PoolBrokenError(
            f"{name[0].upper()}{name[1:]} crashed ({how}), and its workers ended.{advice}"
        )
