"""What a session asks of its supervisors, whether each is a process (`supervisor_process`) or a thread of this one."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.trainer.session.launch import Program
from loaderpool.transport.messages import Words
from loaderpool.transport.pipes import Attachment, Lost

# A field of the board holds a ticket in 48 bits. More than one supervisor can ever deal, and few enough that only the
# 256th supervisor after this one begins with the same number, when no consumer looks at this one's batches any more.
_TICKET_NUMBERS = 1 << 48
_TICKETS_PER_SUPERVISOR = 1 << 40


def tickets_after(first_ticket: int) -> int:
    """Return where the tickets of the supervisor after the one that begins with these begin; never 0."""
    return (first_ticket + _TICKETS_PER_SUPERVISOR) % _TICKET_NUMBERS


class Ready(NamedTuple):
    """What a wait has found, so that a turn costs no system call for what is not there."""

    completions: bool  # there is something to `read`
    notices: bool  # there is something to `receive`
    signal: bool  # a Ctrl-C may have come
    ended: bool  # the supervisor is dead; what it and its workers have said may be there without having been seen


class KnownProcess(Protocol):
    """A process as it was when it began."""

    pid: int
    start_time: int


class ControlPipe(Protocol):
    """The way to the supervisor, kept for as long as anything may still return a slot."""

    is_dead: bool
    on_leftover: Callable[[], None] | None  # has the thread that waits come and see

    def release(self, message: bytes) -> None:
        """Send a message whose place among others does not matter; never blocks, never raises, takes no lock."""

    def send(self, message: bytes) -> None:
        """Send a message behind all earlier ones given to `send`. The caller holds the session's lock."""

    def flush(self) -> bool:
        """Send what was left over; True when nothing is left. The caller holds the session's lock."""

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""

    def fileno(self) -> int:
        """Return what to wait for where something is unsent."""


class SupervisorHandle(Protocol):
    """One supervisor, from its start to its end."""

    name: str  # for messages to people
    next_tickets: int  # of the supervisor after this one

    def wait(self, room_in: int | None, timeout_ms: int | None = None) -> Ready:
        """Blocks until something has arrived, it has ended, or the session is woken: 1 s at most."""

    def read(self, inbox: collections.deque[Words]) -> bool:
        """Put notices that came without bytes into a deque; whether there may be more."""

    def receive(self) -> tuple[Words, Attachment | Lost] | None:
        """Return the next notice that came with bytes, None where there is none now."""

    def send_files(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send a message with descriptors."""

    def reap(self) -> str:
        """Reap it, which has ended; returns how it ended."""

    def end_workers(self, workers: Iterable[KnownProcess]) -> None:
        """End its workers, when it is dead: none writes any more."""

    def end(self) -> None:
        """End it, which was told to close. Blocks: at most some seconds."""

    def close(self) -> None:
        """Close our ends."""


class Starter(Protocol):
    """Starts a session's supervisors, one after the other, and has what stays when one dies."""

    arena: Arena
    program: Program
    hands_over_files: bool  # whether descriptors can be sent

    def start(self, workers: int, first_ticket: int) -> SupervisorHandle:
        """Start one. Raises PoolBrokenError, or OSError where nothing is left for it."""

    def connect(self, supervisor: SupervisorHandle, pipe: ControlPipe | None) -> ControlPipe:
        """Return the way to a supervisor: the one there is, which leads to this one from now on, or a new one."""

    def wake(self) -> None:
        """Have the thread that waits come and see. Runs in: any thread, also in a finalizer or a signal's handler."""

    def close(self) -> None:
        """Let go of everything but the arena's mapping."""
