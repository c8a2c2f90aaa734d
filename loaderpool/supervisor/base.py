"""What every supervisor does, whichever processes its workers are: instructions are carried out, deaths are told.

`main_loop` has a process of its own and forks its workers; `spawned.loop` is a thread of the trainer's. How
messages travel is theirs.
"""

from __future__ import annotations

import abc
import collections
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.memory.recorder import MarkKind
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.state import SupervisorState
from loaderpool.supervisor.watch import HungSample, SampleWatch, Stacks, fault_in
from loaderpool.system import capacity, clock, fault_points, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport.messages import Notice, encode
from loaderpool.transport.reports import LostReport, describe_failure, describe_timeout

# A worker that could not be started, while others run, is tried again after this long.
_RETRY_MS = 1000
# When the first sample takes longer, what comes behind it is made meanwhile. Less: the function of loaders with quick
# samples is called before a batch is wanted, for nothing. More: workers idle for so long.
_SLOW_PROBE_MS = 100
_SIGKILL = int(getattr(signal, "SIGKILL", 9))


class Tickets(Protocol):
    """The way to a worker."""

    def send(self, messages: bytes) -> None:
        """Tell it something, now or later; never blocks."""


class Worker(Protocol):
    """A worker as its supervisor holds it."""

    number: int
    pid: int
    cell: int
    sample: HungSample
    stop: StopWatch | None
    was_stopped: bool

    @property
    def tickets(self) -> Tickets:
        """The way to it."""

    @property
    def stacks(self) -> Stacks:
        """What its threads were at."""


class Workers(Protocol):
    """All workers of a supervisor."""

    @property
    def by_number(self) -> Mapping[int, Any]:
        """Those that run."""

    def __iter__(self) -> Iterator[Any]: ...

    def start(self, number: int, cell: int) -> Any:
        """Start one. Raises OSError where that cannot be."""

    def bury(self, worker: Any) -> None:
        """Reap one that has ended."""

    def last_cell(self, worker: Any) -> LastCell:
        """Return what a buried one left on the board."""


class _Death(NamedTuple):
    """How a worker ended."""

    pid: int
    exit_code: int
    stacks: str  # what faulthandler wrote, where the signal let it
    is_out_of_memory: bool
    was_stopped: bool
    in_setup: bool


class BaseSupervisor(abc.ABC):
    """Carries out a state's instructions.

    Args:
        state: says what is to be done.
        arena: that all share.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.
    """

    _workers: Workers
    _last_death: _Death | None = None
    _last_stacks = ""
    # Said where a worker could not be started for lack of them.
    _no_descriptors = "the supervisor has no file descriptors left (each worker needs five)"

    def __init__(self, state: SupervisorState, arena: Arena, max_restarts: tuple[int, float] | None) -> None:
        self._state, self._max_restarts = state, max_restarts
        self._watch = SampleWatch(arena.board)
        self._recorder = arena.recorder.supervisor
        self._recorder.mark(MarkKind.SUPERVISOR, os.getpid())
        self._oom_kills = capacity.oom_kill_count()
        self._is_over = False
        self._retry_ns = 0  # when a worker that could not be started is tried again; 0: none
        self._slow_ns = 0  # when a probe that runs takes long; 0: none does

    # ---- what is different ----

    @abc.abstractmethod
    def _send(self, message: bytes) -> None:
        """Send the trainer a notice."""

    @abc.abstractmethod
    def _tell(self, message: bytes, value: Any) -> None:
        """Send the trainer a notice with an object of ours."""

    @abc.abstractmethod
    def _load(self, load: s.Load | s.Update) -> list[s.Instruction]:
        """Take in a payload, or a change of it."""

    @abc.abstractmethod
    def _unload(self, loader: int) -> None:
        """Forget a payload."""

    @abc.abstractmethod
    def _read_reports(self) -> None:
        """Take in all that workers have said so far, those that are dead, too."""

    # ---- time ----

    def _pauses_ms(self) -> Iterator[int | None]:
        """Give how long the loop may sleep, for each reason; None: as long as it likes."""
        yield self._watch.pause_ms(timeout_ns for _, timeout_ns in self._state.timeouts())
        if self._retry_ns:
            yield _RETRY_MS
        if self._state.early.awaits_probe:
            yield _SLOW_PROBE_MS

    def _look_at_samples(self) -> None:
        """End workers whose sample has run for too long."""
        timeouts = self._state.timeouts()
        if timeouts:
            workers = self._workers.by_number
            watched = [(workers[number], timeout_ns) for number, timeout_ns in timeouts if number in workers]
            self._watch.look((worker.sample, timeout_ns) for worker, timeout_ns in watched if worker.stop is None)

    def _try_again(self) -> None:
        """Do what is due by now."""
        if self._retry_ns and clock.monotonic_ns() > self._retry_ns:
            self._retry_ns = 0
            self._carry_out(self._state.on_retry())
        if not self._state.early.awaits_probe:
            self._slow_ns = 0
        elif not self._slow_ns:
            self._slow_ns = clock.monotonic_ns() + _SLOW_PROBE_MS * 1_000_000
        elif clock.monotonic_ns() > self._slow_ns:
            self._carry_out(self._state.on_slow_probe())

    # ---- instructions ----

    def _carry_out(self, instructions: Iterable[s.Instruction]) -> None:
        pending = collections.deque(instructions)
        while pending:
            instruction = pending.popleft()
            if isinstance(instruction, s.ToWorker):
                message = instruction.message
                while pending and isinstance(pending[0], s.ToWorker) and pending[0].worker == instruction.worker:
                    message += pending.popleft().message  # type: ignore[union-attr]
                worker = self._workers.by_number.get(instruction.worker)
                if worker is not None:  # where it is dead, its end is told
                    fault_points.reach("supervisor.dealing")
                    worker.tickets.send(message)
            elif isinstance(instruction, s.ToTrainer):
                self._send(instruction.message)
            elif isinstance(instruction, s.Fork):
                # Behind what is pending: that may start the workers which it is about.
                pending.extend(self._start(instruction.worker, instruction.cell))
            elif isinstance(instruction, (s.Load, s.Update)):
                pending.extend(self._load(instruction))
            elif isinstance(instruction, s.Unload):
                self._unload(instruction.loader)
            elif isinstance(instruction, s.LoseTicket):
                self._lose(instruction)
            elif isinstance(instruction, s.FailTicket):
                self._fail(instruction)
            else:
                self._is_over = True

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
            was_stopped=last is not None and last.was_stopped,
            in_setup=last is not None and last.in_setup,
            max_restarts=self._max_restarts,
            node=process.node(),
        )
        message = lost.completion or encode(Notice.LOST, lost.loader)
        self._tell(message, report)

    def _fail(self, failed: s.FailTicket) -> None:
        failure = describe_timeout(
            index=failed.source_index,
            epoch=failed.epoch,
            worker=failed.worker,
            ran_s=failed.ran_ns / 1e9,
            timeout_s=failed.timeout_ns / 1e9,
            stacks=self._last_stacks,
            in_generator=failed.in_generator,
        )
        message = failed.completion or encode(Notice.SPEC_FAILED, failed.loader, failed.worker)
        self._tell(message, failure)

    # ---- workers ----

    def _start(self, number: int, cell: int) -> list[s.Instruction]:
        try:
            fault_points.reach("supervisor.forking")
            worker = self._workers.start(number, cell)
        except OSError as error:
            instructions = self._state.on_fork_failed(number)
            if self._workers.by_number:  # the others go on, and this one is tried again
                self._retry_ns = clock.monotonic_ns() + _RETRY_MS * 1_000_000
            else:
                failure = describe_failure(error, epoch=0, worker=number)
                advice = capacity.start_advice(error, self._no_descriptors)
                self._tell(encode(Notice.LOAD_FAILED, 0), (failure, advice))
            return instructions
        fault_points.reach("supervisor.forked")
        self._recorder.mark(MarkKind.STARTED, worker.pid, number, cell)
        self._send(encode(Notice.WORKER_STARTED, number, worker.pid, cell))
        return []

    def _worker_gone(self, worker: Worker) -> None:
        self._workers.bury(worker)  # reaped: only now does its cell change no more
        self._recorder.mark(MarkKind.ENDED, worker.pid, worker.number, worker.cell)
        fault_points.reach("supervisor.burying")
        # Reports it wrote before it died count: read them first, so that only real losses are redone.
        self._state.on_worker_dead(worker.number)
        self._read_reports()
        last = self._workers.last_cell(worker)
        sample = worker.sample
        self._last_death = _Death(
            pid=worker.pid,
            exit_code=last.exit_code,
            stacks=fault_in(worker.stacks.read()),
            is_out_of_memory=self._was_out_of_memory(last),
            was_stopped=worker.was_stopped,
            in_setup=last.in_setup,
        )
        worker.stacks.close()
        restarts = self._state.restarts
        now_ns = clock.monotonic_ns()
        if sample.index is None:
            instructions = self._state.on_worker_gone(worker.number, last, now_ns)
        else:
            self._last_stacks = sample.stacks_text
            last = last._replace(source_index=sample.index)
            instructions = self._state.on_worker_hung(worker.number, last, sample.ticket, sample.ran_ns, now_ns)
        was_lost = self._state.restarts > restarts  # the exit status does not tell: os._exit(0) loses work, too
        self._send(encode(Notice.WORKER_ENDED, worker.number, worker.pid, int(was_lost)))
        self._carry_out(instructions)

    def _was_out_of_memory(self, last: LastCell) -> bool:
        """Whether the kernel has killed a process for memory since the last look, and this worker was killed so."""
        before, self._oom_kills = self._oom_kills, capacity.oom_kill_count()
        return last.exit_code == -_SIGKILL and self._oom_kills > before
