"""What every contestant is given: items 0 … n-1 and a function, and how its batches are held against what they must be.

The first number of a sample tells its item (`token`), so a batch tells which items it is made of, whoever has made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchlib.model import require

__all__ = ["Array", "Work", "check_batches", "check_items", "check_tokens", "items_of", "make_batch"]

Array = npt.NDArray[Any]
# Batches that a loader may be ahead of the oldest sample that it has not delivered, where it promises no order.
_OUT_OF_ORDER = 512


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work."""

    name: str
    what: str  # for the table
    fn: Callable[[int], Array]  # item -> sample; pickled by name
    shape: tuple[int, ...]  # of a sample
    dtype: type[np.generic]
    batch_size: int
    batches: int  # of an epoch, more than any window takes
    workers: int = 2
    threads: int = 1  # calls that a worker makes at the same time, where a loader has threads in workers
    write: Callable[[int, Array], None] | None = None  # fn's result into memory that is there; None: fn and a copy
    token: Callable[[int], int] = int  # the first number of an item's sample
    items_of: Callable[[Array], Array] | None = None  # batch -> the item of each row; None: its first number
    period: int = 1  # batches after which the cost repeats
    suits_threads: bool = False  # waits, or computes where NumPy has let the GIL go
    ideal: float | None = None  # samples per second that no loader can exceed
    is_tiny: bool = False  # a batch is made in less time than it takes to look at one

    @property
    def items(self) -> int:
        return self.batches * self.batch_size

    @property
    def batch_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize * self.batch_size

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (self.batch_size, *self.shape)

    def with_batches(self, batches: int) -> Work:
        return dataclasses.replace(self, batches=min(batches, self.batches))


def make_batch(work: Work, position: int, out: Array | None = None) -> Array:
    """The batch at this position of an epoch, made here, in `out` or new memory; without a copy where `fn` can."""
    batch = np.empty(work.batch_shape, work.dtype) if out is None else out
    first = position * work.batch_size
    if work.write is not None:
        for row in range(work.batch_size):
            work.write(first + row, batch[row])
    else:
        for row in range(work.batch_size):
            batch[row] = work.fn(first + row)
    return batch


def items_of(work: Work, batch: Array) -> Array:
    """int64[batch]: the item of each row."""
    return work.items_of(batch) if work.items_of else batch.reshape(len(batch), -1)[:, 0].astype(np.int64)


def check_batches(work: Work, batches: Sequence[Array]) -> None:
    """Check all numbers of some batches, whatever items they are made of."""
    for batch in batches:
        require(batch.shape == work.batch_shape, f"a batch of shape {batch.shape}, not {work.batch_shape}")
        require(batch.dtype == np.dtype(work.dtype), f"a batch of {batch.dtype}, not {np.dtype(work.dtype)}")
        for row, item in zip(batch, items_of(work, batch).tolist(), strict=True):
            require(np.array_equal(row, work.fn(item)), f"the sample of item {item} is wrong")


def check_tokens(work: Work, seen: Sequence[tuple[int, float, float]]) -> None:
    """Check that batches have come in order, none missing, none twice.

    Args:
        work: whose batches they are.
        seen: position, first and last row's token of batches that were looked at, in the order in which they came.
    """
    for position, first, last in seen:
        item = position * work.batch_size
        expected = work.token(item), work.token(item + work.batch_size - 1)
        require((first, last) == expected, f"batch {position} begins and ends with {first, last}, not {expected}")


def check_items(work: Work, seen: Sequence[Array], is_whole: bool) -> None:
    """Check that each item has come once, in any order.

    Args:
        work: whose items they are.
        seen: the items of each batch.
        is_whole: an epoch from begin to end, so none may be missing; else those that are must be recent.
    """
    found = np.concatenate(seen)
    unique = np.unique(found)
    require(len(unique) == len(found), f"{len(found) - len(unique)} of {len(found)} samples came twice")
    expected = work.items if is_whole else len(found)
    require(len(found) == expected, f"{len(found)} samples came, not {expected}")
    late = int(unique[-1]) + 1 - len(unique)
    require(late <= (0 if is_whole else _OUT_OF_ORDER * work.batch_size), f"{late} samples are missing")
