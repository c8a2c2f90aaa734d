"""Deals tickets to hosts: to the emptiest first, as many as each has room for, and some alone."""

from __future__ import annotations

from collections.abc import Callable

from loaderpool.supervisor.dealer import Dealer
from loaderpool.supervisor.early import EarlyDealer
from loaderpool.supervisor.host_room import MOST_IN_GROUP
from loaderpool.supervisor.host_roster import HostRoster
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import Ticket, WorkerRecord


class HostDealer(Dealer):
    """Gives tickets to hosts, some in a row as they travel together; a part of a dispatcher's `SupervisorState`.

    No calls are made early there.

    Args:
        ledger: has what is due, and takes what is sent.
        hosts: which there are, and what room they have.
        early: has nothing.
    """

    _tells_slots = False  # they are of the dispatcher's arena, and it looks them up in the ledger

    def __init__(self, ledger: Ledger, hosts: HostRoster, early: EarlyDealer) -> None:
        super().__init__(ledger, hosts, early)
        self._hosts = hosts
        self._latest: WorkerRecord | None = None  # who was given tickets
        self._in_a_row = 0  # how many

    def deal(self, workers: int, give_up: Callable[[Ticket, WorkerRecord], None]) -> None:
        """Give tickets to hosts until none has room, or nothing is to be done.

        Args:
            workers: how many hosts there shall be; shares are of the workers that they have.
            give_up: as in `Dealer.deal`.
        """
        due = self._ledger.due
        while True:
            if self._ledger.held or self._hosts.has_reserved:
                self._deal_alone()
            host = self._next_host()
            if host is None:
                return
            if due:
                ticket = due.popleft()
                if ticket.is_isolated:  # its completion was lost, and it is made again
                    self._ledger.hold([ticket])
                    continue
                if self._ledger.is_stopped(ticket):
                    give_up(ticket, host)
                    continue
                receiver = self._home_of(ticket) or host
            else:
                found = self._cut(host, self._hosts.total_workers)
                if found is None:
                    return
                receiver, ticket = found[0], self._ledger.opened(found[1])
            self._send(self._keeper_of(ticket) or receiver, ticket)
            self._in_a_row += 1

    def _next_host(self) -> WorkerRecord | None:
        """Return the one with most room; while it has workers with nothing to do, for as many as travel together.

        Where slots are short, each of very many hosts would have one ticket otherwise, and answer it in a call.
        """
        host = self._latest
        if host is None or host.place < 0 or len(host.tickets) >= host.workers or self._in_a_row >= MOST_IN_GROUP:
            host, self._in_a_row = self._hosts.roomiest(), 0
            self._latest = host
        return host

    def _deal_alone(self) -> None:
        """Give tickets that are held to hosts that have nothing else; others are emptied for those that wait."""
        held = self._ledger.held
        while held:
            host = self._hosts.emptied()
            if host is None:
                break
            self._send(host, held.pop(next(iter(held))))
        self._hosts.reserve(len(held))
