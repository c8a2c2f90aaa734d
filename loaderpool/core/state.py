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

from loaderpool.core.cutter import Cutter, next_batch
from loaderpool.core.deaths import Deaths
from loaderpool.core.messages import BatchFailed, Ended, Filled, Found, LoaderFailed, Ticket
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
    RunRecord,
    Start,
    Stop,
    ToMain,
    ToWorker,
    WorkerRecord,
)
from loaderpool.core.slots import Slots, Space
from loaderpool.transport.reports import Verdict

_SHORT_S = 0.02  # a second ticket waits only after one that takes less: long ones would wait for a slow sample
_RETRY_S = 1.0  # after a worker could not be started
_NODE_TICKETS, _MOST_NODE_TICKETS = 4, 256  # that a node may have at least, and at most: each has a slot there


class State:
    """Loaders, runs, slots, tickets and workers.

    Each event is a method. After some events call `deal`, then carry out `instructions` in their order and clear them.

    Attributes:
        slots: which run has which.
        retry_at: when `tick` is due; None: it is not.

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
        self._wanted, self._width = workers, max(1, workers)  # width: processes that make rows
        self._of_nodes = of_nodes
        self.slots = Slots(memory, most_slots, self.runs, self._say)
        self._deaths = Deaths(restarts)
        self._broken: bytes | None = None
        self.retry_at: float | None = None
        self._tickets, self._names = itertools.count(1), itertools.count()
        self._cutter = Cutter(self._tickets, of_nodes)

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
        loader = self.loaders.get(number)
        if loader is not None and loader.failure != error:
            self._fail_loader(loader, error)

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
        self.slots.give(run, self._width)

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
        run.is_ended, run.loader.has_given_back = True, run.is_asked
        self._say(MarkEnded(number))
        for worker in {lane.home for lane in run.lanes if lane.home is not None}:  # they end its generators
            self._say(ToWorker(worker, Ended(number)))
        run.free.extend(run.filled.keys() - set(lent))
        run.filled = {offset: run.filled[offset] for offset in lent if offset in run.filled}
        for job in [job for job in self.due if job.slot is not None and job.slot.run is run]:
            self.due.remove(job)
            self._answered(job, None)
        self._settle(run)

    def release(self, number: int, offset: int, ticket: int) -> None:
        """The last view of a slot is gone. What names nothing changes nothing: it crossed an `End`, or came twice."""
        run = self.runs.get(number)
        if run is None or run.filled.get(offset) != ticket:
            return
        del run.filled[offset]
        self.slots.free(run, offset)
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
            self.slots.give(run, self._width)

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
                self.slots.give(run, self._width)

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
            self._note_death(now, death, blamed is not None)
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
            self._note_death(now, death, False)
        self._take_back(node)
        for job in given_up:
            assert death is not None
            self._give_up(job, death.error(Verdict.NODE, len(job.deaths), job.ticket))
        self._hire()

    def joined(self, node: int, workers: int) -> None:
        """A node runs, with so many workers."""
        if node in self.workers:
            self.workers[node].workers = workers
            self._measure()
            for run in [*self.runs.values()]:
                self.slots.give(run, self._width)

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
        self.retry_at = now + _RETRY_S
        if not self.workers:
            self._break(error)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            self._hire()

    # ---- who gets what

    def deal(self) -> None:
        """Give tickets to workers, the emptiest first: what is due, then new ones of the runs in turn."""
        if not self.due and not any(run.free and not run.is_ended for run in self.runs.values()):
            return
        level, has_homes = 0, self._of_nodes or any(run.lanes for run in self.runs.values())
        for run in self.runs.values():
            run.window = None
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
            room = min(max(_NODE_TICKETS, MOST_TICKETS * worker.workers), _MOST_NODE_TICKETS) * bool(worker.workers)
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
            if run.free and not run.is_ended and (batch := self._next_batch(run, worker)) is not None:
                return self._cut(run, batch)
        return None

    def _give(self, worker: WorkerRecord, job: Job) -> None:
        loader = job.loader
        if job.slot is not None and job.slot.batch in loader.keepers and not job.ticket.start:
            keeper = self.workers.get(loader.keepers.pop(job.slot.batch))
            if keeper is not None and not keeper.is_leaving and len(keeper.jobs) < MOST_TICKETS and job.lane is None:
                worker = keeper
        if job.lane is not None and job.slot is not None:
            job.lane.home, job.slot.run.window = worker.number, None
        if loader.left_out:
            left_out = tuple(sample[1:] for sample in loader.left_out if sample[0] == job.ticket.epoch)
            job.ticket = job.ticket._replace(left_out=left_out)
        worker.jobs[job.ticket.number] = job
        self._say(ToWorker(worker.number, job.ticket))

    def _next_batch(self, run: RunRecord, worker: WorkerRecord) -> int | None:
        return next_batch(run, worker.number, (slot.batch for slot in self._slots_of(run)))

    def _cut(self, run: RunRecord, batch: int) -> Job:
        """Make tickets of a run's next batches, for one slot. Return the first; the others are due."""
        first, *others = self._cutter.cut(run, batch, self._width)
        self.due.extend(others)
        return first

    # ---- slots

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
            is_last, batches = run.ends_lane(slot, is_short), run.lanes[slot.batch % len(run.lanes)].batches
            if batches is not None and slot.batch // len(run.lanes) >= batches and not is_last:  # it is after the end
                self._drop(slot.answer)
                self.slots.free(run, slot.offset)
                return
        if slot.count > 1 and slot.failure is not None and not run.is_whole:
            # Each is made by itself, and what is before the one that failed arrives before its error.
            for batch in range(slot.batch, slot.batch + slot.count):
                heapq.heappush(run.again, batch)
            self.slots.free(run, slot.offset)
            return
        if slot.failure is not None or slot.answer is None:
            run.filled[slot.offset], (_, error) = 0, slot.failure or (0, b"")
            self._say(ToMain(BatchFailed(run.number, slot.batch, slot.offset, error)))
            return
        answer, layout = slot.answer, run.loader.layout
        run.filled[slot.offset] = answer.ticket
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

    def _drop(self, answer: Answer | None) -> None:
        if answer is not None and answer.descriptor >= 0:
            self._say(DropFile(answer.descriptor))

    def _settle(self, run: RunRecord) -> None:
        """Give back the slots of a run that has ended: those without a writer and without views."""
        if not run.is_ended:
            return
        self.slots.give_back(run, run.loader.number not in self.loaders)
        if run.feed and not any(True for _ in self._slots_of(run)):
            run.feed = 0
            self._say(ToMain(Ended(run.number)))
        if not run.slots:
            self.runs.pop(run.number, None)
        for other in self.slots.take_starved(run):
            self.slots.give(other, self._width, returning=run.loader)

    def _slots_of(self, run: RunRecord) -> Iterator[Filling]:
        for jobs in itertools.chain([self.due], (worker.jobs.values() for worker in self.workers.values())):
            yield from (job.slot for job in jobs if job.slot is not None and job.slot.run is run)

    # ---- failures

    def _blame(self, job: Job, death: Death) -> None:
        """A worker has died over this job: it is due again, or given up, or a sample of it is left out."""
        verdict, deaths = self._deaths.blame(job, death), len(job.deaths)
        if verdict is None:
            job.ticket = job.ticket._replace(deaths=deaths)
            self.due.appendleft(job)
            return
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

    def _note_death(self, now: float, death: Death, had_begun: bool) -> None:
        """End everything where going on would be to start workers for ever."""
        verdict, deaths = self._deaths.note(now, death, had_begun, self._wanted)
        if verdict is not None:
            self._break(death.error(verdict, deaths, None))

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
            self._deaths.idle = 0
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
        if is_early or self._broken is not None or self.retry_at is not None:
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


def _is_alone(job: Job) -> bool:
    """Whether its node is to have nothing else, so that it is known what the node dies of."""
    return len(job.deaths) >= job.loader.most_deaths - 1
