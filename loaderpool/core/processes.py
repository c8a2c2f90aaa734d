"""The worker processes as the supervisor has them: started, watched for stops, reaped.

They are forked: a worker inherits what the supervisor has loaded, and drops every descriptor that is not its own. Where
a fork would not be clean (`fork_check`), each is an interpreter of its own (`exec_worker`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.core.channel import Channel
from loaderpool.core.watch import Sample, StackFile
from loaderpool.core.worker import Worker
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.memory.board import Field
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.system import fault_points, machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport.payload.loaded import Payloads, plain
from loaderpool.worker.after_fork import become_worker, serve

if TYPE_CHECKING:
    import subprocess


class ForkedProcess:
    """A forked process, from its first line to its exit status.

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

    def kill(self) -> None:
        """End it: it is not reaped yet, so the number is still its own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return its exit status, minus the signal's number where one ended it; None: it runs."""
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """As `poll`, once it has ended. Blocks until then."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another caller was told how it ended, or SIGCHLD is ignored
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class WorkerProcess:
    """A worker: its process, the supervisor's end of its channel, and what its threads were at."""

    def __init__(self, number: int, process: Any, cell: int, channel: Channel, stacks: StackFile) -> None:
        self.number, self.process, self.pid, self.cell = number, process, process.pid, cell
        self.kill: Callable[[], None] = process.kill
        self.channel, self.stacks = channel, stacks
        self.sample = Sample()
        self.stop: StopWatch | None = None  # while it is stopped (SIGSTOP)
        self.was_stopped = False  # it was ended for it
        self.pidfd: int | None = None


class Processes:
    """All workers of a supervisor.

    Made before any module of the user's is imported, so that workers that are executed find what these found.

    Args:
        arena: with the board.
        slots: where workers write.
        payloads: what workers inherit, or load.
        forms: by loader.
        start: the supervisor's own settings.
        private: descriptors of the supervisor that are not the workers'.
    """

    def __init__(
        self,
        arena: Arena,
        slots: SlotFile,
        payloads: Payloads,
        forms: Mapping[int, bytes],
        start: Mapping[str, Any],
        private: Callable[[], list[int]],
    ) -> None:
        self._arena, self._slots, self._payloads, self._forms, self._private = arena, slots, payloads, forms, private
        self._settings, self._environment = start, dict(os.environ)
        self._directory: str | None = None
        with contextlib.suppress(FileNotFoundError):  # it was deleted: inherited it can still be
            self._directory = os.getcwd()
        self.by_number: dict[int, WorkerProcess] = {}
        self.without_pidfd: list[WorkerProcess] = []  # their end is found only by a look
        self.stopped: list[WorkerProcess] = []  # by a signal; they may go on
        self._cells = list(range(MAX_WORKERS - 1, -1, -1))  # that are free
        self._pid = os.getpid()

    def start(self, number: int, is_forked: bool) -> WorkerProcess:
        """Start a worker, by fork or by exec.

        Raises:
            OSError: no memory, no more processes, no descriptors, or no interpreter any more.
        """
        if not self._cells:
            raise OSError(errno.EAGAIN, "too many workers have not ended yet")
        fault_points.reach("supervisor.forking")
        cell, board = self._cells.pop(), self._arena.board
        board.clear(cell)
        try:
            worker = self._launch(number, cell, is_forked)
        except BaseException:
            self._cells.append(cell)
            raise
        board.cells = cell + 1
        board.numbers[board.base(cell) + Field.PID] = worker.pid
        board.numbers[board.base(cell) + Field.NUMBER] = number + 1
        self.by_number[number] = worker
        return worker

    def _launch(self, number: int, cell: int, is_forked: bool) -> WorkerProcess:
        with contextlib.ExitStack() as undo:
            ours, theirs = Channel.pair()
            undo.callback(ours.close)
            with theirs:
                stacks = StackFile()
                undo.callback(stacks.close)
                started: Any
                if is_forked:
                    started = ForkedProcess(lambda: self._become(number, cell, ours.fileno(), theirs.detach(), stacks))
                else:
                    started = self._execute(number, cell, theirs.fileno(), stacks.descriptor)
            undo.pop_all()
        worker = WorkerProcess(number, started, cell, Channel(ours), stacks)
        try:
            worker.pidfd = machine.open_pidfd(worker.pid)
        except OSError:  # none left: its end is found by a look, as on machines that have no such thing
            worker.pidfd = None
        if worker.pidfd is None:
            self.without_pidfd.append(worker)
        return worker

    def bury(self, worker: WorkerProcess) -> int:
        """Reap a worker that has ended, and return its exit code; its cell is the caller's until `free`."""
        del self.by_number[worker.number]
        for some in (self.without_pidfd, self.stopped):
            if worker in some:
                some.remove(worker)
        code = worker.process.wait()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        worker.channel.close()
        return code or 0

    def free(self, worker: WorkerProcess) -> None:
        """Its cell and its stacks are not looked at any more."""
        worker.stacks.close()
        board = self._arena.board
        board.numbers[board.base(worker.cell) + Field.NUMBER] = 0
        self._cells.append(worker.cell)

    def note_stops(self) -> None:
        """Find out which workers were stopped or go on, after a signal has said that one did."""
        for worker in self.by_number.values():
            while True:
                try:
                    found = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                except ChildProcessError:
                    break
                if found is None:
                    break
                worker.stop = StopWatch() if found.si_code == os.CLD_STOPPED else None
        self.stopped = [worker for worker in self.by_number.values() if worker.stop is not None]

    def end_stopped(self) -> None:
        """End those that were stopped for too long; their death is told as any other."""
        for worker in self.stopped:
            if worker.stop is not None and worker.stop.is_too_long():
                worker.stop, worker.was_stopped = None, True
                worker.kill()

    def end_all(self) -> None:
        """Kill and reap them."""
        workers = [*self.by_number.values()]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.process.wait()
            worker.channel.close()

    def _execute(self, number: int, cell: int, channel: int, stacks: int) -> subprocess.Popen[bytes]:
        """Start a worker that is no fork, and loads what it gets tickets for."""
        from loaderpool.core import child_process  # few supervisors ever come here

        start = self._settings
        settings = {name: start[name] for name in ("arena", "arena_bytes", "slots")}
        settings |= {"supervisor_pid": self._pid, "node": process.node(), "channel": channel, "stacks": stacks}
        settings |= self._told(number, cell)
        files = [file for of_loader in self._payloads.files.values() for file in of_loader]
        return child_process.start(
            child_process.Program("loaderpool.core.exec_worker", f"loaderpool-worker-{number}"),
            child_process.Surroundings(self._directory, self._environment, start["path"], start["argv"]),
            settings,
            [settings["arena"], settings["slots"], channel, stacks, *files],
            is_apart=False,  # it is of the supervisor's group, and ends with it
        )

    def _told(self, number: int, cell: int) -> dict[str, Any]:
        """Return what a worker that is no fork is told of itself and of loaders."""
        payloads, forms = self._payloads, dict(self._forms)
        loaders = {"files": payloads.files, "places": dict(payloads.places), "changes": plain(payloads.changes)}
        return {"number": number, "cell": cell, "forms": forms, **loaders}

    def _become(self, number: int, cell: int, ours: int, theirs: int, stacks: StackFile) -> None:
        """Runs in: the new worker, a fork, which keeps nothing of the supervisor's."""
        process.become("worker")
        others = [ours, *self._private()]
        for other in self.by_number.values():
            others += [other.channel.fileno(), other.stacks.descriptor]
            if other.pidfd is not None:
                others.append(other.pidfd)
        become_worker(self._pid, others)
        stacks.arm()
        channel = Channel(socket.socket(fileno=theirs))
        Worker(number, cell, channel, self._arena, self._slots, self._payloads.loaded, self._forms).run()


def pipe_of_stops() -> tuple[int, int]:
    """Return both ends of a pipe that tells of SIGCHLD, by which alone a stopped child is told of."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    return ends


READABLE = select.EPOLLIN if hasattr(select, "EPOLLIN") else 1
