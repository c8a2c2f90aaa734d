"""The supervisor's hands: pipes, forks and deaths; what to do is decided by `state`.

Descriptors of the supervisor (the whole table: docs/internals/protocol.md, "Descriptors"):

    control      read    from the trainer
    reports      both    from all workers; both ends stay open here, so it never ends
    completions  write   to the trainer, shared with all workers
    socket       write   to the trainer, shared with all workers
    arena        memory  the trainer's
    signals      both    written by the handler of SIGCHLD, which tells that a worker was stopped
    a ticket pipe's write end, a pidfd and a memory file for stacks per worker, a pidfd of the trainer
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from loaderpool.memory.arena import Arena
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.base import BaseSupervisor
from loaderpool.supervisor.processes import CleanStart, Processes
from loaderpool.supervisor.state import SupervisorState
from loaderpool.system import clock, fault_points, machine, process
from loaderpool.transport.messages import READ_BYTES, Notice, decode_all, encode
from loaderpool.transport.payload.fork_check import ForkCheck, refuse_open_handles
from loaderpool.transport.payload.loaded import Payloads, ReceivedDescriptors, describe_load_error
from loaderpool.transport.pipes import Outlet, SocketOutlet
from loaderpool.transport.reports import describe_failure


def begin(new_role: process.Role, start: Mapping[str, Any]) -> bool:
    """Be this from now on, with the settings of the start; returns whether the trainer is there still."""
    process.become(new_role, start.get("node"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != start["trainer_pid"]:
        return False  # it died while we started
    sys.argv = list(start["argv"])
    for name in ("control", "socket", "arena", "completions"):
        os.set_inheritable(start[name], False)  # the exec needed it; what the user's function starts needs none
    machine.raise_descriptor_limit()
    return True


def end_group() -> NoReturn:
    """End this process, and with it what the user's function has started and left running."""
    if os.getpgrp() == os.getpid():  # else the group is the trainer's
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


# Without pidfds the process table is looked at this often.
_POLL_MS = 200


class Supervisor(BaseSupervisor):
    """Reads events, asks the state, carries out its instructions; returns from `run` when all is over.

    Runs in: the supervisor process, on its only thread.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._trainer_pid: int = start["trainer_pid"]
        self._control: int = start["control"]
        to_trainer = socket.socket(fileno=start["socket"])
        self._arena = Arena(start["arena"], start["arena_bytes"])
        self._fork_check = ForkCheck()
        self._payloads = Payloads(self._arena, ReceivedDescriptors(to_trainer), self._fork_check.importing)
        self._has_loaded = self._has_told_of_exec = False
        os.set_blocking(self._control, False)
        state = SupervisorState(start["workers"], start["max_restarts"], start["first_ticket"])
        super().__init__(state, self._arena, start["max_restarts"])
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._trainer = Outlet(start["completions"], self._poll)
        self._to_trainer = SocketOutlet(to_trainer, self._poll)
        private = [self._control]
        self._trainer_pidfd = machine.open_pidfd(self._trainer_pid)
        if self._trainer_pidfd is not None:
            self._poll.register(self._trainer_pidfd, select.POLLIN)
            private.append(self._trainer_pidfd)
        self._workers: Processes = Processes(
            self._arena,
            self._poll,
            start["completions"],
            to_trainer,
            self._payloads,
            self._fork_check,
            CleanStart(start),
            private,
        )

    def run(self) -> None:
        """Serve until the trainer says close, or dies."""
        try:
            while not self._is_over:
                ready = self._poll.poll(self._pause_ms())
                self._look_at_clock()
                self._answer([descriptor for descriptor, _ in ready])
                if self._trainer.is_gone or self._to_trainer.is_gone:
                    return
        finally:
            self._workers.end_all()

    def _pause_ms(self) -> int | None:
        """Return how long the loop may sleep; None: until something happens."""
        pauses = [*self._pauses_ms(), self._workers.stop_look_ms]
        if self._trainer_pidfd is None or self._workers.needs_looks:
            pauses.append(_POLL_MS)
        return min((pause for pause in pauses if pause is not None), default=None)

    def _look_at_clock(self) -> None:
        """Do what is due by the clock, which no descriptor tells of."""
        self._look_at_samples()
        self._workers.end_stopped()
        if self._workers.needs_looks:
            for worker in self._workers:
                if worker.pidfd is None and worker.has_ended:
                    self._worker_gone(worker)
        if self._trainer_pidfd is None and os.getppid() != self._trainer_pid:
            self._is_over = True
        self._try_again()

    def _answer(self, ready: list[int]) -> None:
        """Take in what has arrived. Deaths come last: a pidfd made for a new worker may have a dead one's number."""
        workers = self._workers
        dead = [workers.by_pidfd[descriptor] for descriptor in ready if descriptor in workers.by_pidfd]
        for descriptor in ready:
            if descriptor in workers.by_pidfd:
                continue
            if descriptor == workers.reports:
                self._drain(workers.reports, self._state.on_report)
            elif descriptor == self._control:
                if not self._drain(self._control, self._state.on_control):
                    self._is_over = True  # the trainer's end is gone
            elif descriptor == self._trainer_pidfd:
                self._is_over = True
            elif descriptor == workers.signals:
                workers.note_stops()
            else:
                self._flush()
        if not self._is_over:
            for worker in dead:
                self._worker_gone(worker)

    def _drain(self, descriptor: int, handle: Any) -> bool:
        """Handle what one read brings; False at the end of the pipe."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        instructions: list[s.Instruction] = []
        for words in decode_all(data):
            instructions += handle(words)
            if instructions and not isinstance(instructions[-1], (s.ToWorker, s.ToTrainer)):
                self._carry_out(instructions)
                instructions = []
        self._carry_out(instructions)
        return True

    # ---- instructions ----

    def _load(self, load: s.Load | s.Update) -> list[s.Instruction]:
        take_in = self._payloads.load if isinstance(load, s.Load) else self._payloads.update
        try:
            self._arena.board.loading = load.loader
            begun_ns = clock.monotonic_ns()
            with _ends_with(self._trainer_pid):
                fault_points.reach("supervisor.loading")
                take_in(load.loader, load.offset, load.nbytes)
            took_ns = clock.monotonic_ns() - begun_ns
            if not self._fork_check.obstacles():  # else each worker imports for itself, and has its own
                refuse_open_handles()
        except BaseException as error:
            failure = describe_failure(error, epoch=0, worker=None)
            self._tell(encode(Notice.LOAD_FAILED, load.loader), (failure, describe_load_error(error)))
            return self._state.on_load_failed(load.loader)
        finally:
            self._arena.board.loading = 0
        if self._has_loaded:  # what the first payload's imports have left in cycles is not worth the wait
            gc.collect()
        self._has_loaded = True
        gc.freeze()  # so that a worker's collections do not write to, and so copy, these pages
        return self._state.on_loaded(load.loader, took_ns)

    def _unload(self, loader: int) -> None:
        self._payloads.unload(loader)

    def _send(self, message: bytes) -> None:
        self._trainer.send(message)

    def _tell(self, message: bytes, value: Any) -> None:
        self._to_trainer.send_with(message, pickle.dumps(value))

    def _flush(self) -> None:
        self._trainer.flush()
        self._to_trainer.flush()
        for worker in self._workers:
            worker.tickets.flush()

    # ---- workers ----

    def _start(self, number: int, cell: int) -> list[s.Instruction]:
        obstacles = self._fork_check.obstacles()
        if obstacles and not self._has_told_of_exec:  # before anything that such a worker may say
            self._has_told_of_exec = True
            self._tell(encode(Notice.WORKERS_BY_EXEC), (obstacles, process.node()))
        return super()._start(number, cell)

    def _read_reports(self) -> None:
        self._drain(self._workers.reports, self._state.on_report)


@contextlib.contextmanager
def _ends_with(trainer_pid: int) -> Iterator[None]:
    """Look for the trainer's death by a timer while the user's modules are imported, which may take long."""

    def look(*_: Any) -> None:
        if os.getppid() != trainer_pid:
            end_group()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_MS / 1000, _POLL_MS / 1000)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(start: Mapping[str, Any]) -> None:
    """The supervisor process, from the first import to its end."""
    if not begin("supervisor", start):
        return
    try:
        supervisor = Supervisor(start)
    except ProcessLookupError:
        return  # it died just now
    try:
        supervisor.run()
    except BaseException:  # a defect of ours, or a signal from outside: another supervisor goes on, but it is told
        traceback.print_exc()
        raise
    finally:
        # No atexit hooks, no finalizers: no object here needs to be cleaned up.
        machine.flush_standard_streams()
        end_group()
