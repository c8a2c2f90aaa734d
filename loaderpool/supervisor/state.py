"""The supervisor's state: assigns work to workers. Pure: no clock, no process, no I/O.

Events come in as method calls, and instructions go out.

    Begin -> run: slots --cut--> jobs --deal--> worker --Done--> Filled -> main process --Release-+
                ^                  ^                | death                                       |
                |                  +---- due <------+                                             |
                +--------------------------- free slot <------------------------------------------+

Every wait ends, for these reasons:

- Batches of a run are cut in their order. So the batch that a consumer waits for got its slot
  before all later batches, and it keeps that slot if it is made again.
- The main process never lends the last slots of a run (`may_lend`).
- A run without a slot waits only for a run that has ended and is still written to. If there is
  none, it gets an error.
- Generators (lanes) get ahead of one another. A lane's batch is cut only if it is close to the
  lowest batch that is not full: the distance is less than the number of slots that are never lent.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import operator
from typing import Any

from loaderpool.memory.arena import ExtentMap
from loaderpool.plan.batches import Numbering
from loaderpool.supervisor.records import (
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
from loaderpool.supervisor.slots import (
    Cutter,
    Slots,
    has_used_few_slots,
    needs_large_fresh_slot,
    next_batch,
    tickets_of_node,
)
from loaderpool.transport.messages import (
    Begin,
    Done,
    Ended,
    Filled,
    Found,
    Look,
    Status,
    Ticket,
)
from loaderpool.transport.reports import GivenUp

# A second ticket is queued only behind one that takes less time than this. Otherwise long tickets
# would wait behind a slow sample.
_SHORT_S = 0.02
# Least duration of a ticket, as a multiple of the time in which answers gather. Smaller: a worker
# may finish its second ticket in that time. Larger: answers gather in fewer pools.
_WAITS_IN_TICKET = 4
_LAST_TICKET, _SLOTS = operator.attrgetter("last_ticket"), operator.attrgetter("slots")


class State:
    """Loaders, runs, slots, tickets and workers.

    Each event is a method. After some events, the caller calls `deal`, then carries out the
    `instructions` in their order and clears them. All calls come from the supervisor's thread.

    Attributes:
        instructions: Instructions that the supervisor has not carried out yet.
        slots: Slots of all runs.
        is_short: True if a worker could not be started. No worker is started until the next `tick`.
        ticket_s: Expected time in seconds of the latest ticket.
        has_withheld_slot: True if a worker could make a batch in a large fresh slot, but has to
            wait first. Updated by each `deal` in which a worker can accept a ticket.

    Args:
        workers: Number of workers to start.
        memory: Memory file for all slots.
        most_slots: Greatest number of slots of all runs together.
        restarts: Limit (deaths, seconds): more deaths within these seconds end all work; None: no
            limit.
        of_nodes: True if the workers are nodes, which have their own workers. A node gets tickets
            after it has `joined`, and loads new loaders without a restart. Its death is not blamed
            on a sample.
        hands_over: True if a worker may read items for another one. They go through the supervisor
            in a file.
    """

    def __init__(
        self,
        workers: int,
        memory: ExtentMap,
        most_slots: int,
        restarts: tuple[int, float] | None = None,
        of_nodes: bool = False,
        hands_over: bool = True,
    ) -> None:
        self.instructions: list[Instruction] = []
        self._say = self.instructions.append
        self.loaders: dict[int, LoaderRecord] = {}
        self.runs: dict[int, RunRecord] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.roomy: dict[int, WorkerRecord] = {}  # workers that can accept another ticket
        self.due: collections.deque[Job] = collections.deque()
        self._wanted, self._of_nodes = workers, of_nodes
        self.slots = Slots(memory, most_slots, self.runs, self._say)
        self._deaths = Deaths(restarts, of_nodes)
        self._broken: bytes | None = None
        self.is_short = self.has_withheld_slot = False
        self.ticket_s = 0.0
        self._tickets, self._names = itertools.count(1), itertools.count()
        self._cutter = Cutter(self._tickets, of_nodes, hands_over and not of_nodes)

    # ---- messages of the main process

    def load(
        self,
        number: int,
        plan: Numbering,
        leaves_out: bool = False,
        most_deaths: int = 3,
        of: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Add a loader that was loaded. Replace the workers, which were forked without it.

        Args:
            number: Number of the loader's version.
            plan: Numbering of its batches.
            leaves_out: True: leave out samples that end a worker. False: they fail their batch.
            most_deaths: Deaths of workers at one sample before its ticket is abandoned, at least 2.
            of: Number of the loader's first version; None: this one.
            timeout_s: Longest time of a sample in seconds, as in `LoaderRecord`.
        """
        first = number if of is None else of
        loader = self.loaders[number] = LoaderRecord(
            number, plan, first, leaves_out, most_deaths, timeout_s
        )
        if self._broken is not None:
            self._fail_loader(loader, self._broken)
        else:
            for worker in [*self.workers.values()] if not self._of_nodes else ():
                self._dismiss(worker)
            self._hire()

    def look(self, asked: Look) -> None:
        """Queue a ticket that makes the first sample of a loader."""
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
        """Fail a loader: none of its batches can be made. Does nothing if the error is the same."""
        loader = self.loaders.get(number)
        if loader is not None and loader.failure != error:
            self._fail_loader(loader, error)

    def unload(self, number: int) -> None:
        """Remove a loader that was closed. Its runs have ended before."""
        self.loaders.pop(number, None)
        self.slots.return_kept()
        self.due = collections.deque(
            job for job in self.due if job.loader.number != number or job.slot is not None
        )

    def begin(self, asked: Begin, plan: Numbering | None = None) -> None:
        """Start a run, with `plan` if given, otherwise with the loader's plan.

        If the loader is unknown or has failed, the reply is `Status`.
        """
        loader, first = self.loaders.get(asked.loader), asked.first
        if loader is None or loader.failure is not None:
            self._say(ToMain(Status(asked.run, b"" if loader is None else loader.failure)))
            return
        had = {batch for batch in asked.had if batch >= first}
        stop = asked.stop if asked.stop >= 0 else 1 << 1000
        run = self.runs[asked.run] = RunRecord(
            asked.run, loader, plan or loader.plan, first, stop, had
        )
        run.feed, run.is_in_order = asked.feed, asked.is_in_order
        run.demand = {} if asked.is_on_demand else None
        lanes, over = loader.plan.lanes, asked.lanes_over
        run.lanes = [
            Lane(first // lanes + (lane < first % lanes), batches=0 if lane in over else None)
            for lane in range(lanes)
        ]
        # A paused worker would keep its lanes, and so delay all later batches.
        if run.lanes:
            self.resume()
        self.slots.give(run, self.width)

    def extend(self, number: int, stop: int, last_rows: int, first: int = -1) -> None:
        """Allow more batches of a run, as in `Extend`."""
        run = self.runs.get(number)
        if run is None:
            return
        if run.demand is None:
            run.stop, run.last_rows = stop, last_rows
        else:
            run.demand[first] = stop - first, last_rows

    def end(self, number: int, lent: tuple[int, ...]) -> None:
        """End a run. Free its slots, except those with views and those that workers write into.

        Args:
            number: Number of the run.
            lent: Tickets of the slots with views. Not offsets: if a slot's release came before this
                message, the slot may have been filled again since.
        """
        run = self.runs.get(number)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        self._say(Abandon(number))
        # These workers close the run's generators.
        for worker in {lane.home for lane in run.lanes if lane.home is not None}:
            self._say(ToWorker(worker, Ended(number)))
        kept = {offset: ticket for offset, ticket in run.filled.items() if ticket in lent}
        run.free.extend(run.filled.keys() - kept.keys())
        run.filled = kept
        for job in [job for job in self.due if job.slot is not None and job.slot.run is run]:
            self.due.remove(job)
            self._answered(job)
        self._settle(run)

    def release(self, number: int, offset: int, ticket: int) -> None:
        """Free a slot whose last view is gone.

        Does nothing if the run or ticket is unknown: the message crossed an `End`, or came twice.
        """
        run = self.runs.get(number)
        if run is None or run.filled.get(offset) != ticket:
            return
        del run.filled[offset]
        run.free.append(offset)
        if run.is_ended:
            self._settle(run)

    def resize(self, workers: int) -> None:
        """Set the number of workers, at least 1. Starts or stops workers, and adds slots."""
        self._wanted = max(1, workers)
        staying = [worker for worker in self.workers.values() if not worker.is_leaving]
        for worker in staying[self._wanted :]:
            self._dismiss(worker)
        self._hire()
        self._give_slots()

    def pause(self, staying: int) -> None:
        """Give new tickets to `staying` workers only, until `resume`. Pairs with `resume`.

        The other workers finish the tickets that they have. The pause ends early if a worker
        starts, leaves or dies, or if a run of generators starts. Does nothing for nodes and
        generators.
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

    # ---- messages and deaths of workers

    def found(self, worker: int, message: Found) -> bool:
        """Process `Found`: the first sample was made. Return True if the worker had its ticket."""
        job = self._taken(worker, message.ticket)
        if job is None:
            return False
        job.loader.probe_owner = worker
        return True

    def lay_out(self, number: int, layout: Layout, seconds: float) -> None:
        """Set the layout of a loader's slots, and give slots to its runs. Later calls do nothing.

        Args:
            number: Number of the loader's version.
            layout: Layout of its slots.
            seconds: Expected time of a row.
        """
        loader = self.loaders.get(number)
        if loader is None:
            return
        if loader.layout is None:
            loader.layout, loader.row_s = layout, seconds
            for run in [*self.runs.values()]:
                if run.loader is loader:
                    self.slots.give(run, self.width)

    def done(self, worker: int, answer: Done, file: int | None = None) -> int | None:
        """Process `Done`: a ticket is done, or the user's code raised.

        If the worker does not have that ticket, only `file` is dropped. Return the number of the
        loader's first version if rows were made, otherwise None.
        """
        job = self._taken(worker, answer.ticket)
        if job is None:
            self._drop(file)
            return None
        if answer.error:
            self._give_up(job, answer.error)
            return None
        if answer.items:
            self._hand_over(job, answer, file)
            return None
        loader = job.loader
        if answer.rows:
            loader.row_s += (answer.seconds / answer.rows - loader.row_s) * (
                0.5 if loader.rows_measured < 64 else 0.1
            )
            loader.rows_measured += answer.rows
        self._answered(job, answer, file)
        return loader.of if answer.rows else None

    def _hand_over(self, job: Job, answer: Done, file: int | None) -> None:
        """Queue a ticket for any worker, because another one has read its items into a file."""
        slot = job.slot
        assert slot is not None
        slot.items = file
        job.ticket = job.ticket._replace(
            number=next(self._tickets), is_fresh=False, may_hand_over=False, items=answer.items
        )
        job.deaths.clear()
        if job.is_unwanted:
            self._answered(job)
        else:
            self.due.append(job)

    def died(self, worker: int, now: float, ticket: int, death: Death | None) -> bool:
        """Process the death of a worker. All its messages were processed before.

        Return True if the worker was lost: it had tickets, or had no order to stop.

        Args:
            worker: Number of the worker.
            now: Time in seconds.
            ticket: Ticket in work, from the worker's cell of the board; 0: none.
            death: The death; None: the worker ended as requested.
        """
        record = self._removed(worker)
        is_lost = not record.is_leaving or bool(record.jobs)
        death = death if is_lost else None
        # When a node dies, all its tickets are blamed. A ticket that was blamed repeatedly is
        # retried alone, and abandoned if its node dies again.
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
            if why is not None:  # otherwise workers would be restarted forever
                self.stop(death.error(why, deaths, None))
            for job in reversed(blamed):
                self._blame(job, death)
        self._hire()
        return is_lost

    def joined(self, node: int, workers: int) -> None:
        """Set the number of workers of a node, which runs now. It gets tickets from now on."""
        if node in self.workers:
            self.workers[node].workers = workers
            self.note_room(self.workers[node])
            self._give_slots()

    def stop(self, error: bytes) -> None:
        """Fail all loaders, present and future. No worker is started any more."""
        self._broken = error
        for loader in self.loaders.values():
            if loader.failure is None:
                self._fail_loader(loader, error)

    def not_started(self, worker: int, error: bytes) -> None:
        """Process the failed start of a worker. The next `tick` retries it.

        If there is no other worker, all loaders fail with `error`.
        """
        self._take_back(self._removed(worker))
        self.is_short = True
        if not self.workers:
            self.stop(error)

    def tick(self) -> None:
        """Retry failed starts of workers. The supervisor calls this at each tick of its clock."""
        if self.is_short:
            self.is_short = False
            self._hire()

    # ---- assignment

    def deal(self, has_waited: bool = True) -> None:
        """Assign tickets to workers, to those with the fewest tickets first.

        Due jobs come first, then new tickets of the runs in turn.

        Args:
            has_waited: True if a worker has waited long enough for a used slot, so that it may get
                a large fresh one. False: only in runs that have used few slots.
        """
        self._has_waited = has_waited or self._of_nodes
        has_work, may_differ, active = bool(self.due), self._of_nodes, 0
        for run in self.runs.values():
            run.window = None
            has_work = has_work or (bool(run.free or run.fresh) and not run.is_ended)
            active += not run.is_ended
            may_differ = may_differ or bool(run.lanes) or active > 1
        self.has_withheld_slot &= not self.roomy
        if not has_work or not self.roomy:
            return
        # Heap of the workers by their number of tickets, then in the order of `roomy`.
        candidates = [
            (len(worker.jobs) // worker.workers, rank, worker)
            for rank, worker in enumerate(self.roomy.values())
        ]
        heapq.heapify(candidates)
        refused: list[tuple[int, int, WorkerRecord]] = []
        while candidates:
            tickets, rank, worker = heapq.heappop(candidates)
            if worker.number not in self.roomy:  # it has got a ticket chosen for another one
                continue
            if len(worker.jobs) // worker.workers > tickets:  # it has got such a ticket, too
                heapq.heappush(candidates, (tickets + 1, rank, worker))
                continue
            due, job = len(self.due), self._next_job(worker)
            if job is not None:
                if len(self.due) > due:  # row ranges of a batch, which all workers can have
                    candidates += refused
                    heapq.heapify(candidates)
                    refused.clear()
                self._give(worker, job)
                if worker.number in self.roomy:
                    tickets = len(worker.jobs) // worker.workers
                    heapq.heappush(candidates, (tickets, rank, worker))
            elif not may_differ:  # all workers may get the same jobs, so none gets any
                return
            else:
                refused.append((tickets, rank, worker))

    def expects_several_answers(self, seconds: float) -> bool:
        """Return True if several answers are expected in this time, and no worker becomes idle.

        Each worker has a second ticket, which takes several times as long.
        """
        is_ahead = not self.roomy and _WAITS_IN_TICKET * seconds <= self.ticket_s <= _SHORT_S
        return is_ahead and self.ticket_s < seconds * len(self.workers)

    @property
    def files(self) -> list[Any]:
        """Descriptors of the files that came with answers and are still needed."""
        slots = [slot for run in self.runs.values() for slot in run.making.values()]
        found = [file for slot in slots for file in (slot.items, slot.file)]
        return [file for file in found if file is not None]

    def running(self, worker: int) -> Job | None:
        """Return the oldest job of a worker, which should be running, or None if it has no job."""
        record = self.workers.get(worker)
        return None if record is None else next(iter(record.jobs.values()), None)

    def note_room(self, worker: WorkerRecord) -> None:
        """Recompute if a worker can accept another ticket. Called after each change of a worker."""
        jobs = worker.jobs
        if worker.is_leaving or worker.is_paused:
            has_room = False
        elif self._of_nodes:
            most = tickets_of_node(worker.workers) * bool(worker.workers)
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
        later: Job | None = None
        for job in self.due:
            slot = job.slot
            if self._of_nodes and worker.jobs and job.is_alone:
                return None  # a job that must be alone waits until the node has no other
            if slot is not None and slot.items is not None:
                # A worker with a lane reads on, so that others have items.
                if any(lane.home == worker.number for lane in slot.run.lanes):
                    later = later or job
                    continue
            elif (
                slot is not None
                and slot.lane is not None
                and slot.lane.home not in (None, worker.number)
            ):
                continue
            self.due.remove(job)
            return job
        for run in sorted(self.runs.values(), key=_LAST_TICKET):
            if run.is_ended or run.loader.failure is not None or not (run.free or run.fresh):
                continue
            if needs_large_fresh_slot(run):
                # Tickets of other runs do not count, because a worker may always have some. Nodes
                # get the slot in any case, because some of their workers may be idle.
                if not self._of_nodes and any(
                    job.slot is not None and job.slot.run is run for job in worker.jobs.values()
                ):
                    continue
                if not (self._has_waited or has_used_few_slots(run, self.width)):
                    # `again` comes first, because `next_batch` would remove a batch from it.
                    if run.again or next_batch(run, worker.number) is not None:
                        self.has_withheld_slot = True
                    continue
            if (batch := next_batch(run, worker.number)) is not None:
                first, *others = self._cutter.cut(run, batch, self.width, worker.number)
                self.due.extend(others)
                return first
        if later is not None:
            self.due.remove(later)
        return later

    def _give(self, worker: WorkerRecord, job: Job) -> None:
        loader, slot = job.loader, job.slot
        if slot is not None and slot.lane is not None and slot.items is None:
            slot.lane.home, slot.run.window = worker.number, None
        number = loader.probe_owner
        if number is not None and slot is not None and slot.batch == job.ticket.start == 0:
            owner, loader.probe_owner = self.workers.get(number), None
            is_there = owner is not None and not (owner.is_leaving or owner.is_paused)
            if (
                owner is not None
                and is_there
                and len(owner.jobs) < MOST_TICKETS
                and slot.lane is None
            ):
                worker = owner
        if loader.left_out:
            left_out = tuple(
                sample[1:] for sample in loader.left_out if sample[0] == job.ticket.epoch
            )
            job.ticket = job.ticket._replace(left_out=left_out)
        self.ticket_s = job.seconds
        if slot is not None:
            slot.run.writers[slot.offset] = worker.number
        worker.jobs[job.ticket.number] = job
        self.note_room(worker)
        self._say(ToWorker(worker.number, job.ticket, None if slot is None else slot.items))

    # ---- slots

    def _answered(self, job: Job, answer: Done | None = None, file: int | None = None) -> None:
        """Finish a job that no worker has any more. The last job of a slot completes the slot.

        The slot is then reported as full or failed, or is free again.
        """
        slot = job.slot
        if slot is None:
            return
        slot.unanswered -= 1
        if answer is not None:
            slot.rows += answer.rows
            slot.answer, slot.file = answer, file
        if slot.unanswered:
            return
        self._drop(slot.items)
        run, lane, is_last = slot.run, slot.lane, False
        del run.making[slot.offset]
        if run.is_ended:
            self._drop(slot.file)
            run.free.append(slot.offset)
            self._settle(run)
            return
        # A lane ends with a batch that is short, empty or failed. The dispatcher watches the lanes
        # of a run on demand.
        if lane is not None and run.demand is None:
            turn, has_rows = slot.batch // len(run.lanes), slot.rows > 0 or slot.failure is not None
            is_end = slot.rows < slot.asked or slot.failure is not None
            if is_end and (lane.batches is None or turn + has_rows < lane.batches):
                # `lane.batches` may shrink: another worker may answer an earlier batch later.
                lane.batches, is_last = turn + has_rows, True
            elif lane.batches is not None and turn >= lane.batches:  # after the lane's end
                self._drop(slot.file)
                run.free.append(slot.offset)
                return
        if slot.failure is not None and slot.count > 1 and run.demand is None:
            # Make each batch again by itself, so the batches before the failed one arrive.
            for batch in range(slot.batch, slot.batch + slot.count):
                heapq.heappush(run.again, batch)
            run.free.append(slot.offset)
            return
        place = slot.batch, slot.count, slot.rows, slot.offset, job.ticket.slot_bytes
        slots = run.slots, run.slots_wanted, slot.may_lend
        if slot.failure is not None:
            run.filled[slot.offset] = 0
            self._say(ToMain(Filled(run.number, *place, *slots, error=slot.failure[1])))
            return
        answer = slot.answer
        assert answer is not None
        run.filled[slot.offset] = answer.ticket
        filled = Filled(
            run.number, *place, *slots, is_last, answer.ticket, answer.oversize, answer.failures,
            batch_rows=slot.batch_rows,
        )  # fmt: skip
        self._say(ToMain(filled, slot.file))

    def _drop(self, file: int | None) -> None:
        if file is not None:
            self._say(DropFile(file))

    def _settle(self, run: RunRecord) -> None:
        """Release the slots of an ended run that have neither a writer nor views.

        The last one removes the run. Other runs may get the memory.
        """
        self.slots.give_back(run, run.loader.number not in self.loaders)
        if run.feed and not run.making:
            run.feed = 0
            self._say(ToMain(Ended(run.number)))
        if not run.slots:
            self.runs.pop(run.number, None)
        # Runs without slots wait for this memory. Runs of the same loader may have got fewer slots.
        for other in sorted(self.runs.values(), key=_SLOTS):
            if not other.slots or other.loader is run.loader:
                self.slots.give(other, self.width)

    # ---- failures

    def _blame(self, job: Job, death: Death) -> None:
        """Requeue a job that was in work when a worker died, or abandon it.

        If the loader leaves out samples, abandon only the sample that ended the workers.
        """
        why, deaths = self._deaths.blame(job, death), len(job.deaths)
        is_left_out = why is GivenUp.ALONE and job.loader.leaves_out and death.sample >= 0
        if why is not None and (death.is_generator or not is_left_out):
            self._give_up(job, death.error(why, deaths, job.ticket))
            return
        # Of several rows, the cause is unknown, so they are read one by one next.
        if why is not None and death.rows == 1:
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
        self._say(ToMain(Status(loader.number, error)))

    # ---- workers

    def _taken(self, worker: int, ticket: int) -> Job | None:
        """Remove and return a job that a worker has answered. None if the worker lacks the job."""
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
        """Requeue the jobs of a worker that is gone. Jobs of ended runs are finished instead."""
        self._leave_homes(worker)
        for job in reversed(worker.jobs.values()):
            if job.is_unwanted:
                self._answered(job)
            else:
                self.due.appendleft(job)

    def _hire(self) -> None:
        """Start workers up to the requested number, not counting those that leave."""
        # Nodes are started before the first loader: they start slowly, and load loaders later.
        is_early = not self.loaders and not self._of_nodes
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
        """Remove and return the record of a worker that is gone. Paused workers resume."""
        self.resume()
        self.roomy.pop(worker, None)
        return self.workers.pop(worker)

    @property
    def width(self) -> int:
        """Number of processes that make rows, at least 1."""
        return max(
            1,
            sum(node.workers for node in self.workers.values()) if self._of_nodes else self._wanted,
        )

    def _give_slots(self) -> None:
        """Give all runs the slots for the present number of workers."""
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
