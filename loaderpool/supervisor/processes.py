"""The worker processes: started, watched for their end and for being stopped, reaped.

They are forked: a worker inherits what the supervisor has loaded, and drops every descriptor that is not its own. Where
a fork would not be clean (`fork_check`), each is an interpreter of its own (`exec_start`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.watch import HungSample, StackFile
from loaderpool.system import machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport.payload.fork_check import ForkCheck
from loaderpool.transport.payload.loaded import Payloads, plain
from loaderpool.transport.pipes import Outlet
from loaderpool.worker.after_fork import become_worker, serve
from loaderpool.worker.loop import WorkerChannels, WorkerLoop

if TYPE_CHECKING:
    import subprocess


class CleanStart:
    """Starts workers by exec.

    Runs in: the supervisor. Made before any module of the user's is imported, so that these find the same when they are
    imported once more.

    Args:
        start: the supervisor's own settings.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._common = {name: start[name] for name in ("path", "argv", "arena", "arena_bytes")}
        self._common["supervisor_pid"], self._common["node"] = os.getpid(), process.node()
        self._environment = dict(os.environ)
        self._directory: str | None = None
        with contextlib.suppress(FileNotFoundError):  # it was deleted: inherited it can still be
            self._directory = os.getcwd()

    def start(
        self, number: int, cell: int, descriptors: Mapping[str, int], payloads: Payloads
    ) -> subprocess.Popen[bytes]:
        """Start a worker; it will load what it gets tickets for.

        Args:
            number: its number.
            cell: its cell of the board.
            descriptors: its ends, by the names that `main` knows.
            payloads: what it shall load.

        Raises:
            OSError: no memory, no more processes, no descriptors, or no interpreter any more.
        """
        from loaderpool.transport import child_process  # few supervisors ever come here

        files = [[loader, *found] for loader, found in payloads.received.by_loader.items()]
        inherited = [self._common["arena"], *descriptors.values(), *(file for _, *found in files for file in found)]
        settings = {**self._common, **descriptors, "number": number, "cell": cell}
        settings["changes"] = plain(payloads.changes)
        settings["files"] = files
        settings["places"] = [(loader, *place) for loader, place in payloads.places.items()]
        return child_process.start(
            "loaderpool.supervisor.exec_worker",
            settings,
            inherited,
            f"loaderpool-worker-{number}",
            directory=self._directory,
            environment=self._environment,
            is_apart=False,  # it is of the supervisor's group, and ends with it
        )


class ForkedProcess:
    """A forked worker, from its first line to its exit status; methods are named as in `subprocess.Popen`.

    By `os.fork` itself: a library for it costs its import in every supervisor
    (docs/internals/decisions/0018-workers-are-forked-plainly.md).

    Args:
        run: what it does; then it ends, and never returns to what is on the supervisor's stack.

    Raises:
        OSError: no memory, or no more processes.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        machine.flush_standard_streams()  # or both would write what waits in them
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            serve(run)

    def poll(self) -> int | None:
        """Return its exit status, minus the signal's number where one ended it; None: it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Return its exit status once it has ended. Blocks until then."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another caller was told how it ended, or SIGCHLD is ignored
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class _Process(Protocol):
    """What is asked of a process, however it was started: a `subprocess.Popen`, or a fork that answers as one."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...


class WorkerProcess:
    """A worker as the supervisor holds it."""

    def __init__(self, number: int, process: _Process, cell: int, tickets: Outlet, stacks: StackFile) -> None:
        self.number = number
        self.process = process
        self.pid = process.pid
        self.cell = cell
        self.tickets = tickets
        self.pidfd: int | None = None
        self.stacks = stacks
        self.sample = HungSample(self.pid, cell, stacks)
        self.stop: StopWatch | None = None  # while it is stopped (SIGSTOP)
        self.was_stopped = False  # it was ended for it

    @property
    def has_ended(self) -> bool:
        """Whether it is dead, reaped or not."""
        return self.process.poll() is not None


class Processes:
    """All workers of a supervisor.

    Args:
        arena: with their cells and slots.
        poll: is told of each worker's pidfd and of the descriptor that tells of stops.
        completions: write end of the pipe to the trainer, which workers share.
        to_trainer: the socket that they share.
        payloads: what they inherit.
        fork_check: says whether they may be forked.
        clean_start: starts those that may not.
        private: the supervisor's other descriptors, which are none of theirs.
    """

    def __init__(
        self,
        arena: Arena,
        poll: select.poll,
        completions: int,
        to_trainer: socket.socket,
        payloads: Payloads,
        fork_check: ForkCheck,
        clean_start: CleanStart,
        private: list[int],
    ) -> None:
        self._arena, self._poll, self._payloads = arena, poll, payloads
        self._completions, self._socket = completions, to_trainer
        self._fork_check, self._clean_start = fork_check, clean_start
        self.reports, self._reports_write = os.pipe()
        os.set_blocking(self.reports, False)
        self.by_number: dict[int, WorkerProcess] = {}
        self.by_pidfd: dict[int, WorkerProcess] = {}
        self._pid = os.getpid()
        # A stopped child is told of by SIGCHLD only; its handler writes to this pipe, which the poll watches.
        self.signals, signals_write = os.pipe()
        for descriptor in (self.signals, signals_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signals_write, warn_on_full_buffer=False)
        poll.register(self.signals, select.POLLIN)
        poll.register(self.reports, select.POLLIN)
        self._private = [*private, self.reports, self.signals, signals_write, arena.descriptor]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self.by_number.values()))

    def start(self, number: int, cell: int) -> WorkerProcess:
        """Start a worker.

        Raises:
            OSError: no memory, no more processes, or no descriptors.
        """
        with contextlib.ExitStack() as undo:
            read_end, write_end = os.pipe()
            undo.callback(os.close, write_end)
            try:
                os.set_blocking(write_end, False)
                stacks = StackFile()
                undo.callback(stacks.close)
                self._arena.board.clear(cell)
                if self._fork_check.obstacles():
                    process = self._exec(number, cell, read_end, stacks)
                else:
                    process = self._fork(number, cell, read_end, write_end, stacks)
            finally:
                os.close(read_end)
            worker = WorkerProcess(number, process, cell, Outlet(write_end, self._poll), stacks)
            self.by_number[number] = worker
            undo.pop_all()
        try:
            worker.pidfd = machine.open_pidfd(worker.pid)
        except OSError:  # none left: it is looked for, as on machines that have no such thing
            worker.pidfd = None
        if worker.pidfd is not None:
            self.by_pidfd[worker.pidfd] = worker
            self._poll.register(worker.pidfd, select.POLLIN)
        return worker

    @property
    def needs_looks(self) -> bool:
        """Whether there is a worker whose end is found only by a look."""
        return len(self.by_pidfd) < len(self.by_number)

    def bury(self, worker: WorkerProcess) -> None:
        """Reap a worker that has ended, and close what the supervisor held of it but its stacks."""
        del self.by_number[worker.number]
        worker.process.wait()
        if worker.pidfd is not None:
            del self.by_pidfd[worker.pidfd]
            self._poll.unregister(worker.pidfd)
            os.close(worker.pidfd)
        worker.tickets.forget()
        os.close(worker.tickets.descriptor)

    def last_cell(self, worker: WorkerProcess) -> LastCell:
        """Return what a buried worker left on the board, which does not change any more."""
        return LastCell.of(self._arena.board, worker.cell, worker.pid, worker.process.poll() or 0)

    def note_stops(self) -> None:
        """Find out which workers were stopped or go on, after a signal has said that one did."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.signals, 4096)
        for worker in self:
            while True:
                try:
                    found = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                except ChildProcessError:
                    break
                if found is None:
                    break
                worker.stop = StopWatch() if found.si_code == os.CLD_STOPPED else None

    def end_stopped(self) -> None:
        """End those that were stopped for too long (rule 12); their death is told as any other."""
        for worker in self:
            if worker.stop is not None and worker.stop.is_too_long():
                worker.stop, worker.was_stopped = None, True
                kill(worker.pid)

    @property
    def stop_look_ms(self) -> int | None:
        """How soon stopped workers are to be looked at again; None: there are none."""
        return next((worker.stop.look_ms for worker in self if worker.stop is not None), None)

    def end_all(self) -> None:
        """Kill and reap them."""
        for worker in self:
            kill(worker.pid)
        for worker in self:
            worker.process.wait()

    def _fork(self, number: int, cell: int, tickets: int, tickets_write: int, stacks: StackFile) -> _Process:
        return ForkedProcess(functools.partial(self._main, number, cell, tickets, tickets_write, stacks))

    def _exec(self, number: int, cell: int, tickets: int, stacks: StackFile) -> _Process:
        descriptors = {
            "tickets": tickets,
            "reports": self._reports_write,
            "completions": self._completions,
            "socket": self._socket.fileno(),
            "stacks": stacks.descriptor,
        }
        return self._clean_start.start(number, cell, descriptors, self._payloads)

    def _main(self, number: int, cell: int, tickets: int, tickets_write: int, stacks: StackFile) -> None:
        """Runs in: the new worker, a fork."""
        process.become("worker")
        channels = WorkerChannels(tickets, self._reports_write, self._completions, self._socket)
        # Its own pipe's write end, too, or it would never read the end of file that tells of the supervisor's.
        others = [*self._private, tickets_write]
        others += (file for files in self._payloads.received.by_loader.values() for file in files)  # mapped already
        for other in self.by_number.values():
            others += [other.tickets.descriptor, other.stacks.descriptor]
            if other.pidfd is not None:
                others.append(other.pidfd)
        become_worker(self._pid, [tickets], others)
        stacks.arm()
        WorkerLoop(number, cell, self._arena, channels, self._payloads.loaded).run()


def kill(pid: int) -> None:
    """Send SIGKILL, which also ends a stopped process; nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
