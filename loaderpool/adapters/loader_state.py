"""`LoaderState`: a loader's place in a training loop of one's own, as a part of `tf.train.Checkpoint`.

tf.data fetches ahead, so a dataset does not know how many of its batches were trained on. The loop does: here they are
counted as it takes them, and what is saved is the `Loader.state_dict` behind the last of them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import tensorflow as tf

from loaderpool.errors import ArgumentError, StateError
from loaderpool.trainer.epochs.position import IterationLog
from loaderpool.trainer.loader import Loader


class LoaderState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The place of a loader, saved and restored by `tf.train.Checkpoint` beside the model.

        state = LoaderState(loader)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, loader=state)
        ...
        for x, y in state.iterate(loader.as_dataset()):

    After a restore the next batch is the one after the last that the loop was given, however far tf.data had fetched
    ahead. Make the dataset after it.

    Args:
        loader: whose batches the loop takes.

    Raises:
        StateError: its place cannot be saved; also when restoring what another loader has saved.
    """

    def __init__(self, loader: Loader) -> None:
        if not isinstance(loader, Loader):
            raise ArgumentError(f"LoaderState needs the Loader, got a {type(loader).__name__}")
        loader.state_dict(batches_taken=0)  # where it cannot be saved, it says so here
        self._loader = loader
        self._log: IterationLog | None = None  # of the latest iteration; None: the next pass says where it begins
        self._taken = 0  # of its batches
        self._under_way: weakref.ref[Generator[Any, None, None]] | None = None

    def iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, counted as they are taken. One iteration at a time: another one, or a restore, ends it.

        Args:
            batches: the loader, `loader.as_dataset()`, or a dataset made of that with one element for each batch in the
                same order: mapped, prefetched or distributed, but not shuffled, filtered, repeated or batched again.

        Raises:
            StateError: it is not one iteration over this loader.
        """
        self._end_iteration()
        iteration = self._counted(batches)
        self._under_way = weakref.ref(iteration)
        return iteration

    def serialize(self) -> bytes:
        """The place as `Loader.state_dict` says it. Called by TensorFlow, when a checkpoint is saved."""
        core = self._loader._core
        if self._counting() is None and core.tracker.is_iterated_beside(self._log):
            raise StateError(
                "the loader is being iterated, and not by LoaderState.iterate, which would count the batches that are "
                "trained on: loop over state.iterate(loader.as_dataset()), and let go of other iterators before a "
                "checkpoint is saved"
            )
        position = self._log and self._log.position(self._taken)
        return json.dumps(core.state_at(position or core.tracker.next_log().position(0))).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Have the loader's next pass go on there. Called by TensorFlow, when a checkpoint is restored."""
        try:
            state = json.loads(string_value)
        except ValueError as error:
            raise StateError(f"this part of the checkpoint is no LoaderState: {error}") from None
        self._end_iteration()
        self._loader.load_state_dict(state)
        self._log, self._taken = None, 0

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:  # what TensorFlow has checkpoints in a thread ask
        raise StateError(
            "experimental_enable_async_checkpoint=True would save the loader's place later than the weights, when a "
            "thread comes to it: a checkpoint with a LoaderState is saved without it"
        )

    def _counting(self) -> Generator[Any, None, None] | None:
        """The iteration that is under way."""
        return None if self._under_way is None else self._under_way()

    def _end_iteration(self) -> None:
        """Let go of what tf.data has fetched, so that no epoch of the old iteration begins at the new place."""
        if (under_way := self._counting()) is not None:
            under_way.close()

    def _counted(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        tracker, taken = self._loader._core.tracker, 0
        before = tracker.iterations
        try:
            for batch in batches:
                if not taken:
                    begun = tracker.iterations - before
                    if begun != 1:
                        raise StateError(
                            f"LoaderState.iterate needs a dataset that iterates its loader once, and this one has "
                            f"begun {begun} iterations of it by its first batch: make it of this loader's "
                            "as_dataset(), with epochs=n instead of repeat(), and without cache() or zip()"
                        )
                    self._log = tracker.latest
                self._taken = taken = taken + 1
                handed = [batch]
                del batch  # its memory is lent for as long as it is held
                yield handed.pop()
        finally:  # by Ctrl-C, say, while the first batch was awaited, of which tf.data may have some already
            if not taken and tracker.iterations == before + 1:
                self._log, self._taken = tracker.latest, 0
