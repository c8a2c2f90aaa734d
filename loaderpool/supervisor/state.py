"""The supervisor's mind: events in, instructions out, no I/O and no clock.

    trainer's Control words ─▶ on_control ─┐
    workers' Report words   ─▶ on_report  ─┼─▶ list of instructions, carried out by `main_loop`
    a reaped process        ─▶ on_worker_gone
    a payload unpickled     ─▶ on_loaded   ─┘

What is held by whom stands in the `Ledger`, `Dealer` decides who works on what, `Deaths` what a death means. Invariants
(ids of docs/internals/protocol.md) are checked by `check_invariants`; tests call it after each event.
"""

from __future__ import annotations

from loaderpool.supervisor.dealer import Dealer, EarlyDealer
from loaderpool.supervisor.deaths import Deaths
from loaderpool.supervisor.host_dealer import HostDealer, HostDeaths, HostRoster
from loaderpool.supervisor.instructions import (
    Close,
    Fork,
    Instruction,
    ToTrainer,
    ToWorker,
    Update,
)
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import Kept, LastCell, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.transport.messages import Command, Control, Notice, Status, Words, encode

# Where a message names a loader.
_OF_LOADERS: dict[int, int] = {
    Control.RUN_BEGIN: 2,
    Control.SLOT_ADD: 1,
    Control.LAYOUT: 1,
    Control.UPDATE: 1,
    Control.PROBE: 1,
    Control.UNLOAD: 1,
}


class SupervisorState:
    """Decides who does what next.

    Args:
        workers: how many workers there should be.
        max_restarts: how many of them may die within so many seconds; None: any number.
        first_ticket: tickets' numbers begin here, so that none of an earlier supervisor's is used again.
        hosts: it is a dispatcher's, and each worker a host, which has workers of its own.
    """

    def __init__(
        self,
        workers: int,
        max_restarts: tuple[int, float] | None = None,
        first_ticket: int = 1,
        hosts: bool = False,
    ) -> None:
        self.target_workers = workers
        self._hosts = HostRoster() if hosts else None
        self.workers: Roster = Roster() if self._hosts is None else self._hosts
        self.ledger = Ledger(self.workers, first_ticket, hosts)
        self.early = EarlyDealer(self.ledger, self.workers)
        self._dealer = (
            Dealer(self.ledger, self.workers, self.early)
            if self._hosts is None
            else HostDealer(self.ledger, self._hosts, self.early)
        )
        self._deaths = (HostDeaths if hosts else Deaths)(self.ledger, self.workers, self.early, max_restarts)

    # ---- events ----

    def on_control(self, words: Words) -> list[Instruction]:
        """Take in a message of the trainer; one about a loader that is gone by now is passed over."""
        kind, ledger = words[0], self.ledger
        if kind in _OF_LOADERS and words[_OF_LOADERS[kind]] not in ledger.loaders:
            return []
        if kind == Control.RELEASE:
            ledger.release(words[1], words[2])
        elif kind == Control.RUN_BEGIN:
            ledger.begin_run(words)
        elif kind == Control.RUN_AFTER:
            ledger.set_rest(words)
        elif kind == Control.RUN_FEED:
            ledger.set_feed(words[1], words[2])
        elif kind == Control.RUN_LANES:
            ledger.set_lanes(words[1], words[2])
        elif kind == Control.LANE_AT:
            ledger.set_lane(words[1], words[2], words[3])
        elif kind == Control.LANE_OVER:
            ledger.end_lane(words[1], words[2])
        elif kind == Control.RUN_EXTEND:
            ledger.extend_run(words[1], words[2], words[3])
        elif kind == Control.RUN_DEAL:
            ledger.deal_portion(words[1], words[2], words[3])
        elif kind == Control.RUN_END:
            ledger.end_run(words[1])
        elif kind == Control.SLOT_ADD:
            ledger.add_slot(words)
        elif kind == Control.SLOT_RETIRE:
            ledger.retire_slot(words[1])
        elif kind == Control.LOAD:
            ledger.load(words)
        elif kind == Control.LAYOUT:
            ledger.set_layout(words)
        elif kind == Control.RESIZE:
            self.target_workers = words[1]
            self._adjust_workers()
        elif kind == Control.REDO:
            ledger.redo(words[1], words[2], words[3])
        elif kind == Control.UPDATE:
            ledger.out.append(Update(words[1], words[2], words[3]))
        elif kind == Control.PROBE:
            ledger.ask_probe(words)
        elif kind == Control.UNLOAD:
            ledger.unload(ledger.loaders[words[1]])
        elif kind == Control.CLOSE:
            ledger.out.append(Close())
        self._deal()
        return self.ledger.take_out()

    def on_report(self, words: Words) -> list[Instruction]:
        """Take in a worker's report."""
        self._answered(words)
        self._deal()
        return self.ledger.take_out()

    def on_loaded(self, loader_id: int, took_ns: int = 0) -> list[Instruction]:
        """Fork workers that have a payload which is there now, and have the first of them run the probe."""
        loader = self.ledger.loaders[loader_id]
        is_first = not loader.is_loaded
        loader.is_loaded = True
        self.ledger.out.append(ToTrainer(encode(Notice.LOADED, loader_id, took_ns)))
        if self._hosts is None:
            for worker in self.workers:  # they were forked without it
                self._send_away(worker)
        elif not is_first:  # a host replaces its own workers; what they kept was made before the change
            loader.kept.clear()
        if is_first and loader.probe_epoch is not None:
            self.ledger.probe(loader, loader.probe_epoch)
        self._adjust_workers(one_first=True)
        self._deal()
        self._adjust_workers()
        self._deal()
        return self.ledger.take_out()

    def on_load_failed(self, loader_id: int) -> list[Instruction]:
        """Deal no tickets of a loader whose payload, or a change of it, could not be loaded."""
        self.ledger.loaders[loader_id].is_failed = True
        return []

    def on_fork_failed(self, number: int) -> list[Instruction]:
        """Note that a worker could not be started; it is tried again when another one ends, or by `on_retry`."""
        worker = self.workers.remove(number)
        if worker is not None:
            self.ledger.forget(number)
            self.early.drop(worker)
            self.ledger.due.extendleft(reversed(worker.tickets.values()))
            self.workers.free_cell(worker.cell)
        self._deal()
        return self.ledger.take_out()

    def on_retry(self) -> list[Instruction]:
        """Start what could not be started."""
        self._adjust_workers()
        self._deal()
        return self.ledger.take_out()

    def on_room(self, number: int, tickets: int, workers: int) -> list[Instruction]:
        """Take in how many tickets a host may have, and how many workers it has; told again where that changes."""
        assert self._hosts is not None
        self._hosts.set_room(number, tickets, workers)
        self._deal()
        return self.ledger.take_out()

    def on_doubted(self, number: int, ticket_number: int) -> list[Instruction]:
        """Have another host make a ticket that this one has answered, and that was told to have no room."""
        host = self.workers.get(number)
        ticket = None if host is None else self.workers.take(host, ticket_number)
        if ticket is not None and ticket.run is not None and ticket.run.is_ended:
            self.ledger.abandon(ticket)
        elif ticket is not None:
            ticket.attempt += 1
            self.ledger.due.appendleft(ticket)
        self._deal()
        return self.ledger.take_out()

    def on_slow_probe(self) -> list[Instruction]:
        """Have idle workers make what comes after a first probe that takes long."""
        self.early.begin()
        self._deal()
        return self.ledger.take_out()

    def on_worker_dead(self, number: int) -> None:
        """Note that a worker's process has ended. Reports that it wrote before may follow, then `on_worker_gone`."""
        self.workers.bury(number)
        self.ledger.forget(number)

    def on_worker_gone(
        self, number: int, last: LastCell, now_ns: int = 0, is_explained: bool = False
    ) -> list[Instruction]:
        """Answer for the tickets of a worker whose process was reaped.

        Args:
            number: its number.
            last: what it left.
            now_ns: monotonic.
            is_explained: it was ended for a sample that hung; so none of those that were made beside it is to blame.
        """
        worker = self.workers.remove(number)
        if worker is None:
            return self.ledger.take_out()
        self.ledger.forget(number)
        is_over = self._deaths.answer_for(worker, last, now_ns, is_explained, self.target_workers)
        self.workers.free_cell(worker.cell)
        if is_over:
            return self.ledger.take_out()
        self._adjust_workers()
        self._deal()
        return self.ledger.take_out()

    def on_worker_hung(
        self, number: int, last: LastCell, ticket_number: int, ran_ns: int, now_ns: int = 0
    ) -> list[Instruction]:
        """Answer for the tickets of a worker that was killed because its sample ran past the timeout.

        Args:
            number: its number.
            last: what it left, with the index of that sample.
            ticket_number: the ticket that it worked on.
            ran_ns: how long the sample ran.
            now_ns: monotonic.
        """
        is_explained = self._deaths.fail_hung(self.workers.get(number), last, ticket_number, ran_ns)
        if not is_explained:
            last = last._replace(source_index=None)
        return self.on_worker_gone(number, last, now_ns, is_explained)

    @property
    def restarts(self) -> int:
        """How many workers were lost."""
        return self._deaths.lost

    def timeouts(self) -> list[tuple[int, int]]:
        """Return the workers that must be watched, each with the timeout of its current sample in nanoseconds."""
        if not any(loader.timeout_ns for loader in self.ledger.loaders.values()):
            return []
        watched = ((worker.number, worker.first) for worker in self.workers)
        return [
            (number, ticket.loader.timeout_ns)
            for number, ticket in watched
            if ticket is not None and ticket.loader.timeout_ns
        ]

    # ---- workers ----

    def _adjust_workers(self, one_first: bool = False) -> None:
        """Have as many workers as wanted; none before there is something loaded."""
        if not any(loader.is_loaded for loader in self.ledger.loaders.values()):
            return
        staying = self.workers.staying
        missing = self.target_workers - len(staying)
        for _ in range(min(missing, 1) if one_first else missing):
            worker = self.workers.add()
            self.ledger.out.append(Fork(worker.number, worker.cell))
        for worker in staying[self.target_workers :]:
            self._send_away(worker)

    def _send_away(self, worker: WorkerRecord) -> None:
        if not worker.is_leaving:
            self.workers.leave(worker)
            self.ledger.forget(worker.number)
            self.ledger.out.append(ToWorker(worker.number, encode(Command.EXIT)))

    # ---- tickets ----

    def _deal(self) -> None:
        self._dealer.deal(self.target_workers, self._deaths.give_up)

    def _answered(self, words: Words) -> None:
        _, number, worker_number, status, busy_ns, rows, last_kept, attempt = words
        worker = self.workers.get(worker_number)
        ticket = None if worker is None else self.workers.take(worker, number)
        if worker is None or ticket is None:
            return  # a report of a process already given up
        self._deaths.note_answer()
        if ticket.suspect is not None:
            self._deaths.tried(ticket, status, rows)
            return
        loader = ticket.loader
        if ticket.early is not None:
            self.early.answered(ticket, worker, status, rows)
            return
        if ticket.run is None and rows:  # the last may be of another bucket, the others follow the first
            loader.kept |= {batch: Kept(worker_number, batch, 1) for batch in [*range(1, rows), last_kept]}
        if status == Status.FINISHED and rows and ticket.run is not None and not ticket.uses_kept:
            # Units that are whole elements have one "row" a batch in the plan, whatever the batch itself has.
            planned = ticket.count * (ticket.row_stop - ticket.row_start)
            batch_ns = busy_ns * loader.batch_rows // max(1, planned)
            loader.batch_ns = (3 * loader.batch_ns + batch_ns) // 4 if loader.is_measured else batch_ns
            loader.is_measured = True
        if status == Status.FAILED:
            self.ledger.stop_lane(ticket)
        self.ledger.settle(ticket)

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant of docs/internals/protocol.md does not hold."""
        self.ledger.check_invariants()
        self.workers.check_invariants()
