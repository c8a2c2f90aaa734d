"""Slots of each run, and the tickets for them. Pure; part of the supervisor's state.

A slot holds several tiny batches, or one batch. Several workers can make a slow batch: each ticket
is then a range of its rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from loaderpool.memory.arena import PAGE_BYTES, Extent, ExtentMap
from loaderpool.memory.layout import fixed_chunk
from loaderpool.supervisor.records import (
    MOST_TICKETS,
    Filling,
    Instruction,
    Job,
    Layout,
    ReturnPages,
    RunRecord,
    ToMain,
)
from loaderpool.transport.messages import Status, Ticket

# A run has at least 32 slots if they take less than this in all.
_FEW_BYTES = 64 << 20
# The same limit if a slot holds more than `_MANY_BATCHES` batches, because the first use of the
# pages takes time, too.
_MANY_BATCHES_BYTES = 8 << 20
_MANY_BATCHES = 64
# Slots for the consumer: five or six batches that `tf.data` holds with prefetch(2), and a few that
# are ready.
_AT_CONSUMER = 8
# Batches share a ticket up to this expected time. Smaller: messages cost as much as the work.
# Larger: the first batches arrive late.
_CHUNK_S = 0.008
_NODE_CHUNK_S = 0.064  # the same for nodes, where each ticket is a call to another machine
# A batch that takes longer than this is cut into ranges of rows. Smaller: the extra messages cost
# more than the better balance saves.
_RANGE_S = 0.1
# A ticket has at most this times the number of batches that were measured, because the first times
# are not typical.
_FASTER = 4
# Slots that stay free for runs that start later. A quarter of the memory stays free, too. Smaller:
# a run beside others has few slots, or none and an error. Larger: with hundreds of workers, each
# has fewer than two slots.
_FOR_OTHERS = 32
_LEAST_AT_END = 4  # least number of tiny batches in a ticket near the end of an epoch
# Least and greatest number of tickets that a node may have. Each ticket has a slot on the node.
_NODE_TICKETS, _MOST_NODE_TICKETS = 4, 256
# A larger slot is first used only by a worker without another ticket of the run. Smaller:
# workers are idle for longer than the first use of the pages takes. Larger: this use, 0.8 ms per
# MiB, delays the first batches, and takes memory that may never be needed.
_LARGE_BYTES = 1 << 20
# Large slots for each worker that a run uses without a wait. The consumer reads one while the
# worker writes the other. Smaller: workers wait at the start. Larger: more slots have a slow first
# use.
_LARGE_SLOTS_AT_ONCE = 2
# Number of runs that must be able to have all their slots at the same time. Smaller: more tiny
# batches share a slot. Larger: tiny batches cost more.
_RUNS = 4
# If batches differ in their rows, a slot fits the largest batch, but at most this many times the
# mean batch. Smaller: more batches exceed their slot, and are sent in files. With 4, this happens
# to at most one batch in four. Larger: slots take more memory, most of which is unused.
_LARGER = 4
LEAST_SLOTS = 2  # a worker fills one while the consumer has views of the other


def slots_of(slot_bytes: int, most: int, workers: int, room: int) -> int:
    """Return the number of slots that a run should have.

    Each worker fills one slot while its next tickets wait, and the consumer has views of others. If
    slots are small, there are more of them, so that one slow sample does not stop all workers.

    Args:
        slot_bytes: Size of a slot.
        most: Number of batches that fit a slot.
        workers: Number of workers.
        room: Number of tickets that a worker may have.
    """
    few = _MANY_BATCHES_BYTES if most > _MANY_BATCHES else _FEW_BYTES
    return max(room * workers + _AT_CONSUMER, min(max(32, 4 * workers), few // slot_bytes))


def chunk_within(limit: int, slot_bytes: int, chunk: int, workers: int, room: int) -> int:
    """Return the number of tiny batches that may share a slot within a memory limit, at least 1.

    Args:
        limit: Limit of the memory for a loader's slots in bytes.
        slot_bytes: Size of a slot for `chunk` batches.
        chunk: Number of batches that would share a slot without a limit.
        workers: Number of workers.
        room: Number of tickets that a worker may have.
    """
    wanted = slots_of(slot_bytes, chunk, workers, room)
    return max(1, min(chunk, chunk * limit // (slot_bytes * wanted * _RUNS)))


def in_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def size_slots(run: RunRecord, workers: int) -> None:
    """Choose the size of a run's slots, if batches differ in their numbers of rows.

    Each run has its own slot size, because another epoch may have larger batches. A batch that does
    not fit into a slot is sent in a separate file.
    """
    layout = run.loader.layout
    if layout is None or layout.rows is None or run.sized is not None:
        return
    rows, usual, limit = layout.rows, run.plan.usual_rows, layout.limit_bytes
    batch_bytes = rows.bytes_of(usual)
    chunk = fixed_chunk(batch_bytes)
    chunk = chunk_within(limit, batch_bytes * chunk, chunk, workers, layout.room)
    most_rows = max(usual * chunk, min(run.plan.batch_size, _LARGER * usual))
    most_rows = min(most_rows, rows.rows_in(limit // LEAST_SLOTS - PAGE_BYTES))
    size = in_pages(rows.bytes_of(most_rows))
    run.sized = layout._replace(slot_bytes=size, max_chunk=chunk, most_rows=most_rows)


def tickets_of_node(workers: int) -> int:
    """Return the number of tickets that a node with this number of workers may have."""
    return min(max(_NODE_TICKETS, MOST_TICKETS * workers), _MOST_NODE_TICKETS)


def lendable(slots: int, workers: int) -> int:
    """Return the number of a run's slots that may have views.

    The rest is one slot for each worker and one for the next batch, or half of the slots if that is
    fewer.
    """
    return max(slots - min(workers + 1, (slots + 1) // 2), 0)


def _most_of(slots: int) -> int:
    """Return the maximum number of slots for one run, if a quarter stays free for later runs."""
    return slots - max(slots // 4, int(slots > 2))


class Slots:
    """The slots of all runs, at most `most`. A run that cannot have a slot is removed from `runs`.

    Attributes:
        free_bytes: Free memory of the machine, as the supervisor has measured it last.
        kept_bytes: Bytes of pages that ended runs have left in the file for later runs.
    """

    def __init__(
        self,
        memory: ExtentMap,
        most: int,
        runs: dict[int, RunRecord],
        say: Callable[[Instruction], None],
    ) -> None:
        self.free_bytes, self.kept_bytes = 1 << 62, 0
        self._memory, self.most, self.runs, self._say = memory, most, runs, say

    def give(self, run: RunRecord, workers: int) -> None:
        """Give a run the slots that it should have for this number of workers, up to its share.

        The third run of a loader gets a third of the remaining memory, because other runs never
        return slots before their end. After a run has ended, runs with too few slots get more. If a
        run has no slot, it waits for an ended run whose slots are still written to. If there is
        none, the main process gets `Status`.
        """
        size_slots(run, workers)
        layout = run.layout
        if layout is None or run.is_ended:
            return
        size, has_some = layout.slot_bytes, run.slots > 0
        run.slots_wanted = (
            slots_of(size, layout.max_chunk, workers, layout.room)
            if run.demand is None
            else tickets_of_node(workers)
        )
        of_loader = [
            each.slots
            for each in self.runs.values()
            if each.loader.of == run.loader.of and not each.is_ended
        ]
        limit, nbytes = (
            layout.limit_bytes // size,
            min(self._memory.largest, self.free_bytes + self.kept_bytes),
        )
        share = min(run.slots_wanted, max(_most_of(limit) // len(of_loader), 1))
        # The last slot of all is for a run that has none, so `has_some` is subtracted.
        by_memory = min(limit - sum(of_loader), _most_of(nbytes // size)) - has_some
        by_number = self.most - sum(each.slots for each in self.runs.values()) - has_some
        by_number -= min(by_number // 2, _FOR_OTHERS)
        more = min(share - run.slots, -(-by_memory // len(of_loader)), by_number)
        if more > 0:
            offset = self._memory.take(more * size).offset
            kept = min(more * size, self.kept_bytes)
            self.kept_bytes -= kept
            self.free_bytes -= more * size - kept
            new = [offset + number * size for number in reversed(range(more))]
            run.slots += more
            run.fresh.extend(new)
        elif not has_some and not any(each.making for each in self.runs.values() if each.is_ended):
            del self.runs[run.number]
            self._say(ToMain(Status(run.number, b"")))

    def give_back(self, run: RunRecord, returns_pages: bool) -> None:
        """Release the unused slots of an ended run, which have neither a writer nor views.

        Args:
            run: The ended run.
            returns_pages: Return the pages to the system, too, because the loader was closed.
        """
        unused, layout = [*run.free, *run.fresh], run.layout
        size = 0 if layout is None else layout.slot_bytes
        for offset in unused:
            self._memory.give_back(Extent(offset, size))
            if returns_pages:
                self._say(ReturnPages(offset, size))
        if not returns_pages:
            self.kept_bytes += size * len(run.free)
        run.slots -= len(unused)
        run.free.clear()
        run.fresh.clear()

    def return_kept(self) -> None:
        """Return the pages of all free parts of the memory file to the system."""
        self.kept_bytes = 0
        for hole in self._memory.holes():
            self._say(ReturnPages(*hole))


def needs_large_fresh_slot(run: RunRecord) -> bool:
    """Return True if the next ticket of a run would be the first use of a large slot.

    This use takes long, so the slot is only for a worker without a ticket of this run. A run begins
    with few such slots, and uses another one only if a wait has shown that it is needed.
    """
    layout = run.layout
    if run.free or layout is None or layout.slot_bytes <= _LARGE_BYTES:
        return False
    # A worker with threads makes several batches at once, so it may be idle while it has tickets.
    return bool(run.fresh) and layout.room <= MOST_TICKETS


def has_used_few_slots(run: RunRecord, workers: int) -> bool:
    """Return True if a run has used few slots, so it may use a large fresh one without a wait."""
    return len(run.writers) < _LARGE_SLOTS_AT_ONCE * workers


class Cutter:
    """Cuts tickets. Tickets for nodes are larger.

    Args:
        tickets: Provides the numbers of tickets.
        of_nodes: True if the workers are nodes.
        hands_over: True if a worker may read items for another one.
    """

    def __init__(self, tickets: Iterator[int], of_nodes: bool, hands_over: bool) -> None:
        self._tickets, self._of_nodes, self._hands_over = tickets, of_nodes, hands_over
        self._chunk_s = _NODE_CHUNK_S if of_nodes else _CHUNK_S

    def cut(self, run: RunRecord, batch: int, workers: int, worker: int) -> list[Job]:
        """Take an unused slot of a run, and return the jobs that fill it, from this batch on.

        Args:
            run: The run.
            batch: Number of the first batch.
            workers: Number of processes that make rows.
            worker: Number of the worker that gets the first job.
        """
        loader, plan, layout, lane = run.loader, run.plan, run.layout, None
        assert layout is not None
        is_fresh = not run.free
        offset = _taken(run, layout, worker)
        batch_s, may_lend, count, ranges = (
            loader.row_s * plan.usual_rows,
            lendable(run.slots, workers),
            1,
            1,
        )
        epoch, of_epoch, rest = plan.locate(batch)
        run.window = None
        if run.demand is not None:
            count, run.last_rows = run.demand.pop(batch)
            run.stop = batch + count
        if run.lanes:
            lane = run.lanes[batch % len(run.lanes)]
            lane.turn += 1
        elif run.demand is None and batch == run.next:
            count = self._batches_in_ticket(run, of_epoch, batch_s, workers)
            run.next += count
        elif run.demand is None:
            # A batch of `again`. Later batches may fill all other slots, so the consumer must copy
            # this one and return its slot.
            may_lend = 0
        run.may_lend = max(run.may_lend, may_lend)
        batch_rows = () if layout.rows is None else plan.batch_rows(batch, count)
        rows, part_rows = sum(batch_rows) or run.total_rows(batch, count), max(layout.range_rows, 1)
        parts = -(-rows // part_rows)
        if count == 1 and batch_rows:
            # A batch that does not fit into a slot is not split, because its file has one writer.
            batch_s = loader.row_s * rows * (rows <= layout.most_rows)
        if len(set(batch_rows)) == 1:
            batch_rows = ()  # a long message costs as much as 50 tiny batches
        if (
            batch_s > _RANGE_S
            and count == 1
            and layout.range_rows
            and lane is None
            and not self._of_nodes
        ):
            ranges = min(parts, round(batch_s / _RANGE_S))
        slot = run.making[offset] = Filling(
            run, offset, batch, count, ranges, may_lend, rows, lane, batch_rows
        )
        # If some workers have no lane, they make rows of items that others read.
        hands_over = (
            self._hands_over
            and lane is not None
            and len({each.home for each in run.lanes if each.batches is None}) < workers
        )
        place = offset, layout.slot_bytes, is_fresh, run.feed, 0, (), hands_over
        jobs = []
        for number in range(ranges):
            start, stop = (
                min(rows, parts * each // ranges * part_rows) for each in (number, number + 1)
            )
            run.last_ticket = next(self._tickets)
            ticket = Ticket(
                run.last_ticket,
                loader.number,
                run.number,
                epoch,
                of_epoch,
                rest,
                count,
                start,
                stop,
                *place,
            )
            jobs.append(Job(ticket, loader, slot, (stop - start) * loader.row_s))
        return jobs

    def _batches_in_ticket(
        self, run: RunRecord, of_epoch: int, batch_s: float, workers: int
    ) -> int:
        loader, plan, layout = run.loader, run.plan, run.layout
        if batch_s > self._chunk_s / 2 or not loader.rows_measured or layout is None:
            return 1
        left = run.alike(run.next)
        # `share` limits the ticket so that all workers have work near the end of an epoch, and so
        # that the first batches arrive soon.
        share = min(left, max(-(-left // (2 * workers)), _LEAST_AT_END), max(of_epoch, 1))
        measured = _FASTER * max(loader.rows_measured // plan.usual_rows, 1)
        in_time = int(self._chunk_s / batch_s) if batch_s else 1 << 30
        most = max(1, min(layout.max_chunk, in_time, share, measured))
        if layout.rows is not None:
            totals = itertools.accumulate(plan.batch_rows(run.next, most))
            most = max(1, sum(total <= layout.most_rows for total in totals))
        if not run.had:
            return most
        return next((count for count in range(1, most) if run.next + count in run.had), most)


def _taken(run: RunRecord, layout: Layout, worker: int) -> int:
    """Take an unused slot of a run for a worker, and return its offset.

    A worker gets a large slot that it has written before, if there is one, because the first write
    of a process to each page takes time.
    """
    if layout.slot_bytes <= _LARGE_BYTES:
        return (run.free or run.fresh).pop()
    own = [offset for offset in run.free if run.writers.get(offset) == worker]
    offset = (own or run.free or run.fresh)[-1]
    (run.free or run.fresh).remove(offset)
    return offset


def next_batch(run: RunRecord, worker: int) -> int | None:
    """Return the next batch of a run that a worker may make, or None if there is none now."""
    if run.demand is not None:
        homes = (None, worker)
        return next(
            (
                batch
                for batch in run.demand
                if not run.lanes or run.lanes[batch % len(run.lanes)].home in homes
            ),
            None,
        )
    if run.again:
        return heapq.heappop(run.again)
    if not run.lanes:
        while run.next in run.had:
            run.had.remove(run.next)
            run.next += 1
        return run.next if run.next < run.stop else None
    run.window = run.window or _window(run)
    before, by_home = run.window
    batch = min((by_home[home] for home in (None, worker) if home in by_home), default=None)
    return batch if batch is not None and batch < before else None


def _window(run: RunRecord) -> tuple[float, dict[int | None, int]]:
    """Return the read-ahead limit of a run with lanes, and the next batch of each worker's lanes.

    Only batches before the limit may be made. The next batches are keyed by the number of the
    lanes' worker (`Lane.home`). The key None is for lanes without a worker.
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
    if not run.is_in_order:  # the consumer takes any batch, so no lane waits for another
        return float("inf"), by_home
    lowest = min([lowest, *(slot.batch for slot in run.making.values())])
    return lowest + max(run.slots - run.may_lend, 1), by_home
