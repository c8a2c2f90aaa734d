"""`Order`: the item of the source at each position of an epoch; a pure function.

A *position* is a place in the global order of an epoch, 0 to size - 1. With a shuffle, each epoch
has its own permutation of the source's indices. Otherwise the positions are the indices.

`DrawnOrder` is an order that follows from an array. The array is drawn when an epoch begins, so
each epoch has its own array and size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.permutation import MAX_SIZE, permutation

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", bound=Hashable)


def kept(
    latest: dict[_Key, _Value], key: _Key, make: Callable[[], _Value], most: int = 2
) -> _Value:
    """Return the value for a key from `latest`, or make it.

    `latest` keeps the `most` latest values. Threads may share it.
    """
    value = latest.get(key)
    if value is None:
        value = make()
        for old in [*latest][: 1 - most]:
            latest.pop(old, None)
        latest[key] = value
    return value


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """Order of a source's items in each epoch.

    No order is stored, so a size of 10**12 costs nothing.

    Raises:
        ArgumentError: The size is out of its range.
    """

    is_drawn: ClassVar[bool] = False
    """True if each epoch has its own array, which is drawn when the epoch begins.

    Then an item may come at several positions of an epoch, and the sizes of epochs differ.
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

    def take(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the source indices at positions of an epoch.

        Raises:
            IndexError: With a shuffle, a position is not below the size.
        """
        if self.shuffle and positions.size:
            return permutation(self.size, self.seed, epoch).take(positions)
        return positions

    def indices(self, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the indices as Python integers, because a source may be a list or a user's class.

        Raises like `take`.
        """
        indices: list[int] = self.take(epoch, positions).tolist()
        return indices


@dataclass(frozen=True, eq=False)
class DrawnOrder(Order):
    """Order of given indices, for one epoch. Without an array, it stands for those of all epochs.

    The size of an order without an array is the number of items in the source.
    """

    is_drawn: ClassVar[bool] = True
    dtype: ClassVar[type[Any]] = np.int64
    """Type of the array's numbers."""

    table: npt.NDArray[Any] | None = field(default=None, kw_only=True)
    """Source index of each position of the epoch, int64[size]; None: it was not drawn yet."""

    def take(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the source indices at positions of the epoch."""
        assert self.table is not None, "an order that was not drawn"
        indices: npt.NDArray[np.int64] = self.table[positions]
        return indices
