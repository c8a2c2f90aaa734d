"""The trainer's end of the circle: one supervisor process, its pipes, and who reads them.

There is no receiver thread. Whichever consumer has to wait becomes the leader: it polls, drains, hands every message to
whom it concerns and wakes the others; when it has what it wanted it passes the lead on (rule 5,
docs/internals/rules.md).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from loaderpool.errors import LoaderpoolError, PoolBrokenError, closed_error, foreign_error
from loaderpool.memory.board import Field
from loaderpool.memory.recorder import MarkKind
from loaderpool.settings.groups import DEFAULT_RESTARTS
from loaderpool.system import ctrl_c, fault_points, machine
from loaderpool.system.interrupts import InterruptsHeld, checkpoint, note_exit
from loaderpool.trainer.session.launch import SPAWNED, SUPERVISOR, ModuleFiles, Program
from loaderpool.trainer.session.routing import Routing
from loaderpool.trainer.session.running_workers import RunningWorkers
from loaderpool.trainer.session.supervisor_handle import Ready, Starter, SupervisorHandle
from loaderpool.trainer.session.supervisor_process import ProcessStarter, SupervisorDeaths
from loaderpool.trainer.session.warnings import PendingWarnings
from loaderpool.transport.messages import Control, Notice, Words, encode
from loaderpool.transport.pipes import Attachment, Lost, read_attachment

if TYPE_CHECKING:
    from loaderpool.system.long_work import LongWork


class _Session(Protocol):
    def close(self) -> None:
        """End supervisor and workers. May be called twice, from any thread."""


live: weakref.WeakSet[_Session] = weakref.WeakSet()


def live_sessions() -> Iterator[_Session]:
    """Return the sessions that are open in this process."""
    return iter(list(live))


def close_all() -> None:
    """Close every session, for the interpreter ends; in one step that Ctrl-C does not break off."""
    with InterruptsHeld(then="drop"):
        note_exit()
        for session in live_sessions():
            session.close()


# Before the interpreter is torn down: a tf.data thread that waits in one of our calls would hang the exit for ever.
atexit.register(close_all)


# Completions in a row that could not be received before the session ends: they are made again, and a descriptor may
# become free meanwhile.
_LOST_IN_A_ROW = 5

_COMPLETION = int(Notice.COMPLETION)
_ABOUT_WORKERS = frozenset({Notice.WORKER_STARTED, Notice.WORKER_ENDED, Notice.WORKERS_WANTED, Notice.WORKERS_BY_EXEC})
# In the pipe, these may overtake a run's completions with bytes, which were written to the socket before them: without
# those their slots would never be returned.
_MAY_OVERTAKE = frozenset({Notice.UNSURE, Notice.RUN_ENDED})
# These end a loader, or all (0): then the supervisor gives up.
_ENDS = frozenset({Notice.LOAD_FAILED, Notice.LOST, Notice.BROKEN})


def usual_program() -> Program:
    """Return what directs the workers where a pool says nothing else: a process, where it could fork them."""
    return SUPERVISOR if machine.can_fork_workers() else SPAWNED


def make_starter(program: Program, max_restarts: tuple[int, float] | None) -> Starter:
    """Return what starts the supervisors of a session.

    Raises:
        MemoryLimitError: no room for the arena.
        OSError: no descriptors are left.
    """
    if program is not SPAWNED:
        return ProcessStarter(program, max_restarts)
    from loaderpool.trainer.session.supervisor_thread import ThreadStarter  # with multiprocess, which few pools need

    return ThreadStarter(program, max_restarts)


class Session:
    """A running supervisor and everything the trainer shares with it.

    Ownership: `close` ends the supervisor and with it the workers; arrays that are still lent stay valid.

    Args:
        workers: how many workers the supervisor shall have.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.
        program: what is executed in the supervisor's place, and again where that has died; None: the supervisor.

    Raises:
        PoolBrokenError: it could not be started; nothing of it is left.
        MemoryLimitError: no address space for the arena.
    """

    def __init__(
        self, workers: int, max_restarts: tuple[int, float] | None = DEFAULT_RESTARTS, program: Program | None = None
    ) -> None:
        self.workers_wanted, self.hosts = workers, 0
        program = program or usual_program()
        self._is_replaced = program.is_replaced
        with contextlib.ExitStack() as undo:
            try:
                self._starter: Starter = make_starter(program, max_restarts)
                undo.callback(self._starter.close)
                self._supervisor = self._starter.start(workers, first_ticket=1)
            except OSError as error:  # no descriptor is left, say
                raise PoolBrokenError(f"Could not start the worker pool: {error}") from error
            undo.pop_all()
        self.arena, self.hands_over_files = self._starter.arena, self._starter.hands_over_files
        self.pipe = self._starter.connect(self._supervisor, None)
        self.pipe.on_leftover = self._wake_leader
        self._owner_pid = os.getpid()
        self.lock = threading.RLock()
        self._turn = threading.Condition(self.lock)
        self._has_leader = False
        self._followers = 0  # threads that wait for the leader; never fewer than there are
        self._how_broken = ""  # why there is no supervisor any more
        self._lost_in_a_row = 0  # completions that could not be received
        self._has_lost_notice = False  # one that does not come again
        self._gave_up = False  # the supervisor has told why it ends
        self._inbox: collections.deque[Words] = collections.deque()  # read from the pipe, not looked at yet
        self.is_closed = self._has_let_go = False
        self.routing = Routing()
        self.on_idle: Callable[[], None] | None = None
        self.workers = RunningWorkers(self.arena.board)
        self.supervisor_restarts = 0
        self.deliveries = 0  # that consumers have taken
        self._supervisor_deaths = SupervisorDeaths(max_restarts)
        self.warnings = PendingWarnings()
        self.modules = ModuleFiles()
        self.long_work: LongWork | None = None
        self.todo: collections.deque[Callable[[], None]] = collections.deque()  # left by finalizers
        self._numbers = 0
        live.add(self)

    # ---- talking ----

    def take_number(self) -> int:
        """Return a number never used before in this session: for loaders, runs and slots."""
        with self.lock:
            self._numbers += 1
            return self._numbers

    def send(self, kind: Control, *words: int) -> None:
        """Send a control message; earlier ones arrive first. Never blocks."""
        if self.is_foreign:
            return
        with self.lock:
            self.pipe.send(encode(kind, *words))

    def send_files(self, loader: int, descriptors: Sequence[int]) -> None:
        """Hand a loader's data files to the supervisor, before it is told to load it."""
        if descriptors and not self.is_foreign:
            with self.lock:
                self._supervisor.send_files(encode(Control.FILES, loader, len(descriptors)), descriptors)

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready()`, which is asked with the lock held, or until the session is closed or broken.

        Raises:
            ClosedError: the session was closed.
            PoolBrokenError: the supervisor died.
        """
        self.check_owner()
        while not self._wait_once(is_ready):
            checkpoint()  # with the lock free; the handler may return
            self.warnings.say()
            if (work := self.long_work) is not None:
                work.tell()

    def _wait_once(self, is_ready: Callable[[], bool]) -> bool:
        before = ctrl_c.note_signals()
        with InterruptsHeld(self._wake_leader) as held, self.lock:
            while not is_ready():
                work = self.long_work  # may be taken off meanwhile, by any thread
                if held.is_pending or self.warnings.are_due or (work is not None and work.is_due):
                    return False
                ctrl_c.check_patience(before)
                self.check_usable()
                if self._has_leader:
                    self._followers += 1
                    self._turn.wait()
                    self._followers -= 1
                    continue
                self._has_leader = True
                try:
                    self._lead()
                finally:
                    self._has_leader = False
                    if self.is_closed:  # closed under us: who closed left the descriptors to the leader
                        self._close_descriptors()
                    if self._followers:
                        self._turn.notify_all()
            return True

    def resize(self, workers: int) -> None:
        """Ask the supervisor for another number of workers."""
        with self.lock:
            self.check_usable()
            self.workers_wanted = workers
            self.arena.recorder.trainer.mark(MarkKind.WANTED, 0, workers)
            self.send(Control.RESIZE, workers)

    def wake(self) -> None:
        """Have all who wait look again whether they need to. The lock is held."""
        if not self.is_closed:
            self._wake_leader()
            self._turn.notify_all()

    def _wake_leader(self) -> None:
        self._starter.wake()

    def catch_up(self) -> None:
        """Handle what has arrived, without waiting."""
        if self.is_foreign:  # it would take the owner's messages
            return
        with InterruptsHeld(), self.lock:
            if not self._has_leader and not self.is_closed and not self._how_broken:
                self._drain(self._supervisor.wait(None, timeout_ms=0))
                self._turn.notify_all()

    def check_usable(self) -> None:
        """Raise where no message will ever arrive any more."""
        if self.is_closed:
            raise closed_error()
        self.check_owner()
        if self._has_lost_notice:
            soft, _ = machine.descriptor_limits()
            raise PoolBrokenError(
                f"This process ran out of file descriptors (limit: {soft}), so a batch or error could not be received. "
                "Create a new loader, and close files, keep fewer batches, or raise the limit (ulimit -n)."
            )
        if self._how_broken:
            raise self._supervisor_deaths.error(self._supervisor.name, self._how_broken)

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that started the supervisor: it must not touch pipes and arena."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """Raise in a fork. Before any lock is taken: another thread may have held it when this process was forked."""
        if os.getpid() != self._owner_pid:
            raise foreign_error(self._owner_pid)

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
        """Wait for news once, with the lock free, then take them in."""
        if self.todo:
            self.run_todo()
        waits_for_room = self.pipe.has_unsent and not self.pipe.flush()
        self.lock.release()
        try:
            fault_points.reach("trainer.waiting")
            ready = self._supervisor.wait(self.pipe.fileno() if waits_for_room else None)
        finally:
            self.lock.acquire()
        if ready.signal:
            ctrl_c.note_signals()
        if not self.is_closed:
            self._drain(ready)
        if self.on_idle is not None and not (ready.completions or ready.notices or ready.ended):
            self.on_idle()

    def _drain(self, ready: Ready) -> None:
        """Take in everything that has arrived; the end was known before what was written until then is read."""
        supervisor = self._supervisor
        if ready.completions or ready.ended or self._inbox:
            self._read_pipe(supervisor)
        if ready.notices or ready.ended:
            self._drain_socket()
        if self.pipe.has_unsent:
            self.pipe.flush()
        if self.todo:
            self.run_todo()
        if ready.ended and not self.is_closed and not self._how_broken:
            self._replace_supervisor(supervisor)

    def _read_pipe(self, supervisor: SupervisorHandle) -> None:
        """Hand each message to whom it concerns."""
        inbox, has_more = self._inbox, True
        while has_more:
            has_more = supervisor.read(inbox)
            fault_points.reach("trainer.taken_in")
            while inbox:
                words = inbox.popleft()
                # Most are completions, and each call more is one that no cache holds behind a wait.
                (self.routing.tell if words[0] == _COMPLETION else self._dispatch)(words, None)

    def _drain_socket(self) -> None:
        while (received := self._supervisor.receive()) is not None:
            words, attachment = received
            if not isinstance(attachment, Lost):
                self._dispatch(words, attachment)
                self._lost_in_a_row = 0
            elif words[0] == Notice.COMPLETION and self._lost_in_a_row < _LOST_IN_A_ROW:
                self._lost_in_a_row += 1
                self.send(Control.REDO, words[1], words[6])
            elif words[0] not in _ABOUT_WORKERS:
                self._has_lost_notice = True

    # ---- another supervisor (rule 11) ----

    def _replace_supervisor(self, old: SupervisorHandle) -> None:
        """Read the rest of what a dead supervisor and its workers said, then have another one go on."""
        how = old.reap()
        old.end_workers(self.workers.values())
        self._read_pipe(old)
        self._drain_socket()
        indices = self._indices_at_work()
        self.workers.all_ended()
        self._note_death(how, indices)
        if self._gave_up or not self._is_replaced or self._supervisor_deaths.are_too_many:
            self._how_broken = how
            return
        try:
            new = self._starter.start(self.workers_wanted, old.next_tickets)
        except LoaderpoolError as error:
            self._how_broken = f"{how}, and it could not be restarted: {error}"
            return
        self.supervisor_restarts += 1
        self._warn_of_modules()
        self._starter.connect(new, self.pipe)
        self._supervisor = new
        old.close()
        self.routing.by_run.clear()
        for listener in list(self.routing.by_loader.values()):
            listener.on_new_supervisor()

    def _note_death(self, how: str, indices: set[int]) -> None:
        """Note that a supervisor died; `how` says of what, as far as can be told."""
        board = self.arena.board
        importing, board.loading = self.routing.by_loader.get(board.loading), 0
        if importing is not None and not importing.was_loaded:
            importing.on_load_died(how)  # the next one would die of that import, too; so it does not count
        else:
            self._supervisor_deaths.note(indices, self.deliveries)

    def _indices_at_work(self) -> set[int]:
        """Return the source indices of the samples that the workers were at."""
        board = self.arena.board
        found = {board.read(worker.cell, Field.INDEX) for worker in self.workers.values()}
        return {index - 1 for index in found if index}

    def _dispatch(self, words: Words, attachment: Attachment) -> None:
        """Take in what is about the workers, and hand the rest to whom it concerns."""
        kind = words[0]
        if kind in _ABOUT_WORKERS:
            self._note_workers(words, attachment)
            return
        if kind == Notice.WARNING:
            self.warnings.note(read_attachment(attachment))
            return
        if kind in _MAY_OVERTAKE:
            self._drain_socket()
        if kind in _ENDS:
            self._gave_up |= not words[1]
        self.routing.tell(words, attachment)

    def _note_workers(self, words: Words, attachment: Attachment) -> None:
        kind, number = words[:2]
        if kind == Notice.WORKER_STARTED:
            self.workers.started(words, attachment)
            if self.warnings.obstacles or not self.hands_over_files:  # it is no fork, and imports them itself
                self._warn_of_modules()
        elif kind == Notice.WORKER_ENDED:
            self.workers.ended(words)
        elif kind == Notice.WORKERS_WANTED:
            self.workers_wanted, self.hosts = words[1:3]
        else:
            self.warnings.note_obstacles(*read_attachment(attachment))

    def _warn_of_modules(self) -> None:
        if not self.hosts and (text := self.modules.changed()):
            self.warnings.note(text)

    # ---- ending ----

    def close(self) -> None:
        """End supervisor and workers; wakes all who wait. May be called twice, from any thread, in any finalizer."""
        if self.is_closed or self.is_foreign:
            return
        with InterruptsHeld():
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        live.discard(self)
        for listener in list(self.routing.by_loader.values()):
            listener.on_close()
        self.pipe.release(encode(Control.CLOSE))
        self._wake_leader()
        self._supervisor.end()
        self.pipe.is_dead = True
        # These refer to us: what is closed, and its descriptors, shall go without the collector of garbage.
        self.pipe.on_leftover = None
        self.routing.by_run, self.routing.by_slot = {}, {}
        if self.lock.acquire(timeout=1.0):
            try:
                self._turn.notify_all()
                if not self._has_leader:
                    self._close_descriptors()
            finally:
                self.lock.release()

    def _close_descriptors(self) -> None:
        if not self._has_let_go:
            self._has_let_go = True
            self._supervisor.close()
            self._starter.close()
