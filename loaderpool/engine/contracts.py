"""Contract of the engines that a loader uses: an `Engine` starts a `Run` for each pass.

There are two engines. Workers make the batches of `engine.PoolEngine`. `local_engine.LocalEngine`
makes its batches in the main process. All methods are called in the main process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.engine.delivery import Delivery
    from loaderpool.engine.engine_statistics import EngineStatistics
    from loaderpool.memory.layout import BatchForm
    from loaderpool.plan.batches import Plan
    from loaderpool.plan.places import Position
    from loaderpool.transport.payload.generators import Registry


class Run(Protocol):
    """Batches of consecutive epochs, from one position on.

    One thread at a time takes from it. `Engine.begin` starts it, and `end` pairs with that call.

    Attributes:
        outlives_interrupts: `take` may be called again after a KeyboardInterrupt.
    """

    outlives_interrupts: bool

    @property
    def is_current(self) -> bool:
        """True if the batches are made by the present functions and objects.

        Called by any thread.
        """

    @property
    def is_ready(self) -> bool:
        """True if `take` returns without waiting. Called by any thread."""

    @property
    def is_at_end(self) -> bool:
        """True if all batches were taken. Always False if the plan has the number of batches."""

    @property
    def ended_lanes(self) -> Mapping[int, int]:
        """Number of batches of each lane that has ended. Lanes are only used for generators."""

    def take(self) -> Delivery:
        """Return the next batches. Blocks until they have arrived.

        Raises:
            StopIteration: The run was ended, or its last batch was taken.
            LoaderpoolError: The user's function raised, or the pool is broken or closed.
            KeyboardInterrupt: It came while the call waited.
        """

    def extend(self, limit: int) -> None:
        """Allow batches before the number `limit` to be made. Called by the thread that takes.

        Batches are numbered through all epochs (`transport.messages`). Streams and generators
        ignore the limit.
        """

    def end(self) -> None:
        """Abandon the remaining batches. Idempotent and non-blocking.

        Called by any thread, and by finalizers.
        """


class Engine(Protocol):
    """Makes a loader's batches. `LoaderCore` creates it, and `close` pairs with that.

    Attributes:
        plan: The loader's plan.
        cache: Results of `fn`, as this process has them; None: the loader has no cache.
        generators: Random generators of the user's objects, with their keys.
    """

    plan: Plan
    cache: SharedCache | None
    generators: Registry

    def form(self, plan: Plan | None = None) -> BatchForm:
        """Return the form of the batches. Blocks until the first sample has been made.

        Called by any thread, before the first pass begins.

        Args:
            plan: Plan of the epoch that has the first sample, if its order is drawn; None: the
                order of epoch 0 is drawn if it is needed.

        Raises:
            LoaderpoolError: The first sample failed, or the pool is broken or closed.
        """

    def read_ahead(self) -> int:
        """Return the number of batches to make of the next epoch, which may never be requested."""

    def begin(self, place: Position, limit: int, plan: Plan) -> Run:
        """Start a run at a position. Called by the thread on which a pass starts.

        Args:
            place: Position of its first batch.
            plan: Plan of the whole epoch: the loader's, or that of a drawn order.
            limit: Number after the last batch that may be made. Streams and generators ignore it.

        Raises:
            LoaderpoolError: As `form`.
        """

    def refresh(self, is_whole: bool = False) -> None:
        """Use the present state of the user's functions and objects for later runs.

        Called by the thread on which a pass starts, one at a time, before `begin`.

        Args:
            is_whole: Compare objects of any size. Otherwise only parts of large ones are compared.

        Raises:
            LoaderpoolError: An object can no longer be pickled, or the source has lost items.
        """

    def reseed(self) -> None:
        """Seed random generators by their present keys in later runs."""

    def warn_of_replay(self) -> None:
        """Warn of values that differ from those of the workers.

        Called by `replay` before it makes a sample.
        """

    def statistics(self) -> EngineStatistics:
        """Return the current counts. Called by any thread."""

    def close(self) -> None:
        """Release all processes and memory of the loader. Idempotent.

        Called by any thread, and by finalizers.
        """
