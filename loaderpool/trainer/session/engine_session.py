"""What engines and feeds ask of a session: all that they know of the supervisor, or of what takes its place."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from loaderpool.memory.arena import Arena
from loaderpool.trainer.session.routing import Routing
from loaderpool.trainer.session.running_workers import HostPlace
from loaderpool.trainer.session.warnings import PendingWarnings
from loaderpool.transport.messages import Control

if TYPE_CHECKING:
    from loaderpool.system.long_work import LongWork


class ReleasePipe(Protocol):
    """The trainer's end of the control pipe, for what is given back in finalizers."""

    def release(self, message: bytes) -> None:
        """Send a message; never blocks, takes no lock, and may run inside any garbage collection."""


class WorkerProcess(Protocol):
    """A worker as the trainer knows it."""

    @property
    def number(self) -> int:
        """Its number, never given again."""

    @property
    def pid(self) -> int:
        """Of its process; 0: it is a host."""

    @property
    def cell(self) -> int:
        """Its cell of the board."""

    @property
    def place(self) -> HostPlace | None:
        """Where it runs, if it is a host; else None."""


class Workers(Protocol):
    """Those of a session, and how many were lost."""

    restarts: int  # of workers
    hosts_lost: int
    cells: set[int]  # that processes of this machine have had

    def values(self) -> Iterable[WorkerProcess]:
        """Those that run."""


class EngineSession(Protocol):
    """A running supervisor, as an engine sees it. `Session` is one; tests have another, without processes.

    What an engine says by `send` are the words of `Control` (transport/messages.py); what it hears comes through
    `routing`, in the words of `Notice`, inside `wait_for` or `catch_up` of whichever thread reads.
    """

    arena: Arena  # shared with the processes that make batches
    routing: Routing  # who takes which notice
    lock: threading.RLock  # held while anything here or in an engine changes
    todo: collections.deque[Callable[[], None]]  # left by finalizers, done by `run_todo`
    workers_wanted: int  # workers that there shall be
    hosts: int  # that have them, on other machines; 0: they are processes of this one
    hands_over_files: bool  # whether descriptors can be sent to the workers, by `send_files`
    is_closed: bool
    deliveries: int  # batches that consumers have taken; engines count
    supervisor_restarts: int
    warnings: PendingWarnings  # what the user should know of the workers
    long_work: LongWork | None  # what consumers wait for, told of while they do
    on_idle: Callable[[], None] | None  # called about once a second while a consumer waits and nothing comes

    @property
    def pipe(self) -> ReleasePipe:
        """The way back for slots, from finalizers."""

    @property
    def workers(self) -> Workers:
        """Its workers."""

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that owns the session."""

    def take_number(self) -> int:
        """A number never used before: for loaders, runs and slots."""

    def send(self, kind: Control, *words: int) -> None:
        """Send a control message; earlier ones arrive first. Never blocks."""

    def send_files(self, loader: int, descriptors: Sequence[int]) -> None:
        """Hand over a loader's data files, before the loader is loaded."""

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Blocks until `is_ready()`, which is asked with the lock held; raises where it never will be."""

    def catch_up(self) -> None:
        """Handle what has arrived, without waiting."""

    def wake(self) -> None:
        """Have all who wait look again whether they need to. The lock is held."""

    def run_todo(self) -> None:
        """Do what finalizers left; the lock is held, or taken if it is free."""

    def check_usable(self) -> None:
        """Raise where nothing will ever arrive any more."""

    def check_owner(self) -> None:
        """Raise in a fork."""
