"""A pool of workers as the main process has it: a supervisor, and another one when that has died."""

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

from loaderpool.core.channel import Received
from loaderpool.core.child_process import Program, Surroundings, not_begun_error
from loaderpool.core.messages import Ended, NodeIs, Resize, Warn
from loaderpool.core.session import Listener, Session
from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error, foreign_error, warn
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Field
from loaderpool.plan.item_names import item_name
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import InterruptsHeld, checkpoint, note_exit
from loaderpool.system.process import RestartLimit
from loaderpool.transport.payload.modules import ModuleStore
from loaderpool.transport.payload.record import LoaderSettings

# A supervisor begins in a tenth of a second. Shorter: an interpreter that comes over a slow network would be suspected.
_BEGINS_S = 60.0
_WORKERS_END_S = 5.0  # they end in milliseconds; longer for one in an uninterruptible system call

SUPERVISOR = Program("loaderpool.core.supervisor")
live: weakref.WeakSet[WorkerPool] = weakref.WeakSet()  # that are open in this process


def close_all() -> None:
    """Close every pool, for the interpreter ends; in one step that Ctrl-C does not break off."""
    with InterruptsHeld():
        note_exit()
        for pool in list(live):
            pool.close()


# Before the interpreter is torn down: a tf.data thread that waits in one of our calls would hang the exit for ever.
atexit.register(close_all)


class LoaderListener(Listener, Protocol):
    """A version of a loader, which a new supervisor has to load again.

    Attributes:
        settings: What a supervisor reads that does not load the payload.
        was_loaded: A supervisor has loaded it, or an earlier version, once.
    """

    settings: LoaderSettings
    was_loaded: bool

    def load(self, session: Session) -> None:
        """Send it to a supervisor that has just started. Under the lock."""

    def on_load_died(self, how: str) -> None:
        """Fail all runs, because importing its modules ended a supervisor. Under the lock."""

    def on_close(self) -> None:
        """Stop reading its stream: the pool is being closed."""


class NodePlace(NamedTuple):
    """Where a node of a cluster is, as the dispatcher tells it."""

    node: str  # its id, as Ray names it; empty while none is chosen
    address: str
    workers: int  # that the node has; 0 while it starts


class RunningWorker(NamedTuple):
    """A worker that there is."""

    number: int
    pid: int
    cell: int
    place: NodePlace | None = None  # of a node; None: it is a process of this machine


class WorkerPool:
    """A supervisor and its workers.

    Attributes:
        arena: shared memory beside the slots; it outlives supervisors.
        modules: the user's modules as its processes have first imported them.
        places: of nodes, by number.
        has_nodes: its workers are nodes with workers of their own.
        workers_wanted: how many there shall be.
        owner_pid: of the process that has it, and not of its forks.

    Args:
        workers: at least 1.
        restarts: deaths of workers, or of supervisors, that are made good, and within how many seconds; None: any.
        program: is executed in the supervisor's place. It gets its channel, the arena and the slots as descriptors.
            When its channel ends, it must end.
    """

    hands_over_files = True
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
        except OSError as error:  # too many open files, say
            raise PoolBrokenError(f"Could not start the worker pool: {error}") from error
        self.has_nodes = program is not None
        self.places: dict[int, NodePlace] = {}
        # Texts of what came up in other processes, for the user to be warned of in a line of his.
        advice = "" if self.has_nodes else capacity.openmp_advice()
        self.due_warnings: collections.deque[str] = collections.deque([advice] if advice else ())
        self._begins_by_s: float | None = (
            clock.monotonic_s() + _BEGINS_S if self.hands_over_files else None
        )
        self.imports_anew = (
            not self.hands_over_files
        )  # workers are no forks, and import modules themselves
        self.on_idle: Callable[[], None] | None = None
        self.is_closed = False
        self.supervisor_restarts = self.deliveries = 0
        self.loaders: dict[int, LoaderListener] = {}  # by number
        self._numbers = itertools.count(1)
        self._deaths = SupervisorDeaths(restarts)
        self._broken: Callable[[], LoaderpoolError] | None = (
            None  # makes the error that nothing can go on
        )
        self.owner_pid = os.getpid()
        self._around = Surroundings.of_now(self.modules)
        self.lock = threading.RLock()  # held while anything changes
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
        self._resizes = self.arena.board.resizes  # `Resize` messages sent; unread ones are lost now
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
        """Return the workers that there are: the board has them."""
        nowhere = NodePlace("", "", 0) if self.has_nodes else None
        return [
            RunningWorker(*each, self.places.get(each[0], nowhere))
            for each in self.arena.board.workers()
        ]

    def take_number(self) -> int:
        """Return a number that no loader or run of this pool has had."""
        return next(self._numbers)

    def resize(self, workers: int) -> None:
        """Have so many workers from now on."""
        self.check_usable()
        if self._program is SUPERVISOR:  # else nodes tell how many they have
            self.workers_wanted = workers
        board = self.arena.board
        with self.lock:  # or another session would take the place of this one
            # SYNC: stored before the look; pairs with Supervisor._on_main, which counts a message
            # before it reads the size. A message that is on its way brings this size, too: any number
            # of calls beside a supervisor that reads nothing leaves one.
            board.size = 1 + workers
            if board.resizes == self._resizes:
                self._resizes += 1
                self.session.send(Resize(workers))

    def catch_up(self) -> None:
        """Take in what has arrived, without waiting."""
        session = self.session
        if os.getpid() == self.owner_pid and not self.is_closed:
            with InterruptsHeld():
                session.catch_up()
                with (
                    self.lock
                ):  # or another thread might be in the middle of taking in what has arrived
                    is_usable = session.is_usable
                if not is_usable and self._broken is None:
                    self.replace(session)

    def replace(self, lost: Session) -> None:
        """Have another supervisor in the place of one that is lost, unless there is one by now.

        Raises:
            PoolBrokenError: no supervisor could go on.
        """
        with InterruptsHeld(), self.lock:
            if self.is_closed or self.session is not lost:
                return
            self.check_usable()
            how = lost.reap()
            # Until killed workers are gone, or one would write to a cell that another one has.
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
                    f"This process ran out of file descriptors (limit: {soft}), so a batch or error could not be "
                    "received. Create a new loader, and close files, keep fewer batches, or raise the limit (ulimit "
                    "-n)."
                )
                self._broken = functools.partial(PoolBrokenError, text)
                self.check_usable()
            has_exited = lost.exit_code is not None and lost.exit_code >= 0  # and was not killed
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
                if self.is_closed:  # meanwhile, and so is the arena
                    return
                how = f"{how}, and it could not be restarted: {error}"
                self._broken = functools.partial(self._deaths.error, lost.name, how)
                raise self._broken() from error
            lost.lender.keep_only_lent()  # only now: where nothing goes on, runs hand out what they have
            for number, listener in [*lost.listeners.items()]:
                if (
                    number not in self.loaders
                ):  # a run's, or a loader's that was closed: no process looks at it now
                    listener.hear(Received(Ended(number)))
            lost.listeners = {}
            self.session = session
            if self.is_closed:  # meanwhile, and what was closed was the lost one
                session.close()
                return
            for loader in [*self.loaders.values()]:
                loader.load(session)
            self._news.notify_all()

    def _note_death(self, how: str, indices: set[int]) -> None:
        board = self.arena.board
        importing, board.loading = self.loaders.get(board.loading), 0
        if importing is not None and not importing.was_loaded:
            importing.on_load_died(
                how
            )  # the next one would die of that import, too; so it does not count
        else:
            self._deaths.note(indices, self.deliveries)

    def hear(self, message: NodeIs | Warn) -> None:
        """Take in what is said of the pool. The lock is held."""
        if isinstance(message, Warn):
            # Why workers are not forked is said of the first machine on which that is so.
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
        """Done now and then by who waits, without a lock."""
        checkpoint()
        self.say_warnings()
        if self.on_idle is not None and not came:
            self.on_idle()
        if self._begins_by_s is not None:
            self._look_whether_it_began(self._begins_by_s)

    def _look_whether_it_began(self, by_s: float) -> None:
        """Warn if no supervisor has begun for long: an executable that is no Python may run and do anything."""
        if self.arena.board.begun:
            self._begins_by_s = None
        elif clock.monotonic_s() > by_s:
            self._begins_by_s = None
            warn(str(not_begun_error(f"has not begun for {_BEGINS_S:g} s")))

    def say_warnings(self) -> None:
        """Warn in the line of the user's that has led here. Not while a lock is held: it may raise.

        Raises:
            Warning: where a filter makes an error of it.
        """
        while self.due_warnings:
            with contextlib.suppress(IndexError):  # another thread has said it
                warn(self.due_warnings.popleft())

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that has the pool."""
        return os.getpid() != self.owner_pid

    def check_owner(self) -> None:
        """Raise in a fork."""
        if os.getpid() != self.owner_pid:
            raise foreign_error(self.owner_pid)

    def check_usable(self) -> None:
        """Raise if no batch will ever come any more."""
        if self.is_closed:
            raise closed_error()
        self.check_owner()
        if self._broken is not None:
            raise self._broken()

    def close(self) -> None:
        """End supervisor and workers; wakes all who wait. Twice is fine, from any thread, in any finalizer."""
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


# Supervisors in a row that may die before a consumer has taken anything. Smaller: a few kills from outside, while one
# of them starts, end the pool. Larger: the longer a sample that takes its supervisor along is tried.
_WITHOUT_PROGRESS = 8


class SupervisorDeaths:
    """Counts the deaths of a pool's supervisors; the caller holds the pool's lock.

    Args:
        max_restarts: how many are made good, and within how many seconds; None: any number.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._limit, self._max_restarts = RestartLimit(max_restarts), max_restarts
        self._without_progress = 0  # since a consumer took anything
        self._deliveries = 0  # that consumers had taken at the latest one
        self._indices: tuple[int, ...] = ()  # at which the workers were at the latest one

    def note(self, indices: Iterable[int], deliveries: int) -> None:
        """A supervisor died.

        Args:
            indices: source indices of the samples that its workers were at.
            deliveries: how many consumers have taken so far: if more than at the latest death, then whatever ended
                supervisors before, it was not for good.
        """
        self._limit.note(clock.monotonic_ns())
        self._without_progress = self._without_progress + 1 if deliveries == self._deliveries else 1
        self._deliveries = deliveries
        self._indices = tuple(sorted(indices))

    @property
    def are_too_many(self) -> bool:
        """Whether so many supervisors died that another one would likely die, too."""
        is_stuck = self._without_progress > _WITHOUT_PROGRESS
        return self._limit.is_exceeded or (self._max_restarts is not None and is_stuck)

    def error(self, name: str, how: str) -> PoolBrokenError:
        """Return what is raised where the latest one is not replaced."""
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers."
        if self._limit.is_exceeded and self._max_restarts is not None:
            most, seconds = self._max_restarts
            advice = (
                f" Crashes within {seconds:g} s: {self._limit.count}, but restarts=({most}, {seconds:g}) allows {most}."
                f"{advice}"
            )
        if self._without_progress > _WITHOUT_PROGRESS and self._indices:
            at_work = ", ".join(map(item_name, self._indices)).replace(", source index", ",")
            advice = (
                f" It was crash {self._without_progress} in a row without a batch in between. Its workers were at "
                f"{at_work} or shortly after. Check whether your function ends other processes, as os.killpg does."
            )
        return PoolBrokenError(
            f"{name[0].upper()}{name[1:]} crashed ({how}), and its workers ended.{advice}"
        )
