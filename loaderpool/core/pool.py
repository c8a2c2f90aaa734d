"""A pool of workers as the main process has it: a supervisor, and another one when that has died."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from loaderpool.core.channel import Received
from loaderpool.core.child_process import Program, Surroundings
from loaderpool.core.messages import Ended, NodeIs, Resize, Warn
from loaderpool.core.session import Listener, Session
from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error, foreign_error, warn
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Board, Field, Total
from loaderpool.plan.order import item_name
from loaderpool.system import clock, machine
from loaderpool.system.interrupts import InterruptsHeld, LastInterruptsHeld, checkpoint, note_exit
from loaderpool.system.long_work import LongWork
from loaderpool.system.process import RestartLimit, is_library_file, is_trainer

_WORKERS_END_S = 5.0  # they end in milliseconds; longer for one in an uninterruptible system call

SUPERVISOR = Program("loaderpool.core.supervisor")
_library: set[str] = set()  # modules that are known to be none of the user's
live: weakref.WeakSet[WorkerPool] = weakref.WeakSet()  # that are open in this process


def close_all() -> None:
    """Close every pool, for the interpreter ends; in one step that Ctrl-C does not break off."""
    with LastInterruptsHeld():
        note_exit()
        for pool in list(live):
            pool.close()


# Before the interpreter is torn down: a tf.data thread that waits in one of our calls would hang the exit for ever.
atexit.register(close_all)


class Loads(Listener, Protocol):
    """A loader's share of a pool.

    Attributes:
        was_loaded: some supervisor has loaded it.
    """

    was_loaded: bool

    def load(self, session: Session) -> None:
        """Tell this supervisor, which is new, all that it must know. The pool's lock is held."""

    def on_load_died(self, how: str) -> None:
        """A supervisor died while it imported the function: the next one would, too."""

    def on_close(self) -> None:
        """The pool is closed."""


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


class Workers:
    """What is known of a pool's workers: the board has it.

    Args:
        board: where their supervisor writes.
        are_nodes: they are nodes with workers of their own.

    Attributes:
        places: of nodes, by number.
    """

    def __init__(self, board: Board, are_nodes: bool = False) -> None:
        self._board, self._are_nodes = board, are_nodes
        self.places: dict[int, NodePlace] = {}

    def values(self) -> list[RunningWorker]:
        """Return those that there are."""
        nowhere = NodePlace("", "", 0) if self._are_nodes else None
        return [RunningWorker(*each, self.places.get(each[0], nowhere)) for each in self._board.workers()]

    @property
    def restarts(self) -> int:
        """How many died, and were replaced."""
        return 0 if self._are_nodes else self._board.total(Total.LOST)

    @property
    def nodes_lost(self) -> int:
        """How many nodes died, or were given up."""
        return self._board.total(Total.LOST) if self._are_nodes else 0

    @property
    def cells(self) -> range:
        """Cells that workers have had."""
        return range(0 if self._are_nodes else self._board.cells)


class ModuleFiles:
    """Files of the user's modules as they were when a loader was made.

    Which of the modules workers import is not known. A file that keeps its time and size goes unseen.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, int, int] | None] = {}  # by module; None: told of, or cannot be looked at

    def note(self) -> None:
        """Note those that this process has imported and that were not noted before."""
        for name, module in sys.modules.copy().items():  # in one go: threads may import meanwhile
            if name in _library or name in self._files or name == "__main__":
                continue
            try:
                path = vars(module).get("__file__")
            except TypeError:  # something else stands in a module's place
                path = None
            if not isinstance(path, str) or is_library_file(path):
                _library.add(name)
            else:
                self._files[name] = _look_at(path)

    def changed(self) -> str:
        """Return a warning's text that names the files that have changed, each once; empty: there are none."""
        found = []
        for name, file in self._files.items():
            if file is not None and _look_at(file[0]) not in (None, file):
                self._files[name] = None
                found.append(f"  {name} ({file[0]})")
        if not found:
            return ""
        what = "The files of these modules changed after the loader was created. New workers import the new files, and"
        cure = "If your function uses them, create the loader and its pool again to use the new files in all workers."
        return "\n".join([f"{what} older workers keep the old ones:", *found, cure])


def _look_at(path: str) -> tuple[str, int, int] | None:
    """Return the path, when the file was written to, and its bytes; None: in an archive, or deleted."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size


class WorkerPool:
    """A supervisor and its workers.

    Attributes:
        arena: shared memory beside the slots; it outlives supervisors.
        workers: what is known of them.
        workers_wanted: how many there shall be.
        owner_pid: of the process that has it, and not of its forks.

    Args:
        workers: at least 1.
        restarts: deaths of workers, or of supervisors, that are made good, and within how many seconds; None: any.
        program: is executed in the supervisor's place. It gets its channel, the arena and the slots as descriptors.
            When its channel ends, it must end.
    """

    hands_over_files = True

    def __init__(self, workers: int, restarts: tuple[int, float] | None, program: Program | None = None) -> None:
        self.workers_wanted, self._restarts = workers, restarts
        self._program = program or SUPERVISOR
        try:
            self.arena = self._make_arena()
        except OSError as error:  # too many open files, say
            raise PoolBrokenError(f"Could not start the worker pool: {error}") from error
        self.workers = Workers(self.arena.board, program is not None)
        self.modules = ModuleFiles()
        # Texts of what came up in other processes, for the user to be warned of in a line of his.
        self.due_warnings: collections.deque[str] = collections.deque()
        self.imports_anew = not self.hands_over_files  # workers are no forks, and import modules themselves
        self.long_work: LongWork | None = None
        self.on_idle: Callable[[], None] | None = None
        self.is_closed = False
        self.supervisor_restarts = self.deliveries = self._restarts_seen = 0
        self.loaders: dict[int, Loads] = {}  # by number
        self._numbers = itertools.count(1)
        self._deaths = SupervisorDeaths(restarts)
        self._broken: Callable[[], LoaderpoolError] | None = None  # makes the error that nothing can go on
        self.owner_pid = os.getpid()
        self._around = Surroundings.of_now()
        self.lock = threading.RLock()  # held while anything changes
        self._news = threading.Condition(self.lock)
        try:
            self.session = self._start()
        except BaseException:
            self.arena.close_descriptor()
            raise
        live.add(self)

    def _start(self) -> Session:
        workers, is_first = self.workers_wanted, not self.supervisor_restarts
        settings = {"workers": workers, "max_restarts": self._restarts, "is_first": is_first, **self._program.settings}
        session = self._make_session(self._program._replace(settings=settings))
        session.owner, session.listeners = self, {**self.loaders}
        return session

    def _make_arena(self) -> Arena:
        return Arena.create()

    def _make_session(self, program: Program) -> Session:
        return Session(self.arena, self._around, self._news, program)

    def take_number(self) -> int:
        """Return a number that no loader or run of this pool has had."""
        return next(self._numbers)

    def resize(self, workers: int) -> None:
        """Have so many workers from now on."""
        self.check_usable()
        if workers > self.workers_wanted and self.imports_anew:
            self.warn_of_modules()
        if self._program is SUPERVISOR:  # else nodes tell how many they have
            self.workers_wanted = workers
        self.session.send(Resize(workers))

    def catch_up(self) -> None:
        """Take in what has arrived, without waiting."""
        session = self.session
        if os.getpid() == self.owner_pid and not self.is_closed:
            with InterruptsHeld():
                session.catch_up()
                with self.lock:  # or another thread might be in the middle of taking in what has arrived
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
            pids = [worker.pid for worker in self.workers.values() if worker.pid]
            clock.wait_until(lambda: not any(map(machine.start_time, pids)), _WORKERS_END_S)
            indices = {self.arena.board.read(worker.cell, Field.INDEX) - 1 for worker in self.workers.values()}
            self.arena.board.clear_workers()
            self.workers.places.clear()
            if lost.lacks_descriptors:
                soft, _ = machine.descriptor_limits()
                text = (
                    f"This process ran out of file descriptors (limit: {soft}), so a batch or error could not be "
                    "received. Create a new loader, and close files, keep fewer batches, or raise the limit (ulimit "
                    "-n)."
                )
                self._broken = functools.partial(PoolBrokenError, text)
                self.check_usable()
            self._note_death(how, {index for index in indices if index >= 0})
            if self._deaths.are_too_many:
                self._broken = functools.partial(self._deaths.error, lost.name, how)
                self.check_usable()
            self.supervisor_restarts += 1
            self.warn_of_modules()
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
                if number not in self.loaders:  # a run's, or a loader's that was closed: no process looks at it now
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
            importing.on_load_died(how)  # the next one would die of that import, too; so it does not count
        else:
            self._deaths.note(indices, self.deliveries)

    def hear(self, message: NodeIs | Warn) -> None:
        """Take in what is said of the pool. The lock is held."""
        if isinstance(message, Warn):
            # Why workers are not forked is said of the first machine on which that is so.
            if not (message.are_not_forked and self.imports_anew):
                self._note_warning(message.text)
            self.imports_anew |= message.are_not_forked
            return
        places = self.workers.places
        places.pop(message.number, None)
        if message.workers >= 0:
            places[message.number] = NodePlace(message.node, message.address, message.workers)
        self.workers_wanted = sum(place.workers for place in places.values()) or self.workers_wanted

    def turn(self, came: bool) -> None:
        """Done now and then by who waits, without a lock."""
        checkpoint()
        self.say_warnings()
        if (work := self.long_work) is not None:
            work.tell()
        if self.on_idle is not None and not came:
            self.on_idle()

    def tell_of(self, work: LongWork) -> None:
        """Have who waits tell how far this is, unless they tell of something else."""
        if self.long_work is None or self.long_work.is_over:
            self.long_work = work

    def _note_warning(self, text: str) -> None:
        if is_trainer():  # what a node is told of its own workers its dispatcher passes on
            self.due_warnings.append(text)

    def warn_of_modules(self) -> None:
        """Warn of modules that workers which are to come will find changed."""
        if text := self.modules.changed():
            self._note_warning(text)

    def say_warnings(self) -> None:
        """Warn in the line of the user's that has led here. Not while a lock is held: it may raise.

        Raises:
            Warning: where a filter makes an error of it.
        """
        if self.imports_anew and self.workers.restarts != self._restarts_seen:  # they have found modules changed
            self._restarts_seen = self.workers.restarts
            self.warn_of_modules()
        while self.due_warnings:
            with contextlib.suppress(IndexError):  # another thread has said it
                text = self.due_warnings.popleft()
                warn(text)

    def wake(self) -> None:
        """Have all who wait look again whether they need to. The lock is held."""
        self.session.wake()

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
        return self._limit.is_exceeded or (self._max_restarts is not None and self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        return self._without_progress > _WITHOUT_PROGRESS

    def error(self, name: str, how: str) -> PoolBrokenError:
        """Return what is raised where the latest one is not replaced."""
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers."
        if self._limit.is_exceeded and self._max_restarts is not None:
            most, seconds = self._max_restarts
            advice = (
                f" Crashes within {seconds:g} s: {self._limit.count}, but restarts=({most}, {seconds:g}) allows {most}."
                f"{advice}"
            )
        if self._is_stuck and self._indices:
            at_work = ", ".join(map(item_name, self._indices)).replace(", source index", ",")
            advice = (
                f" It was crash {self._without_progress} in a row without a batch in between. Its workers were at "
                f"{at_work} or shortly after. Check whether your function ends other processes, as os.killpg does."
            )
        return PoolBrokenError(f"{name[0].upper()}{name[1:]} crashed ({how}), and its workers ended.{advice}")
