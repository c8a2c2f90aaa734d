"""What a dispatcher knows of one host, and when commands travel to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loaderpool.ray.host_messages import FEW_HOSTS_LINGER_NS, Answers, HostCommand, Message, Piece
from loaderpool.supervisor.ledger import Ledger
from loaderpool.supervisor.scheduler import GROUP_BYTES, group_of, room_of
from loaderpool.system import clock
from loaderpool.trainer.session.running_workers import HostPlace
from loaderpool.transport.messages import Words

# Calls that wait at a host for answers. One: none is there while an answer travels.
_EXCHANGES = 2


class HostRecord:
    """One host, from its start to its end.

    Attributes:
        tickets: what it has, by number: the words of `Command.TICKET` or `Command.PROBE`.
        loaders: whose payload it has been sent.
        runs: that it has been told of, and whose they are.
        slot_bytes: by loader, how large its slots are.
        parts: by ticket, pieces of its slot that have come before the others.
        sent_ns: by exchange, when it was sent.
        gap_since_ns: since when answers wait for others that they have overtaken; 0: none do.
        object_bytes: so much travels from it at once.
        linger_ns: how long it lets answers wait for others, as it was told; 0: it was not told.
        place: where it runs; of one that is starting it says nothing.
        sees: loaders of which it has made a row.
        is_doubted: another host makes again what it could not find the files of; it has no room for more meanwhile.

    Args:
        number: the dispatcher's.
        cell: of the trainer's board.
        looked_at: by number, the hosts that may be due an exchange; it is among them when it is told something.
    """

    def __init__(self, number: int, cell: int, looked_at: dict[int, HostRecord]) -> None:
        self.number, self.cell = number, cell
        self._looked_at = looked_at
        self.place = HostPlace("", "", 0)
        self.object_bytes, self.linger_ns = GROUP_BYTES, 0
        self.tickets: dict[int, Words] = {}
        self.loaders: set[int] = set()
        self.runs: dict[int, int] = {}
        self.slot_bytes: dict[int, int] = {}
        self.parts: dict[int, list[Piece]] = {}
        self.sent_ns: dict[int, int] = {}
        self.sees: set[int] = set()
        self.is_leaving = self.is_doubted = False
        self.gap_since_ns = 0
        self._early: dict[int, list[Message]] = {}  # answers that have overtaken others
        self._place = 0  # of the answers that follow
        self._commands: list[Message] = []
        self._waiting_tickets = 0
        self._oldest_ns = 0  # since when the first of them waits
        self._has_other = False
        self._next = 0

    @property
    def workers(self) -> int:
        """How many it has; 0: it is starting."""
        return self.place.workers

    @property
    def room(self) -> int:
        """How many tickets it may have."""
        if self.is_doubted:
            return 0
        return room_of(self.workers, self._largest_slot, self.object_bytes)

    @property
    def _largest_slot(self) -> int:
        return max(self.slot_bytes.values(), default=1 << 62)

    def command(self, kind: HostCommand, *words: int, beside: Any = None) -> None:
        """Have something done, behind all that was told before."""
        self._commands.append(((kind, *words), beside))
        if kind != HostCommand.TICKET:
            self._has_other = True
        elif not self._waiting_tickets:
            self._oldest_ns = clock.monotonic_ns()
            self._waiting_tickets = 1
        else:
            self._waiting_tickets += 1
        self._looked_at[self.number] = self

    def is_due(self, is_sated: bool, linger_ns: int) -> bool:
        """Whether an exchange shall be sent now.

        Tickets wait for others to travel with, as long as the host has enough to do.

        Args:
            is_sated: the consumer has enough before it, and other hosts for more.
            linger_ns: for no longer than this, then.
        """
        if not self.workers:
            return False
        if len(self.sent_ns) < _EXCHANGES or self._has_other:
            return True
        waiting = self._waiting_tickets
        if not waiting or waiting >= group_of(self._largest_slot, self.object_bytes):
            return waiting > 0
        if is_sated and clock.monotonic_ns() - self._oldest_ns < linger_ns:
            return False
        return len(self.tickets) - waiting <= self.workers

    @property
    def has_waiting(self) -> bool:
        """Whether there are tickets that wait for others."""
        return self._waiting_tickets > 0

    def in_order(self, answers: Answers) -> Iterator[Message]:
        """Take in what an exchange returned, and yield what was waited for: what has overtaken other answers waits."""
        self._early[answers.place] = answers.messages
        while self._place in self._early:
            yield from self._early.pop(self._place)
            self._place += 1
        self.gap_since_ns = (self.gap_since_ns or clock.monotonic_ns()) if self._early else 0

    def take_commands(self, now_ns: int) -> tuple[int, list[Message], list[int]]:
        """Return the number of the next exchange, its commands, and which exchanges are not answered, this one too."""
        commands, self._commands = self._commands, []
        self._waiting_tickets, self._has_other = 0, False
        number, self._next = self._next, self._next + 1
        self.sent_ns[number] = now_ns
        return number, commands, list(self.sent_ns)


# Tickets, and what hosts answer, wait for others to travel with no longer than this; longer where there are many hosts,
# each of which has little of what there is to do: for 10 ms each, so that there are some hundred calls a second.
_LINGER_OF_HOST_NS = 10_000_000
_MOST_LINGER_NS = 1_000_000_000
# How often hosts are looked at whose tickets wait: there may be a thousand, and thousands of answers a second.
_LOOK_NS = 20_000_000
# While no more than one slot in so many is free or to be filled, tickets may wait.
_SATED_SHARE = 4


class ExchangePace:
    """Calls hosts of which something has changed, when it is worth it.

    Args:
        ledger: knows what the consumer has before it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._linger_ns = FEW_HOSTS_LINGER_NS
        self.to_look_at: dict[int, HostRecord] = {}  # by number, the hosts of which something has changed
        self._waiting: dict[int, HostRecord] = {}  # whose tickets wait for others
        self._looked_ns = 0  # when these were looked at

    def look_within_ms(self, at_most: float) -> float:
        """Return how soon `call_hosts` shall be called again, whatever happens."""
        return _LOOK_NS / 1e6 if self._waiting else at_most

    def note(self, record: HostRecord) -> None:
        """A host has answered, or is there."""
        self.to_look_at[record.number] = record

    def forget(self, record: HostRecord) -> None:
        """A host has gone."""
        self.to_look_at.pop(record.number, None)
        self._waiting.pop(record.number, None)

    def fit_to(self, records: Sequence[HostRecord]) -> None:
        """There is another number of hosts that work."""
        self._linger_ns = min(_MOST_LINGER_NS, max(FEW_HOSTS_LINGER_NS, _LINGER_OF_HOST_NS * len(records)))
        for record in records:
            if record.linger_ns != self._linger_ns:
                record.linger_ns = self._linger_ns
                record.command(HostCommand.PACE, record.object_bytes, self._linger_ns)

    def call_hosts(self, hosts: Any) -> None:
        """Send what is due."""
        now_ns = clock.monotonic_ns()
        if self._waiting and now_ns > self._looked_ns + _LOOK_NS:
            self._looked_ns = now_ns
            self.to_look_at.update(self._waiting)
            self._waiting.clear()
        if not self.to_look_at:
            return
        is_sated, looked_at = self._is_sated, list(self.to_look_at.values())
        self.to_look_at.clear()
        for record in looked_at:
            while record.is_due(is_sated, self._linger_ns):
                hosts.exchange(record.number, *record.take_commands(now_ns))
            if record.has_waiting:
                self._waiting[record.number] = record

    @property
    def _is_sated(self) -> bool:
        """Whether most slots hold what the consumer has not taken, or keeps."""
        ledger = self._ledger
        elsewhere = sum(len(loader.free) + loader.outstanding for loader in ledger.loaders.values())
        return elsewhere * _SATED_SHARE < len(ledger.slots)
