"""Deals tickets: which worker gets which one, and what it must be told before it.

What is due again comes first, then what the scheduler cuts; where there is no run yet, calls are made early.
"""

from __future__ import annotations

from collections.abc import Callable

from loaderpool.supervisor.instructions import ToWorker
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import Kept, LoaderRecord, Ticket, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.supervisor.scheduler import MOST_TICKETS, TICKETS_PER_WORKER
from loaderpool.transport.messages import Command, Status, encode


class EarlyDealer:
    """Says which worker makes which call early.

    Args:
        ledger: has the loaders, and takes notice of the tickets.
        workers: of which the idle ones are asked.
    """

    def __init__(self, ledger: Ledger, workers: Roster) -> None:
        self._ledger, self._workers = ledger, workers

    @property
    def awaits_probe(self) -> bool:
        """Whether a first probe runs that was not yet said to take long."""
        return any(loader.probe and not loader.is_slow for loader in self._ledger.loaders.values())

    def begin(self) -> None:
        """Begin to make calls early: the probes that run take long."""
        for loader in self._ledger.loaders.values():
            loader.is_slow |= loader.probe is not None

    def next(self) -> tuple[WorkerRecord, Ticket] | None:
        """A call to be made early and the idle worker for it; None where a run is there, whose tickets would wait."""
        if self._ledger.cutter.has_runs:
            return None
        for loader in self._ledger.loaders.values():
            if loader.probe is None or not loader.is_slow or loader.is_failed or loader.is_unloading:
                continue
            for worker in self._workers.roomy(1):
                kept = worker.early
                if kept is None or kept.rows == kept.of or loader.kept.get(kept.batch) is not kept:
                    kept = self._next_batch(loader, worker)
                if kept is not None:
                    return worker, self._ticket(loader, loader.probe.first, kept)
        return None

    def _next_batch(self, loader: LoaderRecord, worker: WorkerRecord) -> Kept | None:
        while loader.next_early in loader.kept:  # a probe's
            loader.next_early += 1
        if loader.next_early >= loader.end_early:
            return None
        kept = worker.early = Kept(worker.number, loader.next_early, 0, is_early=True)
        loader.kept[kept.batch] = kept
        loader.next_early += 1
        return kept

    def _ticket(self, loader: LoaderRecord, epoch: int, kept: Kept) -> Ticket:
        kept.rows += 1
        number = self._ledger.cutter.take_number()
        return self._ledger.opened(Ticket(number, None, loader, epoch, 0, kept.batch, 0, 0, early=kept.rows - 1))

    def answered(self, ticket: Ticket, worker: WorkerRecord, status: int, calls: int) -> None:
        """Note that a call was made, or that it was none to be made early.

        Args:
            ticket: the call.
            worker: who has answered.
            status: FINISHED; else no batch shall be begun behind those that are.
            calls: how many the batch has; 0: nothing was made, and no more of it shall be.
        """
        loader, kept = ticket.loader, worker.early
        assert kept is not None
        kept.of = calls
        if not calls:
            kept.rows -= 1
            kept.of = kept.rows
            if not kept.rows and loader.kept.get(kept.batch) is kept:
                del loader.kept[kept.batch]
        if status != Status.FINISHED:
            loader.end_early = 0
        self._ledger.settle(ticket)

    def drop(self, worker: WorkerRecord) -> bool:
        """Drop the call that a worker which is gone was to make early; returns whether there was one.

        No batch is begun behind those that are, for the call may end the next worker, too. Its turn will tell.
        """
        ticket = worker.first
        if ticket is None or ticket.early is None:
            return False
        del worker.tickets[ticket.number]
        ticket.loader.end_early = 0
        self._ledger.settle(ticket)
        return True


class Dealer:
    """Gives tickets to workers, as a part of `SupervisorState`.

    Args:
        ledger: has what is due, and takes what is sent.
        workers: who there is.
        early: says what is made early.
    """

    _tells_slots = True

    def __init__(self, ledger: Ledger, workers: Roster, early: EarlyDealer) -> None:
        self._ledger, self._workers, self._early = ledger, workers, early

    def deal(self, workers: int, give_up: Callable[[Ticket, WorkerRecord], None]) -> None:
        """Give tickets to workers until none has room, or nothing is to be done.

        Args:
            workers: how many there shall be, among whom the rows of a batch are shared.
            give_up: is called for a ticket whose generator has failed before, with the worker that has room.
        """
        if self._ledger.cutter.has_lanes:  # shared among those that are there: one that cannot be started takes none
            workers = len(self._workers.staying)
        while True:
            worker = self._workers.roomiest()
            if worker is None and (self._ledger.due or not self._ledger.cutter.has_threads):
                return
            if worker is not None and self._ledger.due:
                ticket = self._ledger.due.popleft()
                if self._ledger.is_stopped(ticket):
                    give_up(ticket, worker)
                    continue
                worker = self._home_of(ticket) or worker
            else:
                found = self._cut(worker, workers)
                if found is None:
                    break
                worker, ticket = found[0], self._ledger.opened(found[1])
                if self._ledger.is_stopped(ticket):  # a portion of a dispatcher's, which waits for an answer
                    give_up(ticket, worker)
                    continue
            worker = self._keeper_of(ticket) or worker
            self._send(worker, ticket)
        while (made_early := self._early.next()) is not None:
            self._send(*made_early)

    def _keeper_of(self, ticket: Ticket) -> WorkerRecord | None:
        """Return the worker that keeps some of the ticket's rows since there was no form, if it has room.

        What it has made early is little work that is left, so many tickets of that may wait for it.
        """
        run = ticket.run
        if run is None or ticket.row_start:
            return None
        kept = run.kept.get(ticket.first)
        if kept is None or (kept.is_early and run.lanes is not None):  # a generator stays at home
            return None
        # The trainer heard of the probe from the worker itself, perhaps before the worker's report is here.
        keeper = self._workers.with_room(kept.worker, MOST_TICKETS if kept.is_early else TICKETS_PER_WORKER)
        if keeper is not None:
            del ticket.loader.kept[kept.batch]
            ticket.uses_kept = True
        return keeper

    def _home_of(self, ticket: Ticket) -> WorkerRecord | None:
        """Return the worker in which the ticket's generator stands, if it has room."""
        lanes = None if ticket.run is None else ticket.run.lanes
        home = None if lanes is None else lanes.homes.get(ticket.first % len(lanes.next))
        return None if home is None else self._workers.with_room(home)

    def _cut(self, roomiest: WorkerRecord | None, workers: int) -> tuple[WorkerRecord, Ticket] | None:
        """Return a new ticket, and who shall have it: the worker with most room, or the one where a generator stands.

        Or, where all have as many tickets as others need, one whose threads want more.
        """
        cutter = self._ledger.cutter
        ticket = None if roomiest is None else cutter.cut(roomiest, workers)
        if roomiest is not None and ticket is not None:
            return roomiest, ticket
        if not (cutter.has_lanes or cutter.has_threads):
            return None
        for worker in self._workers.roomy(MOST_TICKETS if cutter.has_threads else TICKETS_PER_WORKER):
            ticket = cutter.cut(worker, workers)
            if ticket is not None:
                return worker, ticket
        return None

    def _send(self, worker: WorkerRecord, ticket: Ticket) -> None:
        out, number = self._ledger.out, worker.number
        loader, run = ticket.loader, ticket.run
        if run is None:
            if ticket.early is None:
                loader.kept[ticket.row_start] = Kept(number, ticket.row_start, 1)
            out += [ToWorker(number, encode(Command.EXCLUDE, loader.number, *sample)) for sample in loader.excluded]
        else:
            if loader.number not in worker.layouts and loader.layout is not None:
                worker.layouts.add(loader.number)
                out.append(ToWorker(number, encode(Command.LAYOUT, loader.number, *loader.layout)))
                out += [ToWorker(number, encode(Command.EXCLUDE, loader.number, *sample)) for sample in loader.excluded]
            if run.number not in worker.runs:
                worker.runs.add(run.number)
                after, nbytes = run.after
                told = encode(
                    Command.RUN,
                    run.number,
                    loader.number,
                    run.first_epoch,
                    run.batches_per_epoch,
                    after,
                    run.feed,
                    nbytes,
                )
                out.append(ToWorker(number, told))
            if ticket.slot not in worker.slots and self._tells_slots:
                worker.slots.add(ticket.slot)
                slot = self._ledger.slots[ticket.slot]
                out.append(ToWorker(number, encode(Command.SLOT, slot.number, slot.offset, slot.nbytes)))
        if run is not None and run.lanes is not None:
            run.lanes.settle(ticket.first, worker)
        self._workers.give(worker, ticket)
        out.append(ToWorker(number, ticket.command()))
