"""`WeightedOrder`: items drawn with replacement. Their probabilities are proportional to weights.

Each position of an epoch has a random number of 64 bits. The alias table of the weights
(`alias_table`) maps this number to an item.

A random number depends only on seed, epoch and position, so no order is stored. An epoch of any
length starts at once, and any process can look up any position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.alias_table import chosen
from loaderpool.plan.order import DrawnOrder
from loaderpool.plan.permutation import random_bits, stream_key

# Least weight by which a random number is divided. Smaller: the result may overflow. Larger: the
# logarithms of ordinary weights may round differently on two machines.
_LEAST = 1e-300


@dataclass(frozen=True, eq=False)
class WeightedOrder(DrawnOrder):
    """Order whose items are drawn by their weights, with replacement.

    Its `table` is the alias table of the weights: uint64[items].
    """

    dtype: ClassVar[type[Any]] = np.uint64

    def take(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the source indices at positions of an epoch."""
        assert self.table is not None, "an order that was not drawn"
        bits = random_bits(stream_key("weights", self.seed, epoch), positions)
        return chosen(self.table, bits).view(np.int64)


def without_replacement(
    seed: int, epoch: int, weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the items with a weight above 0 in random order, as if drawn one after another.

    Each is drawn with a probability by its weight among those that are left.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
    """
    items = np.flatnonzero(weights)
    # The smallest of exponential random numbers belongs to each item with the probability wanted.
    numbers, weights = -np.log1p(-uniform(seed, epoch, len(weights))[items]), weights[items]
    if weights.min() < _LEAST:
        with np.errstate(divide="ignore"):  # a number may be 0
            numbers = np.log(numbers) - np.log(weights)
    else:
        numbers /= weights
    order: npt.NDArray[np.int64] = items[numbers.argsort(kind="stable")]
    return order


def uniform(seed: int, epoch: int, count: int) -> npt.NDArray[np.float64]:
    """Return `count` random numbers, float64 from 0 to below 1, one for each item.

    They have 53 random bits, and are the same on every machine and NumPy version.
    """
    found = random_bits(stream_key("weights", seed, epoch), np.arange(count))
    numbers: npt.NDArray[np.float64] = (found >> np.uint64(11)) * 2.0**-53
    return numbers
