"""What a dispatcher knows of one host, and when commands travel to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loaderpool.ray.host_messages import Answers, HostCommand, Message, Piece
from loaderpool.supervisor.host_room import GROUP_BYTES, group_of, room_of
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
        self.is_leaving = False
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
