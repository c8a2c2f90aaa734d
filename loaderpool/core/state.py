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

from loaderpool.core.messages import BatchFailed, Filled, Found, GiveBack, LaneOver, LoaderFailed, Ticket
from loaderpool.core.records import (
    MOST_TICKETS,
    Blame,
    Filling,
    Instruction,
    Job,
    Lane,
    Layout,
    LoaderRecord,
    MarkEnded,
    Plan,
    RunRecord,
    Start,
    Stop,
    ToMain,
    ToWorker,
    WorkerRecord,
    slot_bytes,
)
from loaderpool.core.space import Space, lendable, slots_of
from loaderpool.memory.extents import Extent

_CHUNK_S = 0.008  # batches that take less share a ticket. Less: messages cost as much as work. More: late first batches
_RANGE_S = 0.1  # a batch that takes longer is cut into ranges of rows. Less: more messages than balance is worth
_SHORT_S = 0.02  # a second ticket waits only after one that takes less: long ones would wait for a slow sample
_BLOCK_S = 0.0005  # tiny samples are noted and written together, so many as take this, and
_BLOCK_BYTES = 64 * 1024  # ... fit the first-level caches
_FASTER = 4  # a ticket has at most so many times the batches of what was measured: first times are no rule
_DEATHS = 3  # a ticket is given up at so many deaths, if the last two were at the same sample,
_MOST_DEATHS = 9  # ... or at so many, wherever they were: together its samples kill
_RETRY_S = 2.0  # after a worker could not be started


class State:
    """Loaders, runs, slots, tickets and workers.

    Each event is a method. After some events call `deal`, then carry out `instructions` in their order and clear them.
    """

    def __init__(self, workers: int, memory: Space, most_slots: int, restarts: tuple[int, float] | None = None) -> None:
        self.instructions: list[Instruction] = []
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.due: collections.deque[Job] = collections.deque()
        self.starved: list[RunRecord] = []  # runs without a slot, the first one first
        self._wanted = workers
        self._memory = memory
        self._most_slots = most_slots
        self._restarts = restarts
        self._deaths: collections.deque[float] = collections.deque()
        self._broken: bytes | None = None
        self._retry_at: float | None = None
        self._tickets, self._names = itertools.count(1), itertools.count()

    # ---- what the main process says

    def load(
        self, number: int, plan: Plan, first: int, timeout_s: float | None = None, leaves_out: bool = False
    ) -> None:
        """A loader was loaded. Workers that were forked before do not know it, and are replaced."""
        loader = self.loaders[number] = LoaderRecord(number, plan, timeout_s, leaves_out, first)
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
            return
        ticket = Ticket(next(self._tickets), number, 0, first, 1, 0, 1, -1, 1, ())
        self.due.append(Job(ticket, loader, None))
        for worker in [*self.workers.values()]:
            self._dismiss(worker)
        self._hire()

    def unload(self, number: int) -> None:
        """The loader is closed, and so are its runs."""
        self.loaders.pop(number, None)
        self.due = collections.deque(job for job in self.due if job.loader.number != number or job.slot is not None)

    def begin(
        self, number: int, loader: int, first: int, had: tuple[int, ...] = (), over: tuple[int, ...] = ()
    ) -> None:
        """A run begins. One of an unknown loader is answered as well."""
        record = self.loaders.get(loader)
        if record is None or record.failure is not None:
            error = b"" if record is None else record.failure or b""
            self._say(ToMain(BatchFailed(number, first, -1, error)))
            return
        run = self.runs[number] = RunRecord(number, record, first, {batch for batch in had if batch >= first})
        lanes = record.plan.lanes
        run.lanes = [
            Lane(first // lanes + (lane < first % lanes), batches=0 if lane in over else None) for lane in range(lanes)
        ]
        if record.has_given_back:  # it asks no other run in its turn, or both would ask for ever
            run.may_ask, record.has_given_back = 0, False
        self._give_slots(run)

    def end(self, number: int, lent: tuple[int, ...]) -> None:
        """A run is over: its slots are free, but for those that have views, and those that workers write into."""
        run = self.runs.get(number)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        run.loader.has_given_back = run.is_asked
        self._say(MarkEnded(number))
        run.free.extend(run.filled.difference(lent))
        run.filled.intersection_update(lent)
        for job in [job for job in self.due if job.slot is not None and job.slot.run is run]:
            self.due.remove(job)
            self._answered(job, 0)
        self._settle(run)

    def release(self, number: int, offset: int) -> None:
        """The last view of a slot is gone. A release that names nothing changes nothing: it crossed an `End`."""
        run = self.runs.get(number)
        if run is not None and offset in run.filled:
            run.filled.remove(offset)
            run.free.append(offset)
            self._settle(run)

    def resize(self, workers: int) -> None:
        """Have so many workers."""
        self._wanted = max(1, workers)
        staying = [worker for worker in self.workers.values() if not worker.is_leaving]
        for worker in staying[self._wanted :]:
            self._dismiss(worker)
        self._hire()
        for run in [*self.runs.values()]:
            self._give_slots(run)

    # ---- what workers say, and what becomes of them

    def found(self, worker: int, message: Found, layout: Layout) -> None:
        """The first sample was made."""
        job = self._taken(worker, message.ticket)
        if job is None or job.loader.layout is not None:
            return
        loader = job.loader
        loader.layout, loader.keeper, loader.row_s = layout, worker, message.seconds
        self._say(ToMain(message))
        for number in self.workers:
            if number != worker:
                self._say(ToWorker(number, message))
        for run in [*self.runs.values()]:
            if run.loader is loader:
                self._give_slots(run)

    def done(self, worker: int, ticket: int, rows: int, seconds: float) -> None:
        """A ticket is done. An answer to none that this worker has changes nothing."""
        job = self._taken(worker, ticket)
        if job is None:
            return
        loader = job.loader
        if rows:
            loader.row_s += (seconds / rows - loader.row_s) * (0.5 if loader.rows_measured < 64 else 0.1)
            loader.rows_measured += rows
        self._answered(job, rows)

    def failed(self, worker: int, ticket: int, error: bytes) -> None:
        """The user's code raised an exception over a ticket."""
        job = self._taken(worker, ticket)
        if job is not None:
            self._give_up(job, job.ticket.start, error)

    def died(self, worker: int, now: float, ticket: int, row: int, why: Blame | None = None) -> None:
        """A worker is gone, and all that it said was heard before.

        Args:
            worker: its number.
            now: seconds.
            ticket: what it was working at, by its cell; 0: nothing.
            row: of that ticket; -1: none.
            why: what to say if the row is given up; with `is_final` it is given up at once (it took too long).
        """
        record = self.workers.pop(worker)
        blamed = record.jobs.get(ticket)
        if blamed is not None:
            blamed.deaths.append(row)
            if why is not None and not blamed.is_unwanted and self._is_convicted(blamed, why):
                del record.jobs[ticket]
                self._convict(blamed, row, why.error)
        self._take_back(record)
        if not record.is_leaving and not (why is not None and why.is_final):
            self._note_death(now, why)
        self._hire()

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

    # ---- who gets what

    def deal(self) -> None:
        """Give tickets to workers, the emptiest first: what is due, then new ones of the runs in turn."""
        for level in range(max((worker.room for worker in self.workers.values()), default=0)):
            for worker in [*self.workers.values()]:
                if len(worker.jobs) == level and self._may_have_more(worker):
                    job = self._next_job(worker)
                    if job is not None:
                        self._give(worker, job)
                    elif not self._has_homes():
                        return

    def running(self, worker: int) -> Job | None:
        """Return what a worker should be working at."""
        return next(iter(self.workers[worker].jobs.values()), None)

    def _may_have_more(self, worker: WorkerRecord) -> bool:
        if worker.is_leaving or len(worker.jobs) >= worker.room:
            return False
        first = next(iter(worker.jobs.values()), None)
        return first is None or worker.room > MOST_TICKETS or (first.slot is not None and first.seconds <= _SHORT_S)

    def _has_homes(self) -> bool:
        return any(run.lanes for run in self.runs.values())

    def _next_job(self, worker: WorkerRecord) -> Job | None:
        for job in self.due:
            if job.lane is None or job.lane.home in (None, worker.number):
                self.due.remove(job)
                return job
        for run in sorted(self.runs.values(), key=lambda run: run.last_ticket):
            if run.free and not run.is_ended and (batch := self._next_batch(run, worker.number)) is not None:
                return self._cut(run, batch)
        return None

    def _give(self, worker: WorkerRecord, job: Job) -> None:
        keeper = self.workers.get(job.loader.keeper) if job.loader.keeper is not None else None
        if keeper is not None and job.ticket.batch == job.loader.first and job.ticket.start == 0 and job.lane is None:
            job.loader.keeper = None
            if not keeper.is_leaving and len(keeper.jobs) < keeper.room:
                worker = keeper
        if job.lane is not None:
            job.lane.home = worker.number
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
            return run.next
        lanes, best = len(run.lanes), None
        for number, lane in enumerate(run.lanes):
            while lane.turn * lanes + number in run.had:
                run.had.remove(lane.turn * lanes + number)
                lane.turn += 1
            batch = lane.turn * lanes + number
            if not lane.is_over and lane.home in (None, worker) and (best is None or batch < best):
                best = batch
        return best if best is not None and best < self._lowest(run) + max(run.slots - run.may_lend, 1) else None

    def _lowest(self, run: RunRecord) -> int:
        """Return the lowest batch of lanes that is not full."""
        making = [slot.batch for slot in self._slots_of(run)]
        to_cut = [lane.turn * len(run.lanes) + number for number, lane in enumerate(run.lanes) if not lane.is_over]
        return min([*making, *to_cut], default=0)

    def _cut(self, run: RunRecord, batch: int) -> Job:
        """Make tickets of a run's next batches, for one slot. Return the first; the others are due."""
        loader, layout, offset = run.loader, run.loader.layout, run.free.pop()
        assert layout is not None
        batch_s, may_lend, count = loader.row_s * loader.plan.batch_size, lendable(run.slots, self._wanted), 1
        if run.lanes:
            run.lanes[batch % len(run.lanes)].turn += 1
        elif batch == run.next:
            count = self._batches_in_ticket(run, batch_s)
            run.next += count
        else:  # of `again`: later batches may fill all other slots, so this one must come back even while it has views
            may_lend = 0
        run.may_lend = max(run.may_lend, may_lend)
        rows = loader.plan.total_rows(batch, count)
        block = max(1, min(int(_BLOCK_S / max(loader.row_s, 1e-9)), _BLOCK_BYTES // max(layout.row_bytes, 1)))
        parts = min(rows, max(1, round(batch_s / _RANGE_S))) if count == 1 and layout.splits and not run.lanes else 1
        slot = Filling(run, offset, batch, count, parts, may_lend, rows)
        jobs = []
        for start, stop in itertools.pairwise(rows * part // parts for part in range(parts + 1)):
            number = run.last_ticket = next(self._tickets)
            ticket = Ticket(number, loader.number, run.number, batch, count, start, stop, offset, block, ())
            jobs.append(Job(ticket, loader, slot, (stop - start) * loader.row_s))
        self.due.extend(jobs[1:])
        return jobs[0]

    def _batches_in_ticket(self, run: RunRecord, batch_s: float) -> int:
        loader = run.loader
        if batch_s > _CHUNK_S / 2 or not loader.rows_measured or loader.layout is None:
            return 1
        left = loader.plan.batches_per_epoch - run.next % loader.plan.batches_per_epoch
        share = -(-left // (2 * self._wanted))  # towards the end of an epoch all workers have something to do
        measured = _FASTER * max(loader.rows_measured // loader.plan.batch_size, 1)
        most = max(1, min(loader.layout.most, int(_CHUNK_S / batch_s) if batch_s else 1 << 30, share, measured))
        return next((count for count in range(1, most) if run.next + count in run.had), most)

    # ---- slots

    def _give_slots(self, run: RunRecord, returning: int = 0) -> None:
        """Give a run as many slots as it should have with this number of workers, and no more than its share.

        `returning`: runs that have ended to give their slots back, and will begin again.
        """
        layout = run.loader.layout
        if layout is None or run.is_ended or run.is_asked:
            return
        living = sum(not each.is_ended for each in self.runs.values()) + returning
        wanted = slots_of(layout.slot_bytes, self._wanted, self._memory.size // living)
        left = self._most_slots - sum(each.slots for each in self.runs.values())
        room = min(self._most_slots // living - run.slots, left, self._memory.largest // layout.slot_bytes)
        more = min(wanted - run.slots, room)
        if more > 0:
            offset = self._memory.take(more * layout.slot_bytes).offset
            run.slots += more
            run.free.extend(offset + number * layout.slot_bytes for number in reversed(range(more)))
            if run in self.starved:
                self.starved.remove(run)
        elif run.slots == 0 and run not in self.starved:
            self.starved.append(run)
            self._ask_for_slots(run)

    def _ask_for_slots(self, starved: RunRecord) -> None:
        """Have the run with most bytes begin again, which then finds less room; an error if there is none."""
        others = [run for run in self.runs.values() if run.slots and not run.is_ended and run is not starved]
        if any(run.slots > len(run.filled) if run.is_ended else run.is_asked for run in self.runs.values()):
            return  # what they have will be free: wait for it
        if others and starved.may_ask > 0:
            starved.may_ask -= 1
            largest = max(others, key=lambda run: run.slots * slot_bytes(run))
            largest.is_asked = True
            self._say(ToMain(GiveBack(largest.number)))
        else:
            self.starved.remove(starved)
            del self.runs[starved.number]
            self._say(ToMain(BatchFailed(starved.number, starved.next, -1, b"")))

    def _answered(self, job: Job, rows: int) -> None:
        """No worker has this job any more. When a slot has no job left, it is full, failed, or free again."""
        slot = job.slot
        if slot is None:
            return
        slot.unanswered -= 1
        slot.rows += rows
        if slot.unanswered:
            return
        run, is_short = slot.run, slot.rows < slot.asked
        if run.is_ended:
            run.free.append(slot.offset)
            self._settle(run)
            return
        if run.lanes and self._is_after_end(run, slot, is_short):
            run.free.append(slot.offset)
            return
        if slot.count > 1 and (slot.failure is not None or is_short):
            # Each is made by itself, and what is before the one that failed arrives before its error.
            for batch in range(slot.batch, slot.batch + slot.count):
                heapq.heappush(run.again, batch)
            run.free.append(slot.offset)
        elif slot.failure is not None:
            run.filled.add(slot.offset)
            self._say(ToMain(BatchFailed(run.number, slot.batch, slot.offset, slot.failure[1])))
        else:
            run.filled.add(slot.offset)
            self._say(ToMain(Filled(run.number, slot.batch, slot.count, slot.rows, slot.offset, slot.may_lend)))

    def _is_after_end(self, run: RunRecord, slot: Filling, is_short: bool) -> bool:
        """Note where a lane ends: with a batch that is short or failed. Return whether this batch is not one of it."""
        turn, number = divmod(slot.batch, len(run.lanes))
        lane = run.lanes[number]
        batches = turn + (slot.rows > 0 or slot.failure is not None)
        if (is_short or slot.failure is not None) and (lane.batches is None or batches < lane.batches):
            lane.batches = batches  # an earlier batch may be answered later, by another worker
            self._say(ToMain(LaneOver(run.number, number, batches)))
        return lane.batches is not None and turn >= lane.batches

    def _settle(self, run: RunRecord) -> None:
        """Give back the slots of a run that has ended: those without a writer and without views."""
        if not run.is_ended:
            return
        for offset in run.free:
            self._memory.give_back(Extent(offset, slot_bytes(run)))
        run.slots -= len(run.free)
        run.free.clear()
        if not run.slots:
            self.runs.pop(run.number, None)
        if run in self.starved:
            self.starved.remove(run)
        starved, self.starved = self.starved, []
        for other in starved:
            self._give_slots(other, returning=1)

    def _slots_of(self, run: RunRecord) -> Iterator[Filling]:
        jobs = itertools.chain(self.due, *(worker.jobs.values() for worker in self.workers.values()))
        return (job.slot for job in jobs if job.slot is not None and job.slot.run is run)

    # ---- failures

    def _is_convicted(self, job: Job, why: Blame) -> bool:
        deaths = job.deaths
        at_once = why.is_final and job.ticket.block == 1
        same = len(deaths) >= _DEATHS and deaths[-1] == deaths[-2] >= 0
        return at_once or same or len(deaths) >= _MOST_DEATHS

    def _convict(self, job: Job, row: int, error: bytes) -> None:
        if job.loader.leaves_out and job.slot is not None and row >= 0:
            job.ticket = job.ticket._replace(block=1, left_out=(*job.ticket.left_out, row))
            job.deaths.clear()
            self.due.appendleft(job)
        else:
            self._give_up(job, row, error)

    def _give_up(self, job: Job, row: int, error: bytes) -> None:
        if job.slot is None:
            self._fail_loader(job.loader, error)
            return
        if job.slot.failure is None or row < job.slot.failure[0]:
            job.slot.failure = row, error
        self._answered(job, 0)

    def _fail_loader(self, loader: LoaderRecord, error: bytes) -> None:
        loader.failure = error
        self._say(ToMain(LoaderFailed(loader.number, error)))

    def _note_death(self, now: float, why: Blame | None) -> None:
        if self._restarts is None:
            return
        self._deaths.append(now)
        number, seconds = self._restarts
        while self._deaths[0] < now - seconds:
            self._deaths.popleft()
        if len(self._deaths) > number:
            self._break(why.error if why is not None else b"")

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
        job = record.jobs.pop(ticket, None) if record is not None else None
        if record is not None and record.is_leaving and not record.jobs:
            self._say(Stop(worker))
        return job

    def _take_back(self, worker: WorkerRecord) -> None:
        """What a worker had, which is gone, is due again; a dead one's samples are noted one by one."""
        self._leave_homes(worker)
        for job in reversed(worker.jobs.values()):
            if job.is_unwanted:
                self._answered(job, 0)
            else:
                job.ticket = job.ticket._replace(block=1)
                self.due.appendleft(job)

    def _hire(self) -> None:
        """Start workers up to the number that is wanted. Those that leave do not count."""
        if not self.loaders or self._broken is not None or self._retry_at is not None:
            return
        staying = sum(not worker.is_leaving for worker in self.workers.values())
        for _ in range(self._wanted - staying):
            number = next(self._names)
            self.workers[number] = WorkerRecord(number)
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
        assert all(len(worker.jobs) <= worker.room for worker in self.workers.values())
        assert sum(run.slots for run in self.runs.values()) <= self._most_slots
        for slot in (job.slot for job in jobs if job.slot is not None):
            assert slot.unanswered == sum(job.slot is slot for job in jobs)
            assert slot.offset not in slot.run.free and self.runs[slot.run.number] is slot.run
        for run in self.runs.values():
            offsets = [*run.free, *run.filled, *{slot.offset for slot in self._slots_of(run)}]
            assert len(offsets) == len(set(offsets)) == run.slots
