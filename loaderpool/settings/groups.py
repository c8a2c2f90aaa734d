"""Settings of a loader that belong together, checked when made: `Buckets`, `Shard`, `Limits`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loaderpool.errors import ArgumentError, brief
from loaderpool.settings.checks import known_names_only, read_bytes_count, read_seconds, whole_number, whole_numbers

if TYPE_CHECKING:
    import numpy.typing as npt

# Deaths of workers, and within how many seconds, before a general fault is assumed. Fewer would stop a run on a machine
# short of memory for a moment; with more, a fault that hits every worker goes on for minutes before anybody is told.
DEFAULT_RESTARTS = (50, 60.0)
# What travels in the messages' 64-bit words must fit them; this bound is far beyond what anybody means.
_MOST_RESTARTS = 2**31
# The board has one cell per worker; more would only cost address space, but no machine forks as many usefully.
MAX_WORKERS = 1024
# Threads of one worker. More would wait for the one interpreter lock that they share, and workers share none.
MAX_THREADS = 256
# Bucket numbers are kept in 16 bits an item, which sort in linear time. No loader has as many batch shapes.
_MOST_BOUNDARIES = (1 << 16) - 1
_MAX_LENGTH = 2**63 - 1
_MAX_ROWS = 2**31

_Group = TypeVar("_Group")


@dataclasses.dataclass(frozen=True, init=False, eq=False)  # `by` may be an array, which has no plain equality
class Buckets:
    """Batches of items of similar length, like `tf.data.Dataset.bucket_by_sequence_length`.

    Args:
        by: Function `by(item)` that returns the length of an item, called in the workers; or a sequence of all lengths.
        boundaries: Increasing lengths. Bucket `i` has the lengths from `boundaries[i-1]` to below `boundaries[i]`.
        batch_sizes: Batch size of each bucket, one more than `boundaries`. Default: the loader's `batch_size`.

    Example:
        >>> import numpy as np
        >>> import loaderpool as lp
        >>> items = [np.ones(n) for n in (3, 9, 4, 8)]
        >>> buckets = lp.Buckets(len, boundaries=[5])

        >>> with lp.Loader(items, batch_size=2, buckets=buckets, pad=True, workers=2) as loader:
        ...     print([batch.shape for batch in loader])
        [(2, 4), (2, 9)]
    """

    by: Callable[[Any], int] | Sequence[int] | npt.ArrayLike
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None

    @known_names_only
    def __init__(
        self,
        by: Callable[[Any], int] | Sequence[int] | npt.ArrayLike,
        boundaries: Sequence[int],
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        if by is None:
            raise ArgumentError(
                "Buckets.by must be a function that returns an item's length, or the lengths of all items as a list or "
                "integer array, got None"
            )
        edges = whole_numbers("Buckets.boundaries", boundaries, at_most=_MAX_LENGTH)
        if not 1 <= len(edges) <= _MOST_BOUNDARIES:
            raise ArgumentError(f"Buckets.boundaries must have 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}")
        for number, (before, edge) in enumerate(itertools.pairwise(edges), start=1):
            if edge <= before:
                at, below = f"boundaries[{number}]={edge}", f"boundaries[{number - 1}]={before}"
                raise ArgumentError(f"Buckets.boundaries must increase, but {at} is not above {below}")
        sizes = None if batch_sizes is None else whole_numbers("Buckets.batch_sizes", batch_sizes, at_most=_MAX_ROWS)
        if sizes is not None and len(sizes) != len(edges) + 1:
            raise ArgumentError(
                f"Buckets.batch_sizes must have one number for each bucket, {len(edges) + 1} with {len(edges)} "
                f"boundaries, got {len(sizes)}"
            )
        _set(self, by=by, boundaries=edges, batch_sizes=sizes)


@dataclasses.dataclass(frozen=True, init=False)
class Shard:
    """One process's share of each epoch, like `tf.data.Dataset.shard(num_shards, index)`.

    Args:
        num_shards: Number of processes that share each epoch, at least 1.
        index: Number of this process's share, from 0.
    """

    num_shards: int
    index: int

    @known_names_only
    def __init__(self, num_shards: int, index: int) -> None:
        num_shards = whole_number("Shard.num_shards", num_shards, at_least=1)
        index = whole_number("Shard.index", index, at_least=0)
        if index >= num_shards:
            raise ArgumentError(f"Shard.index must be from 0 to {num_shards - 1} (num_shards - 1), got {index}")
        _set(self, num_shards=num_shards, index=index)


@dataclasses.dataclass(frozen=True, init=False)
class Limits:
    """Resource limits of a loader: memory for buffered batches, time per sample, and worker restarts.

    Args:
        memory: Bytes for buffered batches, or a string such as `"512MiB"`. Default: 25 % of free memory, up to 2 GiB.
        timeout_s: Longest time of one sample in seconds; a longer one is an error. Default: `None`, no limit.
        restarts: Worker restarts allowed in 60 s, or a pair of a number and seconds; `None`: any. Default: `(50, 60)`.
        restarts_per_item: Crashes of one task, at least 2, before it is given up; the last two must be at the same
            sample. That sample is an error, or skipped if `on_error` allows it. Default: 3.
    """

    memory: int | None
    timeout_s: float | None
    restarts: tuple[int, float] | None
    restarts_per_item: int

    @known_names_only
    def __init__(
        self,
        *,
        memory: int | str | None = None,
        timeout_s: float | None = None,
        restarts: int | tuple[int, float] | None = DEFAULT_RESTARTS,
        restarts_per_item: int = 3,
    ) -> None:
        _set(
            self,
            memory=read_bytes_count("Limits.memory", memory),
            timeout_s=read_seconds("Limits.timeout_s", timeout_s),
            restarts=check_restarts("Limits.restarts", restarts),
            restarts_per_item=whole_number(
                "Limits.restarts_per_item", restarts_per_item, at_least=1, at_most=_MOST_RESTARTS
            ),
        )


def check_group(name: str, value: Any, kind: type[_Group], also: str = "") -> _Group | None:
    """An argument of a loader that is a group, or None; `also` says what else might have been given."""
    if value is None or isinstance(value, kind):
        return value
    wanted = f"a loaderpool.{kind.__name__}({', '.join(kind.__annotations__)}){also}"
    raise ArgumentError(f"{name} must be {wanted}, got {brief(value)} of type {type(value).__name__}")


def check_restarts(name: str, value: Any) -> tuple[int, float] | None:
    """Deaths of workers that are made good, and within how many seconds; None: no limit."""
    if value is None:
        return None
    count, seconds = value if isinstance(value, tuple) and len(value) == 2 else (value, DEFAULT_RESTARTS[1])
    hint = "a number of restarts, (restarts, seconds), or None for no limit"
    count = whole_number(name, count, at_least=0, at_most=_MOST_RESTARTS, hint=hint)
    window_s = read_seconds(f"{name}[1]", seconds)
    if window_s is None:
        raise ArgumentError(f"{name}[1] must be a number of seconds, got None ({hint})")
    return count, window_s


def _set(group: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(group, name, value)
