"""What the death of a host means: any of the tickets that it had may be to blame.

    died with it ──on fewer hosts than `restarts_per_item`──▶ redone, beside others
          │
          └─else─▶ dealt alone: a host has it and nothing else ──answered──▶ it was not to blame
                                    └─that host dies as well─▶ lost

A death that is explained (the host was drained, or removed, or its node has left) counts for no ticket, and not towards
`Limits.restarts`.
"""

from __future__ import annotations

from loaderpool.supervisor.deaths import Deaths
from loaderpool.supervisor.records import LastCell, Ticket, WorkerRecord
from loaderpool.transport.reports import Verdict


class HostDeaths(Deaths):
    """Answers for the tickets of hosts that have died, as a part of a dispatcher's `SupervisorState`."""

    def answer_for(self, worker: WorkerRecord, last: LastCell, now_ns: int, is_explained: bool, workers: int) -> bool:
        """Answer for the tickets of a host that is gone; returns whether that is the end of everything.

        Args:
            worker: which host; it is no longer on the roster.
            last: whether it had begun; it has as well if it has told its room.
            now_ns: monotonic.
            is_explained: none of its tickets is to blame.
            workers: how many hosts there shall be.
        """
        had_tickets = bool(worker.tickets)
        was_lost = not is_explained and (had_tickets or not worker.is_leaving)
        if was_lost:
            self.limit.note(now_ns)
        redone: list[Ticket] = []
        alone: list[Ticket] = []
        for ticket in worker.tickets.values():
            if ticket.run is not None and ticket.run.is_ended:
                self._ledger.abandon(ticket)
            elif is_explained or not self._is_lost(ticket, worker):
                ticket.attempt += 1
                self.redone += ticket.count if ticket.run is not None else 0
                (alone if ticket.is_isolated else redone).append(ticket)
        self._ledger.due.extendleft(reversed(redone))
        self._ledger.hold(alone)
        if not was_lost:
            return False
        self.lost += 1
        self._idle = 0 if had_tickets or last.has_begun or worker.room else self._idle + 1
        return self._ends_all(last, workers)

    def _is_lost(self, ticket: Ticket, worker: WorkerRecord) -> bool:
        """Count the death of a host that had the ticket; whether the ticket is to blame for it, and so given up."""
        ticket.deaths += 1
        ticket.lost += 1
        if ticket.is_isolated:
            self.limit.forgive(ticket.lost)
            self.give_up(ticket, worker, verdict=Verdict.HOST)
            return True
        ticket.is_isolated = ticket.deaths >= ticket.loader.max_deaths
        return False
