"""`Order`: the item of the source at each position of an epoch; a pure function.

A *position* is a place in the global order of an epoch, 0 to size - 1. With a shuffle, each epoch
has its own permutation of the source's indices. Otherwise the positions are the indices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.permutation import MAX_SIZE, permutation


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """Order of a source's items in each epoch.

    No order is stored, so a size of 10**12 costs nothing.

    Raises:
        ArgumentError: The size is out of its range.
    """

    size: int
    """Number of positions of an epoch, over all shards: the number of items in the source."""
    shuffle: bool = False
    """True if each epoch has its own order."""
    seed: int = 0
    """Seed of the orders of all epochs; any number from 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise ArgumentError(f"size must be 0 to 2**62, got {self.size}")

    def indices(self, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the source indices at positions of an epoch.

        They are Python integers, because a source may be a list or a user's class.

        Raises:
            IndexError: With a shuffle, a position is not below the size.
        """
        if self.shuffle and positions.size:
            positions = permutation(self.size, self.seed, epoch).take(positions)
        indices: list[int] = positions.tolist()
        return indices
