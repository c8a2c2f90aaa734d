"""The supervisor's mind: events in, instructions out, no I/O and no clock.

    trainer's Control words ─▶ on_control ─┐
    workers' Report words   ─▶ on_report  ─┼─▶ list of instructions, carried out by `main_loop`
    a reaped process        ─▶ on_worker_gone
    a payload unpickled     ─▶ on_loaded   ─┘

What is held by whom stands in the `Ledger`; here it is decided who works on what, and what a death means. Invariants
(ids of docs/explanation/protocol.md) are checked by `check_invariants`; tests call it after each event.
"""

from __future__ import annotations

import dataclasses

from loaderpool.supervisor.dealer import Dealer
from loaderpool.supervisor.early import EarlyDealer
from loaderpool.supervisor.inquest import Inquest, Step
from loaderpool.supervisor.instructions import (
    Close,
    FailTicket,
    Fork,
    Instruction,
    LoseTicket,
    ToTrainer,
    ToWorker,
    Update,
)
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import Kept, LastCell, LoaderRecord, Ticket, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.transport.messages import Command, Control, Notice, Status, Words, encode
from loaderpool.transport.reports import Verdict

# Deaths in a row of workers that had no ticket and had not even begun: more means that nothing ever will work. Of those
# that waited for work when they were killed any number may follow one another.
_IDLE_DEATHS = 5
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
    """

    def __init__(self, workers: int, max_restarts: tuple[int, float] | None = None, first_ticket: int = 1) -> None:
        self.target_workers = workers
        self.workers = Roster()
        self.ledger = Ledger(self.workers, first_ticket)
        self.early = EarlyDealer(self.ledger, self.workers)
        self._dealer = Dealer(self.ledger, self.workers, self.early)
        self.restarts = 0
        self._inquest = Inquest(self.ledger.held, max_restarts)
        self._idle_deaths = 0

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

    def on_loaded(self, loader_id: int) -> list[Instruction]:
        """Fork workers that have a payload which is there now, and have the first of them run the probe."""
        loader = self.ledger.loaders[loader_id]
        is_first = not loader.is_loaded
        loader.is_loaded = True
        self.ledger.out.append(ToTrainer(encode(Notice.LOADED, loader_id)))
        for worker in self.workers:  # they were forked without it
            self._send_away(worker)
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
            self.ledger.due.extendleft(reversed(worker.tickets))
            self.workers.free_cell(worker.cell)
        self._deal()
        return self.ledger.take_out()

    def on_retry(self) -> list[Instruction]:
        """Start what could not be started."""
        self._adjust_workers()
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
        was_lost = bool(worker.tickets) or not worker.is_leaving
        was_early = self.early.drop(worker)  # no consumer asked for it, and tickets behind it only waited
        unanswered: list[Ticket] = []
        for ticket in worker.tickets:
            if last.finished == ticket.number << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-4: finished on the board; the completion may or may not have been sent: send it (again).
                # One that carries bytes was sent over the socket before the note.
                if last.status in (Status.FINISHED, Status.ABANDONED):
                    self.ledger.out.append(ToTrainer(ticket.completion(Status(last.status), number)))
                self.ledger.settle(ticket)
            elif last.sending == ticket.number << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-6: the trainer has it or has it not; if it has, the slot is its own by now.
                self.ledger.out.append(ToTrainer(ticket.unsure()))
                self.ledger.settle(ticket)
            else:
                unanswered.append(ticket)
                ticket.is_isolated |= not is_explained
        for ticket in reversed(unanswered if was_early else unanswered[1:]):  # they only waited
            ticket.attempt += 1
            self.ledger.due.appendleft(ticket)
        if was_lost and not was_early:
            self._inquest.restarts.note(now_ns)
        if unanswered and not was_early:
            self._died_over(unanswered[0], worker, last)
        self.workers.free_cell(worker.cell)
        if was_lost:
            self.restarts += 1
            self._idle_deaths = 0 if unanswered or last.has_begun else self._idle_deaths + 1
            is_storm = self._inquest.restarts.is_exceeded
            if is_storm or self._idle_deaths > _IDLE_DEATHS + self.target_workers:
                verdict = Verdict.STORM if is_storm else Verdict.BEFORE
                deaths = self._inquest.restarts.count if is_storm else self._idle_deaths
                self.ledger.out += [LoseTicket(b"", 0, 0, last.source_index, deaths, verdict), Close()]
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
        worker = self.workers.get(number)
        ticket = worker.tickets[0] if worker is not None and worker.tickets else None
        attempt = 0 if ticket is None else ticket.number << 16 | ticket.attempt
        if (
            ticket is None
            or ticket.number != ticket_number
            or attempt in (last.finished, last.sending)  # it got over it in the last moment
            or (ticket.run is not None and ticket.run.is_ended)  # the answer matters no more
            or ticket.early is not None  # nor here: its turn will tell
        ):
            return self.on_worker_gone(number, last._replace(source_index=None), now_ns)
        assert worker is not None
        assert last.source_index is not None
        index = last.source_index
        loader, run = ticket.loader, ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        if loader.may_exclude and not last.in_generator:
            ticket.deaths -= 1  # it is no mystery what to leave out
            self._exclude(loader, epoch, index, ran_ns, 0)
        else:
            self.workers.take_first(worker)
            if ticket.suspect is not None:
                self.ledger.settle(ticket)
                ticket = ticket.suspect
                self._inquest.convict(ticket)
            completion = b"" if run is None else ticket.completion(Status.FAILED, number)
            self.ledger.out.append(
                FailTicket(
                    completion, loader.number, epoch, index, ran_ns, loader.timeout_ns, number, last.in_generator
                )
            )
            self.ledger.stop_lane(ticket)
            self.ledger.settle(ticket)
        return self.on_worker_gone(number, last, now_ns, is_explained=True)

    def timeouts(self) -> list[tuple[int, int]]:
        """Return the workers that must be watched, each with the timeout of its current sample in nanoseconds."""
        if not any(loader.timeout_ns for loader in self.ledger.loaders.values()):
            return []
        return [
            (worker.number, worker.tickets[0].loader.timeout_ns)
            for worker in self.workers
            if worker.tickets and worker.tickets[0].loader.timeout_ns
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
        self._dealer.deal(self.target_workers, self._give_up)

    def _answered(self, words: Words) -> None:
        _, number, worker_number, status, busy_ns, rows, last_kept, attempt = words
        worker = self.workers.get(worker_number)
        if worker is None or not worker.tickets or worker.tickets[0].number != number:
            return  # a report of a process already given up
        ticket = self.workers.take_first(worker)
        self._idle_deaths = 0
        if ticket.suspect is not None:
            self._tried(ticket, status, rows)
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

    # ---- deaths over tickets ----

    def _died_over(self, ticket: Ticket, worker: WorkerRecord, last: LastCell) -> None:
        if ticket.run is not None and ticket.run.is_ended:  # a trial's suspect was abandoned with its run
            self.ledger.abandon(ticket)
            return
        index, exit_code = last.source_index, last.exit_code
        step = self._inquest.died_over(ticket, index, last.in_generator)
        loader, run = ticket.loader, ticket.run
        if step is Step.REDO:
            self.ledger.due.appendleft(ticket)
        elif step is Step.TRY_ROWS:
            self._try_row(ticket, 0)
        elif step is Step.GIVE_UP:
            self._give_up(ticket, worker, None, Verdict.TOGETHER)
        else:
            if ticket.suspect is not None:
                self.ledger.settle(ticket)
                ticket = ticket.suspect
            self._inquest.convict(ticket)
            if loader.may_exclude and index is not None and not last.in_generator:
                self._exclude(loader, ticket.first if run is None else run.epoch_of(ticket.first), index, 0, exit_code)
                self.ledger.due.appendleft(ticket)
            else:
                self._give_up(ticket, worker, index, Verdict.ALONE)

    def _try_row(self, ticket: Ticket, row: int) -> None:
        trial = dataclasses.replace(
            ticket, number=self.ledger.cutter.take_number(), attempt=0, deaths=0, suspect=ticket, trial=row, lost=0
        )
        self.ledger.due.appendleft(self.ledger.opened(trial))

    def _tried(self, trial: Ticket, status: int, rows: int) -> None:
        """Note that a row ran alone and its worker lives."""
        suspect = trial.suspect
        assert suspect is not None
        if suspect.number in self.ledger.held and status != Status.ABANDONED:
            if trial.trial + 1 < rows:
                self._try_row(suspect, trial.trial + 1)
            else:
                self._inquest.acquit(suspect)
                self.ledger.due.appendleft(suspect)
        self.ledger.settle(trial)

    def _exclude(self, loader: LoaderRecord, epoch: int, index: int, ran_ns: int, exit_code: int) -> None:
        """Have this sample never run again."""
        sample = epoch, index, ran_ns, exit_code & 0xFFFF
        loader.excluded.append(sample)
        command = encode(Command.EXCLUDE, loader.number, *sample)
        informed = [worker.number for worker in self.workers if loader.number in worker.layouts]
        self.ledger.out += [ToWorker(number, command) for number in informed]

    def _give_up(
        self, ticket: Ticket, worker: WorkerRecord, index: int | None = None, verdict: Verdict = Verdict.ALONE
    ) -> None:
        run = ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        completion = b"" if run is None else ticket.completion(Status.LOST, worker.number)
        self.ledger.out.append(LoseTicket(completion, ticket.loader.number, epoch, index, ticket.lost, verdict))
        self.ledger.stop_lane(ticket)
        self.ledger.settle(ticket)

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant of docs/explanation/protocol.md does not hold."""
        self.ledger.check_invariants()
        self.workers.check_invariants()
