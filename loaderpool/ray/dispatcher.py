"""The dispatcher: what the supervisor is to the trainer, with hosts in the place of workers.

The trainer speaks to it as to a supervisor. What is made where is decided by the same pure state; the bytes that hosts
answer with are written into the trainer's slots here. How hosts are started, called and ended is behind `RayHosts`.

Runs in: the dispatcher's process, on its main thread; `News` comes from any.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import select
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from loaderpool.errors import CacheError, ClusterError, SourceError
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import HostState
from loaderpool.ray.host_messages import HostCommand, HostReport, News
from loaderpool.ray.host_record import HostRecord
from loaderpool.ray.hosted import read_bundles
from loaderpool.ray.loader_payloads import LoaderPayloads
from loaderpool.ray.trainer_pipes import TrainerPipes
from loaderpool.ray.unseen_files import UnseenFiles
from loaderpool.supervisor import instructions as s
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.state import SupervisorState
from loaderpool.system import clock
from loaderpool.transport.messages import (
    READ_BYTES,
    Command,
    Control,
    Notice,
    Report,
    Status,
    Words,
    decode_all,
    encode,
    split32,
)
from loaderpool.transport.pickling import get_object, send
from loaderpool.transport.reports import LostReport, Verdict, describe_failure

# How often clocks are looked at: for heartbeats, and tickets that wait for others to travel with.
_LOOK_MS = 250
# While no more than one slot in so many is free or to be filled, tickets may wait: a call costs all sides some 3 ms.
_SATED_SHARE = 4


class Dispatcher:
    """Reads events, asks the state, carries out its instructions; returns from `run` when all is over.

    Args:
        start: the settings of its start, as a supervisor's.
        host_timeout_s: a host that does not answer for so long is ended.
    """

    def __init__(self, start: Mapping[str, Any], host_timeout_s: float) -> None:
        self._is_first = start["first_ticket"] == 1
        self._timeout_ns = int(host_timeout_s * 1e9)
        self._state = SupervisorState(0, start["max_restarts"], start["first_ticket"], hosts=True)
        self._is_over = False
        self._looked_ns = 0
        self._poll = select.poll()
        self._trainer = TrainerPipes(start, self._poll)
        self._payloads = LoaderPayloads(self._trainer.payloads, self._trainer.arena)
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._poll.register(self._woken, select.POLLIN)
        self._records: dict[int, HostRecord] = {}
        self._to_call: dict[int, HostRecord] = {}  # of which something has changed
        self._commands = HostCommands(self._state.ledger, self._trainer.arena)
        self._losses = HostLosses(start["max_restarts"])
        self._unseen = UnseenFiles(self._records)
        self._with_new_room: list[HostRecord] = []  # of which the state is to be told
        self._hosts: Any  # `RayHosts`, or what tests have in its place

    def tell(self, news: News) -> None:
        """Have the loop look at something. Runs in: any thread."""
        self._news.put(news)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def run(self, hosts: Any) -> None:
        """Serve until the trainer says close, or dies."""
        self._hosts = hosts
        try:
            while not self._is_over and not self._trainer.is_gone:
                ready = [descriptor for descriptor, _ in self._poll.poll(_LOOK_MS)]
                self._look_at_clock()
                for descriptor in ready:
                    if descriptor == self._woken:
                        self._read_news()
                    else:
                        for words in self._trainer.answer(descriptor):
                            self._obey(words)
                self._call_hosts()
        finally:
            hosts.close()

    def _call_hosts(self, at_once: bool = False) -> None:
        """Send what is due, or all that waits. Tickets wait while most slots hold what the consumer has not taken."""
        ledger = self._state.ledger
        elsewhere = sum(len(loader.free) + loader.outstanding for loader in ledger.loaders.values())
        is_sated = not at_once and elsewhere * _SATED_SHARE < len(ledger.slots)
        for record in list(self._to_call.values()):
            while record.is_due(is_sated):
                self._hosts.exchange(record.number, *record.take_commands(clock.monotonic_ns()))
            if not record.waiting_tickets:
                del self._to_call[record.number]

    def _look_at_clock(self) -> None:
        now_ns = clock.monotonic_ns()
        if now_ns < self._looked_ns + _LOOK_MS * 1_000_000:  # there may be a thousand hosts, and turns many a second
            return
        self._looked_ns = now_ns
        self._trainer.look()
        silent_since = now_ns - self._timeout_ns
        for record in list(self._records.values()):
            if record.sent_ns and min(record.sent_ns.values()) < silent_since:
                self._lose(record, f"no answer for {self._timeout_ns / 1e9:g} s", is_silent=True)
            elif 0 < record.gap_since_ns < silent_since:
                self._lose(record, f"some answers did not arrive within {self._timeout_ns / 1e9:g} s")
        self._call_hosts(at_once=True)

    # ---- from the trainer, and from the state ----

    def _obey(self, words: Words) -> None:
        """Take in a message of the trainer."""
        kind, number = words[:2]
        if kind == Control.RESIZE:
            self._hosts.want(number)
            return
        if kind == Control.LOAD:
            self._payloads.note(number, words[5:])
        elif kind == Control.RUN_END:
            for record in self._records.values():
                if number in record.runs:
                    record.command(HostCommand.ABANDON, number)
            self._unseen.forget_run(number)
            self._tell_doubts()
        self._commands.note(words)
        self._carry_out(self._state.on_control(words))

    def _carry_out(self, instructions: Iterable[s.Instruction]) -> None:
        pending = collections.deque(instructions)
        while pending:
            instruction = pending.popleft()
            if isinstance(instruction, s.ToWorker):
                record = self._records.get(instruction.worker)
                if record is not None:
                    for words in decode_all(instruction.message):
                        self._command(record, words)
            elif isinstance(instruction, s.ToTrainer):
                self._trainer.send(instruction.message)
            elif isinstance(instruction, s.Fork):
                number = instruction.worker
                self._records[number] = record = HostRecord(number, instruction.cell, self._to_call)
                self._trainer.begin_cell(record.cell)
                self._tell_place(record)
                self._hosts.start(instruction.worker)
            elif isinstance(instruction, s.Load):
                pending.extend(self._load(instruction))
            elif isinstance(instruction, s.Update):
                self._payloads.update(instruction, self._records.values())
                pending.extend(self._state.on_loaded(instruction.loader))
            elif isinstance(instruction, s.Unload):
                self._commands.forget(instruction.loader)
                self._payloads.unload(instruction.loader, self._records.values())
            elif isinstance(instruction, s.LoseTicket):
                self._trainer.tell(*self._losses.told(instruction))
            elif isinstance(instruction, s.Close):
                self._is_over = True
            else:
                raise AssertionError(f"samples are watched by nodes: {instruction}")
            while self._with_new_room and not pending:  # behind what is pending, which is about what was dealt before
                record = self._with_new_room.pop()
                pending.extend(self._state.on_room(record.number, record.room, record.workers))

    def _load(self, load: s.Load) -> list[s.Instruction]:
        try:
            self._payloads.load(load)
        except OSError as error:
            failure = describe_failure(error, epoch=0, worker=None)
            self._trainer.tell(encode(Notice.LOAD_FAILED, load.loader), (failure, ""))
            return self._state.on_load_failed(load.loader)
        for record in self._records.values():
            if record.workers:
                self._payloads.send_all(self._hosts, record)
        return self._state.on_loaded(load.loader)

    def _command(self, record: HostRecord, words: Words) -> None:
        """Tell a host what the state tells a worker."""
        if words[0] == Command.EXIT:
            record.is_leaving = True
            self._trainer.set_state(record.cell, HostState.LEAVING)
            self._let_go(record)
            return
        self._commands.give(record, words)
        if words[0] == Command.LAYOUT:
            self._with_new_room.append(record)

    # ---- from hosts ----

    def _read_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, READ_BYTES)
        while not self._is_over and not self._news.empty():
            self._take_in(self._news.get())

    def _take_in(self, news: News) -> None:
        if news.kind == "over":
            self._end(news.value)
            return
        if news.kind == "warning":
            self._trainer.tell(encode(Notice.WARNING), news.value)
            return
        if news.kind == "hosts":
            self._carry_out(self._state.on_control((Control.RESIZE, news.value, 0, 0, 0, 0, 0, 0)))
            return
        record = self._records.get(news.host)
        if record is None:
            return  # of a host that was given up
        if news.kind == "placed":
            record.place = news.value
            self._tell_place(record)
        elif news.kind == "started":
            record.place = news.value
            if not record.is_leaving:
                self._trainer.set_state(record.cell, HostState.RUNNING)
            self._tell_place(record)
            self._tell_workers()
            self._to_call[record.number] = record
            self._payloads.send_all(self._hosts, record)
            self._carry_out(self._state.on_room(record.number, record.room, record.workers))
        elif news.kind == "answered":
            number, answers = news.value
            record.sent_ns.pop(number, None)
            self._to_call[record.number] = record
            for said, beside in record.in_order(answers):
                if said[0] == HostReport.COUNTS:
                    self._trainer.set_wait(record.cell, said[1])
                else:
                    self._answered(record, said, beside)
            self._let_go(record)
        else:
            self._lose(record, news.value)

    def _answered(self, record: HostRecord, said: tuple[int, ...], beside: Any) -> None:
        kind = said[0]
        if kind == HostReport.TICKET:
            words = record.tickets.pop(said[1])
            if said[4:]:
                self._payloads.count_cached(record.runs[words[2]], record.cell, said[4:])
            self._take_answer(record, words, said[2], said[3], beside)
        elif kind == HostReport.PROBE:
            words = record.tickets.pop(said[1])
            notice, status = (Notice.SPEC_FAILED, Status.FAILED) if said[2] else (Notice.SPEC, Status.FINISHED)
            self._trainer.send_with(encode(notice, words[2], record.number), beside)
            self._report(said[1], record, status)
        elif kind == HostReport.LOST and said[1]:
            words = record.tickets.pop(said[1])
            self._trainer.send_with(encode(Notice.LOST, words[2]), beside)
            self._report(said[1], record, Status.FAILED)
        elif kind == HostReport.LOST:
            self._trainer.send_with(encode(Notice.LOST, 0), beside)
            self._is_over = True
        elif kind == HostReport.LOAD_FAILED and not said[1]:
            self._trainer.send_with(encode(Notice.LOAD_FAILED, 0), beside)
            self._is_over = True
        elif kind == HostReport.LOAD_FAILED:
            if not self._state.ledger.loaders[said[1]].is_failed:  # of each host in turn
                self._trainer.send_with(encode(Notice.LOAD_FAILED, said[1]), beside)
                self._carry_out(self._state.on_load_failed(said[1]))
        elif kind == HostReport.NO_CACHE:
            self._refuse(said[1], CacheError, f"on node {record.place.address}: {beside}")
        else:
            self._break(ClusterError, f"on node {record.place.address}: {beside}")

    def _refuse(self, loader: int, error: type[Exception], text: str) -> None:
        self._trainer.tell(encode(Notice.BROKEN, loader), (error.__name__, text))
        self._carry_out(self._state.on_load_failed(loader))

    def _take_answer(self, record: HostRecord, words: Words, status: int, busy_ns: int, beside: Any) -> None:
        """Take in what a host has made of a ticket, unless it is doubted that it sees the files."""
        # What a generator yields is made where it stands.
        has_rows = status in (Status.FINISHED, Status.OVERSIZE) and self._state.ledger.runs[words[2]].lanes is None
        wrong = self._unseen.look(record, words, beside[1]) if has_rows else ""
        self._tell_doubts()
        if wrong is None:
            self._carry_out(self._state.on_doubted(record.number, words[1]))
            return
        if wrong:
            failure = describe_failure(SourceError(wrong), epoch=0, worker=None)
            status, beside = Status.FAILED, pickle.dumps(failure)
        self._complete(record, words, status, busy_ns, beside)

    def _tell_doubts(self) -> None:
        """Tell the state of which hosts it is doubted that they see files, and of which no longer."""
        for record in self._unseen.settled():
            self._carry_out(self._state.on_room(record.number, record.room, record.workers))

    def _complete(self, record: HostRecord, words: Words, status: int, busy_ns: int, beside: Any) -> None:
        slot = self._state.ledger.slots[words[6]]
        status = self._trainer.complete(words, record.number, status, beside, slot)
        self._trainer.count_ticket(record.cell, words, busy_ns)
        count, attempt = split32(words[4])
        self._report(words[1], record, status, busy_ns, count * split32(words[5])[1], count, attempt)

    def _report(self, ticket: int, record: HostRecord, status: int, *rest: int) -> None:
        done = encode(Report.DONE, ticket, record.number, status, *rest)
        self._carry_out(self._state.on_report(next(decode_all(done))))

    # ---- ends ----

    def _let_go(self, record: HostRecord) -> None:
        """End a host that is to leave, once it has answered what it has."""
        if record.is_leaving and not record.tickets:
            self._gone(record, is_explained=True)

    def _lose(self, record: HostRecord, why: str, is_silent: bool = False) -> None:
        """Have others make what a host had that is dead, or as good as dead."""
        where = self._losses.note(record.place.address, why, record.tickets)
        print(f"loaderpool: lost the remote workers on node {where}: {why}", file=sys.stderr, flush=True)
        self._gone(record, is_explained=False, is_silent=is_silent)

    def _gone(self, record: HostRecord, is_explained: bool, is_silent: bool = False) -> None:
        del self._records[record.number]
        self._to_call.pop(record.number, None)
        self._unseen.forget_host()
        self._payloads.forget_host(record.cell)
        self._hosts.end(record.number, is_silent)
        lost = self._state.restarts
        self._state.on_worker_dead(record.number)
        last = LastCell(has_begun=record.workers > 0)
        instructions = self._state.on_worker_gone(record.number, last, clock.monotonic_ns(), is_explained)
        lost = self._state.restarts - lost
        # Over the socket, as that it has started: or it could overtake that.
        self._trainer.send_with(encode(Notice.WORKER_ENDED, record.number, 0, lost), b"")
        self._tell_workers()
        self._carry_out(instructions)
        self._tell_doubts()

    def _tell_place(self, record: HostRecord) -> None:
        self._trainer.tell(encode(Notice.WORKER_STARTED, record.number, 0, record.cell), record.place)

    def _tell_workers(self) -> None:
        hosts = [record for record in self._records.values() if record.workers]
        if hosts:
            self._trainer.send(encode(Notice.WORKERS_WANTED, sum(host.workers for host in hosts), len(hosts)))

    def _end(self, why: str) -> None:
        """Nothing will come any more: tell the trainer why."""
        self._break(ClusterError, why if self._is_first else f"the Ray cluster was lost: {why}")

    def _break(self, error: type[Exception], text: str) -> None:
        self._trainer.tell(encode(Notice.BROKEN, 0), (error.__name__, text))
        self._is_over = True


class HostCommands:
    """Makes of a worker's commands those of hosts.

    Args:
        ledger: of the dispatcher's state.
        arena: that it shares with the trainer.
    """

    def __init__(self, ledger: Ledger, arena: Arena) -> None:
        self._ledger, self._arena = ledger, arena
        self._layouts: dict[int, Words] = {}  # by loader, as the trainer has told them
        self._slot_bytes: dict[int, int] = {}  # of the largest of each loader

    def note(self, words: Words) -> None:
        """Note what a message of the trainer says of a loader's slots."""
        kind, loader = words[:2]
        if kind == Control.LAYOUT:
            self._layouts[loader] = words
        elif kind == Control.SLOT_ADD:
            self._slot_bytes[loader] = max(self._slot_bytes.get(loader, 0), words[4])

    def forget(self, loader: int) -> None:
        """Forget a loader that was unloaded."""
        self._layouts.pop(loader, None)
        self._slot_bytes.pop(loader, None)

    def give(self, record: HostRecord, words: Words) -> None:
        """Have a host do what a worker is told, but for `Command.EXIT`."""
        kind, number = words[:2]
        if kind == Command.TICKET:
            _, _, run, first, count_attempt, rows, slot, _ = words
            loader, capacity = record.runs[run], self._ledger.slots[slot].nbytes
            if capacity > record.slot_bytes[loader]:
                record.slot_bytes[loader] = capacity
                record.command(HostCommand.SLOT_BYTES, loader, capacity)
            record.tickets[number] = words
            count, feed = split32(count_attempt)[0], self._ledger.runs[run].feed
            items = read_bundles(self._arena.map, feed, range(first, first + count)) if feed else None
            record.command(HostCommand.TICKET, number, run, first, count, split32(rows)[1], beside=items)
        elif kind == Command.PROBE:
            record.tickets[number] = words
            items = read_bundles(self._arena.map, words[4], [0]) if words[4] else None
            record.command(HostCommand.PROBE, number, words[2], words[3], words[5], beside=items)
        elif kind == Command.RUN:
            _, run, loader, epoch, per_epoch, after, _, nbytes = words
            start = bytes(self._arena.map[after : after + nbytes]) if nbytes else send(after) if after else None
            record.runs[run] = loader
            told = self._ledger.runs[run]
            lanes = 0 if told.lanes is None else len(told.lanes.next)
            rest = told.full_batches, told.last_rows
            record.command(
                HostCommand.RUN, run, loader, epoch, per_epoch, *rest, lanes, int(told.feed > 0), beside=start
            )
        elif kind == Command.RUN_OVER:
            del record.runs[number]
            record.command(HostCommand.RUN_OVER, number)
        elif kind == Command.LAYOUT:
            places, form = get_object(self._arena, words[2], words[3])
            slot_bytes = record.slot_bytes[number] = self._slot_bytes[number]
            record.command(HostCommand.LAYOUT, number, slot_bytes, *self._layouts[number][4:], beside=(places, form))


# Smaller: of a storm the error counts fewer nodes than there were. Larger only makes it longer.
_KEPT = 50


class _Loss(NamedTuple):
    address: str
    why: str
    tickets: frozenset[int]  # that the host had


class HostLosses:
    """Remembers where hosts were lost, of what, and which tickets they had.

    Args:
        max_restarts: how many may be lost, and within how many seconds; None: any number.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._max_restarts = max_restarts
        self._latest: collections.deque[_Loss] = collections.deque(maxlen=_KEPT)

    def note(self, address: str, why: str, tickets: Iterable[int]) -> str:
        """A host was lost; returns where, for people."""
        where = address or "(not chosen yet)"
        self._latest.append(_Loss(where, why, frozenset(tickets)))
        return where

    def told(self, lost: s.LoseTicket) -> tuple[bytes, LostReport]:
        """Return the notice that tells the trainer of work that is given up, and what goes with it."""
        with_it = [loss for loss in self._latest if lost.ticket in loss.tickets]
        losses = with_it if lost.verdict is Verdict.HOST and with_it else self._latest
        report = LostReport(
            verdict=lost.verdict,
            index=lost.source_index,
            epoch=lost.epoch,
            exit_code=None,
            pid=None,
            deaths=lost.deaths,
            max_restarts=self._max_restarts,
            hosts=tuple((loss.address, loss.why) for loss in losses),
        )
        return lost.completion or encode(Notice.LOST, lost.loader), report
