"""The supervisor's hands: pipes, forks and deaths; what to do is decided by `state`.

Descriptors of the supervisor (the whole table: docs/explanation/protocol.md, "Descriptors"):

    control      read    from the trainer
    reports      both    from all workers; both ends stay open here, so it never ends
    completions  write   to the trainer, shared with all workers
    socket       write   to the trainer, shared with all workers
    arena        memory  the trainer's
    a ticket pipe's write end and a pidfd per worker, a pidfd of the trainer
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loaderpool import clock, machine, role
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Field
from loaderpool.messages import READ_BYTES, Notice, pack, unpack_all
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.loading import Payloads
from loaderpool.supervisor.outlet import Outlet
from loaderpool.supervisor.records import LastWords
from loaderpool.supervisor.state import SupervisorState
from loaderpool.supervisor.watch import HungSample, SampleWatch, StackFile
from loaderpool.worker.failures import LostReport, describe_failure, describe_timeout
from loaderpool.worker.hygiene import become_worker
from loaderpool.worker.loop import WorkerChannels, WorkerLoop, send_with_bytes

__all__ = ["Supervisor", "main"]

# Without pidfds the process table is looked at this often.
_POLL_MS = 200


class _WorkerProcess:
    """A worker as the supervisor holds it."""

    def __init__(self, process: Any, cell: int, tickets: Outlet, pidfd: int | None, stacks: StackFile) -> None:
        self.process = process
        self.cell = cell
        self.sample = HungSample(process.pid, cell, stacks)
        self.tickets = tickets
        self.pidfd = pidfd


@dataclasses.dataclass(frozen=True)
class _Death:
    """How a worker ended."""

    pid: int
    exit_code: int
    stacks: str  # what faulthandler wrote, where the signal let it
    is_out_of_memory: bool


class Supervisor:
    """Reads events, asks the state, carries out its instructions; returns from `run` when all is over.

    Runs in: the supervisor process, on its only thread.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._trainer_pid: int = start["trainer_pid"]
        self._control: int = start["control"]
        self._completions: int = start["completions"]
        self._socket = socket.socket(fileno=start["socket"])
        self._arena = Arena(start["arena"], start["arena_bytes"])
        self._payloads = Payloads(self._arena)
        self._reports_read, self._reports_write = os.pipe()
        os.set_blocking(self._control, False)
        os.set_blocking(self._reports_read, False)
        self._max_restarts: tuple[int, float] | None = start["max_restarts"]
        limit = self._max_restarts
        self._state = SupervisorState(start["workers"], (limit[0], int(limit[1] * 1e9)) if limit else None)
        self._oom_kills = machine.oom_kill_count()
        self._watch = SampleWatch(self._arena.board)
        self._workers: dict[int, _WorkerProcess] = {}
        self._by_pidfd: dict[int, int] = {}
        self._is_over = False
        self._poll = select.poll()
        self._trainer = Outlet(self._completions, self._poll)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._reports_read, select.POLLIN)
        self._trainer_pidfd = machine.open_pidfd(self._trainer_pid)
        if self._trainer_pidfd is not None:
            self._poll.register(self._trainer_pidfd, select.POLLIN)
        from multiprocess import get_context

        self._context = get_context("fork")

    def run(self) -> None:
        """Serve until the trainer says close, or dies."""
        has_pidfds = self._trainer_pidfd is not None
        try:
            while not self._is_over:
                timeouts = self._state.timeouts()
                pause_ms = self._watch.pause_ms(timeout_ns for _, timeout_ns in timeouts)
                if not has_pidfds:
                    pause_ms = min(_POLL_MS, pause_ms or _POLL_MS)
                ready = self._poll.poll(pause_ms)
                if timeouts:
                    self._watch.look((self._workers[number].sample, timeout_ns) for number, timeout_ns in timeouts)
                for descriptor, _ in ready:
                    if descriptor == self._reports_read:
                        self._drain(self._reports_read, self._state.on_report)
                    elif descriptor == self._control:
                        if not self._drain(self._control, self._state.on_control):
                            return  # the trainer's end is gone
                    elif descriptor == self._trainer_pidfd:
                        return
                    elif descriptor in self._by_pidfd:
                        self._worker_gone(self._by_pidfd[descriptor])
                    else:
                        self._flush()
                if self._trainer.is_gone:
                    return
                if not has_pidfds:
                    self._look_for_deaths()
        finally:
            self._end_workers()

    def _drain(self, descriptor: int, handle: Any) -> bool:
        """Handle what one read brings; False at the end of the pipe."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        instructions: list[s.Instruction] = []
        for words in unpack_all(data):
            instructions += handle(words)
            if instructions and not isinstance(instructions[-1], (s.ToWorker, s.ToTrainer)):
                self._carry_out(instructions)
                instructions = []
        self._carry_out(instructions)
        return True

    # ---- instructions ----

    def _carry_out(self, instructions: Iterable[s.Instruction]) -> None:
        pending = collections.deque(instructions)
        while pending:
            instruction = pending.popleft()
            if isinstance(instruction, s.ToWorker):
                message = instruction.message
                while pending and isinstance(pending[0], s.ToWorker) and pending[0].worker == instruction.worker:
                    message += pending.popleft().message  # type: ignore[union-attr]
                worker = self._workers.get(instruction.worker)
                if worker is not None:  # where it is dead, its pidfd tells
                    worker.tickets.send(message)
            elif isinstance(instruction, s.ToTrainer):
                self._trainer.send(instruction.message)
            elif isinstance(instruction, s.Fork):
                self._fork(instruction.worker, instruction.cell)
            elif isinstance(instruction, (s.Load, s.Update)):
                pending.extend(self._load(instruction))
            elif isinstance(instruction, s.Unload):
                self._payloads.unload(instruction.loader)
            elif isinstance(instruction, s.LoseTicket):
                self._lose(instruction)
            elif isinstance(instruction, s.FailTicket):
                self._fail(instruction)
            else:
                self._is_over = True

    def _load(self, load: s.Load | s.Update) -> list[s.Instruction]:
        take_in = self._payloads.load if isinstance(load, s.Load) else self._payloads.update
        try:
            with _ends_with(self._trainer_pid):
                take_in(load.loader, load.offset, load.nbytes)
        except BaseException as error:
            from loaderpool.supervisor.shipping import describe_load_error

            failure = describe_failure(error, epoch=0, worker=None)
            self._to_trainer_bytes(pack(Notice.LOAD_FAILED, load.loader), (failure, describe_load_error(error)))
            return []
        gc.collect()
        gc.freeze()  # so that a worker's collections do not write to, and so copy, these pages
        return self._state.on_loaded(load.loader)

    def _lose(self, lost: s.LoseTicket) -> None:
        last = self._last_death
        report = LostReport(
            verdict=lost.verdict,
            index=lost.source_index,
            epoch=lost.epoch,
            exit_code=last.exit_code if last else None,
            pid=last.pid if last else None,
            deaths=lost.deaths,
            stacks=last.stacks if last else "",
            is_out_of_memory=last is not None and last.is_out_of_memory,
            max_restarts=self._max_restarts,
        )
        message = lost.completion or pack(Notice.LOST, lost.loader)
        self._to_trainer_bytes(message, report)

    def _fail(self, failed: s.FailTicket) -> None:
        failure = describe_timeout(
            index=failed.source_index,
            epoch=failed.epoch,
            worker=failed.worker,
            ran_s=failed.ran_ns / 1e9,
            timeout_s=failed.timeout_ns / 1e9,
            stacks=self._last_stacks,
        )
        message = failed.completion or pack(Notice.SPEC_FAILED, failed.loader, failed.worker)
        self._to_trainer_bytes(message, failure)

    def _to_trainer_bytes(self, message: bytes, value: Any) -> None:
        import pickle

        # Rare and small, and the trainer reads the socket whenever it waits; its buffer holds many of these.
        send_with_bytes(self._socket, message, pickle.dumps(value))

    def _flush(self) -> None:
        self._trainer.flush()
        for worker in self._workers.values():
            worker.tickets.flush()

    # ---- processes ----

    def _fork(self, number: int, cell: int) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._arena.board.clear(cell)
        stacks = StackFile()
        arguments = (number, cell, read_end, write_end, stacks)
        process = self._context.Process(target=self._worker_main, args=arguments, name=f"worker-{number}")
        try:
            process.start()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            stacks.close()
            self._to_trainer_bytes(
                pack(Notice.LOAD_FAILED, 0), (describe_failure(error, epoch=0, worker=number), _fork_advice(error))
            )
            return
        os.close(read_end)
        pidfd = machine.open_pidfd(process.pid)
        self._workers[number] = _WorkerProcess(process, cell, Outlet(write_end, self._poll), pidfd, stacks)
        if pidfd is not None:
            self._by_pidfd[pidfd] = number
            self._poll.register(pidfd, select.POLLIN)
        self._trainer.send(pack(Notice.WORKER_STARTED, number, process.pid, cell))

    def _worker_main(self, number: int, cell: int, tickets: int, tickets_write: int, stacks: StackFile) -> None:
        """Runs in: the new worker."""
        role.become("worker")
        channels = WorkerChannels(tickets, self._reports_write, self._completions, self._socket)
        # Its own pipe's write end, too, or it would never read the end of file that tells of the supervisor's.
        mine = [self._control, self._reports_read, self._arena.descriptor, tickets_write]
        if self._trainer_pidfd is not None:
            mine.append(self._trainer_pidfd)
        for other in self._workers.values():
            mine.append(other.tickets.descriptor)
            if other.pidfd is not None:
                mine.append(other.pidfd)
            mine.append(other.sample.stacks.descriptor)
        become_worker(self._pid, [tickets], mine)
        stacks.arm()
        try:
            WorkerLoop(number, cell, self._arena, channels, self._payloads.loaded).run()
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # nobody is there any more: everything is over

    def _worker_gone(self, number: int) -> None:
        worker = self._workers.pop(number)
        worker.process.join()  # reaped: only now is its cell the last word
        if worker.pidfd is not None:
            del self._by_pidfd[worker.pidfd]
            self._poll.unregister(worker.pidfd)
            os.close(worker.pidfd)
        worker.tickets.forget()
        os.close(worker.tickets.descriptor)
        # Reports it wrote before it died count: read them first, so that only real losses are redone.
        self._state.on_worker_dead(number)
        self._drain(self._reports_read, self._state.on_report)
        board = self._arena.board
        sample = worker.sample
        stacks = sample.stacks.read()
        sample.stacks.close()
        exit_code = worker.process.exitcode
        self._last_death = _Death(worker.process.pid, exit_code, stacks, self._was_out_of_memory(exit_code))
        at = board.read(worker.cell, Field.INDEX)
        last = LastWords(
            finished=board.read(worker.cell, Field.FINISHED),
            sending=board.read(worker.cell, Field.SENDING),
            status=board.read(worker.cell, Field.STATUS),
            source_index=at - 1 if at else None,
            exit_code=exit_code,
        )
        restarts = self._state.restarts
        now_ns = clock.monotonic_ns()
        if sample.index is None:
            instructions = self._state.on_worker_gone(number, last, now_ns)
        else:
            self._last_stacks = sample.stacks_text
            last = last._replace(source_index=sample.index)
            instructions = self._state.on_worker_hung(number, last, sample.ticket, sample.ran_ns, now_ns)
        was_lost = self._state.restarts > restarts  # the exit status does not tell: os._exit(0) loses work, too
        self._trainer.send(pack(Notice.WORKER_ENDED, number, worker.process.pid, int(was_lost)))
        self._carry_out(instructions)

    def _look_for_deaths(self) -> None:
        """The fallback where there are no pidfds."""
        for number, worker in list(self._workers.items()):
            if worker.process.exitcode is not None:
                self._worker_gone(number)
        if os.getppid() != self._trainer_pid:
            self._is_over = True

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            try:
                os.kill(worker.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for worker in self._workers.values():
            worker.process.join()

    def _was_out_of_memory(self, exit_code: int) -> bool:
        """Whether the kernel has killed somebody for memory since the last look, and this worker was killed so."""
        before, self._oom_kills = self._oom_kills, machine.oom_kill_count()
        return exit_code == -signal.SIGKILL and self._oom_kills > before

    _last_death: _Death | None = None
    _last_stacks = ""
    _pid = os.getpid()


@contextlib.contextmanager
def _ends_with(trainer_pid: int) -> Iterator[None]:
    """While the user's modules are imported, which may take long, the trainer's death is looked for by a timer."""

    def look(*_: Any) -> None:
        if os.getppid() != trainer_pid:
            _end_group()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_MS / 1000, _POLL_MS / 1000)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _end_group() -> None:
    """End this process, and with it what the user's function has started and left running."""
    if os.getpgrp() == os.getpid():  # else the group is the trainer's
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _fork_advice(error: OSError) -> str:
    return (
        f"a worker could not be started: {error.strerror}. The machine is out of memory or of processes "
        "(ulimit -u, or the container's pids limit): use fewer workers, or raise the limit"
    )


def main(start: Mapping[str, Any]) -> None:
    """The supervisor process, from the first import to its end."""
    role.become("supervisor")
    Supervisor._pid = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != start["trainer_pid"]:
        return  # it died while we started
    sys.argv = list(start["argv"])
    try:
        supervisor = Supervisor(start)
    except ProcessLookupError:
        return  # it died just now
    supervisor.run()
    # No atexit hooks, no finalizers: nothing here is anybody's to clean up.
    sys.stdout.flush()
    sys.stderr.flush()
    _end_group()
