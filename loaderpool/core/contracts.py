"""Contract of the engines that a loader drives: an `Engine` starts a `Run` for each pass.

The engines are `engine.PoolEngine`, whose batches come from workers, and `local_engine.LocalEngine`, which makes them
in the main process. All methods are called in the main process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.core.delivery import Delivery
    from loaderpool.core.engine_statistics import EngineStatistics
    from loaderpool.memory.layout import BatchForm
    from loaderpool.plan.batches import Plan
    from loaderpool.plan.places import Position
    from loaderpool.transport.payload.generators import Registry


class Run(Protocol):
    """Batches of consecutive epochs, from one position on.

    One thread at a time takes from it. `Engine.begin` starts it, and `end` pairs with that.

    Attributes:
        outlives_interrupts: `take` may be called again after a KeyboardInterrupt.
    """

    outlives_interrupts: bool

    @property
    def is_current(self) -> bool:
        """True if its batches are made by the present functions and objects. Called by any thread."""

    @property
    def is_ready(self) -> bool:
        """True if `take` returns without waiting. Called by any thread."""

    @property
    def is_at_end(self) -> bool:
        """True if all batches were taken. Only streams and generators have an end that is not counted."""

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        """Number of batches of each generator that has ended, by its lane."""

    def take(self) -> Delivery:
        """Return the next batches. Blocks until they have arrived.

        Raises:
            StopIteration: The run has ended, or the stream or the generators have.
            LoaderpoolError: The user's function raised, or the pool is broken or closed.
            KeyboardInterrupt: It came in the wait.
        """

    def extend(self, limit: int) -> None:
        """Allow batches before the number `limit` to be made. Called by the thread that takes."""

    def end(self) -> None:
        """Abandon the rest. Idempotent and non-blocking. Called by any thread, and by finalizers."""


class Engine(Protocol):
    """Makes a loader's batches. `LoaderCore` makes it, and `close` pairs with that.

    Attributes:
        plan: The loader's plan.
        cache: Results of `fn`, as this process has them; None: the loader has no cache.
        generators: Random generators of the user's objects, with their keys.
    """

    plan: Plan
    cache: SharedCache | None
    generators: Registry

    def form(self) -> BatchForm:
        """Return the form of the batches. Blocks until the first sample has been made.

        Called by any thread, before the first pass begins.

        Raises:
            LoaderpoolError: The first sample failed, or the pool is broken or closed.
        """

    def read_ahead(self) -> int:
        """Return the number of batches to make of an epoch that may never be asked for."""

    def begin(self, place: Position, limit: int) -> Run:
        """Start a run at a position. Called by the thread on which a pass begins.

        Args:
            place: Position of its first batch.
            limit: Batches before this number may be made. A stream's are made as they are read.

        Raises:
            LoaderpoolError: As `form`.
        """

    def refresh(self, is_whole: bool = False) -> None:
        """Use the user's functions and objects as they are now for later runs.

        Called by the thread on which a pass begins, one at a time, before `begin`.

        Args:
            is_whole: Compare large objects as well, in place of a glance at them.

        Raises:
            LoaderpoolError: They cannot be pickled any more, or the source has lost items.
        """

    def reseed(self) -> None:
        """Seed random generators by their present keys in later runs."""

    def warn_of_replay(self) -> None:
        """Warn of values that differ from those of the workers. Called by `replay` before it makes a sample."""

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment. Called by any thread."""

    def close(self) -> None:
        """Release all processes and memory of the loader. Idempotent. Called by any thread, and by finalizers."""
