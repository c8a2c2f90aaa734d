"""Contracts of a worker's parts: where the items of a ticket come from, and what calls the user's function for them.

Both run in the process that calls the function: a worker, or the main process if there are none. Tickets are processed
by one thread. `Runner.unit` may hand calls to other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from loaderpool.plan.generators import CapturedGenerators
from loaderpool.worker.tickets import Opened, Ticket


class Items(Protocol):
    """Items of a loader's source, ticket by ticket.

    The implementations are `items.IndexedItems`, `tickets.StreamedItems` and `lanes.LaneItems`.
    """

    @property
    def first_batches(self) -> int:
        """Number of batches in which the first sample is searched: those whose items can be had as a loader starts."""

    def open(self, ticket: Ticket) -> Opened:
        """Return the rows of a ticket, all of whose items can be read from now on. Called once for each ticket.

        Raises:
            Abandoned: Nobody waits for these items any more.
            Exception: The user's code raised: a generator, or what unpickles an item.
        """

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators of the user's objects from now on, and start generator functions again."""

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators, some of which the hook `setup` has made just now."""

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Call `check` after the user's code has made an item. Called before a ticket that has ended workers."""

    def forget(self, epoch: int) -> None:
        """Release what is kept of an epoch whose rest is not wanted."""

    def close(self) -> None:
        """Release all that is kept, and end the user's generators. It may be opened again."""


class Runner(Protocol):
    """Calls the user's functions. The implementations are `calls.Calls` and, with threads, `calls.ThreadCalls`."""

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """Return the result of one call: a sample of the row `start`, or a batch of the rows `start` to `stop`.

        Called in the order of rows, for each row of an opened ticket once. Blocks until the result is there.

        Raises:
            BaseException: Whatever the function raised.
        """
