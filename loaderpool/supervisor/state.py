"""The supervisor's mind: events in, instructions out, no I/O and no clock.

    trainer's Control words ─▶ on_control ─┐
    workers' Report words   ─▶ on_report  ─┼─▶ list of instructions, carried out by `engine`
    a reaped process        ─▶ on_worker_gone
    a payload unpickled     ─▶ on_loaded   ─┘

A ticket's life: due → dealt (in a worker's pipe, at most two) → answered. A slot's: free → ticketed → (the trainer's)
→ free. Invariants (ids of docs/explanation/protocol.md) are checked by `check_invariants`; tests call it after each
event.
"""

from __future__ import annotations

import collections
import dataclasses

from loaderpool.messages import Control, Notice, Order, Status, Words, pack, split32
from loaderpool.supervisor.cutting import TicketCutter
from loaderpool.supervisor.inquest import Inquest, Step
from loaderpool.supervisor.instructions import (
    Close,
    FailTicket,
    Fork,
    Instruction,
    Load,
    LoseTicket,
    ToTrainer,
    ToWorker,
    Unload,
    Update,
)
from loaderpool.supervisor.records import LastWords, LoaderRecord, RunRecord, SlotRecord, Ticket, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.worker.failures import Verdict

__all__ = ["SupervisorState"]

# Deaths in a row of workers that had no ticket and had not even begun: more means that nothing ever will work. Of those
# that waited for work when somebody killed them any number may follow one another.
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
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.slots: dict[int, SlotRecord] = {}
        self.restarts = 0
        self._cutter = TicketCutter(self.slots, first_ticket)
        self._due: collections.deque[Ticket] = collections.deque()  # to be redone, before anything new
        self._inquest = Inquest(max_restarts)
        self._idle_deaths = 0
        self._out: list[Instruction] = []

    # ---- events ----

    def on_control(self, words: Words) -> list[Instruction]:
        """The trainer said something. What it says of a loader that is gone by now is no news."""
        kind = words[0]
        if kind in _OF_LOADERS and words[_OF_LOADERS[kind]] not in self.loaders:
            return []
        if kind == Control.RELEASE:
            self._release(words[1], words[2])
        elif kind == Control.RUN_BEGIN:
            _, run, of, epoch, per_epoch, start, limit, quota = words
            state = RunRecord(run, self.loaders[of], epoch, per_epoch, start, limit, quota)
            self.runs[run] = state
            self._cutter.add(state)
        elif kind == Control.RUN_EXTEND:
            extended = self.runs.get(words[1])
            if extended is not None:
                extended.limit, extended.quota = words[2], words[3]
        elif kind == Control.RUN_END:
            self._end_run(words[1])
        elif kind == Control.SLOT_ADD:
            loader = self.loaders[words[1]]
            slot = SlotRecord(words[2], loader, words[3], words[4], lent_ticket=words[5])
            self.slots[slot.slot] = slot
            if not slot.lent_ticket:
                loader.free.append(slot.slot)
        elif kind == Control.SLOT_RETIRE:
            self._retire_slot(words[1])
        elif kind == Control.LOAD:
            _, loader_id, offset, nbytes, probe, max_deaths, timeout_ns, flags = words
            may_exclude, is_per_sample = map(bool, split32(flags))
            probe_epoch = probe - 1 if probe else None
            self.loaders[loader_id] = LoaderRecord(
                loader_id, max_deaths, probe_epoch, timeout_ns, may_exclude, is_per_sample
            )
            self._out.append(Load(loader_id, offset, nbytes))
        elif kind == Control.LAYOUT:
            self._set_layout(words)
        elif kind == Control.RESIZE:
            self.target_workers = words[1]
            self._adjust_workers()
        elif kind == Control.REDO:
            self._redo(words[1], words[2], words[3])
        elif kind == Control.UPDATE:
            self._out.append(Update(words[1], words[2], words[3]))
        elif kind == Control.PROBE:
            self._probe(self.loaders[words[1]], words[2])
        elif kind == Control.UNLOAD:
            self.loaders[words[1]].is_unloading = True
            self._finish_unload(self.loaders[words[1]])
        elif kind == Control.CLOSE:
            self._out.append(Close())
        self._deal()
        return self._take_out()

    def on_report(self, words: Words) -> list[Instruction]:
        """A worker said something."""
        self._answered(words)
        self._deal()
        return self._take_out()

    def on_loaded(self, loader_id: int) -> list[Instruction]:
        """A payload is there: fork workers that have it, and have the first of them run the probe."""
        loader = self.loaders[loader_id]
        is_first = not loader.is_loaded
        loader.is_loaded = True
        self._out.append(ToTrainer(pack(Notice.LOADED, loader_id)))
        for worker in self.workers:  # they were forked without it
            self._send_away(worker)
        if is_first and loader.probe_epoch is not None:
            self._probe(loader, loader.probe_epoch)
        self._adjust_workers(one_first=True)
        self._deal()
        self._adjust_workers()
        self._deal()
        return self._take_out()

    def on_fork_failed(self, number: int) -> list[Instruction]:
        """A worker could not be started; it is tried again when another one ends, or by `on_retry`."""
        worker = self.workers.remove(number)
        if worker is not None:
            self._due.extendleft(reversed(worker.tickets))
            self.workers.free_cell(worker.cell)
        self._deal()
        return self._take_out()

    def on_retry(self) -> list[Instruction]:
        """Start what could not be started."""
        self._adjust_workers()
        self._deal()
        return self._take_out()

    def on_worker_dead(self, number: int) -> None:
        """A worker's process has ended. Reports that it wrote before may follow, then `on_worker_gone`."""
        self.workers.bury(number)

    def on_worker_gone(self, number: int, last: LastWords, now_ns: int = 0) -> list[Instruction]:
        """A worker's process was reaped.

        Args:
            number: its number.
            last: what it left.
            now_ns: monotonic.
        """
        worker = self.workers.remove(number)
        if worker is None:
            return self._take_out()
        was_lost = bool(worker.tickets) or not worker.is_leaving
        unanswered: list[Ticket] = []
        for ticket in worker.tickets:
            if last.finished == ticket.ticket << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-4: finished on the board; the completion may or may not have been sent: send it (again).
                # One that carries bytes was sent over the socket before the note.
                if last.status in (Status.FINISHED, Status.ABANDONED):
                    self._out.append(ToTrainer(ticket.completion(Status(last.status), number)))
                self._settle(ticket)
            elif last.sending == ticket.ticket << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-6: the trainer has it or has it not; if it has, the slot is its own by now.
                self._out.append(ToTrainer(ticket.unsure()))
                self._settle(ticket)
            else:
                unanswered.append(ticket)
        for ticket in reversed(unanswered[1:]):  # they only waited
            ticket.attempt += 1
            self._due.appendleft(ticket)
        if was_lost:
            self._inquest.restarts.note(now_ns)
        if unanswered:
            self._died_over(unanswered[0], worker, last)
        self.workers.free_cell(worker.cell)
        if was_lost:
            self.restarts += 1
            self._idle_deaths = 0 if unanswered or last.has_begun else self._idle_deaths + 1
            is_storm = self._inquest.restarts.is_exceeded
            if is_storm or self._idle_deaths > _IDLE_DEATHS + self.target_workers:
                verdict = Verdict.STORM if is_storm else Verdict.BEFORE
                deaths = self._inquest.restarts.count if is_storm else self._idle_deaths
                self._out += [LoseTicket(b"", 0, 0, last.source_index, deaths, verdict), Close()]
                return self._take_out()
        self._adjust_workers()
        self._deal()
        return self._take_out()

    def on_worker_hung(
        self, number: int, last: LastWords, ticket_number: int, ran_ns: int, now_ns: int = 0
    ) -> list[Instruction]:
        """A worker was killed and reaped because its sample ran past the timeout.

        Args:
            number: its number.
            last: what it left, with the index of that sample.
            ticket_number: the ticket that it worked on.
            ran_ns: how long the sample ran.
            now_ns: monotonic.
        """
        worker = self.workers.get(number)
        ticket = worker.tickets[0] if worker is not None and worker.tickets else None
        attempt = 0 if ticket is None else ticket.ticket << 16 | ticket.attempt
        if ticket is None or ticket.ticket != ticket_number or attempt in (last.finished, last.sending):
            # It got over it in the last moment.
            return self.on_worker_gone(number, last._replace(source_index=None), now_ns)
        assert worker is not None
        assert last.source_index is not None
        index = last.source_index
        loader, run = ticket.loader, ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        if loader.may_exclude:
            ticket.deaths -= 1  # it is no mystery what to leave out
            self._exclude(loader, epoch, index, ran_ns, 0)
        else:
            self.workers.take_first(worker)
            if ticket.suspect is not None:
                self._settle(ticket)
                ticket = ticket.suspect
                self._inquest.convict(ticket)
            completion = b"" if run is None else ticket.completion(Status.FAILED, number)
            self._out.append(FailTicket(completion, loader.loader, epoch, index, ran_ns, loader.timeout_ns, number))
            self._settle(ticket)
        return self.on_worker_gone(number, last, now_ns)

    def timeouts(self) -> list[tuple[int, int]]:
        """The workers that must be watched, each with the timeout of its current sample in nanoseconds."""
        if not any(loader.timeout_ns for loader in self.loaders.values()):
            return []
        return [
            (worker.worker, worker.tickets[0].loader.timeout_ns)
            for worker in self.workers
            if worker.tickets and worker.tickets[0].loader.timeout_ns
        ]

    # ---- runs and slots ----

    def _end_run(self, run_id: int) -> None:
        run = self.runs.get(run_id)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        rest = self._cutter.remove(run)
        if rest is not None:  # nobody will make it
            self._out.append(ToTrainer(rest.completion(Status.ABANDONED, 0)))
        for ticket in [ticket for ticket in self._due if ticket.run is run]:
            self._due.remove(ticket)
            self._abandon(ticket)
        for ticket in [ticket for ticket in self._inquest.held.values() if ticket.run is run]:
            del self._inquest.held[ticket.ticket]
            self._abandon(ticket)
        self._finish_run(run)

    def _abandon(self, ticket: Ticket) -> None:
        if ticket.suspect is None:  # of trials the trainer knows nothing
            self._out.append(ToTrainer(ticket.completion(Status.ABANDONED, 0)))
        self._settle(ticket)

    def _finish_run(self, run: RunRecord) -> None:
        if not run.is_ended or run.outstanding or self.runs.get(run.run) is not run:
            return
        del self.runs[run.run]
        for worker in self.workers:
            if run.run in worker.runs:
                worker.runs.discard(run.run)
                if not worker.is_leaving:
                    self._out.append(ToWorker(worker.worker, pack(Order.RUN_OVER, run.run)))
        self._out.append(ToTrainer(pack(Notice.RUN_ENDED, run.run)))

    def _release(self, number: int, ticket_number: int) -> None:
        """Nobody looks at the slot any more. RELEASE-1: said twice, or of earlier work in it, it changes nothing."""
        slot = self.slots.get(number)
        if slot is None:
            return
        if slot.lent_ticket:
            if slot.lent_ticket != ticket_number:
                return
            slot.lent_ticket = 0
        elif slot.run is None or all(ticket.ticket != ticket_number for ticket in slot.tickets):
            return
        else:
            slot.run.held -= 1
            slot.run = None
            slot.tickets = []
        if slot.is_retiring:
            self._drop_slot(slot)
        else:
            slot.loader.free.append(number)

    def _retire_slot(self, number: int) -> None:
        slot = self.slots.get(number)
        if slot is None:
            return
        slot.is_retiring = True
        if slot.run is None and not slot.lent_ticket:
            slot.loader.free.remove(number)
            self._drop_slot(slot)

    def _drop_slot(self, slot: SlotRecord) -> None:
        del self.slots[slot.slot]
        for worker in self.workers:
            worker.slots.discard(slot.slot)
        self._out.append(ToTrainer(pack(Notice.SLOT_RETIRED, slot.slot)))

    def _redo(self, ticket_number: int, slot_number: int, count: int) -> None:
        slot = self.slots.get(slot_number)
        for at, ticket in enumerate(slot.tickets if slot is not None else ()):
            if slot is not None and ticket.ticket == ticket_number and ticket.run is not None:
                # A new one: the worker's report of the old one may still be on its way.
                again = dataclasses.replace(
                    ticket, ticket=self._cutter.take_number(), attempt=1, deaths=0, count=count or ticket.count
                )
                slot.tickets[at] = again
                ticket.run.outstanding += 1
                ticket.loader.outstanding += 1
                self._due.append(again)

    def _probe(self, loader: LoaderRecord, epoch: int) -> None:
        self._due.append(Ticket(self._cutter.take_number(), None, loader, epoch, 0, 0, 0, 0))
        loader.outstanding += 1

    def _finish_unload(self, loader: LoaderRecord) -> None:
        if loader.is_unloading and not loader.outstanding and loader.loader in self.loaders:
            del self.loaders[loader.loader]
            for number in [slot.slot for slot in self.slots.values() if slot.loader is loader]:
                del self.slots[number]
            self._due = collections.deque(ticket for ticket in self._due if ticket.loader is not loader)
            self._out += [Unload(loader.loader), ToTrainer(pack(Notice.UNLOADED, loader.loader))]

    def _set_layout(self, words: Words) -> None:
        _, loader_id, offset, nbytes, chunk_split, rows, full_batches, batch_ns = words
        loader = self.loaders[loader_id]
        loader.layout = (offset, nbytes)
        loader.max_chunk, can_split = split32(chunk_split)
        loader.can_split = bool(can_split)
        loader.batch_rows, loader.last_rows = split32(rows)
        loader.full_batches, loader.batch_ns = full_batches, batch_ns

    # ---- workers ----

    def _adjust_workers(self, one_first: bool = False) -> None:
        """Have as many workers as wanted; none before there is something loaded."""
        if not any(loader.is_loaded for loader in self.loaders.values()):
            return
        staying = self.workers.staying
        missing = self.target_workers - len(staying)
        for _ in range(min(missing, 1) if one_first else missing):
            worker = self.workers.add()
            self._out.append(Fork(worker.worker, worker.cell))
        for worker in staying[self.target_workers :]:
            self._send_away(worker)

    def _send_away(self, worker: WorkerRecord) -> None:
        if not worker.is_leaving:
            self.workers.leave(worker)
            self._out.append(ToWorker(worker.worker, pack(Order.EXIT)))

    # ---- tickets ----

    def _deal(self) -> None:
        while True:
            worker = self.workers.roomiest()
            if worker is None:
                return
            if self._due:
                ticket = self._due.popleft()
            else:
                cut = self._cutter.cut(must_be_short=bool(worker.tickets), workers=self.target_workers)
                if cut is None:
                    return
                ticket = cut
            first_worker = ticket.loader.first_worker
            if ticket.run is not None and ticket.first == 0 and first_worker is not None:
                # The trainer heard of the probe from the worker itself, perhaps before the worker's report is here.
                prober = self.workers.with_room(first_worker)
                if prober is not None:
                    worker = prober
                    ticket.loader.first_worker = None
                    ticket.uses_kept = True
            self._send(worker, ticket)

    def _send(self, worker: WorkerRecord, ticket: Ticket) -> None:
        out, number = self._out, worker.worker
        loader, run = ticket.loader, ticket.run
        if run is None:
            loader.first_worker = number
            out += [ToWorker(number, pack(Order.EXCLUDE, loader.loader, *sample)) for sample in loader.excluded]
        else:
            if loader.loader not in worker.layouts and loader.layout is not None:
                worker.layouts.add(loader.loader)
                out.append(ToWorker(number, pack(Order.LAYOUT, loader.loader, *loader.layout)))
                out += [ToWorker(number, pack(Order.EXCLUDE, loader.loader, *sample)) for sample in loader.excluded]
            if run.run not in worker.runs:
                worker.runs.add(run.run)
                told = pack(Order.RUN, run.run, loader.loader, run.first_epoch, run.batches_per_epoch)
                out.append(ToWorker(number, told))
            if ticket.slot not in worker.slots:
                worker.slots.add(ticket.slot)
                slot = self.slots[ticket.slot]
                out.append(ToWorker(number, pack(Order.SLOT, slot.slot, slot.offset, slot.nbytes)))
        self.workers.give(worker, ticket)
        out.append(ToWorker(number, ticket.order()))

    def _answered(self, words: Words) -> None:
        _, number, worker_number, status, busy_ns, rows, _, attempt = words
        worker = self.workers.get(worker_number)
        if worker is None or not worker.tickets or worker.tickets[0].ticket != number:
            return  # a report of a process already given up
        ticket = self.workers.take_first(worker)
        self._idle_deaths = 0
        if ticket.suspect is not None:
            self._tried(ticket, status, rows)
            return
        loader = ticket.loader
        if status == Status.FINISHED and rows and ticket.run is not None and not ticket.uses_kept:
            # Units that are whole elements have one "row" a batch in the plan, whatever the batch itself has.
            planned = ticket.count * (ticket.row_stop - ticket.row_start)
            batch_ns = busy_ns * loader.batch_rows // max(1, planned)
            loader.batch_ns = (3 * loader.batch_ns + batch_ns) // 4 if loader.is_measured else batch_ns
            loader.is_measured = True
        self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        """A ticket needs nothing more."""
        ticket.loader.outstanding -= 1
        if ticket.run is not None:
            ticket.run.outstanding -= 1
            self._finish_run(ticket.run)
        self._finish_unload(ticket.loader)

    # ---- deaths over tickets ----

    def _died_over(self, ticket: Ticket, worker: WorkerRecord, last: LastWords) -> None:
        index, exit_code = last.source_index, last.exit_code
        step = self._inquest.died_over(ticket, index)
        loader, run = ticket.loader, ticket.run
        if step is Step.REDO:
            self._due.appendleft(ticket)
        elif step is Step.TRY_ROWS:
            self._try_row(ticket, 0)
        elif step is Step.GIVE_UP:
            self._give_up(ticket, worker, None, Verdict.TOGETHER)
        else:
            if ticket.suspect is not None:
                self._settle(ticket)
                ticket = ticket.suspect
            if ticket.run is not None and ticket.run.is_ended:
                return  # it was abandoned with its run, while its trial ran
            self._inquest.convict(ticket)
            if loader.may_exclude and index is not None:
                self._exclude(loader, ticket.first if run is None else run.epoch_of(ticket.first), index, 0, exit_code)
                self._due.appendleft(ticket)
            else:
                self._give_up(ticket, worker, index, Verdict.ALONE)

    def _try_row(self, ticket: Ticket, row: int) -> None:
        trial = dataclasses.replace(
            ticket, ticket=self._cutter.take_number(), attempt=0, deaths=0, suspect=ticket, trial=row, lost=0
        )
        assert trial.run is not None
        trial.run.outstanding += 1
        trial.loader.outstanding += 1
        self._due.appendleft(trial)

    def _tried(self, trial: Ticket, status: int, rows: int) -> None:
        """A row ran alone, and its worker lives."""
        suspect = trial.suspect
        assert suspect is not None
        if suspect.ticket in self._inquest.held and status != Status.ABANDONED:
            if trial.trial + 1 < rows:
                self._try_row(suspect, trial.trial + 1)
            else:
                self._inquest.acquit(suspect)
                self._due.appendleft(suspect)
        self._settle(trial)

    def _exclude(self, loader: LoaderRecord, epoch: int, index: int, ran_ns: int, exit_code: int) -> None:
        """Have this sample never run again."""
        loader.excluded.append((epoch, index, ran_ns, exit_code & 0xFFFF))
        for worker in self.workers:
            if loader.loader in worker.layouts:
                self._out.append(ToWorker(worker.worker, pack(Order.EXCLUDE, loader.loader, *loader.excluded[-1])))

    def _give_up(self, ticket: Ticket, worker: WorkerRecord, index: int | None, verdict: Verdict) -> None:
        run = ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        completion = b"" if run is None else ticket.completion(Status.LOST, worker.worker)
        self._out.append(LoseTicket(completion, ticket.loader.loader, epoch, index, ticket.lost, verdict))
        self._settle(ticket)

    def _take_out(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant of docs/explanation/protocol.md does not hold."""
        for loader in self.loaders.values():  # RING-1: a slot is free or held by one run
            assert len(set(loader.free)) == len(loader.free)
            assert all(self.slots[slot].run is None for slot in loader.free)
        for run in self.runs.values():  # RING-2: no run holds more than its quota
            held = sum(1 for slot in self.slots.values() if slot.run is run)
            assert held == run.held <= max(run.quota, held if run.is_ended else 0)
        dealt = [ticket for worker in self.workers for ticket in worker.tickets]
        dealt += [*self._due, *self._inquest.held.values()]
        assert len({id(ticket) for ticket in dealt}) == len(dealt)  # TICKET-1: in one place
        for run in self.runs.values():
            assert run.outstanding == sum(1 for ticket in dealt if ticket.run is run)  # TICKET-2
        self.workers.check_invariants()
