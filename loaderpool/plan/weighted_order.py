"""`WeightedOrder`: items drawn at random with replacement, each with a probability by its weight.

Position p of an epoch has a random number u(p), uniform from 0 to below 1. Its item is the first
whose cumulative weight exceeds u(p) times the sum of all weights:

```
    weights      2      1         3           u(p) * 6 = 2.4 is in the range of item 1
    cumulative   2      3         6
                 ├──────┼──┬──────┼───────────────┤
    item            0     1               2
```

A random number depends only on seed, epoch and position, so no order is stored. An epoch of any
length starts at once, and any process can look up any position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.order import DrawnOrder
from loaderpool.plan.permutation import stream_key

# 64-bit numbers that Philox makes in one step of its counter.
_STEP = 4


@dataclass(frozen=True, eq=False)
class WeightedOrder(DrawnOrder):
    """Order whose items are drawn by their weights, with replacement.

    Its `table` has the sum of the weights up to and with each item: float64[items], ascending, the
    last above 0.
    """

    dtype: ClassVar[type[Any]] = np.float64

    def indices(self, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the source indices at positions of an epoch."""
        assert self.table is not None, "an order that was not drawn"
        drawn = uniform(self.seed, epoch, positions) * self.table[-1]
        indices: list[int] = self.table.searchsorted(drawn, side="right").tolist()
        return indices


def without_replacement(
    seed: int, epoch: int, weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the items with a weight above 0 in random order, as if drawn one after another.

    Each is drawn with a probability by its weight among those that are left.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
    """
    items = np.flatnonzero(weights)
    # The smallest of exponential random numbers belongs to each item with the probability wanted.
    numbers = -np.log1p(-uniform(seed, epoch, np.arange(len(weights)))[items]) / weights[items]
    order: npt.NDArray[np.int64] = items[numbers.argsort(kind="stable")]
    return order


def uniform(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the random number of each position, float64 from 0 to below 1.

    They have 53 random bits, and are the same on every machine and NumPy version.

    Args:
        seed: seed of the order.
        epoch: number of the epoch.
        positions: int64[n], of any order; consecutive positions are faster.
    """
    found = np.empty(len(positions), np.uint64)
    ends = [*(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    key, start = stream_key("weights", seed, epoch), 0
    for end in ends:
        if end > start:
            steps, skipped = divmod(int(positions[start]), _STEP)
            bits = np.random.Philox(key=key).advance(steps)
            found[start:end] = bits.random_raw(skipped + end - start)[skipped:]
        start = end
    numbers: npt.NDArray[np.float64] = (found >> np.uint64(11)) * 2.0**-53
    return numbers
