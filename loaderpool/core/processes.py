"""The worker processes as the supervisor has them: started, watched for stops and for slow samples, reaped.

They are forked: a worker inherits what the supervisor has loaded, drops every descriptor that is not its own, and opens
the user's files again, so that it has a position of its own in each. Where a fork would not be clean
(`loaded.ForkCheck`), each is an interpreter of its own, which loads payloads itself.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.config import MAX_WORKERS
from loaderpool.core.channel import GRACE_S, Channel
from loaderpool.core.worker import Worker
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.memory.board import Field
from loaderpool.system import clock, fault_points, machine, open_files, process
from loaderpool.system.machine import StopWatch
from loaderpool.system.open_files import OpenFile
from loaderpool.transport.payload.handles import forget_connections
from loaderpool.transport.payload.loaded import Payloads, describe_load_error
from loaderpool.transport.payload.modules import ModuleStore, keep
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.own_process import become_worker, serve, settle_libraries
from loaderpool.worker.tickets import WorkFailed

if TYPE_CHECKING:
    import subprocess


_LOOKS_PER_TIMEOUT = 8
_SHORTEST_LOOK_NS, _LONGEST_LOOK_NS = 10_000_000, 1_000_000_000
# From the request for the stacks to the kill: faulthandler writes them in well under a millisecond.
_STACKS_NS = 100_000_000
_FIELDS = Field.TICKET, Field.INDEX, Field.STARTED_NS


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
        """End it, unless it is reaped: the number may be another one's by now."""
        if self.poll() is None:
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


class StackFile:
    """A memory file into which a worker's faulthandler writes when it is asked; made before the fork.

    Args:
        descriptor: of one that another process has made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = machine.create_memory_file("stacks") if descriptor is None else descriptor
        self._begins = 0

    def arm(self) -> None:
        """Runs in: the worker. Faults of C code (SIGSEGV, SIGABRT, ...) write the stack there, too."""
        faulthandler.enable(self.descriptor, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=self.descriptor, all_threads=True, chain=False)

    def ask(self, pid: int) -> None:
        """Ask the worker for the stacks of its threads; what was written so far is of no interest."""
        self._begins = os.fstat(self.descriptor).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def read(self) -> str:
        """Return what was written since."""
        size = os.fstat(self.descriptor).st_size - self._begins
        return os.pread(self.descriptor, size, self._begins).decode(errors="replace")

    def close(self) -> None:
        """Drop it."""
        os.close(self.descriptor)


class Sample:
    """What a worker is at, as far as it was watched."""

    def __init__(self) -> None:
        self.started = self.ran_ns = self.asked_ns = self.ticket = self.looked_ns = 0
        self.index: int | None = None  # of the sample, once the worker is killed for it
        self.stacks_text = ""


class WorkerProcess:
    """A worker: its process, the supervisor's end of its channel, and what its threads were at."""

    def __init__(
        self, number: int, process: Any, cell: int, channel: Channel, stacks: StackFile
    ) -> None:
        self.number, self.process, self.pid, self.cell = number, process, process.pid, cell
        self.kill: Callable[[], None] = process.kill
        self.channel, self.stacks = channel, stacks
        self.sample = Sample()
        self.stop_watch, self.was_stopped = (
            StopWatch(),
            False,
        )  # it was ended as it was stopped (SIGSTOP) for long
        self.pidfd: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether it is now, by a SIGSTOP. As a parent sees it: that costs a twentieth of a look into /proc."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except (
            AttributeError,
            ChildProcessError,
        ):  # other systems have no such call; or it was reaped
            return False
        return found is not None


class Processes:
    """All workers of a supervisor.

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
        self._arena, self._slots, self._payloads, self._forms, self._private = (
            arena,
            slots,
            payloads,
            forms,
            private,
        )
        self._settings = start
        self.by_number: dict[int, WorkerProcess] = {}
        self.has_lanes = False  # there is, or was, a loader of generators
        self.without_pidfd: list[WorkerProcess] = []  # their end is found only by a look
        self._cells = list(range(MAX_WORKERS - 1, -1, -1))  # that are free
        self._pid = os.getpid()

    def start(self, number: int, files: Sequence[OpenFile] | None) -> WorkerProcess:
        """Start a worker, by fork or by exec.

        Args:
            number: its number.
            files: those that a fork opens again. None: start it by exec.

        Raises:
            OSError: no memory, no more processes, no descriptors, or no interpreter any more.
        """
        if not self._cells:
            raise OSError(errno.EAGAIN, "too many workers have not ended yet")
        fault_points.reach("supervisor.forking")
        cell, board = self._cells.pop(), self._arena.board
        board.clear(cell)
        try:
            worker = self._launch(number, cell, files)
        except BaseException:
            self._cells.append(cell)
            raise
        board.cells = max(board.cells, cell + 1)
        board.numbers[board.base(cell) + Field.PID] = worker.pid
        board.numbers[board.base(cell) + Field.NUMBER] = number + 1
        self.by_number[number] = worker
        return worker

    def _launch(self, number: int, cell: int, files: Sequence[OpenFile] | None) -> WorkerProcess:
        with contextlib.ExitStack() as undo:
            ours, theirs = Channel.pair()
            undo.callback(ours.close)
            with theirs:
                stacks = StackFile()
                undo.callback(stacks.close)
                started: Any
                if files is not None:
                    private = [ours.fileno(), *self.private()]
                    started = ForkedProcess(
                        lambda: self._become(number, cell, private, theirs.detach(), stacks, files)
                    )
                else:
                    started = self._execute(number, cell, theirs.fileno(), stacks.descriptor)
            undo.pop_all()
        worker = WorkerProcess(number, started, cell, Channel(ours), stacks)
        try:
            worker.pidfd = machine.open_pidfd(worker.pid)
        except (
            OSError
        ):  # none left: its end is found by a look, as on machines that have no such thing
            worker.pidfd = None
        if worker.pidfd is None:
            self.without_pidfd.append(worker)
        return worker

    def bury(self, worker: WorkerProcess) -> int:
        """Reap a worker that has ended, and return its exit code; its cell is the caller's until `free`."""
        del self.by_number[worker.number]
        if worker in self.without_pidfd:
            self.without_pidfd.remove(worker)
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

    def end_stopped(self) -> None:
        """End those that were stopped for too long; their death is told as any other."""
        for worker in self.by_number.values():
            if not worker.is_stopped:
                worker.stop_watch.runs()
            elif worker.stop_watch.is_too_long():
                worker.was_stopped = True
                worker.kill()

    def end_hung(self, watched: Sequence[tuple[WorkerProcess, int]]) -> None:
        """End those whose sample runs past its timeout, which is given in nanoseconds; to be called every `look_ns`.

        A worker notes on the board which sample it is at and since when. The time a sample has run is summed up over
        looks, and a gap between looks (Ctrl-Z, a suspended machine, a supervisor that was kept waiting) counts as no
        more than two of them, so that only a worker that really ran, or really slept, for so long is called hung.

            runs ──past the limit──▶ asked (SIGUSR1: faulthandler writes all stacks, also out of C code) ──▶ killed
              ▲────────────── it went on to the next sample after all ─────────────┘
        """
        now = clock.monotonic_ns()
        for worker, timeout_ns in watched:
            # The ticket first: where a new one begins meanwhile, the state sees that this one is over.
            ticket, index, started = (
                self._arena.board.read(worker.cell, field) for field in _FIELDS
            )
            sample = worker.sample
            if sample.index is not None:  # killed, not reaped yet
                continue
            elapsed, longest, sample.looked_ns = (
                now - sample.looked_ns,
                2 * look_ns(timeout_ns),
                now,
            )
            if not index or started != sample.started or ticket != sample.ticket:
                sample.started, sample.ran_ns, sample.asked_ns, sample.ticket = (
                    started,
                    0,
                    0,
                    ticket,
                )
                continue
            sample.ran_ns += min(elapsed, longest)
            if not sample.asked_ns:
                if sample.ran_ns > timeout_ns:
                    sample.asked_ns = now
                    worker.stacks.ask(worker.pid)
            elif now - sample.asked_ns > _STACKS_NS:
                thread = self._arena.board.read(worker.cell, Field.THREAD)
                sample.index, sample.stacks_text = (
                    index - 1,
                    _beginning_with(thread, worker.stacks.read()),
                )
                worker.kill()

    def end_all(self) -> None:
        """Kill and reap them, those with generators after a moment in which they may close these."""
        workers = [*self.by_number.values()]
        if self.has_lanes:
            for worker in workers:
                worker.channel.end_sending()
            clock.wait_until(
                lambda: all(worker.process.poll() is not None for worker in workers), GRACE_S
            )
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.process.wait()
            worker.channel.close()

    def _execute(
        self, number: int, cell: int, channel: int, stacks: int
    ) -> subprocess.Popen[bytes]:
        """Start a worker that is no fork, and loads what it gets tickets for."""
        from loaderpool.core import child_process  # few supervisors ever come here

        start = self._settings
        settings = {name: start[name] for name in ("arena", "arena_bytes", "slots")}
        settings |= {
            "supervisor_pid": self._pid,
            "node": process.node(),
            "channel": channel,
            "stacks": stacks,
        }
        settings |= self._told(number, cell)
        files = [file for of_loader in self._payloads.files.values() for file in of_loader]
        return child_process.start(
            child_process.Program("loaderpool.core.processes", f"loaderpool-worker-{number}"),
            child_process.Surroundings(
                None, os.environ, start["path"], start["argv"], ModuleStore(start["modules"])
            ),
            settings,
            [settings["arena"], settings["slots"], channel, stacks, *files],
            is_apart=False,  # it is of the supervisor's group, and ends with it
        )

    def _told(self, number: int, cell: int) -> dict[str, Any]:
        """Return what a worker that is no fork is told of itself and of loaders."""
        payloads, forms = self._payloads, dict(self._forms)
        loaders = {"files": payloads.files, "places": dict(payloads.places)}
        return {"number": number, "cell": cell, "forms": forms, **loaders}

    def private(self) -> list[int]:
        """Return the descriptors that are the supervisor's alone, with its ends of all workers."""
        found = self._private()
        for worker in self.by_number.values():
            found += [worker.channel.fileno(), worker.stacks.descriptor]
            if worker.pidfd is not None:
                found.append(worker.pidfd)
        return found

    def _become(
        self,
        number: int,
        cell: int,
        private: Sequence[int],
        theirs: int,
        stacks: StackFile,
        files: Sequence[OpenFile],
    ) -> None:
        """Runs in: the new worker, a fork, which keeps nothing of the supervisor's."""
        process.become("worker")
        become_worker(self._pid, private)
        open_files.reopen(files)
        forget_connections()
        stacks.arm()
        channel = Channel(socket.socket(fileno=theirs))
        Worker(
            number, cell, channel, self._arena, self._slots, self._payloads.loaded, self._forms
        ).run()


def fault_in(stacks: str) -> str:
    """Return what faulthandler wrote as C code ended the process; "": it did not."""
    begins = stacks.rfind("Fatal Python error")  # what faulthandler begins with then
    return stacks[begins:] if begins >= 0 else ""


def _beginning_with(thread: int, stacks: str) -> str:
    """Return the stacks of all threads, this one's first, as far as faulthandler has named it."""
    first = f"hread 0x{thread:016x} "  # "Thread ..." or "Current thread ..."
    return "\n\n".join(
        sorted(
            stacks.strip().split("\n\n"), key=lambda stack: first not in stack.partition("\n")[0]
        )
    )


def look_ns(timeout_ns: int) -> int:
    """Return how often workers are to be looked at for a timeout."""
    return max(_SHORTEST_LOOK_NS, min(_LONGEST_LOOK_NS, timeout_ns // _LOOKS_PER_TIMEOUT))


# ---- workers that are no forks


class LatePayloads(dict[int, WorkerPayload]):
    """Payloads by loader, each loaded when it is asked for first.

    Not at once: a loader may be unloaded while this process starts, and its place in the arena be another's. Who asks
    has a ticket for it.

    Args:
        arena: where they are.
        start: what its process is told.
    """

    def __init__(self, arena: Arena, start: Mapping[str, Any]) -> None:
        super().__init__()
        self._payloads = Payloads(arena, start["files"])
        self._places, self._worker = start["places"], start["number"]

    def __missing__(self, loader: int) -> WorkerPayload:
        try:
            self._payloads.load(loader, *self._places[loader])
        except BaseException as error:
            advice = describe_load_error(error, "the worker")
            failure = describe_failure(error, epoch=0, worker=self._worker, load_advice=advice)
            raise WorkFailed(failure, error) from None
        settle_libraries()
        self[loader] = self._payloads.loaded[loader]
        return self[loader]


def main(start: Mapping[str, Any]) -> None:
    """Runs in: a worker that is no fork, from the first import to its end."""
    process.become("worker", start["node"])
    become_worker(start["supervisor_pid"])
    keep(ModuleStore(start["modules"]))
    StackFile(start["stacks"]).arm()
    arena, slots = Arena(start["arena"], start["arena_bytes"]), SlotFile(start["slots"])
    channel = Channel(socket.socket(fileno=start["channel"]))
    payloads = LatePayloads(arena, start)
    serve(
        Worker(start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]).run
    )
