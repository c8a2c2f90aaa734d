"""Cuts runs into tickets: chunks of tiny batches, single batches, row ranges of slow ones, by the measured time.

Decided before a ticket is issued (rule 9, docs/internals/rules.md), from what the function was last seen to take.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from loaderpool.supervisor.records import (
    LaneRecords,
    LoaderRecord,
    PortionRecords,
    RunRecord,
    SlotRecord,
    Ticket,
    WorkerRecord,
)

# What a call returns is one object, and each costs the dispatcher some 3 ms, whatever its size (measured with Ray
# 2.60). Larger ones save little more.
GROUP_BYTES = 48 << 20
# Tickets whose batches may travel together. More of tiny batches would only wait for one another: each ticket is 64 ms
# of work.
MOST_IN_GROUP = 16


def group_of(slot_bytes: int) -> int:
    """Return how many tickets' batches may travel together, where a slot has so many bytes."""
    return max(1, min(MOST_IN_GROUP, GROUP_BYTES // max(1, slot_bytes)))


def travelling(hosts: int, slot_bytes: int) -> int:
    """Return how many tickets of so many hosts travel: a group to each, and one from it."""
    return 2 * hosts * group_of(slot_bytes)


def room_of(workers: int, slot_bytes: int) -> int:
    """Return how many tickets a host may have: what its workers are at, what waits for them, and what travels."""
    return 2 * workers + travelling(1, slot_bytes)


# So that after a death it is exact which tickets were whose; the second keeps the worker busy while the first's report
# is under way.
TICKETS_PER_WORKER = 2
# Where a worker has threads, they shall have so much to do behind the ticket that it is at. Less: they idle behind a
# call that takes much longer than others (decision 17 has the figures). More: more slots are filled ahead.
_CALLS_AHEAD_PER_THREAD = 8
# However tiny the batches, so that all commands fit a pipe of the usual size.
MOST_TICKETS = 256
# A chunk should take about this long: shorter pays for messages, and for the caches that every switch between processes
# empties; longer has batches wait for others that they have nothing to do with.
_CHUNK_NS = 8_000_000
# For hosts, to which a call costs some 0.25 ms on each side. Longer: a run's first batches come late.
_HOST_CHUNK_NS = 64_000_000
# The chunks before an epoch's end are not made smaller than this: each costs a hand-over.
_LEAST_AT_EDGE = 4
# A batch slower than the first is cut into row ranges of about the second, so that all workers share it.
_SPLIT_NS = 250_000_000
_PART_NS = 100_000_000
# A second ticket waits in a worker's pipe only where tickets are short; behind a long one it would wait in vain. Of row
# ranges one may wait as well, for many are under way at once: without it workers that wait for I/O idle after each.
_SHORT_TICKET_NS = 30_000_000


def tickets_per_worker(threads: int, calls: int) -> int:
    """Return how many tickets a worker may have, where a batch is so many calls of the function."""
    if threads == 1:
        return TICKETS_PER_WORKER
    return min(MOST_TICKETS, max(TICKETS_PER_WORKER, 1 - (-_CALLS_AHEAD_PER_THREAD * threads // max(1, calls))))


class TicketCutter:
    """The runs in their turn, and what each may have made next.

    Attributes:
        has_threads: of one of them, workers make several calls at the same time.

    Args:
        slots: all slots by number; the state's own.
        first_number: of its tickets.
        hosts: they are for hosts, which have as many of them as they have room for.
    """

    def __init__(self, slots: Mapping[int, SlotRecord], first_number: int, hosts: bool = False) -> None:
        self._slots, self._hosts = slots, hosts
        self._chunk_ns = _HOST_CHUNK_NS if hosts else _CHUNK_NS
        self._turn: collections.deque[RunRecord] = collections.deque()  # the next to be served first
        self._next_number = first_number
        self.has_threads = False

    def add(self, run: RunRecord) -> None:
        """Serve this run, too."""
        self._turn.append(run)
        self._look_for_threads()

    def remove(self, run: RunRecord) -> Ticket | None:
        """Serve it no more; what is left of a batch that was being cut into row ranges comes back."""
        self._turn.remove(run)
        self._look_for_threads()
        if run.part_slot is None:
            return None
        rows = run.rows_of(run.part_batch)
        rest = Ticket(0, run, run.loader, run.part_batch, 1, run.part_row, rows, run.part_slot)
        run.part_slot = None
        return rest

    def _look_for_threads(self) -> None:
        self.has_threads = any(run.loader.threads > 1 for run in self._turn)

    @property
    def has_runs(self) -> bool:
        """Whether there is any run."""
        return bool(self._turn)

    @property
    def has_lanes(self) -> bool:
        """Whether there are lanes: which ticket there is depends on the worker that gets it."""
        return any(run.lanes is not None for run in self._turn)

    def forget(self, worker: int) -> None:
        """Note that no generator stands in this worker any more."""
        for run in self._turn:
            if run.lanes is not None:
                run.lanes.homes = {lane: home for lane, home in run.lanes.homes.items() if home != worker}

    def cut(self, worker: WorkerRecord, workers: int) -> Ticket | None:
        """Return the next new ticket for a worker, runs taking turns; None: no run may have one now.

        Args:
            worker: where it has a ticket, the new one waits behind that, so it is none that takes long.
            workers: how many share the work.
        """
        turn = self._turn
        for _ in range(len(turn)):
            run = turn[0]
            turn.rotate(-1)
            loader = run.loader
            if loader.layout is None or loader.is_failed:
                continue
            if worker.tickets and not self._hosts and not _may_wait(worker, loader):
                continue
            if run.part_slot is not None:
                return self._cut_rows(run)
            if run.lanes is not None:
                ticket = self._cut_lane(run, run.lanes, worker, workers)
                if ticket is not None:
                    return ticket
                continue
            if run.next < run.limit and loader.free and run.held < run.quota:
                slot = self._slots[loader.free.pop()]
                slot.run = run
                run.held += 1
                if _is_split(loader):
                    run.part_slot, run.part_batch, run.part_row = slot.number, run.next, 0
                    run.next += 1
                    return self._cut_rows(run)
                return self._cut_batches(run, slot, workers)
            if run.portions is not None and run.portions.waiting and loader.free and run.held < run.quota:
                return self._cut_portion(run, run.portions)
        return None

    def _cut_portion(self, run: RunRecord, portions: PortionRecords) -> Ticket:
        slot = self._take_slot(run)
        portion = portions.place(slot.number, portions.waiting[0])
        if len(portion) == 1 and _is_split(run.loader):
            run.part_slot, run.part_batch, run.part_row = slot.number, portion.start, 0
            return self._cut_rows(run)
        return self._new_ticket(run, slot, portion.start, len(portion), 0, run.rows_of(portion.start))

    def _take_slot(self, run: RunRecord) -> SlotRecord:
        slot = self._slots[run.loader.free.pop()]
        slot.run = run
        run.held += 1
        return slot

    def _cut_lane(self, run: RunRecord, lanes: LaneRecords, worker: WorkerRecord, workers: int) -> Ticket | None:
        """Return a batch of one of the lanes that this worker may have."""
        if run.held >= run.quota or not run.loader.free:
            return None
        if run.portions is not None:
            found = lanes.portion_for(worker, workers, run.portions.waiting)
            if found is None:
                return None
            slot = self._take_slot(run)
            batch = run.portions.place(slot.number, found).start
        else:
            lane = lanes.lane_for(worker, workers, run.limit)
            if lane is None:
                return None
            slot = self._take_slot(run)
            batch = lanes.next[lane]
            lanes.next[lane] += len(lanes.next)
        return self._new_ticket(run, slot, batch, 1, 0, run.rows_of(batch))

    def _cut_batches(self, run: RunRecord, slot: SlotRecord, workers: int) -> Ticket:
        loader = run.loader
        in_epoch = run.next % run.batches_per_epoch
        count = 1
        if loader.max_chunk > 1 and loader.is_measured:
            # Chunks grow with an epoch, for the consumer waits for the first, and shrink towards its end, for the next
            # epoch's first would wait in a worker's pipe behind a large one. They also shrink towards the end of what
            # may be made, so that all workers end together.
            to_edge = run.full_batches - in_epoch
            taper = max(_LEAST_AT_EDGE, -(-to_edge // max(1, workers)))
            left = run.limit - run.next
            fair = -(-left // (TICKETS_PER_WORKER * max(1, workers)))
            by_time = self._chunk_ns // max(1, loader.batch_ns)
            count = max(1, min(loader.max_chunk, by_time, fair, in_epoch, to_edge, taper))
        for batch in run.kept:  # that one shall go to the worker that keeps some of it
            if run.next < batch < run.next + count:
                count = batch - run.next
        ticket = self._new_ticket(run, slot, run.next, count, 0, run.rows_of(run.next))
        run.next += count
        return ticket

    def _cut_rows(self, run: RunRecord) -> Ticket:
        loader = run.loader
        assert run.part_slot is not None
        rows = run.rows_of(run.part_batch)
        kept = None if run.part_row else run.kept.get(run.part_batch)
        stop = min(rows, max(run.part_row + _rows_of_part(loader), 0 if kept is None else kept.rows))
        ticket = self._new_ticket(run, self._slots[run.part_slot], run.part_batch, 1, run.part_row, stop)
        run.part_row = stop
        if stop == rows:
            run.part_slot = None
        return ticket

    def _new_ticket(self, run: RunRecord, slot: SlotRecord, first: int, count: int, start: int, stop: int) -> Ticket:
        ticket = Ticket(self.take_number(), run, run.loader, first, count, start, stop, slot.number)
        slot.tickets.append(ticket)
        return ticket

    def take_number(self) -> int:
        """Return a ticket number never used before."""
        self._next_number += 1
        return self._next_number - 1


def _may_wait(worker: WorkerRecord, loader: LoaderRecord) -> bool:
    """Whether a new ticket may lie in the worker's pipe behind those that it has."""
    if loader.threads > 1:
        calls = [ticket.calls for ticket in worker.tickets.values()]
        ahead = sum(calls) - calls[0]
        return ahead < _CALLS_AHEAD_PER_THREAD * loader.threads
    if _is_split(loader):
        is_short = _rows_of_part(loader) * loader.batch_ns <= _PART_NS * loader.batch_rows
    else:
        is_short = loader.batch_ns <= _SHORT_TICKET_NS
    return is_short and len(worker.tickets) < TICKETS_PER_WORKER


def _is_split(loader: LoaderRecord) -> bool:
    """Whether a batch is cut into row ranges."""
    return loader.can_split and loader.batch_ns > _SPLIT_NS


def _rows_of_part(loader: LoaderRecord) -> int:
    """Return how many rows such a range has: one at least, however slow."""
    return max(loader.threads, loader.batch_rows * _PART_NS // loader.batch_ns)
