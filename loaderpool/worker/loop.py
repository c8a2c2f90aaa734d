"""A worker's life: read tickets from its pipe, fill slots, report.

    supervisor ──Command─▶ [ticket pipe] ──▶ worker ──rows──▶ slot
                                              │ 1 FINISHED on the board
                                              │ 2 completion (pipe, or socket where bytes go with it)
                                              └ 3 report to the supervisor

The order of the three steps is PROTO-4 (docs/internals/protocol.md): after a death *finished* on the board means
that the supervisor may send the completion again, and anything else that none exists.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import select
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.layout import VaryingLayout
from loaderpool.memory.recorder import CallKind
from loaderpool.plan.base import Start
from loaderpool.system import clock, fault_points, machine
from loaderpool.transport.messages import (
    READ_BYTES,
    Command,
    Notice,
    Report,
    Status,
    Words,
    decode_all,
    encode,
    join32,
    split32,
)
from loaderpool.transport.pickling import get_object, receive
from loaderpool.transport.pipes import send_descriptor, send_with_bytes, write_message
from loaderpool.transport.reports import LOST_PIPES_STATUS, Failure, describe_failure
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.jobs import Abandoned, Job, WorkFailed
from loaderpool.worker.lanes import LaneItems
from loaderpool.worker.work import Work


class Channels(Protocol):
    """What the loop asks of them. Runs in: a worker, on its main thread."""

    def read(self) -> bytes:
        """Return commands, whole ones; empty: there is no supervisor any more. Blocks until there are some."""

    def has_more(self) -> bool:
        """Whether `read` would not block."""

    def report(self, message: bytes) -> None:
        """Tell the supervisor."""

    def complete(self, message: bytes) -> None:
        """Tell the trainer that a ticket was answered."""

    def send(self, message: bytes, extra: bytes) -> None:
        """Tell the trainer something, with bytes of any length."""

    def hold(self, layout: VaryingLayout, failures: bytes) -> Any:
        """Put a batch that does not fit its slot, and failures behind it, where `send_held` finds them.

        Raises:
            MemoryLimitError: the machine has no room for it.
            OSError: there is no descriptor for it.
        """

    def send_held(self, message: bytes, held: Any) -> None:
        """Send a message with what is held. Ownership: takes it."""

    def are_intact(self) -> bool:
        """Whether they still lead where they led at the beginning (rule 10)."""


class _Held(NamedTuple):
    """A memory file with a batch."""

    descriptor: int
    batch_bytes: int


class WorkerChannels:
    """The descriptors that a worker of the supervisor's owns.

    Args:
        tickets: read end of its pipe.
        reports: write end, shared by all workers.
        completions: write end, shared by all workers and the supervisor.
        to_trainer: the trainer has the other end.
    """

    def __init__(self, tickets: int, reports: int, completions: int, to_trainer: socket.socket) -> None:
        self._tickets, self._reports, self._completions, self._socket = tickets, reports, completions, to_trainer
        self._poll = select.poll()
        self._poll.register(tickets, select.POLLIN)
        mine = (tickets, reports, completions, to_trainer.fileno())
        self._identities = [(descriptor, machine.file_identity(descriptor)) for descriptor in mine]

    def read(self) -> bytes:
        return os.read(self._tickets, READ_BYTES)

    def has_more(self) -> bool:
        return bool(self._poll.poll(0))

    def report(self, message: bytes) -> None:
        write_message(self._reports, message)

    def complete(self, message: bytes) -> None:
        write_message(self._completions, message)

    def send(self, message: bytes, extra: bytes) -> None:
        send_with_bytes(self._socket, message, extra)

    def hold(self, layout: VaryingLayout, failures: bytes) -> _Held:
        descriptor = machine.create_memory_file("oversize")
        try:
            nbytes = layout.nbytes + len(failures)
            os.ftruncate(descriptor, nbytes)
            machine.reserve(descriptor, 0, nbytes)
            with mmap.mmap(descriptor, nbytes) as view:
                layout.write(view, 0)
                view[layout.nbytes :] = failures
        except BaseException:
            os.close(descriptor)
            raise
        return _Held(descriptor, layout.nbytes)

    def send_held(self, message: bytes, held: _Held) -> None:
        try:
            send_descriptor(self._socket, message, held.descriptor, held.batch_bytes)
        finally:
            os.close(held.descriptor)

    def are_intact(self) -> bool:
        return all(machine.file_identity(descriptor) == identity for descriptor, identity in self._identities)


_ASIDE: dict[int, CallKind] = {
    Command.TRY: CallKind.ALONE,
    Command.EARLY: CallKind.EARLY,
    Command.PROBE: CallKind.PROBE,
}
# Faults for single pages of a slot cost more than its first batch from about here on.
_LARGE_SLOT_BYTES = 1 << 20


class _Run(NamedTuple):
    loader: int
    first_epoch: int
    batches_per_epoch: int
    after: Start  # where its epoch begins
    feed: int  # where the table of its stream lies; 0: there is none


class WorkerLoop:
    """Runs tickets until told to exit, or until the supervisor's end of the pipe is gone.

    Runs in: a worker. Blocks: in `read` on the ticket pipe while there is nothing to do.
    """

    def __init__(
        self, worker: int, cell: int, arena: Arena, channels: Channels, payloads: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._worker, self._cell, self._arena, self._channels = worker, cell, arena, channels
        self._numbers = arena.board.numbers
        self._base = Board.base(cell)
        self._recorder = arena.recorder.worker(cell)
        self._payloads = payloads
        self._works: dict[int, Work] = {}
        self._runs: dict[int, _Run] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        self._commands: collections.deque[Words] = collections.deque()  # read, and not obeyed yet
        self._begun: collections.deque[Words] = collections.deque()  # tickets before those, at which threads are

    def run(self) -> None:
        """Serve until the end."""
        self._numbers[self._base + Field.PID] = os.getpid()
        commands, begun = self._commands, self._begun
        while True:
            fault_points.reach("worker.idle")
            waited = clock.monotonic_ns()
            data = self._channels.read()
            waited = clock.monotonic_ns() - waited
            self._numbers[self._base + Field.WAIT_NS] += waited
            if self._recorder is not None:
                self._recorder.waited_ns = waited
            if not data:
                return
            commands.extend(decode_all(data))
            while begun or commands:  # obeying one may find more
                if not self._obey(begun.popleft() if begun else commands.popleft()):
                    return

    def _look_ahead(self) -> bool:
        """Have threads begin with tickets that lie behind the one that is being filled; whether more may come.

        A command of another kind is obeyed in its turn, and nothing behind it begins before.
        """
        commands = self._commands
        while True:
            while commands:
                words = commands[0]
                if words[0] == Command.TICKET:
                    if not self._begin(words):
                        return False
                    self._begun.append(words)
                elif words[0] in (Command.RUN, Command.SLOT):  # what a ticket behind them needs
                    self._obey(words)
                else:
                    return False
                commands.popleft()
            if not self._channels.has_more():
                return True
            self._check_pipes()
            data = self._channels.read()
            if not data:
                return False
            commands.extend(decode_all(data))

    def _begin(self, words: Words) -> bool:
        run = self._runs[words[2]]
        work = self._works.get(run.loader)
        if work is None:
            return False
        offset, capacity = self._slots[words[6]]
        return work.begin(_job(words, run), self._arena.map, offset, capacity)

    def _obey(self, words: Words) -> bool:
        kind = words[0]
        if kind == Command.TICKET:
            self._ticket(words)
        elif kind == Command.RUN:
            after = get_object(self._arena, words[5], words[7]) if words[7] else words[5]
            self._runs[words[1]] = _Run(words[2], words[3], words[4], after, words[6])
        elif kind == Command.RUN_OVER:
            run = self._runs.pop(words[1], None)
            if run is not None and not any(same == run for same in self._runs.values()):
                self._forget_epoch(run)
        elif kind == Command.SLOT:
            self._slots[words[1]] = (words[2], words[3])
            if words[3] >= _LARGE_SLOT_BYTES:
                machine.map_pages(self._arena.map, words[2], words[3])
        elif kind == Command.LAYOUT:
            _, pickled = get_object(self._arena, words[2], words[3])
            form, is_given = receive(pickled)
            with contextlib.suppress(WorkFailed):  # there is no payload: the answer to the ticket will say so
                self._work(words[1]).set_form(form, is_given)
        elif kind == Command.EXCLUDE:
            with contextlib.suppress(WorkFailed):
                self._work(words[1]).exclude(
                    epoch=words[2], index=words[3], ran_s=words[4] / 1e9, exit_code=_signed16(words[5])
                )
        elif kind in _ASIDE:
            self._call_aside(words)
        elif kind == Command.EXIT:
            return False
        return True

    def _call_aside(self, words: Words) -> None:
        """Make calls whose results go into no slot, or not yet."""
        kind, begun_ns = words[0], clock.monotonic_ns()
        if self._recorder is not None:
            self._recorder.ticket = words[1]
        if kind == Command.TRY:
            self._try(words)
        elif kind == Command.EARLY:
            self._make_early(*words[1:6])
        else:
            self._probe(ticket=words[1], loader=words[2], epoch=words[3], feed=words[4], batch=words[5])
        if self._recorder is not None:
            self._recorder.note_call(begun_ns, clock.monotonic_ns() - begun_ns, 0, _ASIDE[kind])

    def _forget_epoch(self, run: _Run) -> None:
        """End the generators of an epoch that was abandoned."""
        work = self._works.get(run.loader)
        if work is not None and isinstance(work.items, LaneItems):
            work.items.forget(run.first_epoch)

    def _work(self, loader: int) -> Work:
        """Return the loader's work; raises WorkFailed where its payload has to be loaded here and cannot be."""
        work = self._works.get(loader)
        if work is None:
            payload = self._payloads[loader]
            work = self._works[loader] = Work(
                payload,
                self._numbers,
                self._base,
                self._worker,
                shared=self._arena.map,
                call_clock=CallClock(self._arena.call_times, self._cell, loader, self._recorder),
            )
            work.look_ahead = self._look_ahead
        return work

    def _probe(self, ticket: int, loader: int, epoch: int, feed: int, batch: int) -> None:
        import cloudpickle

        self._numbers[self._base + Field.TICKET] = ticket
        others: tuple[int, ...] = ()
        try:
            work = self._work(loader)
            work.ensure_setup()
            probe = work.probe(epoch, feed, batch)
            found, others = cloudpickle.dumps(probe), probe.other_batches
            status, notice = Status.FINISHED, Notice.SPEC
        except WorkFailed as error:
            found, status, notice = cloudpickle.dumps(error.failure), Status.FAILED, Notice.SPEC_FAILED
        self._check_pipes()
        self._numbers[self._base + Field.INDEX] = 0
        self._channels.send(encode(notice, loader, self._worker), found)
        self._channels.report(encode(Report.DONE, ticket, self._worker, status, 0, len(others), max(others, default=0)))

    def _make_early(self, ticket: int, loader: int, epoch: int, batch: int, call: int) -> None:
        """Make one call whose turn will come. What fails is not told: then it will fail again."""
        self._numbers[self._base + Field.TICKET] = ticket
        calls: int | None = None
        try:
            work = self._work(loader)
            work.ensure_setup()
            calls = work.make_early(epoch, batch, call)
        except WorkFailed:  # of the setup hook, or of loading
            pass
        self._check_pipes()
        self._numbers[self._base + Field.INDEX] = 0
        status = Status.ABANDONED if calls is None else Status.FINISHED
        self._channels.report(encode(Report.DONE, ticket, self._worker, status, 0, calls or 0))

    def _try(self, words: Words) -> None:
        """Make one row of a ticket that ended workers, alone: this process lives, or it does not."""
        _, ticket, run_id, first_batch, count_which, rows, begin_with, _ = words
        count, which = split32(count_which)
        run = self._runs[run_id]
        epoch, batch = divmod(first_batch, run.batches_per_epoch)
        job = Job(run_id, run.first_epoch + epoch, batch, count, *split32(rows), after=run.after, feed=run.feed)
        self._numbers[self._base + Field.TICKET] = ticket
        status = Status.FINISHED
        total = 0
        try:
            work = self._work(run.loader)
            work.ensure_setup()
            total = work.try_alone(job, which, begin_with - 1 if begin_with else None)
        except Abandoned:
            status = Status.ABANDONED
        except WorkFailed:  # of the setup hook, or of loading
            pass
        self._check_pipes()
        self._numbers[self._base + Field.INDEX] = 0
        self._channels.report(encode(Report.DONE, ticket, self._worker, status, 0, total))

    def _ticket(self, words: Words) -> None:
        _, ticket, run_id, first_batch, count_attempt, rows, slot, _ = words
        count, attempt = split32(count_attempt)
        run = self._runs[run_id]
        fault_points.reach("worker.ticket_taken")
        board, base = self._numbers, self._base
        board[base + Field.TICKET] = ticket
        if self._recorder is not None:
            self._recorder.ticket = ticket
        started = clock.monotonic_ns()
        row_count = batches_ended = 0
        failure_bytes = b""
        held: Any = None
        try:
            work = self._work(run.loader)
            work.ensure_setup()
            offset, capacity = self._slots[slot]
            job = _job(words, run)
            filled = work.fill(job, self._arena.map, offset, capacity)
            if filled.row_failures:
                failure_bytes = _dumps(filled.row_failures)
            status = Status.FINISHED
            if filled.oversize is not None:
                held = self._channels.hold(filled.oversize, failure_bytes)
                status = Status.OVERSIZE
            batches_ended = count if work.items.ends_batch(job) else 0
            row_count = filled.rows
        except Abandoned:
            status = Status.ABANDONED
        except WorkFailed as error:
            status, failure_bytes = Status.FAILED, _dumps(error.failure)
        except (MemoryError, OSError) as error:  # no room for the batch, or no descriptor for its file
            status = Status.FAILED
            failure_bytes = _dumps(describe_failure(error, epoch=run.first_epoch, worker=self._worker))
        busy = clock.monotonic_ns() - started
        self._check_pipes()
        fault_points.reach("worker.before_note")
        board[base + Field.INDEX] = 0
        board[base + Field.SAMPLES] += row_count
        board[base + Field.BATCHES] += batches_ended
        board[base + Field.BUSY_NS] += busy
        completion = encode(
            Notice.COMPLETION, ticket, run_id, first_batch, count_attempt, rows, slot, join32(status, self._worker)
        )
        if status == Status.OVERSIZE or failure_bytes:
            # The bytes are the completion: one message carries both, so no death falls between them (PROTO-6).
            # SYNC: stored before the first byte is sent; pairs with Processes.last_words, after a death.
            board[base + Field.SENDING] = ticket << 16 | attempt
            fault_points.reach("worker.before_sending")
            self._send_large(completion, held, failure_bytes)
            fault_points.reach("worker.after_sending")
            board[base + Field.STATUS] = status
            board[base + Field.FINISHED] = ticket << 16 | attempt
        else:
            board[base + Field.STATUS] = status
            # SYNC: the rows are stored before this word; pairs with Processes.last_words, after a death.
            board[base + Field.FINISHED] = ticket << 16 | attempt
            fault_points.reach("worker.before_completion")
            self._channels.complete(completion)
        fault_points.reach("worker.before_report")
        self._channels.report(encode(Report.DONE, ticket, self._worker, status, busy, row_count, count, attempt))
        fault_points.reach("worker.after_report")
        if self._recorder is not None:
            epoch, batch = divmod(first_batch, run.batches_per_epoch)
            place = (run.first_epoch + epoch, batch, count, *split32(rows), slot, attempt)
            published_ns = clock.monotonic_ns()
            self._recorder.note_ticket(run.loader, run_id, started, started + busy, published_ns, place, status)

    def _check_pipes(self) -> None:
        """End this process where the function has closed or replaced our descriptors (rule 10), or has forked it."""
        end_stray()
        if not self._channels.are_intact():
            os._exit(LOST_PIPES_STATUS)

    def _send_large(self, completion: bytes, held: Any, failures: bytes) -> None:
        if held is None:
            self._channels.send(completion, failures)
        else:
            self._channels.send_held(completion, held)


def _job(words: Words, run: _Run) -> Job:
    """Return the job of a Command.TICKET."""
    _, _, run_id, first_batch, count_attempt, rows, _, is_isolated = words
    count, attempt = split32(count_attempt)
    epoch, batch = divmod(first_batch, run.batches_per_epoch)
    epoch += run.first_epoch
    return Job(run_id, epoch, batch, count, *split32(rows), attempt, run.after, run.feed, is_isolated=bool(is_isolated))


def _signed16(word: int) -> int:
    return word - (1 << 16) if word >> 15 else word


def _dumps(value: Failure | Any) -> bytes:
    import pickle

    return pickle.dumps(value, protocol=5)
