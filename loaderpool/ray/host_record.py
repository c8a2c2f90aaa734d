"""What a dispatcher knows of one host, and when commands travel to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loaderpool.ray.host_messages import Answers, HostCommand, Message
from loaderpool.supervisor.scheduler import group_of, room_of
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
        waiting_tickets: how many of the tickets are still to be sent.
        sent_ns: by exchange, when it was sent.
        gap_since_ns: since when answers wait for others that they have overtaken; 0: none do.
        place: where it runs; of one that is starting it says nothing.
        sees: loaders of which it has made a row.
        is_doubted: another host makes again what it could not find the files of; it has no room for more meanwhile.

    Args:
        number: the dispatcher's.
        cell: of the trainer's board.
        to_call: by number, the hosts that may be due an exchange; it is among them when it is told something.
    """

    def __init__(self, number: int, cell: int, to_call: dict[int, HostRecord]) -> None:
        self.number, self.cell = number, cell
        self._to_call = to_call
        self.place = HostPlace("", "", 0)
        self.tickets: dict[int, Words] = {}
        self.loaders: set[int] = set()
        self.runs: dict[int, int] = {}
        self.slot_bytes: dict[int, int] = {}
        self.sent_ns: dict[int, int] = {}
        self.sees: set[int] = set()
        self.is_leaving = self.is_doubted = False
        self.gap_since_ns = 0
        self._early: dict[int, list[Message]] = {}  # answers that have overtaken others
        self._place = 0  # of the answers that follow
        self._commands: list[Message] = []
        self.waiting_tickets = 0
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
        return room_of(self.workers, self._largest_slot)

    @property
    def _largest_slot(self) -> int:
        return max(self.slot_bytes.values(), default=1 << 62)

    def command(self, kind: HostCommand, *words: int, beside: Any = None) -> None:
        """Have something done, behind all that was told before."""
        self._commands.append(((kind, *words), beside))
        if kind == HostCommand.TICKET:
            self.waiting_tickets += 1
        else:
            self._has_other = True
        self._to_call[self.number] = self

    def is_due(self, is_sated: bool) -> bool:
        """Whether an exchange shall be sent now: tickets wait for others while the host has enough to do.

        Args:
            is_sated: they wait as long as the consumer has enough before it, too.
        """
        waiting = self.waiting_tickets
        if not self.workers:
            return False
        if len(self.sent_ns) < _EXCHANGES or self._has_other or waiting >= group_of(self._largest_slot):
            return True
        return waiting > 0 and not is_sated and len(self.tickets) - waiting <= self.workers

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
        self.waiting_tickets, self._has_other = 0, False
        number, self._next = self._next, self._next + 1
        self.sent_ns[number] = now_ns
        return number, commands, list(self.sent_ns)
