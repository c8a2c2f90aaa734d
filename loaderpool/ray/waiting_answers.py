"""A host's answers until they travel: which of them together, and when."""

from __future__ import annotations

import collections

from loaderpool.ray.host_messages import HostReport, Message, Piece
from loaderpool.supervisor.host_room import GROUP_BYTES, group_of
from loaderpool.system import clock

# How long answers wait for others at the most, where there are few hosts.
FEW_HOSTS_LINGER_NS = 300_000_000


class WaitingAnswers:
    """Answers that wait for others to travel with. The session's lock is held by the caller.

    Attributes:
        slot_bytes: of the loader whose batches they are.
        linger_ns: none waits longer for others.
        tickets: that are under way, and will be answered.
        urgent: so many answers more wait for no other: a consumer waits for a run's first batches.
    """

    def __init__(self) -> None:
        self.slot_bytes, self._most_bytes, self.linger_ns = GROUP_BYTES, GROUP_BYTES, FEW_HOSTS_LINGER_NS
        self.tickets = self.urgent = 0
        self._messages: collections.deque[Message] = collections.deque()
        self._bytes = 0
        self._oldest_ns = 0  # since when the first of them waits

    def __bool__(self) -> bool:
        return bool(self._messages)

    def set_pace(self, nbytes: int, linger_ns: int) -> None:
        """Have so many bytes travel together at most, and none wait for others longer than this."""
        self._most_bytes, self.linger_ns = nbytes, linger_ns

    @property
    def group(self) -> int:
        """So many of them need not wait."""
        return group_of(self.slot_bytes, self._most_bytes)

    def add(self, message: Message) -> None:
        """Take in an answer; those to tickets may wait."""
        said, beside = message
        if not self._messages:
            self._oldest_ns = clock.monotonic_ns()
        self._messages.append(message)
        self._bytes += _size_of(beside)
        if said[0] == HostReport.TICKET:
            self.tickets -= 1
        else:
            self.urgent += 1

    def are_worth_it(self, workers: int) -> bool:
        """Whether those that there are shall travel now.

        Args:
            workers: of the host. While some of them have nothing to do, the slots of what is done are wanted back. Not
                where there are many hosts: so many calls would be too much for the dispatcher.
        """
        return bool(self._messages) and (
            self.urgent > 0
            or self._bytes >= self._most_bytes
            or len(self._messages) >= self.group
            or self.tickets < (workers if self.linger_ns <= FEW_HOSTS_LINGER_NS else 1)
            or clock.monotonic_ns() - self._oldest_ns > self.linger_ns
        )

    def take(self) -> list[Message]:
        """Return what travels now: all, or as much as an object may have. A larger answer travels in parts."""
        taken: list[Message] = []
        room = self._most_bytes
        while self._messages and room > 0:
            said, beside = self._messages[0]
            nbytes = _size_of(beside)
            if nbytes <= room:
                taken.append(self._messages.popleft())
            elif taken:
                break
            else:
                pieces, failures = beside
                now, later = _cut(pieces, room)
                taken.append(((HostReport.PART, said[1]), now))
                self._messages[0] = said, (later, failures)
                nbytes = room
            room -= nbytes
            self._bytes -= nbytes
        self.urgent = max(0, self.urgent - len(taken))
        return taken


def _size_of(beside: object) -> int:
    """How many bytes of slots an answer has with it."""
    return sum(piece.content.nbytes for piece in beside[0]) if isinstance(beside, tuple) else 0


def _cut(pieces: list[Piece], nbytes: int) -> tuple[list[Piece], list[Piece]]:
    """Return pieces of so many bytes, and the rest."""
    now: list[Piece] = []
    later = list(pieces)
    while nbytes > 0:
        at, content = later.pop(0)
        now.append(Piece(at, content[:nbytes]))
        if content.nbytes > nbytes:
            later.insert(0, Piece(at + nbytes, content[nbytes:]))
        nbytes -= now[-1].content.nbytes
    return now, later
