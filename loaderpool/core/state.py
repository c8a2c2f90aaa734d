"""Who works on what: the supervisor's whole state. Events in, instructions out; no clock, no process, no I/O.

    Begin --> run: slots --cut--> jobs --deal--> worker --Done--> slot full: Filled --> main process --Release--+
                ^                  ^ due: made again, or rows of a batch | death                                |
                |                  +------------------------------------<+                                      |
                +----------------------------------------- free slot <------------------------------------------+

Why every wait ends. Batches of a run are cut in their order, so the batch that a consumer waits for got its slot
before all later ones, and keeps it when it is made again; and the main process never lends a run's last slots
(`may_lend`). Generators (lanes) get ahead of one another: a batch of theirs is cut only as far after the lowest one
that is not full as there are slots that are never lent.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterator

from loaderpool.core.messages import BatchFailed, Ended, Filled, Found, GiveBack, LoaderFailed, Ticket
from loaderpool.core.records import (
    MOST_TICKETS,
    Answer,
    Death,
    DropFile,
    Filling,
    Instruction,
    Job,
    Lane,
    Layout,
    LoaderRecord,
    MarkEnded,
    Plan,
    ReturnPages,
    RunRecord,
    Start,
    Stop,
    ToMain,
    ToWorker,
    WorkerRecord,
)
from loaderpool.core.space import Space, lendable, slots_of
from loaderpool.memory.extents import Extent
from loaderpool.transport.reports import Verdict

_CHUNK_S = 0.008  # batches that take less share a ticket. Less: messages cost as much as work. More: late first batches
_RANGE_S = 0.1  # a batch that takes longer is cut into ranges of rows. Less: more messages than balance is worth
_SHORT_S = 0.02  # a second ticket waits only after one that takes less: long ones would wait for a slow sample
_FASTER = 4  # a ticket has at most so many times the batches of what was measured: first times are no rule
_LEAST_AT_END = 4  # tickets before an epoch's end have so many batches at least, if they are tiny
_TOGETHER = 3  # a ticket is given up at so many times the deaths of one sample: together its samples kill
_IDLE_DEATHS = 5  # beside the number of workers: so many may die running before they have begun anything
_RETRY_S = 1.0  # after a worker could not be started
_NODE_CHUNK_S = 0.064  # as _CHUNK_S, for nodes: each ticket is a call to another machine
_NODE_TICKETS = 4  # that a node may have at least


class State:
    """Loaders, runs, slots, tickets and workers.

    Each event is a method. After some events call `deal`, then carry out `instructions` in their order and clear them.

    Attributes:
        free_bytes: that the machine has; looked at when slots are given.

    Args:
        workers: how many there shall be.
        memory: for all slots.
        most_slots: of all runs together.
        restarts: deaths of workers that are made good, and within how many seconds; None: any number.
        of_nodes: workers are nodes with workers of their own. Each begins to get tickets when it has `joined`, and is
            told of loaders while it lives; its death is no sample's fault.
    """

    def __init__(
        self,
        workers: int,
        memory: Space,
        most_slots: int,
        restarts: tuple[int, float] | None = None,
        of_nodes: bool = False,
    ) -> None:
        self.instructions: list[Instruction] = []
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.due: collections.deque[Job] = collections.deque()
        self.starved: list[RunRecord] = []  # runs without a slot, the first one first
        self.free_bytes = 1 << 62
        self._wanted, self._width = workers, max(1, workers)  # width: processes that make rows
        self._of_nodes, self._chunk_s = of_nodes, _NODE_CHUNK_S if of_nodes else _CHUNK_S
        self._memory = memory
        self._most_slots = most_slots
        self._restarts = restarts
        self._deaths: collections.deque[float] = collections.deque()
        self._idle_deaths = 0  # running, before anything was begun
        self._broken: bytes | None = None
        self._retry_at: float | None = None
        self._tickets, self._names = itertools.count(1), itertools.count()

    # ---- what the main process says

    def load(self, number: int, plan: Plan, leaves_out: bool = False, most_deaths: int = 3) -> None:
        """A loader was loaded. Workers that were forked before do not know it, and are replaced.

        Args:
            number: the loader's.
            plan: of its batches.
            leaves_out: whether samples that end a worker are left out; else a batch with one is an error.
            most_deaths: over one sample, before it is given up.
        """
        loader = self.loaders[number] = LoaderRecord(number, plan, leaves_out, max(2, most_deaths))
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
            return
        self.renew()

    def renew(self) -> None:
        """Replace all workers: what they were forked with has changed."""
        for worker in [*self.workers.values()] if not self._of_nodes else ():
            self._dismiss(worker)
        self._hire()

    def look(self, number: int, epoch: int, batch: int, feed: int = 0) -> None:
        """The first sample of this batch of an epoch is to be made."""
        loader = self.loaders.get(number)
        if loader is None:
            return
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
            return
        loader.failure = None
        ticket = Ticket(next(self._tickets), number, 0, epoch, batch, 0, 1, 0, 1, -1, 0, False, feed, 0, ())
        self.due.append(Job(ticket, loader, None))

    def fail(self, number: int, error: bytes) -> None:
        """No batch of a loader can be made."""
        if number in self.loaders:
            self._fail_loader(self.loaders[number], error)

    def unload(self, number: int) -> None:
        """The loader is closed, and so are its runs."""
        self.loaders.pop(number, None)
        self.due = collections.deque(job for job in self.due if job.loader.number != number or job.slot is not None)

    def begin(
        self,
        number: int,
        loader: int,
        first: int,
        had: tuple[int, ...] = (),
        over: tuple[int, ...] = (),
        stop: int = -1,
        plan: Plan | None = None,
        feed: int = 0,
        is_in_order: bool = True,
        is_whole: bool = False,
    ) -> None:
        """A run begins. One of an unknown loader is answered as well.

        Args:
            number: the run's.
            loader: the loader's.
            first: number of the first batch.
            had: later batches that are not to be made.
            over: lanes that are over.
            stop: the number after the last batch; -1: there is none.
            plan: of its batches; None: the loader's.
            feed: where the items of a stream are; 0: they are read by index.
            is_in_order: batches are taken in their order.
            is_whole: all go into one slot.
        """
        record = self.loaders.get(loader)
        if record is None or record.failure is not None:
            error = b"" if record is None else record.failure or b""
            self._say(ToMain(BatchFailed(number, first, -1, error)))
            return
        had_later = {batch for batch in had if batch >= first}
        end = stop if stop >= 0 else 1 << 1000
        run = self.runs[number] = RunRecord(number, record, plan or record.plan, first, end, had_later)
        run.feed, run.is_in_order, run.is_whole, lanes = feed, is_in_order, is_whole, record.plan.lanes
        run.lanes = [
            Lane(first // lanes + (lane < first % lanes), batches=0 if lane in over else None) for lane in range(lanes)
        ]
        if record.has_given_back:  # it asks no other run in its turn, or both would ask for ever
            run.may_ask, record.has_given_back = 0, False
        self._give_slots(run)

    def extend(self, number: int, stop: int, last_rows: int) -> None:
        """More batches may be made."""
        run = self.runs.get(number)
        if run is not None:
            run.stop, run.last_rows = stop, last_rows

    def end(self, number: int, lent: tuple[int, ...]) -> None:
        """A run is over: its slots are free, but for those that have views, and those that workers write into."""
        run = self.runs.get(number)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        run.loader.has_given_back = run.is_asked
        self._say(MarkEnded(number))
        for worker in self.workers if run.lanes else ():  # they end the generators that they have of it
            self._say(ToWorker(worker, Ended(number)))
        run.free.extend(run.filled.difference(lent))
        run.filled.intersection_update(lent)
        for job in [job for job in self.due if job.slot is not None and job.slot.run is run]:
            self.due.remove(job)
            self._answered(job, None)
        self._settle(run)

    def release(self, number: int, offset: int) -> None:
        """The last view of a slot is gone. A release that names nothing changes nothing: it crossed an `End`."""
        run = self.runs.get(number)
        if run is None or offset not in run.filled:
            return
        run.filled.remove(offset)
        self._free(run, offset)
        self._settle(run)

    def resize(self, workers: int) -> None:
        """Have so many workers."""
        self._wanted = max(1, workers)
        self._measure()
        staying = [worker for worker in self.workers.values() if not worker.is_leaving]
        for worker in staying[self._wanted :]:
            self._dismiss(worker)
        self._hire()
        for run in [*self.runs.values()]:
            self._give_slots(run)

    # ---- what workers say, and what becomes of them

    def found(self, worker: int, message: Found, layout: Layout | None, seconds: float = 0.0) -> bool:
        """The first sample was made; returns whether that was asked for.

        Args:
            worker: who has made it.
            message: what it has said.
            layout: of the slots; None: it was another batch's sample, which only the main process wanted.
            seconds: that a row will take.
        """
        job = self._taken(worker, message.ticket)
        if job is None:
            return False
        epoch, batch = job.ticket.epoch, job.ticket.batch
        job.loader.keepers[epoch * job.loader.plan.batches_per_epoch + batch] = worker
        if layout is not None:
            self.lay_out(job.loader.number, layout, seconds)
        return True

    def lay_out(self, number: int, layout: Layout, seconds: float) -> None:
        """The layout of a loader's slots is known."""
        loader = self.loaders.get(number)
        if loader is None:
            return
        if self._broken is None:
            loader.failure = None
        if loader.layout is not None:
            return
        loader.layout, loader.row_s = layout, seconds
        for run in [*self.runs.values()]:
            if run.loader is loader:
                self._give_slots(run)

    def done(self, worker: int, answer: Answer) -> None:
        """A ticket is done. An answer to none that this worker has changes nothing."""
        job = self._taken(worker, answer.ticket)
        if job is None:
            self._drop(answer)
            return
        loader = job.loader
        if answer.rows:
            loader.row_s += (answer.seconds / answer.rows - loader.row_s) * (0.5 if loader.rows_measured < 64 else 0.1)
            loader.rows_measured += answer.rows
        self._answered(job, answer)

    def failed(self, worker: int, ticket: int, error: bytes) -> None:
        """The user's code raised an exception over a ticket."""
        job = self._taken(worker, ticket)
        if job is not None:
            self._give_up(job, error)

    def died(self, worker: int, now: float, ticket: int, death: Death | None) -> None:
        """A worker is gone, and all that it said was heard before.

        Args:
            worker: its number.
            now: seconds.
            ticket: what it was working at, by its cell; 0: nothing.
            death: how it ended; None: as it was told to.
        """
        record = self.workers.pop(worker)
        if self._of_nodes:
            self._node_died(record, now, death)
            return
        blamed = record.jobs.get(ticket)
        if death is None or (record.is_leaving and not record.jobs):
            death = None
        elif blamed is not None and not blamed.is_unwanted:
            del record.jobs[ticket]
        self._take_back(record)
        if death is not None:
            self._idle_deaths = 0 if blamed is not None or death.has_begun else self._idle_deaths + 1
            if not death.hung_s:
                self._deaths.append(now)
            self._break_after(now, death)
            if blamed is not None and not blamed.is_unwanted:
                self._blame(blamed, death)
        self._hire()

    def _node_died(self, node: WorkerRecord, now: float, death: Death | None) -> None:
        """A node is gone. A ticket over which several went is dealt alone, and given up if its node goes again."""
        given_up = []
        self._measure()
        if death is not None and (node.jobs or not node.is_leaving):
            for number, job in [*node.jobs.items()]:
                if not job.is_unwanted:
                    job.deaths.append(-1)
                    if len(job.deaths) >= job.loader.most_deaths:
                        given_up.append(node.jobs.pop(number))
            self._deaths.append(now)
            self._idle_deaths = 0 if death.has_begun else self._idle_deaths + 1
            self._break_after(now, death)
        self._take_back(node)
        for job in given_up:
            assert death is not None
            self._give_up(job, death.error(Verdict.HOST, len(job.deaths), job.ticket))
        self._hire()

    def joined(self, node: int, workers: int) -> None:
        """A node runs, with so many workers."""
        if node in self.workers:
            self.workers[node].workers = workers
            self._measure()
            for run in [*self.runs.values()]:
                self._give_slots(run)

    def _measure(self) -> None:
        self._width = self._wanted
        if self._of_nodes:
            self._width = max(1, sum(node.workers for node in self.workers.values()))

    def stop(self, error: bytes) -> None:
        """Nothing can be made any more."""
        self._break(error)

    def not_started(self, worker: int, now: float, error: bytes) -> None:
        """A worker could not be started: there are fewer until some seconds later, or, if there are none, an error."""
        self._take_back(self.workers.pop(worker))
        self._retry_at = now + _RETRY_S
        if not self.workers:
            self._break(error)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._hire()

    @property
    def retry_at(self) -> float | None:
        """When `tick` is due; None: it is not."""
        return self._retry_at

    # ---- who gets what

    def deal(self) -> None:
        """Give tickets to workers, the emptiest first: what is due, then new ones of the runs in turn."""
        if not self.due and not any(run.free and not run.is_ended for run in self.runs.values()):
            return
        level, has_homes = 0, self._of_nodes or any(run.lanes for run in self.runs.values())
        while True:
            busier = 1 << 30
            for worker in [*self.workers.values()]:
                count = len(worker.jobs) // (worker.workers or 1)
                if count > level:
                    busier = min(busier, count)
                elif count == level and not worker.is_leaving and self._may_have_more(worker):
                    job = self._next_job(worker)
                    if job is not None:
                        self._give(worker, job)
                        busier = min(busier, len(worker.jobs) // (worker.workers or 1))
                    elif not has_homes:
                        return
            if busier == 1 << 30:
                return
            level = busier

    def running(self, worker: int) -> Job | None:
        """Return what a worker should be working at."""
        return next(iter(self.workers[worker].jobs.values()), None)

    def _may_have_more(self, worker: WorkerRecord) -> bool:
        jobs = worker.jobs
        if self._of_nodes:
            room = max(_NODE_TICKETS, MOST_TICKETS * worker.workers) if worker.workers else 0
            return len(jobs) < room and not any(_is_alone(job) for job in jobs.values())
        if not jobs:
            return True
        first = next(iter(jobs.values()))
        room = first.loader.layout.room if first.loader.layout is not None else MOST_TICKETS
        if first.slot is None or len(jobs) >= room:
            return False
        return (
            room > MOST_TICKETS
            or first.seconds <= _SHORT_S
            or first.ticket.stop - first.ticket.start < first.slot.asked
        )

    def _next_job(self, worker: WorkerRecord) -> Job | None:
        for job in self.due:
            if self._of_nodes and worker.jobs and _is_alone(job):
                return None  # until it has answered all
            if job.lane is None or job.lane.home in (None, worker.number):
                self.due.remove(job)
                return job
        for run in sorted(self.runs.values(), key=lambda run: run.last_ticket):
            if run.free and not run.is_ended and (batch := self._next_batch(run, worker.number)) is not None:
                return self._cut(run, batch)
        return None

    def _give(self, worker: WorkerRecord, job: Job) -> None:
        loader = job.loader
        if job.slot is not None and job.slot.batch in loader.keepers and not job.ticket.start:
            keeper = self.workers.get(loader.keepers.pop(job.slot.batch))
            if keeper is not None and not keeper.is_leaving and len(keeper.jobs) < MOST_TICKETS and job.lane is None:
                worker = keeper
        if job.lane is not None:
            job.lane.home = worker.number
        if loader.left_out:
            left_out = tuple(sample[1:] for sample in loader.left_out if sample[0] == job.ticket.epoch)
            job.ticket = job.ticket._replace(left_out=left_out)
        worker.jobs[job.ticket.number] = job
        self._say(ToWorker(worker.number, job.ticket))

    def _next_batch(self, run: RunRecord, worker: int) -> int | None:
        """Return the batch of a run that this worker may make next."""
        if run.again:
            return heapq.heappop(run.again)
        if not run.lanes:
            while run.next in run.had:
                run.had.remove(run.next)
                run.next += 1
            return run.next if run.next < run.stop else None
        lanes, best = len(run.lanes), None
        for number, lane in enumerate(run.lanes):
            while lane.turn * lanes + number in run.had:
                run.had.remove(lane.turn * lanes + number)
                lane.turn += 1
            batch = lane.turn * lanes + number
            if not lane.is_over and lane.home in (None, worker) and (best is None or batch < best):
                best = batch
        if best is None or not run.is_in_order:  # without an order what has a slot is taken: nothing waits for a lane
            return best
        return best if best < self._lowest(run) + max(run.slots - run.may_lend, 1) else None

    def _lowest(self, run: RunRecord) -> int:
        """Return the lowest batch of lanes that is not full."""
        making = [slot.batch for slot in self._slots_of(run)]
        to_cut = [lane.turn * len(run.lanes) + number for number, lane in enumerate(run.lanes) if not lane.is_over]
        return min([*making, *to_cut], default=0)

    def _cut(self, run: RunRecord, batch: int) -> Job:
        """Make tickets of a run's next batches, for one slot. Return the first; the others are due."""
        loader, plan, layout, offset = run.loader, run.plan, run.loader.layout, run.free.pop()
        assert layout is not None
        batch_s, may_lend, count = loader.row_s * plan.batch_size, lendable(run.slots, self._width), 1
        if run.lanes:
            run.lanes[batch % len(run.lanes)].turn += 1
        elif batch == run.next:
            count = self._batches_in_ticket(run, batch_s)
            run.next += count
        else:  # of `again`: later batches may fill all other slots, so this one must come back even while it has views
            may_lend = 0
        run.may_lend = max(run.may_lend, may_lend)
        rows = run.total_rows(batch, count)
        splits = count == 1 and layout.splits and not run.lanes and not self._of_nodes
        parts = min(rows, max(1, round(batch_s / _RANGE_S))) if splits else 1
        slot = Filling(run, offset, batch, count, parts, may_lend, rows)
        epoch, of_epoch, rest = plan.locate(batch)
        jobs = []
        for start, stop in itertools.pairwise(rows * part // parts for part in range(parts + 1)):
            number = run.last_ticket = next(self._tickets)
            place = epoch, of_epoch, rest, count, start, stop, offset, run.sizes[offset], offset in run.fresh
            ticket = Ticket(number, loader.number, run.number, *place, run.feed, 0, ())
            jobs.append(Job(ticket, loader, slot, (stop - start) * loader.row_s))
        run.fresh.discard(offset)
        self.due.extend(jobs[1:])
        return jobs[0]

    def _batches_in_ticket(self, run: RunRecord, batch_s: float) -> int:
        loader, plan = run.loader, run.plan
        if run.is_whole:
            return run.stop - run.next
        if batch_s > self._chunk_s / 2 or not loader.rows_measured or loader.layout is None:
            return 1
        left = run.alike(run.next)
        # Towards the end of an epoch all workers have something to do.
        share = min(left, max(-(-left // (2 * self._width)), _LEAST_AT_END))
        measured = _FASTER * max(loader.rows_measured // plan.batch_size, 1)
        most = max(1, min(loader.layout.most, int(self._chunk_s / batch_s) if batch_s else 1 << 30, share, measured))
        if not run.had:
            return most
        return next((count for count in range(1, most) if run.next + count in run.had), most)

    # ---- slots

    def _give_slots(self, run: RunRecord, returning: LoaderRecord | None = None) -> None:
        """Give a run as many slots as it should have with this number of workers, and no more than its share.

        `returning`: a run of this loader has ended to give its slots back, and will begin again.
        """
        layout = run.loader.layout
        if layout is None or run.is_ended or run.is_asked:
            return
        size, others = layout.slot_bytes, [each for each in self.runs.values() if not each.is_ended]
        living = len(others) + (returning is not None)
        of_loader = [each for each in others if each.loader is run.loader and each is not run]
        sharing = 1 + len(of_loader) + (returning is run.loader)
        limit = min(layout.limit_bytes // sharing, layout.limit_bytes - sum(each.nbytes for each in of_loader))
        wanted = slots_of(size, layout.most, self._width, layout.room, min(limit, self._memory.size // living))
        wanted = min(wanted, 1) if run.is_whole else wanted
        left = self._most_slots - sum(each.slots for each in self.runs.values())
        room = min(self._most_slots // living - run.slots, left, self._memory.largest // size, self.free_bytes // size)
        more = min(wanted - run.slots, room)
        if more > 0:
            offset = self._memory.take(more * size).offset
            self.free_bytes -= more * size
            new = [offset + number * size for number in reversed(range(more))]
            run.sizes.update(dict.fromkeys(new, size))
            run.free.extend(new)
            run.fresh.update(new)
            if run in self.starved:
                self.starved.remove(run)
        elif run.slots == 0 and run not in self.starved:
            self.starved.append(run)
            share = min(layout.limit_bytes // sharing, self._memory.size // living) // size
            if min(share, self._most_slots // living) < 1:  # nor would there be if the others gave back
                self._refuse(run)
            else:
                self._ask_for_slots(run, of_loader if limit < size else others)

    def _free(self, run: RunRecord, offset: int) -> None:
        """Have a slot that is free again; a larger one in its place, if batches have outgrown it."""
        layout, size = run.loader.layout, run.sizes[offset]
        if layout is not None and size < layout.slot_bytes <= min(self._memory.largest, self.free_bytes):
            is_allowed = run.nbytes + layout.slot_bytes - size <= layout.limit_bytes
            if is_allowed:
                self._memory.give_back(Extent(offset, size))
                self._say(ReturnPages(offset, size))
                del run.sizes[offset]
                run.fresh.discard(offset)
                offset = self._memory.take(layout.slot_bytes).offset
                run.sizes[offset] = layout.slot_bytes
                run.fresh.add(offset)
        run.free.append(offset)

    def _ask_for_slots(self, starved: RunRecord, others: list[RunRecord]) -> None:
        """Have the run with most bytes begin again, which then finds less room; an error if there is none."""
        others = [run for run in others if run.slots and run is not starved]
        if any(run.slots > len(run.filled) if run.is_ended else run.is_asked for run in self.runs.values()):
            return  # what they have will be free: wait for it
        if others and starved.may_ask > 0:
            starved.may_ask -= 1
            largest = max(others, key=lambda run: run.nbytes)
            largest.is_asked = True
            self._say(ToMain(GiveBack(largest.number)))
        else:
            self._refuse(starved)

    def _refuse(self, starved: RunRecord) -> None:
        """There is no slot for a run, so it has no batches."""
        self.starved.remove(starved)
        del self.runs[starved.number]
        self._say(ToMain(BatchFailed(starved.number, starved.next, -1, b"")))

    def _answered(self, job: Job, answer: Answer | None) -> None:
        """No worker has this job any more. When a slot has no job left, it is full, failed, or free again."""
        slot = job.slot
        if slot is None:
            return
        slot.unanswered -= 1
        if answer is not None:
            slot.rows += answer.rows
            slot.answer = answer
        if slot.unanswered:
            return
        run, is_short = slot.run, slot.rows < slot.asked
        if run.is_ended:
            self._drop(slot.answer)
            run.free.append(slot.offset)
            self._settle(run)
            return
        is_last = False
        if run.lanes:
            is_last, batches = self._ends_lane(run, slot, is_short), run.lanes[slot.batch % len(run.lanes)].batches
            if batches is not None and slot.batch // len(run.lanes) >= batches and not is_last:  # it is after the end
                self._drop(slot.answer)
                self._free(run, slot.offset)
                return
        if slot.count > 1 and slot.failure is not None and not run.is_whole:
            # Each is made by itself, and what is before the one that failed arrives before its error.
            for batch in range(slot.batch, slot.batch + slot.count):
                heapq.heappush(run.again, batch)
            self._free(run, slot.offset)
            return
        run.filled.add(slot.offset)
        if slot.failure is not None or slot.answer is None:
            error = b"" if slot.failure is None else slot.failure[1]
            self._say(ToMain(BatchFailed(run.number, slot.batch, slot.offset, error)))
            return
        answer = slot.answer
        layout = run.loader.layout
        if answer.oversize and layout is not None:
            grown = -(-(answer.oversize // slot.count * layout.most * 5 // 4) // 4096) * 4096
            if grown > layout.slot_bytes:
                run.loader.layout = layout._replace(slot_bytes=grown)
        size, slots = run.sizes[slot.offset], run.slots
        place = slot.batch, slot.count, slot.rows, slot.offset, size, slots, slot.may_lend, is_last
        self._say(
            ToMain(
                Filled(run.number, *place, answer.ticket, answer.oversize, answer.failures),
                answer.descriptor,
            )
        )

    def _ends_lane(self, run: RunRecord, slot: Filling, is_short: bool) -> bool:
        """Note where a lane ends: with a batch that is short, failed or empty. Return whether it is this one."""
        turn, number = divmod(slot.batch, len(run.lanes))
        lane = run.lanes[number]
        batches = turn + (slot.rows > 0 or slot.failure is not None)
        if (is_short or slot.failure is not None) and (lane.batches is None or batches < lane.batches):
            lane.batches = batches  # an earlier batch may be answered later, by another worker
            return True
        return False

    def _drop(self, answer: Answer | None) -> None:
        if answer is not None and answer.descriptor >= 0:
            self._say(DropFile(answer.descriptor))

    def _settle(self, run: RunRecord) -> None:
        """Give back the slots of a run that has ended: those without a writer and without views."""
        if not run.is_ended:
            return
        is_unloaded = run.loader.number not in self.loaders  # else the next run has these pages
        for offset in run.free:
            size = run.sizes.pop(offset)
            self._memory.give_back(Extent(offset, size))
            if is_unloaded:
                self._say(ReturnPages(offset, size))
        run.free.clear()
        run.fresh.clear()
        if run.feed and not any(True for _ in self._slots_of(run)):
            run.feed = 0
            self._say(ToMain(Ended(run.number)))
        if not run.slots:
            self.runs.pop(run.number, None)
        if run in self.starved:
            self.starved.remove(run)
        starved, self.starved = self.starved, []
        for other in starved:
            self._give_slots(other, returning=run.loader)

    def _slots_of(self, run: RunRecord) -> Iterator[Filling]:
        jobs = itertools.chain(self.due, *(worker.jobs.values() for worker in self.workers.values()))
        return (job.slot for job in jobs if job.slot is not None and job.slot.run is run)

    # ---- failures

    def _blame(self, job: Job, death: Death) -> None:
        """A worker has died over this job: it is due again, or given up, or a sample of it is left out."""
        job.deaths.append(death.sample)
        most = job.loader.most_deaths
        is_same = len(job.deaths) >= most and job.deaths[-1] == job.deaths[-2]
        if death.hung_s or is_same:
            verdict = Verdict.ALONE
        elif len(job.deaths) >= _TOGETHER * most:
            verdict = Verdict.TOGETHER
        else:
            job.ticket = job.ticket._replace(deaths=len(job.deaths))
            self.due.appendleft(job)
            return
        deaths = len(job.deaths)
        if verdict is Verdict.ALONE:  # its deaths are explained, so they are no storm
            for _ in range(min(deaths - bool(death.hung_s), len(self._deaths))):
                self._deaths.pop()
        if job.loader.leaves_out and death.sample >= 0 and verdict is Verdict.ALONE and not death.is_generator:
            job.loader.left_out.append((job.ticket.epoch, death.sample, death.hung_s, death.exit_code))
            job.ticket = job.ticket._replace(deaths=deaths)
            job.deaths.clear()
            self.due.appendleft(job)
            return
        self._give_up(job, death.error(verdict, deaths, job.ticket))

    def _give_up(self, job: Job, error: bytes) -> None:
        if job.slot is None and job.ticket.batch:  # another sample than the first: its turn will tell
            self._say(ToMain(Found(0, job.loader.number, job.ticket.batch, b"", 0.0)))
            return
        if job.slot is None:
            self._fail_loader(job.loader, error)
            return
        row = job.ticket.start
        if job.slot.failure is None or row < job.slot.failure[0]:
            job.slot.failure = row, error
        self._answered(job, None)

    def _fail_loader(self, loader: LoaderRecord, error: bytes) -> None:
        loader.failure = error
        self._say(ToMain(LoaderFailed(loader.number, error)))

    def _break_after(self, now: float, death: Death) -> None:
        """End everything where going on would be to start workers for ever."""
        if self._restarts is not None:
            number, seconds = self._restarts
            while self._deaths and self._deaths[0] < now - seconds:
                self._deaths.popleft()
            if len(self._deaths) > number:
                self._break(death.error(Verdict.STORM, len(self._deaths), None))
                return
        if self._idle_deaths > _IDLE_DEATHS + self._wanted:
            self._break(death.error(Verdict.BEFORE, self._idle_deaths, None))

    def _break(self, error: bytes) -> None:
        """No worker is started any more, and no batch made."""
        self._broken = error
        for loader in self.loaders.values():
            if loader.failure is None:
                self._fail_loader(loader, error)

    # ---- workers

    def _taken(self, worker: int, ticket: int) -> Job | None:
        """Take a ticket from a worker; None: it has no such ticket."""
        record = self.workers.get(worker)
        if record is None:
            return None
        job = record.jobs.pop(ticket, None)
        if job is not None:
            record.has_answered = True
            self._idle_deaths = 0
        if record.is_leaving and not record.jobs:
            self._say(Stop(worker))
        return job

    def _take_back(self, worker: WorkerRecord) -> None:
        """What a worker had, which is gone, is due again."""
        self._leave_homes(worker)
        for job in reversed(worker.jobs.values()):
            if job.is_unwanted:
                self._answered(job, None)
            else:
                self.due.appendleft(job)

    def _hire(self) -> None:
        """Start workers up to the number that is wanted. Those that leave count once there are twice as many."""
        is_early = not self.loaders and not self._of_nodes  # nodes take long to start, and load what comes later
        if is_early or self._broken is not None or self._retry_at is not None:
            return
        staying = sum(not worker.is_leaving for worker in self.workers.values())
        for _ in range(self._wanted - staying):
            number = next(self._names)
            self.workers[number] = WorkerRecord(number, workers=int(not self._of_nodes))
            self._say(Start(number))

    def _dismiss(self, worker: WorkerRecord) -> None:
        if worker.is_leaving:
            return
        worker.is_leaving = True
        self._leave_homes(worker)
        if not worker.jobs:
            self._say(Stop(worker.number))

    def _leave_homes(self, worker: WorkerRecord) -> None:
        for lane in (lane for run in self.runs.values() for lane in run.lanes if lane.home == worker.number):
            lane.home = None

    def _say(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def check(self) -> None:
        """Raise AssertionError if a slot or a ticket is in two places, or in none. For tests."""
        jobs = [*self.due, *(job for worker in self.workers.values() for job in worker.jobs.values())]
        assert len({job.ticket.number for job in jobs}) == len(jobs)
        assert sum(run.slots for run in self.runs.values()) <= self._most_slots
        for slot in (job.slot for job in jobs if job.slot is not None):
            assert slot.unanswered == sum(job.slot is slot for job in jobs)
            assert slot.offset not in slot.run.free and self.runs[slot.run.number] is slot.run
        for run in self.runs.values():
            offsets = [*run.free, *run.filled, *{slot.offset for slot in self._slots_of(run)}]
            assert len(offsets) == len(set(offsets)) == run.slots and run.fresh <= run.sizes.keys()


def _is_alone(job: Job) -> bool:
    """Whether its node is to have nothing else, so that it is known what the node dies of."""
    return len(job.deaths) >= job.loader.most_deaths - 1
