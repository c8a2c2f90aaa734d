"""What a death means: which tickets are redone, tried or given up, and when there were too many.

    a worker is gone ──▶ its tickets: answered (the board tells), redone, tried row by row, given up
                    └──▶ counted: more than `Limits.restarts`, or none that ever begins, end everything

`deaths.py` finds out which sample is to blame, and has the chart of that.
"""

from __future__ import annotations

import dataclasses
import enum

from loaderpool.supervisor.dealer import EarlyDealer
from loaderpool.supervisor.instructions import Close, FailTicket, LoseTicket, ToTrainer, ToWorker
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import LastCell, LoaderRecord, Ticket, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.system.process import RestartLimit
from loaderpool.transport.messages import Command, Status, encode
from loaderpool.transport.reports import Verdict

# Deaths of one row alone: with one, a worker killed from outside in that moment would convict it.
_LONE_DEATHS = 2
# A row whose worker dies outside of its call, again and again, is given up nevertheless.
_TRIAL_DEATHS = 8
_ACQUITTALS = 3


class Step(enum.Enum):
    """What follows from a death over a ticket."""

    REDO = enum.auto()
    TRY_ROWS = enum.auto()  # its rows alone
    CONVICT = enum.auto()  # the row that ran, or the one whose trial it was
    GIVE_UP = enum.auto()  # no row kills alone


class Inquest:
    """The tickets whose rows are being tried, and what is known of each.

    Args:
        held: takes the tickets whose rows are being tried, by number.
        limit: counts deaths; those that a sample explains are taken from it.
    """

    def __init__(self, held: dict[int, Ticket], limit: RestartLimit) -> None:
        self._held, self._limit = held, limit

    def died_over(self, ticket: Ticket, index: int | None, in_generator: bool = False) -> Step:
        """Note that a worker died over this ticket, at the source index if the board knew.

        A generator has no rows that could be tried alone: it is convicted when it ends two workers running at the
        same item. So is a ticket of one call; a worker that was killed between two calls names no sample.
        """
        suspect = ticket.suspect
        ticket.attempt += 1
        if suspect is not None:
            suspect.lost += 1
            ticket.deaths += index is not None
            is_convicted = ticket.deaths >= _LONE_DEATHS or ticket.attempt >= _TRIAL_DEATHS
            return Step.CONVICT if is_convicted else Step.REDO
        ticket.deaths += 1
        ticket.lost += 1
        is_same, ticket.hint = index == ticket.hint, index
        if ticket.deaths < ticket.loader.max_deaths:
            return Step.REDO
        if in_generator or ticket.is_alone:
            return Step.CONVICT if is_same and ticket.deaths >= _LONE_DEATHS else Step.REDO
        if ticket.acquittals >= _ACQUITTALS:
            return Step.GIVE_UP
        self._held[ticket.number] = ticket
        return Step.TRY_ROWS

    def acquit(self, ticket: Ticket) -> None:
        """Note that all its rows were tried and none killed."""
        del self._held[ticket.number]
        ticket.deaths = 0
        ticket.acquittals += 1

    def convict(self, ticket: Ticket) -> None:
        """Note that one of its rows kills: the deaths over it came from that, so they are no storm."""
        self._held.pop(ticket.number, None)
        self._limit.forgive(ticket.lost)
        ticket.deaths = ticket.acquittals = 0


# Deaths in a row of workers that had no ticket and had not even begun: more means that nothing ever will work. Of those
# that waited for work when they were killed any number may follow one another.
_IDLE_DEATHS = 5


class Deaths:
    """Answers for the tickets of workers that have died, as a part of `SupervisorState`.

    Attributes:
        lost: how many workers died that had work, or should have had some.
        limit: says whether these were too many of late.

    Args:
        ledger: takes what follows for the tickets.
        workers: who there is.
        early: knows what was made early.
        max_restarts: how many may die within so many seconds; None: any number.
    """

    def __init__(
        self, ledger: Ledger, workers: Roster, early: EarlyDealer, max_restarts: tuple[int, float] | None
    ) -> None:
        self._ledger, self._workers, self._early = ledger, workers, early
        self.lost = 0
        self.limit = RestartLimit(max_restarts)
        self._inquest = Inquest(ledger.held, self.limit)
        self._idle = 0

    def note_answer(self) -> None:
        """Note that a worker has answered a ticket: they do begin."""
        self._idle = 0

    def answer_for(self, worker: WorkerRecord, last: LastCell, now_ns: int, is_explained: bool, workers: int) -> bool:
        """Answer for the tickets of a worker that is gone; returns whether that is the end of everything.

        Args:
            worker: which one; it is no longer on the roster.
            last: what it left.
            now_ns: monotonic.
            is_explained: it was ended for a sample that hung; so none of those that were made beside it is to blame.
            workers: how many there shall be.
        """
        was_lost = bool(worker.tickets) or not worker.is_leaving
        was_early = self._early.drop(worker)  # no consumer asked for it, and tickets behind it only waited
        unanswered = self._unanswered(worker, last)
        for ticket in unanswered:
            ticket.is_isolated |= not is_explained
        for ticket in reversed(unanswered if was_early else unanswered[1:]):  # they only waited
            ticket.attempt += 1
            self._ledger.due.appendleft(ticket)
        if was_lost and not was_early:
            self.limit.note(now_ns)
        if unanswered and not was_early:
            self._died_over(unanswered[0], worker, last)
        if was_lost:
            self.lost += 1
            self._idle = 0 if unanswered or last.has_begun else self._idle + 1
        return was_lost and self._ends_all(last, workers)

    def _unanswered(self, worker: WorkerRecord, last: LastCell) -> list[Ticket]:
        """Return its tickets without those that it has answered, or may have; these are settled."""
        unanswered: list[Ticket] = []
        for ticket in worker.tickets.values():
            if last.finished == ticket.number << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-4: finished on the board; the completion may or may not have been sent: send it (again).
                # One that carries bytes was sent over the socket before the note.
                if last.status in (Status.FINISHED, Status.ABANDONED):
                    self._ledger.out.append(ToTrainer(ticket.completion(Status(last.status), worker.number)))
                self._ledger.settle(ticket)
            elif last.sending == ticket.number << 16 | ticket.attempt and ticket.run is not None:
                # PROTO-6: the trainer has it or has it not; if it has, the slot is its own by now.
                self._ledger.out.append(ToTrainer(ticket.unsure()))
                self._ledger.settle(ticket)
            else:
                unanswered.append(ticket)
        return unanswered

    def _ends_all(self, last: LastCell, workers: int) -> bool:
        """End everything where going on would be to restart workers for ever; returns whether it is so."""
        is_storm = self.limit.is_exceeded
        if not is_storm and self._idle <= _IDLE_DEATHS + workers:
            return False
        verdict = Verdict.STORM if is_storm else Verdict.BEFORE
        deaths = self.limit.count if is_storm else self._idle
        self._ledger.out += [LoseTicket(b"", 0, 0, last.source_index, deaths, verdict), Close()]
        return True

    def fail_hung(self, worker: WorkerRecord | None, last: LastCell, ticket_number: int, ran_ns: int) -> bool:
        """Answer for the ticket of a worker that was killed as its sample ran past the timeout; `answer_for` follows.

        Args:
            worker: which one; None: it is gone already.
            last: what it left, with the index of that sample.
            ticket_number: the ticket that it worked on.
            ran_ns: how long the sample ran.

        Returns:
            whether the sample explains the death.
        """
        ticket = None if worker is None else worker.first
        attempt = 0 if ticket is None else ticket.number << 16 | ticket.attempt
        if (
            ticket is None
            or ticket.number != ticket_number
            or attempt in (last.finished, last.sending)  # it got over it in the last moment
            or (ticket.run is not None and ticket.run.is_ended)  # the answer matters no more
            or ticket.early is not None  # nor here: its turn will tell
        ):
            return False
        assert worker is not None
        assert last.source_index is not None
        index = last.source_index
        loader, run = ticket.loader, ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        if loader.may_exclude and not last.in_generator:
            ticket.deaths -= 1  # it is no mystery what to leave out
            self._exclude(loader, epoch, index, ran_ns, 0)
            return True
        self._workers.take(worker, ticket.number)
        if ticket.suspect is not None:
            self._ledger.settle(ticket)
            ticket = ticket.suspect
            self._inquest.convict(ticket)
        number = worker.number
        completion = b"" if run is None else ticket.completion(Status.FAILED, number)
        self._ledger.out.append(
            FailTicket(completion, loader.number, epoch, index, ran_ns, loader.timeout_ns, number, last.in_generator)
        )
        self._ledger.stop_lane(ticket)
        self._ledger.settle(ticket)
        return True

    def _died_over(self, ticket: Ticket, worker: WorkerRecord, last: LastCell) -> None:
        if ticket.run is not None and ticket.run.is_ended:  # a trial's suspect was abandoned with its run
            self._ledger.abandon(ticket)
            return
        index, exit_code = last.source_index, last.exit_code
        step = self._inquest.died_over(ticket, index, last.in_generator)
        loader, run = ticket.loader, ticket.run
        if step is Step.REDO:
            self._ledger.due.appendleft(ticket)
        elif step is Step.TRY_ROWS:
            self._try_row(ticket, 0)
        elif step is Step.GIVE_UP:
            self.give_up(ticket, worker, None, Verdict.TOGETHER)
        else:
            if ticket.suspect is not None:
                self._ledger.settle(ticket)
                ticket = ticket.suspect
            self._inquest.convict(ticket)
            if loader.may_exclude and index is not None and not last.in_generator:
                self._exclude(loader, ticket.first if run is None else run.epoch_of(ticket.first), index, 0, exit_code)
                self._ledger.due.appendleft(ticket)
            else:
                self.give_up(ticket, worker, index, Verdict.ALONE)

    def _try_row(self, ticket: Ticket, row: int) -> None:
        trial = dataclasses.replace(
            ticket, number=self._ledger.cutter.take_number(), attempt=0, deaths=0, suspect=ticket, trial=row, lost=0
        )
        self._ledger.due.appendleft(self._ledger.opened(trial))

    def tried(self, trial: Ticket, status: int, rows: int) -> None:
        """Note that a row ran alone and its worker lives."""
        suspect = trial.suspect
        assert suspect is not None
        if suspect.number in self._ledger.held and status != Status.ABANDONED:
            if trial.trial + 1 < rows:
                self._try_row(suspect, trial.trial + 1)
            else:
                self._inquest.acquit(suspect)
                self._ledger.due.appendleft(suspect)
        self._ledger.settle(trial)

    def _exclude(self, loader: LoaderRecord, epoch: int, index: int, ran_ns: int, exit_code: int) -> None:
        """Have this sample never run again."""
        sample = epoch, index, ran_ns, exit_code & 0xFFFF
        loader.excluded.append(sample)
        command = encode(Command.EXCLUDE, loader.number, *sample)
        informed = [worker.number for worker in self._workers if loader.number in worker.layouts]
        self._ledger.out += [ToWorker(number, command) for number in informed]

    def give_up(
        self, ticket: Ticket, worker: WorkerRecord, index: int | None = None, verdict: Verdict = Verdict.ALONE
    ) -> None:
        """Tell the trainer that a ticket is not made any more."""
        run = ticket.run
        epoch = ticket.first if run is None else run.epoch_of(ticket.first)
        completion = b"" if run is None else ticket.completion(Status.LOST, worker.number)
        lost = LoseTicket(completion, ticket.loader.number, epoch, index, ticket.lost, verdict, ticket.number)
        self._ledger.out.append(lost)
        self._ledger.stop_lane(ticket)
        self._ledger.settle(ticket)
