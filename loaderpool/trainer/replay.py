"""Replay of one sample of a training in this process, for a debugger or a traceback."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.checks import whole_number
from loaderpool.config import MAX_EPOCH
from loaderpool.element.spec import ElementSpec, sample_spec
from loaderpool.engine.local_engine import LocalEngine
from loaderpool.errors import ArgumentError, LoaderpoolError, brief
from loaderpool.hints import known_names_only
from loaderpool.plan.places import Position
from loaderpool.trainer.arguments import check_arguments
from loaderpool.worker.own_process import SavedGlobals
from loaderpool.worker.tickets import WorkFailed

if TYPE_CHECKING:
    from loaderpool.plan.batches import Plan
    from loaderpool.trainer.loader import Loader

# Rows that are searched together. Smaller: it takes longer. Larger: it takes more memory.
_TOGETHER = 1 << 16
_MOST_SHARDS = 64  # shards that are searched for one that has an item


@known_names_only
def replay(loader: Loader, index: int, epoch: int = 0) -> Any:
    """Compute one sample again in the main process, and return the function's result.

    The sample gets its own random numbers. It uses the current data and globals; a
    `LoaderpoolWarning` names changes. The loader may be closed.

    Args:
        loader: Loader of the sample.
        index: Source index, as in error messages. With `batch_fn`, the whole batch is computed;
            with `samples_per_item`, a list of the item's samples that this loader loads.
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
    if not hasattr(loader, "_core"):
        raise ArgumentError(
            f"loader must be a Loader, got {brief(loader)} of type {type(loader).__name__}"
        )
    found = Replay(loader, whole_number("index", index, at_least=0), epoch)
    if (engine := loader._core.engine) is not None:
        engine.warn_of_replay()
    return found.run()


class Replay:
    """Repeats the call that makes one sample in a training, with the same random streams and bits.

    Runs in: the calling process; no worker is started. The loader is not changed. `random` and
    `numpy.random` are seeded from the start; a training may seed them only once it has noticed that
    its function draws from them. Hooks between epochs are not run, so the data is that before
    epoch 0.

    Attributes:
        epoch: Epoch of the sample.
        position: Position of the sample in the epoch, which keys the random streams.
        batch: Batch of the sample, as counted by this shard. With `samples_per_item`, the batch of
            the first sample.
        row: Row of the sample in the batch.
        indices: Source indices of the call, in the order in which it gets them.

    Raises:
        ArgumentError: There is no such index or epoch, or this loader does not make the sample. The
            text has the reason.
    """

    def __init__(self, loader: Loader, index: int, epoch: int = 0) -> None:
        # `seed_globals="auto"` leads to the same numbers as True. The cache is off, so that the
        # function is called.
        here = {
            "workers": 0,
            "threads": 1,
            "seed_globals": bool(loader.config.seed_globals),
            "cache": None,
        }
        own = loader._core.engine
        generators = None if own is None else own.generators
        engine = self._engine = LocalEngine(
            check_arguments({**loader._core.arguments, **here}), None, generators
        )
        plan, self.epoch = engine.plan, whole_number("epoch", epoch, at_least=0, at_most=MAX_EPOCH)
        if plan.is_open and not plan.is_endless:
            what = "generators, which have" if plan.lanes else "a stream, which has"
            raise ArgumentError(
                f"replay needs a source index, but the source is {what} no index. Make the loader "
                "with workers=0: then the error is raised in this process"
            )
        size = engine.checked.length or plan.order.size
        if not 0 <= index < size:
            raise ArgumentError(
                f"index must be 0 to {size - 1} (the source has {size:,} items), got {index}"
            )
        # Of the loader itself, because it has the keys of the order's random generators.
        plan = loader._core.tracker.plan_of(Position(self.epoch))
        samples = self._samples = engine.checked.config.samples_per_item
        numbers = [index] if samples is None else range(index * samples, (index + 1) * samples)
        found = [find(plan, epoch, number) for number in numbers]
        self._places = [place for place in found if place is not None]
        if not self._places:
            why = _why_not(plan, epoch, numbers[0])
            raise ArgumentError(
                f"this loader does not load source index {index} in epoch {epoch}: {why}"
            )
        self._plan = plan
        self.batch, self.row = self._places[0]
        positions, indices = self._rows(self.batch)
        self.position = positions[self.row]
        self.indices = indices if engine.checked.unit == "batch" else [index]

    def _rows(self, batch: int) -> tuple[list[int], list[int]]:
        """Return the positions and the source indices of a batch."""
        positions = self._plan.positions(self.epoch, batch)
        return positions.tolist(), self._plan.order.indices(self.epoch, positions)

    def run(self) -> object:
        """Return the function's unchanged result: a sample, or a batch with `batch_fn`.

        With `samples_per_item`, return a list of the item's samples that this loader loads.

        Raises:
            BaseException: The original error of the function, the source or the `setup` hook.
        """
        work = self._engine.work
        with SavedGlobals(), self._engine.captured_kept():
            try:
                work.ensure_setup()
            except WorkFailed as failed:
                raise failed.error from None
            # The function writes into a row of a batch, whose form comes from the first sample.
            if self._engine.checked.payload.takes_out:
                # If the first sample fails, this one gets no `out`.
                with contextlib.suppress(LoaderpoolError):
                    self._engine.form()
                work.calls.kept.clear()
            made = [work.call(self.epoch, *self._rows(batch), row) for batch, row in self._places]
            return made[0] if self._samples is None else made

    def first_of(self, result: Any) -> Any:
        """Return the result, or its first sample if it is the list of an item's samples."""
        return result if self._samples is None else result[0]

    def spec_of(self, result: object) -> ElementSpec:
        """Return the structure, dtypes and shapes of the result.

        Raises:
            SpecMismatchError: No batch can be made of the result.
        """
        return sample_spec(
            result, self._engine.checked.given_spec, self._engine.work.calls.chain.origin
        )


def _why_not(plan: Plan, epoch: int, index: int) -> str:
    """Return the reason why a shard does not have a source index in an epoch."""
    other_epoch = ". Pass the epoch that the error names"
    if plan.order.is_drawn and index not in plan.order.indices(epoch, np.arange(plan.order.size)):
        return f"its order leaves it out{other_epoch}"
    others = "" if not plan.order.shuffle else ". It may be in another one in other epochs"
    for shard in range(min(plan.num_shards, _MOST_SHARDS)):
        if find(dataclasses.replace(plan, shard_index=shard), epoch, index) is not None:
            has = f"Shard({plan.num_shards}, {plan.shard_index})"
            return f"Shard({plan.num_shards}, {shard}) does, and this loader has {has}{others}"
    or_other = ", or another shard does" * (plan.num_shards > _MOST_SHARDS)
    return f"drop_remainder=True drops it{or_other}{other_epoch * plan.order.shuffle}"


def find(plan: Plan, epoch: int, index: int) -> tuple[int, int] | None:
    """Return the batch of this shard that contains a source index, and the row in the batch.

    None if no batch of the epoch contains it.
    """
    begin, end, together = 0, plan.batches_per_epoch, max(1, _TOGETHER // plan.most_rows)
    if not (plan.order.shuffle or plan.rows_vary):  # including endless sequences
        begin = index // ((plan.batch_size or 1) * plan.num_shards)
        end = min(end, begin + 1)
    for first in range(begin, end, together):
        count = min(together, end - first)
        indices = plan.order.indices(epoch, plan.positions(epoch, first, count))
        if index in indices:
            row = indices.index(index)
            for batch in range(first, first + count):
                rows = plan.rows(epoch, batch)
                if row < rows:
                    return batch, row
                row -= rows
    return None
