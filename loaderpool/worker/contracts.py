"""Contracts of a worker's parts: `Items` provides a ticket's items, `Runner` calls the user's
function.

Both run in the process that calls the function: a worker, or the main process if there are no
workers. One thread processes all tickets. Calls may run on other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import CapturedGenerators
from loaderpool.transport.messages import Ticket
from loaderpool.worker.tickets import Opened


class Items(Protocol):
    """Items of a loader's source, ticket by ticket.

    The implementations are `items.IndexedItems`, `tickets.StreamedItems` and `lanes.LaneItems`.
    """

    def first_batches(self, plan: Plan) -> int:
        """Return the number of batches in which the probe searches for the first sample.

        Their items are available as soon as the loader starts.
        """

    def open(self, ticket: Ticket, plan: Plan) -> Opened:
        """Return the rows of a ticket. All their items can be read from now on.

        Called once for each ticket, and by the probe.

        Args:
            ticket: The ticket.
            plan: Plan of the ticket's epoch, or of its remainder.

        Raises:
            Abandoned: The ticket's run was abandoned.
            Exception: The user's code raised: a generator, or code that unpickles an item.
        """

    def put(self, positions: Sequence[int], items: Sequence[object]) -> None:
        """Store the items of the next ticket to open, which another process or thread has read.

        Never called for a source with an index.
        """

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators of the user's objects from now on, and restart generator
        functions.
        """

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators. The `setup` hook has just made some of them."""

    def check_after_each(self, check: Callable[[], None]) -> None:
        """From now on, call `check` each time that the user's code has made an item.

        The worker calls this before each ticket. If the ticket has ended workers, `check` is
        thorough.
        """

    def forget(self, epoch: int) -> None:
        """Release the kept items of an epoch whose remainder is not needed."""

    def close(self) -> None:
        """Release all kept items and end the user's generators. `open` may be called afterwards."""


class Runner(Protocol):
    """Calls the user's functions.

    The implementations are `calls.Calls`, which makes one call after the other, and
    `concurrent_calls.ConcurrentCalls`, on threads or as coroutines.
    """

    def unit(self, opened: Opened, start: int, stop: int) -> object:
        """Return the result of one call: a sample of row `start`, or a batch of rows `start` to
        `stop`.

        Called in the order of rows, once for each row of an opened ticket. Blocks until the result
        is there.

        Raises:
            BaseException: The exception that the function raised.
        """
