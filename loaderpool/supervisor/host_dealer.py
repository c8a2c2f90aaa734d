"""Deals tickets to hosts: to the emptiest first, as many as each has room for, and some alone."""

from __future__ import annotations

from collections.abc import Callable

from loaderpool.supervisor.dealer import Dealer, EarlyDealer
from loaderpool.supervisor.deaths import Deaths
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.records import LastCell, Ticket, WorkerRecord
from loaderpool.supervisor.roster import Roster
from loaderpool.supervisor.scheduler import MOST_IN_GROUP, MOST_TICKETS, TICKETS_PER_WORKER
from loaderpool.transport.reports import Verdict

# So many degrees of fullness are told apart: as many as a roster has places. Fewer: hosts with large rooms are served
# in turn though one is fuller.
_PLACES = MOST_TICKETS


class HostRoster(Roster):
    """Knows which hosts there are, how many tickets each may have, and which is the emptiest.

    Attributes:
        total_workers: how many workers those hosts have together that may be given tickets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total_workers = 0
        self._in_use = 0  # a bit for each place where there is one; places are by fullness here
        self._emptying: dict[int, None] = {}  # reserved, and not empty yet
        self._empty: dict[int, None] = {}  # reserved, and without a ticket

    def set_room(self, number: int, tickets: int, workers: int) -> None:
        """Note how many tickets a host may have, and how many workers it has for them."""
        host = self._workers.get(number)
        if host is None or host.is_leaving or host.is_dead:
            return
        self._withdraw(host)
        self.total_workers += workers - host.workers
        host.room, host.workers = tickets, workers
        if not tickets:
            self._unreserve(host)
        self._enter(host)

    def roomiest(self) -> WorkerRecord | None:
        """Return the host of whose room the largest share is free, None where all are full.

        So each worker of any host has something to do before one of them has a second ticket to wait for.
        """
        if not self._in_use:
            return None
        place = (self._in_use & -self._in_use).bit_length() - 1
        return self._workers[next(iter(self._with[place]))]

    def roomy(self, tickets: int = TICKETS_PER_WORKER) -> list[WorkerRecord]:
        """Return all that have room, the emptiest first."""
        return [self._workers[number] for place in self._with for number in place]

    def with_room(self, number: int, tickets: int = TICKETS_PER_WORKER) -> WorkerRecord | None:
        """Return this host if it has room, else None."""
        host = self._workers.get(number)
        return host if host is not None and host.place >= 0 else None

    def give(self, worker: WorkerRecord, ticket: Ticket) -> None:
        """Count one more ticket of a host; where it is one to be dealt alone, nothing else is dealt there."""
        if ticket.is_isolated:
            del self._empty[worker.number]
        self._withdraw(worker)
        worker.tickets[ticket.number] = ticket
        self._enter(worker)

    def take(self, worker: WorkerRecord, number: int) -> Ticket | None:
        """Take a ticket from a host, as it is done; None: the host does not have it."""
        ticket = worker.tickets.get(number)
        if ticket is None:
            return None
        self._withdraw(worker)
        del worker.tickets[number]
        if ticket.is_isolated:
            worker.is_reserved = False
        elif not worker.tickets and worker.number in self._emptying:
            del self._emptying[worker.number]
            self._empty[worker.number] = None
        self._enter(worker)
        return ticket

    # ---- tickets that are dealt alone ----

    def emptied(self) -> WorkerRecord | None:
        """Return a host without a ticket, reserved for one that is dealt alone; None: there is none yet."""
        if not self._empty:
            host = self.roomiest()
            if host is None or host.tickets:
                return None
            self._reserve(host)
        return self._workers[next(iter(self._empty))]

    def reserve(self, hosts: int) -> None:
        """Deal nothing more to so many hosts until they are empty: as many as tickets wait to be dealt alone."""
        while len(self._emptying) + len(self._empty) < hosts:
            host = self.roomiest()
            if host is None:
                return
            self._reserve(host)
        while len(self._emptying) + len(self._empty) > hosts:  # their runs were ended
            host = self._workers[next(iter(self._emptying or self._empty))]
            self._unreserve(host)
            self._enter(host)

    @property
    def has_reserved(self) -> bool:
        """Whether there are hosts that wait for such a ticket."""
        return bool(self._emptying or self._empty)

    def _reserve(self, host: WorkerRecord) -> None:
        self._withdraw(host)
        host.is_reserved = True
        (self._emptying if host.tickets else self._empty)[host.number] = None

    def _unreserve(self, host: WorkerRecord) -> None:
        """Have it wait for such a ticket no more; one that it has stays alone."""
        if host.number in self._emptying or host.number in self._empty:
            self._emptying.pop(host.number, None)
            self._empty.pop(host.number, None)
            host.is_reserved = False

    # ---- where it stands ----

    def _enter(self, worker: WorkerRecord) -> None:
        has = len(worker.tickets)
        if has < worker.room and not (worker.is_reserved or worker.is_leaving or worker.is_dead):
            worker.place = has * _PLACES // worker.room
            self._with[worker.place][worker.number] = None
            self._in_use |= 1 << worker.place

    def _withdraw(self, worker: WorkerRecord) -> None:
        if worker.place >= 0:
            hosts = self._with[worker.place]
            del hosts[worker.number]
            if not hosts:
                self._in_use &= ~(1 << worker.place)
            worker.place = -1

    def _close(self, worker: WorkerRecord) -> None:
        super()._close(worker)
        self._unreserve(worker)
        self.total_workers -= worker.workers
        worker.workers = 0

    def check_invariants(self) -> None:
        """Raise AssertionError where a host has what it may not have, or stands in a wrong place."""
        for at, hosts in enumerate(self._with):
            assert bool(hosts) == bool(self._in_use >> at & 1)
            assert all(self._workers[number].place == at for number in hosts)
        for host in self._workers.values():  # HOST-2
            is_alone = any(ticket.is_isolated for ticket in host.tickets.values())
            is_waiting = host.number in self._emptying or host.number in self._empty
            is_there = not (host.is_leaving or host.is_dead)
            assert not is_alone or len(host.tickets) == 1
            assert not (is_alone and is_waiting)
            assert not is_there or host.is_reserved == (is_alone or is_waiting)
            assert (host.number in self._empty) == (is_waiting and not host.tickets)
            is_open = is_there and not host.is_reserved and len(host.tickets) < host.room
            assert (host.place >= 0) == is_open
        waiting = {*self._emptying, *self._empty}
        assert waiting <= {host.number for host in self._workers.values() if not (host.is_leaving or host.is_dead)}
        assert self.total_workers == sum(host.workers for host in self._workers.values())


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
