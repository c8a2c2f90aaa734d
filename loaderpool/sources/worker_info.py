"""What a generator that runs in several copies may ask: which of them it is."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Which copy of a generator this is. Keyed by these alone, what it yields is the same wherever it runs."""

    index: int
    """Its number among the copies, or its shard's among the shards, from 0; over all processes of a data-parallel
    training."""
    count: int
    """How many copies, or shards, there are."""
    seed: int
    """A number of its own in each epoch, 0 to 2**64 - 1, for generators of random numbers."""
    epoch: int
    """Which pass over the loader it is made for."""
    shard: Any = None
    """The element of `shards` that it was given; None without shards."""


_current: WorkerInfo | None = None


def worker_info() -> WorkerInfo | None:
    """Return which copy of its generator calls; None anywhere but in a generator of `Loader.from_generator`."""
    return _current


def set_worker_info(info: WorkerInfo | None) -> None:
    """Have `worker_info` return this from now on."""
    global _current
    _current = info
