"""Start, watch and reap the worker processes. Runs in: the supervisor.

Workers are forked. A worker inherits the payloads that the supervisor has loaded. It closes every
descriptor that is not its own, and reopens the user's files, so that it has its own position in
each. If a fork would not be clean (`loaded.ForkCheck`), each worker is a new interpreter that loads
payloads itself.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.memory.board import Field
from loaderpool.system import clock, fault_points, machine, open_files, process
from loaderpool.system.machine import StopWatch
from loaderpool.system.open_files import OpenFile
from loaderpool.transport.channel import GRACE_S, Channel
from loaderpool.transport.modules import ModuleStore, keep
from loaderpool.transport.payload.handles import forget_connections
from loaderpool.transport.payload.loaded import Payloads, describe_load_error
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.loop import Worker
from loaderpool.worker.own_process import become_worker, serve, settle_libraries
from loaderpool.worker.tickets import WorkFailed

if TYPE_CHECKING:
    import subprocess

    from loaderpool.transport.child_process import Surroundings

# Checks of a worker's sample within its timeout, and the limits of the time between two checks.
_LOOKS_PER_TIMEOUT = 8
_SHORTEST_LOOK_NS, _LONGEST_LOOK_NS = 10_000_000, 1_000_000_000
# Time from the request for a worker's stacks to its kill. faulthandler writes them in well under a
# millisecond.
_STACKS_NS = 100_000_000
# The ticket is read first. If a new ticket begins meanwhile, the ticket that was read is older than
# the sample, and `Supervisor._death_of` ignores the timeout.
_FIELDS = Field.TICKET, Field.INDEX, Field.STARTED_NS


class ForkedProcess:
    """A forked process, from its start to its exit status.

    It calls `os.fork` directly, because every supervisor would pay for the import of a library
    (docs/internals/decisions/0018-workers-are-forked-plainly.md).

    Args:
        run: Function that the process executes. The process exits after it, and never returns to
            the frames of the supervisor.

    Raises:
        OSError: Not enough memory, or too many processes.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        machine.flush_standard_streams()  # otherwise both processes would write buffered output
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            serve(run)

    def kill(self) -> None:
        """Kill the process, unless it was reaped: its pid may belong to another one by now."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None if the process is running."""
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """Return the exit status. Blocks until the process has ended, unless `options` forbid."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another caller has reaped it, or SIGCHLD is ignored
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class StackFile:
    """A memory file into which a worker's faulthandler writes its stacks.

    The supervisor creates it before the fork. It calls `ask`, waits, then calls `read`.

    Args:
        descriptor: Descriptor of a file that another process has created; -1: there is none, so
            crashes are written to stderr, and stacks stay unknown; None: create one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = machine.create_memory_file("stacks") if descriptor is None else descriptor
        self._begins = 0

    def arm(self) -> None:
        """Let faulthandler write stacks to the file, at `ask` and at a crash of C code.

        Called by the worker when it starts. Crashes are SIGSEGV, SIGABRT and the like.
        """
        if self.descriptor < 0:
            faulthandler.enable(sys.stderr or os.open(os.devnull, os.O_WRONLY), all_threads=False)
            return
        faulthandler.enable(self.descriptor, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=self.descriptor, all_threads=True, chain=False)

    def ask(self, pid: int) -> None:
        """Request the stacks of all threads of the worker. `read` skips earlier contents."""
        if self.descriptor < 0:
            return
        self._begins = os.fstat(self.descriptor).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def read(self) -> str:
        """Return the text that was written since the last `ask`."""
        if self.descriptor < 0:
            return ""
        size = os.fstat(self.descriptor).st_size - self._begins
        return os.pread(self.descriptor, size, self._begins).decode(errors="replace")

    def close(self) -> None:
        """Close the file's descriptor in this process."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Sample:
    """The sample that a worker has in work, as `Processes.end_hung` watches it."""

    def __init__(self) -> None:
        self.started = self.ran_ns = self.asked_ns = self.ticket = self.looked_ns = 0
        self.index: int | None = None  # source index, set when the worker is killed for its timeout
        self.stacks_text = ""


class WorkerProcess:
    """A worker: its process, the supervisor's end of its channel, and its watched sample."""

    def __init__(
        self,
        number: int,
        process: ForkedProcess | subprocess.Popen[bytes],
        cell: int,
        channel: Channel,
        stacks: StackFile,
    ) -> None:
        self.number, self.process, self.pid, self.cell = number, process, process.pid, cell
        self.kill: Callable[[], None] = process.kill
        self.channel, self.stacks = channel, stacks
        self.sample = Sample()
        # `was_stopped` is True if the worker was killed because it was stopped (SIGSTOP) for long.
        self.stop_watch, self.was_stopped = StopWatch(), False
        self.pidfd: int | None = None

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by SIGSTOP now.

        It calls `waitid`, as the parent can. This takes a twentieth of the time of a read from
        /proc.
        """
        try:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        # Some systems have no such call. Or the process was reaped.
        except (AttributeError, ChildProcessError):
            return False
        return found is not None


class Processes:
    """All workers of a supervisor.

    Args:
        arena: Arena with the board.
        slots: Memory file that workers write into.
        payloads: Payloads that workers inherit or load.
        forms: Pickled form of the batches, by loader (`Found.content`).
        start: Settings of the supervisor.
        private: Returns the descriptors of the supervisor that workers must close.
    """

    _channel_type: type[Channel] = Channel
    _make_stacks: Callable[[], StackFile] = staticmethod(StackFile)
    _is_spawned = False  # True if the supervisor is a thread of the main process

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
        # True once a loader has generators or coroutines, whose `finally` blocks are to run.
        self.end_gently = False
        self.without_pidfd: list[WorkerProcess] = []  # workers whose end must be polled
        self._cells = list(range(MAX_WORKERS - 1, -1, -1))  # free cells of the board
        self._pid = os.getpid()

    def start(self, number: int, files: Sequence[OpenFile] | None) -> WorkerProcess:
        """Start a worker, by fork or by exec.

        Args:
            number: Number of the worker.
            files: Files of the user that the fork reopens. None: start it by exec.

        Raises:
            OSError: Not enough memory, processes or descriptors.
            PoolBrokenError: The interpreter is gone.
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
            ours, theirs = self._channel_type.pair()
            undo.callback(ours.close)
            with theirs:
                stacks = self._make_stacks()
                undo.callback(stacks.close)
                started: ForkedProcess | subprocess.Popen[bytes]
                if files is not None:
                    private = [ours.fileno(), *self.private()]
                    started = ForkedProcess(
                        lambda: self._become(number, cell, private, theirs.detach(), stacks, files)
                    )
                else:
                    started = self._execute(number, cell, theirs.fileno(), stacks.descriptor)
            undo.pop_all()
        worker = WorkerProcess(number, started, cell, self._channel_type(ours), stacks)
        try:
            worker.pidfd = machine.open_pidfd(worker.pid)
        # No descriptor is left. The worker's end is polled, as on systems without pidfds.
        except OSError:
            worker.pidfd = None
        if worker.pidfd is None:
            self.without_pidfd.append(worker)
        return worker

    def bury(self, worker: WorkerProcess) -> int:
        """Reap a worker that has ended, and return its exit code. Pairs with `free`.

        The caller may read the worker's cell and stacks until it calls `free`.
        """
        del self.by_number[worker.number]
        if worker in self.without_pidfd:
            self.without_pidfd.remove(worker)
        code = worker.process.wait()
        if worker.pidfd is not None:
            os.close(worker.pidfd)
        worker.channel.close()
        return code or 0

    def free(self, worker: WorkerProcess) -> None:
        """Release the cell and the stacks of a reaped worker. Pairs with `bury`."""
        worker.stacks.close()
        board = self._arena.board
        board.numbers[board.base(worker.cell) + Field.NUMBER] = 0
        self._cells.append(worker.cell)

    def end_stopped(self) -> None:
        """Kill workers that were stopped (SIGSTOP) for too long. Called at each tick."""
        for worker in self.by_number.values():
            if not worker.is_stopped:
                worker.stop_watch.runs()
            elif worker.stop_watch.is_too_long():
                worker.was_stopped = True
                worker.kill()

    def end_hung(self, watched: Sequence[tuple[WorkerProcess, int]]) -> None:
        """Kill workers whose sample has run longer than its timeout. Called every `look_ns`.

        A worker stores its sample and the start time on the board. The run time of a sample is
        summed over the calls. A gap between two calls counts as at most two intervals. Such gaps
        are Ctrl-Z, a suspended machine, or a supervisor that had to wait. So only a worker that
        itself ran or slept for that long is killed.

            runs ──timeout──▶ asked (SIGUSR1: faulthandler writes all stacks, also in C) ──▶ killed
              ▲───── the worker has begun its next sample ─────┘

        Args:
            watched: Workers, each with its timeout in nanoseconds.
        """
        now = clock.monotonic_ns()
        for worker, timeout_ns in watched:
            ticket, index, started = (
                self._arena.board.read(worker.cell, field) for field in _FIELDS
            )
            sample = worker.sample
            if sample.index is not None:  # already killed, but not reaped yet
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
        """Kill and reap all workers. With `end_gently`, they get `GRACE_S` to end by themselves."""
        workers = [*self.by_number.values()]
        if self.end_gently:
            for worker in workers:
                worker.channel.end_sending()
            clock.wait_until(
                lambda: all(worker.process.poll() is not None for worker in workers), GRACE_S
            )
        for worker in workers:
            worker.kill()
        for worker in workers:
            self.bury(worker)
            worker.stacks.close()

    def _execute(
        self, number: int, cell: int, channel: int, stacks: int
    ) -> subprocess.Popen[bytes]:
        """Start a worker without a fork. It loads the payloads of the tickets that it gets."""
        from loaderpool.transport import (
            child_process,  # imported here, because few supervisors need it
        )

        around, payloads = self._surroundings(), self._payloads
        settings = {
            "arena": self._arena.address,
            "slots": self._slots.address,
            "supervisor_pid": self._pid,
            "node": process.node(),
            "is_spawned": self._is_spawned,
            "channel": channel,
            "stacks": stacks,
            "number": number,
            "cell": cell,
            "module_frames": around.modules.frames() if around.modules.descriptor < 0 else b"",
            "forms": dict(self._forms),
            "files": payloads.files,
            "places": payloads.places,
        }
        files = [file for of_loader in payloads.files.values() for file in of_loader]
        return child_process.start(
            child_process.Program("loaderpool.supervisor.processes", f"loaderpool-worker-{number}"),
            around,
            settings,
            [self._arena.descriptor, self._slots.descriptor, channel, stacks, *files],
            # A supervisor process is killed with its group, and the worker with it.
            is_apart=self._is_spawned,
        )

    def _surroundings(self) -> Surroundings:
        """Return the supervisor's own surroundings, for a worker that is not forked."""
        from loaderpool.transport.child_process import Surroundings

        start = self._settings
        return Surroundings(
            None, os.environ, start["path"], start["argv"], ModuleStore(start["modules"])
        )

    def private(self) -> list[int]:
        """Return the supervisor's descriptors, which a new worker has to close."""
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
        """Run the worker. Called in the fork, which first closes the supervisor's descriptors."""
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
    """Return the output of faulthandler at a crash of C code, or "" if there was no such crash."""
    begins = stacks.rfind("Fatal Python error")  # first words of that output
    return stacks[begins:] if begins >= 0 else ""


def _beginning_with(thread: int, stacks: str) -> str:
    """Return the stacks of all threads, with those of this thread first."""
    first = f"hread 0x{thread:016x} "  # part of "Thread ..." and "Current thread ..."
    return "\n\n".join(
        sorted(
            stacks.strip().split("\n\n"), key=lambda stack: first not in stack.partition("\n")[0]
        )
    )


def look_ns(timeout_ns: int) -> int:
    """Return the time between two checks of workers with this timeout, in nanoseconds."""
    return max(_SHORTEST_LOOK_NS, min(_LONGEST_LOOK_NS, timeout_ns // _LOOKS_PER_TIMEOUT))


# ---- workers without a fork


class LatePayloads(dict[int, WorkerPayload]):
    """Payloads by loader. Each is loaded at its first lookup.

    The process does not load payloads at its start, because a loader may be unloaded during the
    start, and its place in the arena reused. A worker that looks up a payload has a ticket for it,
    so the loader is still there.

    Args:
        arena: Arena with the pickled payloads.
        start: Settings of the process.
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
    """Run a worker without a fork, until its end. Called by the boot code of `child_process`."""
    process.become("worker", start["node"])
    become_worker(start["supervisor_pid"])
    keep(ModuleStore(start["modules"], start["module_frames"]))
    StackFile(start["stacks"]).arm()
    arena, slots = Arena(*start["arena"]), SlotFile(*start["slots"])
    end = socket.socket(fileno=start["channel"])
    if start["is_spawned"]:
        # Imported here, because few workers need it.
        from loaderpool.transport.stream_channel import StreamChannel

        channel: Channel = StreamChannel(end, waits=True)
    else:
        channel = Channel(end)
    payloads = LatePayloads(arena, start)
    serve(
        Worker(start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]).run
    )
