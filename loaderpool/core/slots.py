"""Which run has which slots, and what is made in each: some tiny batches, one, or some rows of a slow one. Pure.

Part of the supervisor's state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from loaderpool.core.messages import BatchFailed, Ticket
from loaderpool.core.records import Filling, Instruction, Job, ReturnPages, RunRecord, ToMain
from loaderpool.memory.arena import Extent, ExtentMap

_FEW_BYTES = 64 << 20  # a run has 32 slots if they take less than this,
_MANY_BATCHES_BYTES = (
    8 << 20
)  # ... or this, if each holds very many batches: to take their pages takes time, too
_MANY_BATCHES = 64
_AT_CONSUMER = (
    8  # what `tf.data` has under prefetch(2), which is five or six, and some that are ready
)
_CHUNK_S = 0.008  # batches that take less share a ticket. Less: messages cost as much as work. More: late first batches
_NODE_CHUNK_S = 0.064  # the same for nodes: each ticket is a call to another machine
_RANGE_S = 0.1  # a batch that takes longer is cut into ranges of rows. Less: more messages than balance is worth
_FASTER = 4  # a ticket has at most so many times the batches of what was measured: first times are no rule
# Of all slots these are for runs that begin later, as is a quarter of the memory. Less: a run beside others has few, or
# none and an error. More: hundreds of workers have less than two each.
_FOR_OTHERS = 32
_LEAST_AT_END = 4  # tickets before an epoch's end have so many batches at least, if they are tiny


def slots_of(slot_bytes: int, most: int, workers: int, room: int) -> int:
    """Return how many slots of `slot_bytes` a run should have, where each of the workers may have `room` tickets.

    Each worker fills some while the next ones wait for it, and the consumer has views of others. Small slots are more,
    so that one slow sample does not stop all workers.
    """
    few = _MANY_BATCHES_BYTES if most > _MANY_BATCHES else _FEW_BYTES
    return max(room * workers + _AT_CONSUMER, min(max(32, 4 * workers), few // slot_bytes))


def lendable(slots: int, workers: int) -> int:
    """Return how many of a run's slots may have views, so that each worker and the next batch still have one."""
    return max(slots - min(workers + 1, (slots + 1) // 2), 0)


def _most_of(slots: int) -> int:
    """Return what one run may have of these: a quarter is for runs that begin later, or one."""
    return slots - max(slots // 4, int(slots > 2))


class Slots:
    """The slots of all runs, `most` of them at most. A run that can have no slot is taken out of `runs`.

    Attributes:
        free_bytes: that the machine has; looked at when slots are given.
        kept_bytes: that ended runs have left in the file, for those that come.
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
        """Give a run as many slots as it should have for so many workers, if that is no more than its share.

        The third run of a loader gets a third of what is left, as the others cannot be asked for theirs. When one ends,
        those that had less get more. One that gets none waits for an ended run whose slots are still written to, or is
        told of an error.
        """
        layout = run.loader.layout
        if layout is None or run.is_ended:
            return
        size, has_some = (
            layout.slot_bytes,
            run.slots > 0,
        )  # the last slot of all is for a run that has none
        run.slots_wanted = slots_of(size, layout.max_chunk, workers, layout.room)
        of_loader = [
            each.slots
            for each in self.runs.values()
            if each.loader.of == run.loader.of and not each.is_ended
        ]
        limit, nbytes = (
            layout.limit_bytes // size,
            min(self._memory.largest, self.free_bytes + self.kept_bytes),
        )
        share = min(
            1 if run.is_whole else run.slots_wanted, max(_most_of(limit) // len(of_loader), 1)
        )
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
            run.free.extend(new)
            run.fresh.update(new)
        elif not has_some and not any(each.making for each in self.runs.values() if each.is_ended):
            del self.runs[run.number]
            self._say(ToMain(BatchFailed(run.number, run.next, -1, b"")))

    def give_back(self, run: RunRecord, returns_pages: bool) -> None:
        """Give back the slots of a run that has ended, which have neither a writer nor views.

        Their pages, too, if the loader has no next run that would have them.
        """
        for offset in run.free:
            assert run.loader.layout is not None
            size = run.loader.layout.slot_bytes
            self._memory.give_back(Extent(offset, size))
            if returns_pages:
                self._say(ReturnPages(offset, size))
            else:
                self.kept_bytes += size * (offset not in run.fresh)
        run.slots -= len(run.free)
        run.free.clear()
        run.fresh.clear()

    def return_kept(self) -> None:
        """Give back the pages of all free parts of the memory file."""
        self.kept_bytes = 0
        for hole in self._memory.holes():
            self._say(ReturnPages(*hole))


class Cutter:
    """Cuts tickets, for nodes larger ones."""

    def __init__(self, tickets: Iterator[int], of_nodes: bool) -> None:
        self._tickets, self._of_nodes = tickets, of_nodes
        self._chunk_s = _NODE_CHUNK_S if of_nodes else _CHUNK_S

    def cut(self, run: RunRecord, batch: int, workers: int) -> list[Job]:
        """Return the tickets of a run's next batches, from this one on, for one of its free slots."""
        loader, plan, layout, offset, lane = (
            run.loader,
            run.plan,
            run.loader.layout,
            run.free.pop(),
            None,
        )
        assert layout is not None
        batch_s, may_lend, count, ranges = (
            loader.row_s * plan.batch_size,
            lendable(run.slots, workers),
            1,
            1,
        )
        epoch, of_epoch, rest = plan.locate(batch)
        run.window = None
        if run.lanes:
            lane = run.lanes[batch % len(run.lanes)]
            lane.turn += 1
        elif batch == run.next:
            count = self._batches_in_ticket(run, of_epoch, batch_s, workers)
            run.next += count
        else:  # of `again`: later batches may fill all other slots, so this one must come back even while it has views
            may_lend = 0
        run.may_lend = max(run.may_lend, may_lend)
        rows = run.total_rows(batch, count)
        if (
            batch_s > _RANGE_S
            and count == 1
            and layout.splits
            and lane is None
            and not self._of_nodes
        ):
            ranges = min(rows, round(batch_s / _RANGE_S))
        slot = run.making[offset] = Filling(run, offset, batch, count, ranges, may_lend, rows, lane)
        place = offset, layout.slot_bytes, offset in run.fresh, run.feed, 0, ()
        run.fresh.discard(offset)
        jobs = []
        for number in range(ranges):
            start, stop = rows * number // ranges, rows * (number + 1) // ranges
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
        loader, plan = run.loader, run.plan
        if run.is_whole:
            return run.stop - run.next
        if batch_s > self._chunk_s / 2 or not loader.rows_measured or loader.layout is None:
            return 1
        left = run.alike(run.next)
        # Towards the end of an epoch all workers have something to do, and its first batches come soon.
        share = min(left, max(-(-left // (2 * workers)), _LEAST_AT_END), max(of_epoch, 1))
        measured = _FASTER * max(loader.rows_measured // plan.batch_size, 1)
        in_time = int(self._chunk_s / batch_s) if batch_s else 1 << 30
        most = max(1, min(loader.layout.max_chunk, in_time, share, measured))
        if not run.had:
            return most
        return next((count for count in range(1, most) if run.next + count in run.had), most)


def next_batch(run: RunRecord, worker: int) -> int | None:
    """Return the batch of a run that a worker may make next; None: there is none."""
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
    lowest = min([lowest, *(slot.batch for slot in run.making.values())])
    return lowest + max(run.slots - run.may_lend, 1), by_home
