"""How many epochs an iteration of a dataset has, and what that says of the passes over its loader."""

from __future__ import annotations

import operator
from typing import Any

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.trainer.loader_core import LoaderCore

_LARGEST_INT64 = 2**63 - 1  # what tf.data counts with


class Epochs:
    """The epochs of each iteration of one dataset.

    Attributes:
        count: how many; None: it never ends.
        was_ended: an iteration has come to its end. `fit` iterates a dataset again in each of its own epochs, so
            another one that has begun by then may be followed as well.
    """

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.was_ended = False

    def is_followed(self, done: int) -> bool | None:
        """Whether a pass will come after the one that has so many of its iteration before it; None: unknown.

        Of a single epoch that cannot be known: `predict` iterates a dataset once, and `fit` as often as it has epochs.
        """
        if self.count is None or done + 1 < self.count:
            return True
        return None if self.count == 1 or self.was_ended else False


def check_epochs(core: LoaderCore, epochs: Any) -> int | None:
    """How many passes over a loader an iteration has; None: no end, as of every endless sequence.

    Raises:
        ArgumentError, ArgumentTypeError: no such number, or one that the loader cannot have.
    """
    plan = core.tracker.plan
    if epochs is None:
        return None
    epochs = read_whole("epochs", epochs, "a whole number from 1 on, or None for a stream without end", at_least=1)
    if epochs * plan.batches_per_epoch > _LARGEST_INT64 and not plan.is_open:
        raise ArgumentError(
            f"epochs={epochs} with {plan.batches_per_epoch} batches each are more than 2**63 batches: epochs=None is a "
            "stream without end"
        )
    if plan.is_endless and epochs > 1:
        raise ArgumentError(
            f"epochs={epochs} of an endless sequence: the first would never end. Leave epochs away, and say "
            "steps_per_epoch to fit, which then goes on with the next index in each epoch"
        )
    return None if plan.is_endless else epochs


def read_whole(name: str, value: Any, what: str, *, at_least: int) -> int:
    """A whole number that TensorFlow can count to.

    Raises:
        ArgumentError, ArgumentTypeError: it is none, by its name.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be {what}, got {value!r}")
    if not at_least <= number <= _LARGEST_INT64:
        raise ArgumentError(f"{name} must be {what}, got {number}")
    return number
