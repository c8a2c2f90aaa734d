"""The supervisor's books: loaders, runs, slots and tickets, who holds what, and what follows when one of them ends.

A ticket's life: due → dealt (in a worker's pipe, at most two) → settled. A slot's: free → ticketed → (the trainer's)
→ free. A run or loader is gone when it was ended and no ticket of it is out.
"""

from __future__ import annotations

import collections
import dataclasses

from loaderpool.supervisor.instructions import Instruction, Load, ToTrainer, ToWorker, Unload
from loaderpool.supervisor.records import LaneRecords, LoaderRecord, PortionRecords, RunRecord, SlotRecord, Ticket
from loaderpool.supervisor.roster import Roster
from loaderpool.supervisor.scheduler import TicketCutter
from loaderpool.transport.messages import Command, Notice, Status, Words, encode, split32


class Ledger:
    """Knows who holds what. What others must be told of it is added to `out`.

    Attributes:
        loaders: by number.
        runs: by number.
        slots: by number.
        cutter: makes new tickets of the runs.
        due: tickets to be dealt before anything new.
        held: tickets by number that no worker has while their rows are tried one by one, or a host is emptied for them.
        out: instructions, in their order.

    Args:
        workers: are told of runs and slots that end.
        first_ticket: tickets' numbers begin here.
        hosts: the workers are hosts.
    """

    def __init__(self, workers: Roster, first_ticket: int, hosts: bool = False) -> None:
        self._workers, self._hosts = workers, hosts
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.slots: dict[int, SlotRecord] = {}
        self.cutter = TicketCutter(self.slots, first_ticket, hosts)
        self.due: collections.deque[Ticket] = collections.deque()
        self.held: dict[int, Ticket] = {}
        self.out: list[Instruction] = []

    def take_out(self) -> list[Instruction]:
        """Return the instructions so far, to be carried out now."""
        out, self.out = self.out, []
        return out

    # ---- tickets ----

    def probe(self, loader: LoaderRecord, epoch: int, batch: int = 0) -> None:
        """Have the first samples of an epoch made, for their spec; or one whole batch of it."""
        ticket = self.opened(Ticket(self.cutter.take_number(), None, loader, epoch, 0, batch, 0, 0))
        loader.probed_epoch = epoch
        if not batch:
            loader.probe = ticket
        self.due.append(ticket)

    def redo(self, ticket_number: int, slot_number: int, count: int) -> None:
        """Have a ticket made again, of which the trainer could use the first `count` batches only; 0: nothing of it."""
        slot = self.slots.get(slot_number)
        for at, ticket in enumerate(slot.tickets if slot is not None else ()):
            if slot is not None and ticket.number == ticket_number and ticket.run is not None:
                # A new one: the worker's report of the old one may still be on its way.
                again = dataclasses.replace(
                    ticket, number=self.cutter.take_number(), attempt=1, deaths=0, count=count or ticket.count
                )
                slot.tickets[at] = again
                if ticket.run.lanes is not None:  # it may be different this time
                    ticket.run.lanes.failed.discard(again.first % len(ticket.run.lanes.next))
                self.due.append(self.opened(again))

    def opened(self, ticket: Ticket) -> Ticket:
        """Count a ticket that must be settled before its run and its loader can be over; returns it."""
        ticket.loader.outstanding += 1
        if ticket.run is not None:
            ticket.run.outstanding += 1
        return ticket

    def hold(self, tickets: list[Ticket]) -> None:
        """Keep tickets that are to be dealt alone until a host is empty for them, before those that wait already."""
        if tickets:
            waiting = dict(self.held)
            self.held.clear()
            self.held.update({ticket.number: ticket for ticket in tickets} | waiting)

    def settle(self, ticket: Ticket) -> None:
        """Count a ticket as settled: it needs nothing more."""
        ticket.loader.outstanding -= 1
        if ticket.run is not None:
            ticket.run.outstanding -= 1
            self._finish_run(ticket.run)
        elif ticket is ticket.loader.probe:
            ticket.loader.probe = None
        self._finish_unload(ticket.loader)

    def abandon(self, ticket: Ticket) -> None:
        """Drop a ticket whose run was ended."""
        if ticket.suspect is None:  # of trials the trainer knows nothing
            self.out.append(ToTrainer(ticket.completion(Status.ABANDONED, 0)))
        self.settle(ticket)

    def forget(self, worker: int) -> None:
        """Note that no generator stands in this worker any more, and that it keeps nothing."""
        self.cutter.forget(worker)
        for loader in self.loaders.values():
            loader.kept = {batch: kept for batch, kept in loader.kept.items() if kept.worker != worker}

    # ---- runs ----

    def begin_run(self, words: Words) -> None:
        """Begin a run, as Control.RUN_BEGIN says."""
        _, number, of, epoch, per_epoch, start, limit, quota = words
        run = RunRecord(number, self.loaders[of], epoch, per_epoch, start, limit, quota)
        self.runs[number] = run
        self.cutter.add(run)

    def set_rest(self, words: Words) -> None:
        """Note where a run's epoch begins, as Control.RUN_AFTER says."""
        _, number, after, full_batches, last_rows, nbytes, *_ = words
        run = self.runs.get(number)
        if run is not None:
            run.after, run.full_batches, run.last_rows = (after, nbytes), full_batches, last_rows

    def set_feed(self, number: int, feed: int) -> None:
        """Note where a run's stream lies, as Control.RUN_FEED says."""
        run = self.runs.get(number)
        if run is not None:
            run.feed = feed

    def set_lanes(self, number: int, lanes: int) -> None:
        """Note how many lanes a run has, as Control.RUN_LANES says."""
        run = self.runs.get(number)
        if run is not None:
            run.lanes = LaneRecords([run.next + (lane - run.next) % lanes for lane in range(lanes)])

    def set_lane(self, number: int, lane: int, batch: int) -> None:
        """Note where a lane begins, as Control.LANE_AT says."""
        run = self.runs.get(number)
        if run is not None and run.lanes is not None:
            run.lanes.next[lane] = batch

    def end_lane(self, number: int, lane: int) -> None:
        """Make no more batches of a lane, as Control.LANE_OVER says."""
        run = self.runs.get(number)
        if run is not None and run.lanes is not None:
            run.lanes.over.add(lane)

    def stop_lane(self, ticket: Ticket) -> None:
        """Stop the generator of a ticket that failed: all that it would make after it would fail as well."""
        lanes = None if ticket.run is None else ticket.run.lanes
        if lanes is not None:
            lanes.failed.add(ticket.first % len(lanes.next))

    def is_stopped(self, ticket: Ticket) -> bool:
        """Whether it lies behind a ticket of its generator that failed, so that the consumer never comes to it."""
        lanes = None if ticket.run is None else ticket.run.lanes
        return lanes is not None and ticket.suspect is None and ticket.first % len(lanes.next) in lanes.failed

    def deal_portion(self, number: int, first: int, count: int) -> None:
        """Have a portion of a run made, as Control.RUN_DEAL says."""
        run = self.runs.get(number)
        if run is not None and not run.is_ended and count:
            if run.portions is None:
                run.portions = PortionRecords()
            run.portions.deal(range(first, first + count))

    def extend_run(self, number: int, limit: int, quota: int) -> None:
        """Let more of a run be made, in more slots."""
        run = self.runs.get(number)
        if run is not None:
            run.limit, run.quota = limit, quota

    def end_run(self, number: int) -> None:
        """End a run of which the trainer has abandoned the rest."""
        run = self.runs.get(number)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        rest = self.cutter.remove(run)
        if rest is not None:  # no worker will make it
            self.out.append(ToTrainer(rest.completion(Status.ABANDONED, 0)))
        for ticket in [ticket for ticket in self.due if ticket.run is run]:
            self.due.remove(ticket)
            self.abandon(ticket)
        for ticket in [ticket for ticket in self.held.values() if ticket.run is run]:
            del self.held[ticket.number]
            self.abandon(ticket)
        self._finish_run(run)

    def _finish_run(self, run: RunRecord) -> None:
        if not run.is_ended or run.outstanding or self.runs.get(run.number) is not run:
            return
        del self.runs[run.number]
        for worker in self._workers:
            if run.number in worker.runs:
                worker.runs.discard(run.number)
                if not worker.is_leaving:
                    self.out.append(ToWorker(worker.number, encode(Command.RUN_OVER, run.number)))
        self.out.append(ToTrainer(encode(Notice.RUN_ENDED, run.number)))

    # ---- slots ----

    def add_slot(self, words: Words) -> None:
        """Add a slot to its loader's ring, as Control.SLOT_ADD says."""
        loader = self.loaders[words[1]]
        slot = SlotRecord(words[2], loader, words[3], words[4], lent_ticket=words[5])
        self.slots[slot.number] = slot
        if not slot.lent_ticket:
            loader.free.append(slot.number)

    def release(self, number: int, ticket_number: int) -> None:
        """Take back a slot whose last view has died. RELEASE-1: said twice, or of earlier work, it does nothing."""
        slot = self.slots.get(number)
        if slot is None:
            return
        if slot.lent_ticket:
            if slot.lent_ticket != ticket_number:
                return
            slot.lent_ticket = 0
        elif slot.run is None or all(ticket.number != ticket_number for ticket in slot.tickets):
            return
        else:
            slot.run.held -= 1
            if slot.run.portions is not None:
                slot.run.portions.release(number)
            slot.run = None
            slot.tickets = []
        if slot.is_retiring:
            self._drop_slot(slot)
        else:
            slot.loader.free.append(number)

    def retire_slot(self, number: int) -> None:
        """Give a slot's memory back as soon as it is not in use."""
        slot = self.slots.get(number)
        if slot is None:
            return
        slot.is_retiring = True
        if slot.run is None and not slot.lent_ticket:
            slot.loader.free.remove(number)
            self._drop_slot(slot)

    def _drop_slot(self, slot: SlotRecord) -> None:
        del self.slots[slot.number]
        for worker in self._workers:
            worker.slots.discard(slot.number)
        self.out.append(ToTrainer(encode(Notice.SLOT_RETIRED, slot.number)))

    # ---- loaders ----

    def set_layout(self, words: Words) -> None:
        """Take a loader's layout, as Control.LAYOUT says."""
        _, number, offset, nbytes, chunk_split, rows, full_batches, batch_ns = words
        loader = self.loaders[number]
        loader.layout = (offset, nbytes)
        loader.max_chunk, threads_split = split32(chunk_split)
        if not self._hosts:  # a host shares a batch among its own workers and their threads
            loader.threads, loader.can_split = threads_split >> 1, bool(threads_split & 1)
        loader.batch_rows, loader.last_rows = split32(rows)
        loader.full_batches, loader.batch_ns = full_batches, batch_ns

    def load(self, words: Words) -> None:
        """Begin a loader, as Control.LOAD says."""
        _, loader, offset, nbytes, probe, max_deaths, timeout_ns, flags = words
        may_exclude, is_per_sample = map(bool, split32(flags))
        probe_epoch = probe - 1 if probe else None
        self.loaders[loader] = LoaderRecord(loader, max_deaths, probe_epoch, timeout_ns, may_exclude, is_per_sample)
        self.out.append(Load(loader, offset, nbytes))

    def ask_probe(self, words: Words) -> None:
        """Have a probe made, now or when the loader is loaded, as Control.PROBE says."""
        _, number, epoch, feed, batch, *_ = words
        loader = self.loaders[number]
        loader.feed = feed
        if loader.is_loaded:
            self.probe(loader, epoch, batch)
        else:
            loader.probe_epoch = epoch

    def unload(self, loader: LoaderRecord) -> None:
        """Close a loader; it goes with its last ticket."""
        loader.is_unloading = True
        self._finish_unload(loader)

    def _finish_unload(self, loader: LoaderRecord) -> None:
        if loader.is_unloading and not loader.outstanding and loader.number in self.loaders:
            del self.loaders[loader.number]
            for number in [slot.number for slot in self.slots.values() if slot.loader is loader]:
                del self.slots[number]
            for ticket in [ticket for ticket in self.due if ticket.loader is loader]:
                self.due.remove(ticket)
            self.out += [Unload(loader.number), ToTrainer(encode(Notice.UNLOADED, loader.number))]

    def check_invariants(self) -> None:
        """Raise AssertionError where an invariant of docs/internals/protocol.md does not hold."""
        for loader in self.loaders.values():  # RING-1: a slot is free or held by one run
            assert len(set(loader.free)) == len(loader.free)
            assert all(self.slots[slot].run is None for slot in loader.free)
        for run in self.runs.values():  # RING-2: no run holds more than its quota
            held = sum(1 for slot in self.slots.values() if slot.run is run)
            assert held == run.held <= max(run.quota, held if run.is_ended else 0)
            if run.portions is not None and not run.is_ended:  # DEAL-1: no batch is out twice, each in its slot
                portions = [*run.portions.waiting, *run.portions.in_slots.values()]
                assert sum(map(len, portions)) == len(run.portions.out)
                assert run.portions.out == set().union(*portions)
                for slot, portion in run.portions.in_slots.items():
                    assert self.slots[slot].run is run
                    assert all(ticket.first == portion.start for ticket in self.slots[slot].tickets)
        dealt = [ticket for worker in self._workers for ticket in worker.tickets.values()]
        dealt += [*self.due, *self.held.values()]
        assert len({id(ticket) for ticket in dealt}) == len(dealt)  # TICKET-1, HOST-1: in one place
        for run in self.runs.values():
            assert run.outstanding == sum(1 for ticket in dealt if ticket.run is run)  # TICKET-2
