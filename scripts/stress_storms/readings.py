"""The two ways of taking a pass that can be saved: a loop over the loader, and one over its dataset (`LoaderState`)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Protocol

import loaderpool as lp

from .shapes import Shape

__all__ = ["DatasetReading", "LoopReading", "Reading", "can_be_dataset"]


class Reading(Protocol):
    """One iteration, from the beginning of an epoch or from a saved place on."""

    @property
    def epoch(self) -> int | None:
        """Of its pass; None: it does not say."""

    def __iter__(self) -> Iterator[Any]: ...

    def save(self, taken: int, draw: random.Random) -> Any:
        """Where it stands, when so many of its batches were taken."""


class LoopReading:
    """A loop over the loader.

    Args:
        loader: what is read.
        place: what `save` gave, of this or another loader; None: the next epoch.
        folder: is not used.
    """

    def __init__(self, loader: lp.Loader, place: Any, folder: str) -> None:
        self._loader = loader
        if place is not None:
            loader.load_state_dict(json.loads(place))
        self._batches = iter(loader)

    @property
    def epoch(self) -> int | None:
        """See `Reading`."""
        return self._batches.epoch

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def save(self, taken: int, draw: random.Random) -> Any:
        """See `Reading`."""
        loader, own = self._loader, self._batches.state_dict
        if loader.last_error is not None:  # a pass that has failed is no live one
            return json.dumps(own())
        ways = (own, loader.state_dict, lambda: loader.state_dict(batches_taken=taken))
        return json.dumps(draw.choice(ways)())


class DatasetReading:
    """A loop over `as_dataset()`, saved and restored by `tf.train.Checkpoint` as a `LoaderState`.

    Args:
        loader: what is read.
        place: see `LoopReading`.
        folder: where checkpoints are.
    """

    epoch = None

    def __init__(self, loader: lp.Loader, place: Any, folder: str) -> None:
        import tensorflow as tf

        from loaderpool.adapters.tensorflow import LoaderState

        self._nest = tf.nest
        self._loader, self._state = loader, LoaderState(loader)
        self._checkpoint = tf.train.Checkpoint(loader=self._state)
        self._prefix = f"{folder}/checkpoint"
        if place is not None:
            self._checkpoint.read(place).assert_consumed()

    def __iter__(self) -> Iterator[Any]:
        for batch in self._state.iterate(self._loader.as_dataset()):
            yield self._nest.map_structure(lambda tensor: tensor.numpy(), batch)

    def save(self, taken: int, draw: random.Random) -> Any:
        """See `Reading`."""
        return self._checkpoint.write(self._prefix)


def can_be_dataset(shape: Shape) -> bool:
    """Whether a dataset of it, saved by TensorFlow, gives the very arrays of the loader."""
    return not (shape.is_one_shot or shape.is_sequence or shape.settings.get("ragged"))
