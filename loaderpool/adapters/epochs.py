"""How many epochs an iteration of a dataset has, and what that says of the passes over its loader."""

from __future__ import annotations


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
