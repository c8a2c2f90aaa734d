"""Who works on what: the supervisor's whole state. Events in, instructions out; no clock, no process, no I/O.

    Begin --> run: slots --cut--> jobs --deal--> worker --Done--> slot full: Filled --> main process --Release--+
                ^                  ^ due: made again, or rows of a batch | death                                |
                |                  +------------------------------------<+                                      |
                +----------------------------------------- free slot <------------------------------------------+

Why every wait ends. Batches of a run are cut in their order, so the batch that a consumer waits for got its slot
before all later ones, and keeps it when it is made again; and the main process never lends a run's last slots
(`may_lend`). A run without a slot waits only for one that has ended and is still written to; else it gets an error.
Generators (lanes) get ahead of one another: a batch of theirs is cut only as far after the lowest one
that is not full as there are slots that are never lent.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import operator
from typing import Any

from loaderpool.core.messages import (
    BatchFailed,
    Begin,
    Done,
    Ended,
    Filled,
    Found,
    LoaderFailed,
    Look,
    Ticket,
)
from loaderpool.core.records import (
    MOST_TICKETS,
    Abandon,
    Death,
    Deaths,
    DropFile,
    Instruction,
    Job,
    Lane,
    Layout,
    LoaderRecord,
    RunRecord,
    Start,
    Stop,
    ToMain,
    ToWorker,
    WorkerRecord,
)
from loaderpool.core.slots import Cutter, Slots, next_batch
from loaderpool.memory.arena import ExtentMap
from loaderpool.plan.batches import Numbering
from loaderpool.transport.reports import GivenUp

_SHORT_S = 0.02  # a second ticket waits only after one that takes less: long ones would wait for a slow sample
_LAST_TICKET, _SLOTS = operator.attrgetter("last_ticket"), operator.attrgetter("slots")
_NODE_TICKETS, _MOST_NODE_TICKETS = (
    4,
    256,
)  # that a node may have at least, and at most: each has a slot there


class State:
    """Loaders, runs, slots, tickets and workers.

    Each event is a method. After some events call `deal`, then carry out `instructions` in their order and clear them.

    Attributes:
        slots: which run has which.
        is_short: a worker could not be started; none is, until the next `tick`.

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
        memory: ExtentMap,
        most_slots: int,
        restarts: tuple[int, float] | None = None,
        of_nodes: bool = False,
    ) -> None:
        self.instructions: list[Instruction] = []
        self._say = self.instructions.append
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.roomy: dict[int, WorkerRecord] = {}  # workers that may have more tickets
        self.due: collections.deque[Job] = collections.deque()
        self._wanted, self._of_nodes = workers, of_nodes
        self.slots = Slots(memory, most_slots, self.runs, self._say)
        self._deaths = Deaths(restarts, of_nodes)
        self._broken: bytes | None = None
        self.is_short = False
        self._tickets, self._names = itertools.count(1), itertools.count()
        self._cutter = Cutter(self._tickets, of_nodes)

    # ---- what the main process says

    def load(
        self,
        number: int,
        plan: Numbering,
        leaves_out: bool = False,
        most_deaths: int = 3,
        of: int | None = None,
    ) -> None:
        """A loader was loaded. Workers that were forked before do not know it, and are replaced.

        Args:
            number: the loader's.
            plan: of its batches.
            leaves_out: whether samples that end a worker are left out; else a batch with one is an error.
            most_deaths: over one sample, before it is given up.
            of: the number of the loader's first version; None: it is this one.
        """
        first = number if of is None else of
        loader = self.loaders[number] = LoaderRecord(
            number, plan, first, leaves_out, max(2, most_deaths)
        )
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
        else:
            for worker in [*self.workers.values()] if not self._of_nodes else ():
                self._dismiss(worker)
            self._hire()

    def look(self, asked: Look) -> None:
        """A loader's first sample is to be made."""
        loader = self.loaders.get(asked.loader)
        if loader is None:
            return
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
            return
        loader.failure = None
        ticket = Ticket(next(self._tickets), asked.loader, stop=1, offset=-1, feed=asked.feed)
        self.due.append(Job(ticket, loader, None))

    def fail(self, number: int, error: bytes) -> None:
        """No batch of a loader can be made."""
        loader = self.loaders.get(number)
        if loader is not None and loader.failure != error:
            self._fail_loader(loader, error)

    def unload(self, number: int) -> None:
        """The loader is closed, and so are its runs."""
        self.loaders.pop(number, None)
        self.slots.return_kept()
        self.due = collections.deque(
            job for job in self.due if job.loader.number != number or job.slot is not None
        )

    def begin(self, asked: Begin, plan: Numbering | None = None) -> None:
        """A run begins, by another plan than its loader's perhaps. One of an unknown loader is answered as well."""
        loader, first = self.loaders.get(asked.loader), asked.first
        if loader is None or loader.failure is not None:
            error = b"" if loader is None else loader.failure or b""
            self._say(ToMain(BatchFailed(asked.run, first, -1, error)))
            return
        had = {batch for batch in asked.had if batch >= first}
        stop = asked.stop if asked.stop >= 0 else 1 << 1000
        run = self.runs[asked.run] = RunRecord(
            asked.run, loader, plan or loader.plan, first, stop, had
        )
        run.feed, run.is_in_order, run.is_whole = asked.feed, asked.is_in_order, asked.is_whole
        lanes, over = loader.plan.lanes, asked.lanes_over
        run.lanes = [
            Lane(first // lanes + (lane < first % lanes), batches=0 if lane in over else None)
            for lane in range(lanes)
        ]
        if (
            run.lanes
        ):  # a paused worker would keep its lanes, and with them all batches after theirs
            self.resume()
        self.slots.give(run, self.width)

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
        self._say(Abandon(number))
        for worker in {
            lane.home for lane in run.lanes if lane.home is not None
        }:  # they end its generators
            self._say(ToWorker(worker, Ended(number)))
        run.free.extend(run.filled.keys() - set(lent))
        run.filled = {offset: run.filled[offset] for offset in lent if offset in run.filled}
        for job in [job for job in self.due if job.slot is not None and job.slot.run is run]:
            self.due.remove(job)
            self._answered(job)
        self._settle(run)

    def release(self, number: int, offset: int, ticket: int) -> None:
        """The last view of a slot is gone. What names nothing changes nothing: it crossed an `End`, or came twice."""
        run = self.runs.get(number)
        if run is None or run.filled.get(offset) != ticket:
            return
        del run.filled[offset]
        run.free.append(offset)
        if run.is_ended:
            self._settle(run)

    def resize(self, workers: int) -> None:
        """Have so many workers."""
        self._wanted = max(1, workers)
        staying = [worker for worker in self.workers.values() if not worker.is_leaving]
        for worker in staying[self._wanted :]:
            self._dismiss(worker)
        self._hire()
        self._give_slots()

    def pause(self, staying: int) -> None:
        """Give new tickets to this number of workers only, until `resume`. Tickets that others have are finished.

        A worker that starts, leaves or dies meanwhile ends the pause, as generators do. Does nothing for nodes.
        """
        self.resume()
        if self._of_nodes or any(run.lanes for run in self.runs.values()):
            return
        for worker in [*self.workers.values()][max(1, staying) :]:
            worker.is_paused = True
            self.note_room(worker)

    def resume(self) -> None:
        """Give new tickets to all workers again."""
        for worker in self.workers.values():
            if worker.is_paused:
                worker.is_paused = False
                self.note_room(worker)

    # ---- what workers say, and what becomes of them

    def found(self, worker: int, message: Found) -> bool:
        """The first sample was made; returns whether that was asked for."""
        job = self._taken(worker, message.ticket)
        if job is None:
            return False
        job.loader.keeper = worker
        return True

    def lay_out(self, number: int, layout: Layout, seconds: float) -> None:
        """The layout of a loader's slots is known."""
        loader = self.loaders.get(number)
        if loader is None:
            return
        if loader.layout is None:
            loader.layout, loader.row_s = layout, seconds
            for run in [*self.runs.values()]:
                if run.loader is loader:
                    self.slots.give(run, self.width)

    def done(self, worker: int, answer: Done, file: Any = None) -> int | None:
        """A ticket is done, or the user's code raised. An answer to none that this worker has changes nothing.

        Returns the number of the loader's first version, if rows were made.
        """
        job = self._taken(worker, answer.ticket)
        if job is None:
            self._drop(file)
            return None
        if answer.error:
            self._give_up(job, answer.error)
            return None
        loader = job.loader
        if answer.rows:
            loader.row_s += (answer.seconds / answer.rows - loader.row_s) * (
                0.5 if loader.rows_measured < 64 else 0.1
            )
            loader.rows_measured += answer.rows
        self._answered(job, answer, file)
        return loader.of if answer.rows else None

    def died(self, worker: int, now: float, ticket: int, death: Death | None) -> bool:
        """A worker is gone, and all that it said was heard before; returns whether it was lost.

        Args:
            worker: its number.
            now: seconds.
            ticket: what it was working at, by its cell; 0: nothing.
            death: how it ended; None: as it was told to.
        """
        record = self._removed(worker)
        is_lost = not record.is_leaving or bool(record.jobs)
        death = death if is_lost else None
        # Of a node all that it had: what several of them died of is dealt alone, and given up if its node goes again.
        at_work = (
            [*record.jobs.values()]
            if self._of_nodes
            else [job for job in [record.jobs.get(ticket)] if job]
        )
        blamed = [job for job in at_work if death is not None and not job.is_unwanted]
        for job in blamed:
            del record.jobs[job.ticket.number]
        self._take_back(record)
        if death is not None:
            why, deaths = self._deaths.note(now, death, bool(at_work), self._wanted)
            if why is not None:  # to go on would be to start workers for ever
                self.stop(death.error(why, deaths, None))
            for job in reversed(blamed):
                self._blame(job, death)
        self._hire()
        return is_lost

    def joined(self, node: int, workers: int) -> None:
        """A node runs, with so many workers."""
        if node in self.workers:
            self.workers[node].workers = workers
            self.note_room(self.workers[node])
            self._give_slots()

    def stop(self, error: bytes) -> None:
        """Nothing can be made any more: no worker is started, and no batch made."""
        self._broken = error
        for loader in self.loaders.values():
            if loader.failure is None:
                self._fail_loader(loader, error)

    def not_started(self, worker: int, error: bytes) -> None:
        """A worker could not be started: there are fewer until some time later, or, if there are none, an error."""
        self._take_back(self._removed(worker))
        self.is_short = True
        if not self.workers:
            self.stop(error)

    def tick(self) -> None:
        """A second has passed, or so."""
        if self.is_short:
            self.is_short = False
            self._hire()

    # ---- who gets what

    def deal(self) -> None:
        """Give tickets to workers, the emptiest first: what is due, then new ones of the runs in turn."""
        has_work, has_homes = bool(self.due), self._of_nodes
        for run in self.runs.values():
            run.window = None
            has_work = has_work or (bool(run.free) and not run.is_ended)
            has_homes = has_homes or bool(run.lanes)
        asked = self.roomy.copy() if has_work else {}
        while asked:
            level = min([len(worker.jobs) // worker.workers for worker in asked.values()])
            for worker in [*asked.values()]:
                if worker.number not in self.roomy:
                    del asked[worker.number]
                elif len(worker.jobs) // worker.workers == level:
                    job = self._next_job(worker)
                    if job is not None:
                        self._give(worker, job)
                    elif has_homes:  # there may be some for others
                        del asked[worker.number]
                    else:
                        return

    def running(self, worker: int) -> Job | None:
        """Return what a worker should be working at."""
        record = self.workers.get(worker)
        return None if record is None else next(iter(record.jobs.values()), None)

    def note_room(self, worker: WorkerRecord) -> None:
        """Note whether a worker may have one more ticket, as its tickets have changed, or it has."""
        jobs = worker.jobs
        if worker.is_leaving or worker.is_paused:
            has_room = False
        elif self._of_nodes:
            most = min(
                max(_NODE_TICKETS, MOST_TICKETS * worker.workers), _MOST_NODE_TICKETS
            ) * bool(worker.workers)
            has_room = len(jobs) < most and not any(job.is_alone for job in jobs.values())
        elif not jobs:
            has_room = True
        else:
            first = next(iter(jobs.values()))
            layout, slot, ticket = first.loader.layout, first.slot, first.ticket
            if layout is None or slot is None or len(jobs) >= layout.room:
                has_room = False
            else:
                is_short = first.seconds <= _SHORT_S or ticket.stop - ticket.start < slot.asked
                has_room = is_short or layout.room > MOST_TICKETS
        if has_room:
            self.roomy[worker.number] = worker
        else:
            self.roomy.pop(worker.number, None)

    def _next_job(self, worker: WorkerRecord) -> Job | None:
        for job in self.due:
            if self._of_nodes and worker.jobs and job.is_alone:
                return None  # until it has answered all
            if (
                job.slot is None
                or job.slot.lane is None
                or job.slot.lane.home in (None, worker.number)
            ):
                self.due.remove(job)
                return job
        for run in sorted(self.runs.values(), key=_LAST_TICKET):
            if not run.free or run.is_ended or run.loader.failure is not None:
                continue
            if (batch := next_batch(run, worker.number)) is not None:
                first, *others = self._cutter.cut(run, batch, self.width)
                self.due.extend(others)
                return first
        return None

    def _give(self, worker: WorkerRecord, job: Job) -> None:
        loader, slot = job.loader, job.slot
        if slot is not None and slot.lane is not None:
            slot.lane.home, slot.run.window = worker.number, None
        if loader.keeper is not None and slot is not None and slot.batch == job.ticket.start == 0:
            keeper, loader.keeper = self.workers.get(loader.keeper), None
            is_there = keeper is not None and not (keeper.is_leaving or keeper.is_paused)
            if (
                keeper is not None
                and is_there
                and len(keeper.jobs) < MOST_TICKETS
                and slot.lane is None
            ):
                worker = keeper
        if loader.left_out:
            left_out = tuple(
                sample[1:] for sample in loader.left_out if sample[0] == job.ticket.epoch
            )
            job.ticket = job.ticket._replace(left_out=left_out)
        worker.jobs[job.ticket.number] = job
        self.note_room(worker)
        self._say(ToWorker(worker.number, job.ticket))

    # ---- slots

    def _answered(self, job: Job, answer: Done | None = None, file: Any = None) -> None:
        """No worker has this job any more. When a slot has no job left, it is full, failed, or free again."""
        slot = job.slot
        if slot is None:
            return
        slot.unanswered -= 1
        if answer is not None:
            slot.rows += answer.rows
            slot.answer, slot.file = answer, file
        if slot.unanswered:
            return
        run, lane, is_last = slot.run, slot.lane, False
        del run.making[slot.offset]
        if run.is_ended:
            self._drop(slot.file)
            run.free.append(slot.offset)
            self._settle(run)
            return
        if lane is not None:  # it ends with a batch that is short, empty or failed
            turn, has_rows = slot.batch // len(run.lanes), slot.rows > 0 or slot.failure is not None
            is_end = slot.rows < slot.asked or slot.failure is not None
            if is_end and (lane.batches is None or turn + has_rows < lane.batches):
                lane.batches, is_last = (
                    turn + has_rows,
                    True,
                )  # an earlier one may be answered later, by another worker
            elif lane.batches is not None and turn >= lane.batches:  # it is after the end
                self._drop(slot.file)
                run.free.append(slot.offset)
                return
        if slot.failure is not None:
            if slot.count > 1 and not run.is_whole:
                # Each is made by itself, and what is before the one that failed arrives before its error.
                for batch in range(slot.batch, slot.batch + slot.count):
                    heapq.heappush(run.again, batch)
                run.free.append(slot.offset)
            else:
                run.filled[slot.offset] = 0
                self._say(ToMain(BatchFailed(run.number, slot.batch, slot.offset, slot.failure[1])))
            return
        answer = slot.answer
        assert answer is not None
        run.filled[slot.offset] = answer.ticket
        place = slot.batch, slot.count, slot.rows, slot.offset, job.ticket.slot_bytes
        slots = run.slots, run.slots_wanted, slot.may_lend
        told = Filled(
            run.number, *place, *slots, is_last, answer.ticket, answer.oversize, answer.failures
        )
        self._say(ToMain(told, slot.file))

    def _drop(self, file: Any) -> None:
        if file is not None:
            self._say(DropFile(file))

    def _settle(self, run: RunRecord) -> None:
        """Give back the slots of a run that has ended: those without a writer and without views."""
        self.slots.give_back(run, run.loader.number not in self.loaders)
        if run.feed and not run.making:
            run.feed = 0
            self._say(ToMain(Ended(run.number)))
        if not run.slots:
            self.runs.pop(run.number, None)
        # First those that wait for what this one gives back, then those of its loader, which may have had less.
        for other in sorted(self.runs.values(), key=_SLOTS):
            if not other.slots or other.loader is run.loader:
                self.slots.give(other, self.width)

    # ---- failures

    def _blame(self, job: Job, death: Death) -> None:
        """A worker has died over this job: it is due again, or given up, or a sample of it is left out."""
        why, deaths = self._deaths.blame(job, death), len(job.deaths)
        is_left_out = why is GivenUp.ALONE and job.loader.leaves_out and death.sample >= 0
        if why is not None and (death.is_generator or not is_left_out):
            self._give_up(job, death.error(why, deaths, job.ticket))
            return
        if why is not None:
            job.loader.left_out.append(
                (job.ticket.epoch, death.sample, death.hung_s, death.exit_code)
            )
            job.deaths.clear()
        job.ticket = job.ticket._replace(deaths=deaths)
        self.due.appendleft(job)

    def _give_up(self, job: Job, error: bytes) -> None:
        slot = job.slot
        if slot is not None:
            if slot.failure is None or job.ticket.start < slot.failure[0]:
                slot.failure = job.ticket.start, error
            self._answered(job)
        else:
            self._fail_loader(job.loader, error)

    def _fail_loader(self, loader: LoaderRecord, error: bytes) -> None:
        loader.failure = error
        self._say(ToMain(LoaderFailed(loader.number, error)))

    # ---- workers

    def _taken(self, worker: int, ticket: int) -> Job | None:
        """Take a ticket from a worker; None: it has no such ticket."""
        record = self.workers.get(worker)
        if record is None:
            return None
        job = record.jobs.pop(ticket, None)
        if job is not None:
            self._deaths.idle = 0
            self.note_room(record)
        if record.is_leaving and not record.jobs:
            self._say(Stop(worker))
        return job

    def _take_back(self, worker: WorkerRecord) -> None:
        """What a worker had, which is gone, is due again."""
        self._leave_homes(worker)
        for job in reversed(worker.jobs.values()):
            if job.is_unwanted:
                self._answered(job)
            else:
                self.due.appendleft(job)

    def _hire(self) -> None:
        """Start workers up to the number that is wanted, beside those that leave."""
        is_early = (
            not self.loaders and not self._of_nodes
        )  # nodes take long to start, and load what comes later
        if is_early or self._broken is not None or self.is_short:
            return
        staying = sum(not worker.is_leaving for worker in self.workers.values())
        for _ in range(self._wanted - staying):
            self.resume()
            number = next(self._names)
            worker = self.workers[number] = WorkerRecord(number, workers=int(not self._of_nodes))
            self.note_room(worker)
            self._say(Start(number))

    def _removed(self, worker: int) -> WorkerRecord:
        """Take out a worker that is gone."""
        self.resume()
        self.roomy.pop(worker, None)
        return self.workers.pop(worker)

    @property
    def width(self) -> int:
        """How many processes make rows."""
        return max(
            1,
            sum(node.workers for node in self.workers.values()) if self._of_nodes else self._wanted,
        )

    def _give_slots(self) -> None:
        """There are more workers, or fewer: runs get the slots that so many need."""
        for run in [*self.runs.values()]:
            self.slots.give(run, self.width)

    def _dismiss(self, worker: WorkerRecord) -> None:
        if worker.is_leaving:
            return
        worker.is_leaving = True
        self.resume()
        self.note_room(worker)
        self._leave_homes(worker)
        if not worker.jobs:
            self._say(Stop(worker.number))

    def _leave_homes(self, worker: WorkerRecord) -> None:
        for lane in (
            lane for run in self.runs.values() for lane in run.lanes if lane.home == worker.number
        ):
            lane.home = None
