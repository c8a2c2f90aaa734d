"""Which batch is next, and what is in a ticket: some tiny batches, one, or some rows of a slow one. Pure.

By the time that rows have taken; of the supervisor's state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from loaderpool.core.messages import Ticket
from loaderpool.core.records import Filling, Job, RunRecord
from loaderpool.core.slots import lendable

_CHUNK_S = 0.008  # batches that take less share a ticket. Less: messages cost as much as work. More: late first batches
_NODE_CHUNK_S = 0.064  # the same for nodes: each ticket is a call to another machine
_RANGE_S = 0.1  # a batch that takes longer is cut into ranges of rows. Less: more messages than balance is worth
_FASTER = 4  # a ticket has at most so many times the batches of what was measured: first times are no rule
_LEAST_AT_END = 4  # tickets before an epoch's end have so many batches at least, if they are tiny


class Cutter:
    """Cuts tickets, for nodes larger ones."""

    def __init__(self, tickets: Iterator[int], of_nodes: bool) -> None:
        self._tickets, self._of_nodes = tickets, of_nodes
        self._chunk_s = _NODE_CHUNK_S if of_nodes else _CHUNK_S

    def cut(self, run: RunRecord, batch: int, workers: int) -> list[Job]:
        """Return the tickets of a run's next batches, from this one on, for one of its free slots."""
        loader, plan, layout, offset, lane = run.loader, run.plan, run.loader.layout, run.free.pop(), None
        assert layout is not None
        batch_s, may_lend, count, parts = loader.row_s * plan.batch_size, lendable(len(run.sizes), workers), 1, 1
        run.window = None
        if run.lanes:
            lane = run.lanes[batch % len(run.lanes)]
            lane.turn += 1
        elif batch == run.next:
            count = self._batches_in_ticket(run, batch_s, workers)
            run.next += count
        else:  # of `again`: later batches may fill all other slots, so this one must come back even while it has views
            may_lend = 0
        run.may_lend = max(run.may_lend, may_lend)
        rows = run.total_rows(batch, count)
        if batch_s > _RANGE_S and count == 1 and layout.splits and lane is None and not self._of_nodes:
            parts = min(rows, round(batch_s / _RANGE_S))
        slot = Filling(run, offset, batch, count, parts, may_lend, rows, lane)
        epoch, of_epoch, rest = plan.locate(batch)
        place = offset, run.sizes[offset], offset in run.fresh, run.feed, 0, ()
        run.fresh.discard(offset)
        jobs = []
        for part in range(parts):
            start, stop = rows * part // parts, rows * (part + 1) // parts
            number = run.last_ticket = next(self._tickets)
            ticket = Ticket(number, loader.number, run.number, epoch, of_epoch, rest, count, start, stop, *place)
            jobs.append(Job(ticket, loader, slot, (stop - start) * loader.row_s))
        return jobs

    def _batches_in_ticket(self, run: RunRecord, batch_s: float, workers: int) -> int:
        loader, plan = run.loader, run.plan
        if run.is_whole:
            return run.stop - run.next
        if batch_s > self._chunk_s / 2 or not loader.rows_measured or loader.layout is None:
            return 1
        left = run.alike(run.next)
        # Towards the end of an epoch all workers have something to do.
        share = min(left, max(-(-left // (2 * workers)), _LEAST_AT_END))
        measured = _FASTER * max(loader.rows_measured // plan.batch_size, 1)
        most = max(1, min(loader.layout.most, int(self._chunk_s / batch_s) if batch_s else 1 << 30, share, measured))
        if not run.had:
            return most
        return next((count for count in range(1, most) if run.next + count in run.had), most)


def next_batch(run: RunRecord, worker: int, slots_of: Callable[[RunRecord], Iterator[Filling]]) -> int | None:
    """Return the batch of a run that a worker may make next; None: there is none.

    `slots_of` returns the slots of a run for which workers have tickets.
    """
    if run.again:
        return heapq.heappop(run.again)
    if not run.lanes:
        while run.next in run.had:
            run.had.remove(run.next)
            run.next += 1
        return run.next if run.next < run.stop else None
    run.window = run.window or _window(run, slots_of(run))
    before, by_home = run.window
    batch = min((by_home[home] for home in (None, worker) if home in by_home), default=None)
    return batch if batch is not None and batch < before else None


def _window(run: RunRecord, making: Iterator[Filling]) -> tuple[float, dict[int | None, int]]:
    """Return the batch before which lanes' batches may be made, and the first one of the lanes at home with a worker.

    Those at home with none are under None.
    """
    lanes, by_home, lowest = len(run.lanes), dict[int | None, int](), 1 << 1000
    for number, lane in enumerate(run.lanes):
        while lane.turn * lanes + number in run.had:
            run.had.remove(lane.turn * lanes + number)
            lane.turn += 1
        batch = lane.turn * lanes + number
        if lane.batches is None:
            by_home[lane.home] = min(batch, by_home.get(lane.home, batch))
            lowest = min(batch, lowest)
    if not run.is_in_order:  # what has a slot is taken: nothing waits for a lane
        return float("inf"), by_home
    lowest = min([lowest, *(slot.batch for slot in making)])  # of those that are not full
    return lowest + max(len(run.sizes) - run.may_lend, 1), by_home
