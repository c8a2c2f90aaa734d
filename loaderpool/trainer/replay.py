"""One sample of a training again, alone and in this process: for a debugger, a traceback, or to see a crash."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from loaderpool.checks import whole_number
from loaderpool.config import MAX_EPOCH
from loaderpool.core.local_engine import LocalEngine
from loaderpool.element.spec import ElementSpec, sample_spec
from loaderpool.errors import ArgumentError, LoaderpoolError
from loaderpool.plan.order import Plan
from loaderpool.trainer.arguments import check_arguments
from loaderpool.worker.own_process import SavedGlobals
from loaderpool.worker.tickets import WorkFailed

if TYPE_CHECKING:
    from loaderpool.trainer.loader import Loader

# Shards that a message looks through for the one that has an index: more would take seconds, and no training has so
# many.
_MOST_SHARDS = 10_000


def replay(loader: Loader, index: int, epoch: int = 0) -> Any:
    """Compute one sample again in the main process, with its own random numbers, and return the function's result.

    It uses the current data and globals; a `LoaderpoolWarning` names changes. The loader may be closed.

    Args:
        loader: Loader of the sample.
        index: Source index, as in error messages. With `batch_fn`, the whole batch is computed.
        epoch: Epoch number, from 0. Default: 0.

    Raises:
        BaseException: If the function raises; the original exception.

    Example:
        >>> import loaderpool as lp
        >>> loader = lp.Loader(range(10), lambda item: item**2, workers=2)
        >>> lp.replay(loader, index=3)
        9
        >>> loader.close()
    """
    found = Replay(loader, whole_number("index", index, at_least=0), epoch)
    engine = loader._core.engine
    if engine is not None and engine.captured is not None:
        engine.captured.warn(in_replay=True)
    return found.run()


class Replay:
    """Makes the very sample that a training makes of a source index: same call, same random streams, same bits.

    Runs in: the process that asks; no worker is started. The loader stays as it is. Where the training finds out only
    on the way that its one function draws from `random` or `numpy.random`, they are seeded here from the start.

    Attributes:
        epoch, position: where the sample is; the position keys the random streams.
        batch, row: the same, as this shard has it.
        indices: all that the call is for, in the order in which it gets them.
        has_hooks: the training has hooks between epochs. None is run here, so the data is that before epoch 0.
        why_no_out: the first sample's error, which leaves `out` None for this one.

    Raises:
        ArgumentError: no such index or epoch, or one that this loader never makes; says why.
    """

    def __init__(self, loader: Loader, index: int, epoch: int = 0) -> None:
        # "auto" draws what True draws. Without the cache: who replays a sample wants to see its function called.
        here = {"workers": 0, "threads": 1, "seed_globals": bool(loader.config.seed_globals), "cache": None}
        engine = self._engine = LocalEngine(check_arguments({**loader._core.arguments, **here}))
        self.has_hooks = loader._core.tracker.has_hooks
        self.why_no_out: LoaderpoolError | None = None
        plan, self.epoch = engine.plan, whole_number("epoch", epoch, at_least=0, at_most=MAX_EPOCH)
        if plan.is_open and not plan.is_endless:
            what = "generators, which have" if plan.lanes else "a stream, which has"
            raise ArgumentError(f"the source is {what} no index. Run the loader with workers=0 instead")
        if not 0 <= index < plan.size:
            raise ArgumentError(f"index must be 0 to {plan.size - 1} (the source has {plan.size:,} items), got {index}")
        self.position = plan.position_of(epoch, index)
        place = plan.place(epoch, self.position)
        if place is None:
            raise ArgumentError(_why_nowhere(plan, index, epoch, self.position))
        self.batch, self.row = place
        self._positions = plan.positions(epoch, self.batch)
        if engine.unit != "batch":
            self._positions = self._positions[self.row : self.row + 1]
        self.indices = plan.indices(epoch, self._positions)

    def run(self) -> Any:
        """What the function returns, as it is; a whole batch or element where one call makes that.

        Raises:
            BaseException: what the function, the source or the `setup` hook raised, itself.
        """
        work = self._engine.work
        with SavedGlobals():
            try:
                work.ensure_setup()
            except WorkFailed as failed:
                raise failed.error from None
            if self._engine.takes_out:  # it writes into a row of a batch, and how that looks the first sample tells
                try:
                    self._engine.form()
                except LoaderpoolError as error:
                    self.why_no_out = error
                work.calls.kept.clear()
            return work.call(self.epoch, self._positions.tolist(), self.indices)

    def spec_of(self, result: Any) -> ElementSpec:
        """The result's structure, dtypes and shapes.

        Raises:
            SpecMismatchError: no batch can be made of it.
        """
        return sample_spec(result, self._engine.given_spec, self._engine.work.calls.origin)


def _why_nowhere(plan: Plan, index: int, epoch: int, position: int) -> str:
    where = f"this loader does not load source index {index} in epoch {epoch}: it is at position {position:,}, "
    other_epochs = "; the position differs in other epochs" if plan.shuffle else ""
    for shard in range(min(plan.num_shards, _MOST_SHARDS)):
        if dataclasses.replace(plan, shard_index=shard).place(epoch, position) is not None:
            return (
                f"{where}which belongs to Shard({plan.num_shards}, {shard}), but this loader has "
                f"Shard({plan.num_shards}, {plan.shard_index}){other_epochs}"
            )
    return f"{where}among the last {plan.rows_left_out} rows, which drop_remainder=True drops{other_epochs}"
