"""Settings of a loader that belong together, checked when made: `Auto`, `Buckets`, `Shard`, `Limits`, …."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.settings.checks import auto_flag, read_bytes_count, read_seconds, whole_number, whole_numbers
from loaderpool.settings.known_names import known_names_only

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


@dataclasses.dataclass(frozen=True, init=False)
class Auto:
    """Bounds within which a pool finds its number of workers while training runs: `workers=Auto(min=2, max=8)`.

    `workers="auto"` is `Auto()`. The number is the least that feeds the training's steps, as long as CPUs and memory
    allow; each change is in `statistics().decisions`, and changes no bit of any batch.

    Args:
        min: the fewest workers, at least 1.
        max: the most; None: four for each CPU that may be used, and at least 32: workers that wait for a disk or a
            server use no CPU.
        start: how many there are at first; None: one for each CPU that may be used, within these bounds.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    min: int
    max: int | None
    start: int | None

    @known_names_only
    def __init__(self, min: int = 1, max: int | None = None, start: int | None = None) -> None:  # noqa: A002
        least = whole_number("Auto.min", min, at_least=1, at_most=MAX_WORKERS)
        most = None if max is None else whole_number("Auto.max", max, at_least=least, at_most=MAX_WORKERS)
        if start is not None:
            start = whole_number("Auto.start", start, at_least=least, at_most=most or MAX_WORKERS)
        _set(self, min=least, max=most, start=start)

    def bounds(self, cpus: int) -> tuple[int, int]:
        """The fewest and the most workers on a machine with so many CPUs."""
        most = self.max or min(MAX_WORKERS, max(4 * cpus, 32, self.min))
        return self.min, most

    def first(self, cpus: int) -> int:
        """How many there are at first."""
        least, most = self.bounds(cpus)
        return self.start or min(most, max(least, cpus))


@dataclasses.dataclass(frozen=True, init=False, eq=False)  # `by` may be an array, which has no plain equality
class Buckets:
    """Batches are made of items of like length, as by `tf.data.Dataset.bucket_by_sequence_length`.

    Args:
        by: a function that gives an item's length, a whole number from 0 on, or the lengths of all items as a list or
            array. The function is called for each item while the loader is made, by the workers; with lengths given,
            nothing need be read.
        boundaries: where buckets end, rising: an item of length l is in bucket i where
            `boundaries[i-1] <= l < boundaries[i]`.
        batch_sizes: rows of a batch of each bucket, one more than `boundaries`; None: the loader's `batch_size` for
            all.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named. What does not go with the source, as a wrong number
            of lengths, the loader refuses.
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
            raise ArgumentTypeError(
                "Buckets.by must be a function that gives the length of an item, or the lengths of all items as a list "
                "or array of whole numbers, got None"
            )
        edges = whole_numbers("Buckets.boundaries", boundaries, at_most=_MAX_LENGTH)
        if not 1 <= len(edges) <= _MOST_BOUNDARIES:
            raise ArgumentError(f"Buckets.boundaries must be 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}")
        for number in range(1, len(edges)):
            if edges[number] <= edges[number - 1]:
                raise ArgumentError(
                    f"Buckets.boundaries must rise, but boundaries[{number}]={edges[number]} is not above "
                    f"boundaries[{number - 1}]={edges[number - 1]}"
                )
        sizes = None if batch_sizes is None else whole_numbers("Buckets.batch_sizes", batch_sizes, at_most=_MAX_ROWS)
        if sizes is not None and len(sizes) != len(edges) + 1:
            raise ArgumentError(
                f"Buckets.batch_sizes must have one number for each bucket, {len(edges) + 1} with {len(edges)} "
                f"boundaries, got {len(sizes)}"
            )
        _set(self, by=by, boundaries=edges, batch_sizes=sizes)


@dataclasses.dataclass(frozen=True, init=False)
class Shard:
    """A loader has one share of each epoch, as a dataset has by `tf.data.Dataset.shard(num_shards, index)`.

    Args:
        num_shards: how many loaders share each epoch, at least 1.
        index: which share is this one's, from 0.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    num_shards: int
    index: int

    @known_names_only
    def __init__(self, num_shards: int, index: int) -> None:
        num_shards = whole_number("Shard.num_shards", num_shards, at_least=1)
        index = whole_number("Shard.index", index, at_least=0)
        if index >= num_shards:
            raise ArgumentError(
                f"Shard.index must be in 0 .. num_shards-1 = {num_shards - 1}, got {index} (shards count from 0)"
            )
        _set(self, num_shards=num_shards, index=index)


@dataclasses.dataclass(frozen=True, init=False)
class Limits:
    """Limits bound a loader's memory, the time of a sample, and the deaths of workers that are made good.

    Args:
        memory: bytes for buffered batches, a number or such as "512MiB"; None: a quarter of what is free, at most
            2 GiB.
        pin: pin (page-lock) that memory for an NVIDIA GPU, so that batches are copied to the device straight out of
            it and beside the computation. "auto": once TensorFlow uses the GPU, at most half of what is free. True:
            once any framework does; then keep each batch until asynchronous copies of yours are done (PyTorch's with
            `non_blocking=True`; `as_torch(device="cuda")` does). Same bits; `statistics()` says what is pinned.
        timeout_s: seconds that one sample may take, or one item of a generator; past them its worker is replaced, and
            the sample is an error. None: any time.
        restarts: deaths of workers that are made good, as a number within a minute or a pair of a number and seconds;
            more are an error, for then the fault is general. None: any number.
        restarts_per_item: deaths of workers over the same work after which its samples are run one by one, at least 1;
            the one that ends its worker also when it runs alone is an error (or left out, by `on_error`).

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    memory: int | None
    pin: bool | Literal["auto"]
    timeout_s: float | None
    restarts: tuple[int, float] | None
    restarts_per_item: int

    @known_names_only
    def __init__(
        self,
        *,
        memory: int | str | None = None,
        pin: bool | Literal["auto"] = "auto",
        timeout_s: float | None = None,
        restarts: int | tuple[int, float] | None = DEFAULT_RESTARTS,
        restarts_per_item: int = 3,
    ) -> None:
        _set(
            self,
            memory=read_bytes_count("Limits.memory", memory),
            pin=auto_flag("Limits.pin", pin),
            timeout_s=read_seconds("Limits.timeout_s", timeout_s),
            restarts=check_restarts("Limits.restarts", restarts),
            restarts_per_item=whole_number(
                "Limits.restarts_per_item", restarts_per_item, at_least=1, at_most=_MOST_RESTARTS
            ),
        )


@dataclasses.dataclass(frozen=True, init=False)
class WorkerOptions:
    """Worker options say how each worker calls the functions.

    Args:
        threads: calls of the functions that each worker makes at the same time, on threads of its own, 1 to 256: for
            functions that wait (reads over a network) rather than compute. The functions and the source must be safe
            for threads, and draw random numbers from `rng` only. Same batches and bits. Excludes `cache` and
            generators; with `workers=0` there are no threads.
        seed_globals: reseed `random`, `numpy.random` and torch's generator for each sample; "auto": once the function
            is seen to use them.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
    """

    threads: int
    seed_globals: bool | Literal["auto"]

    @known_names_only
    def __init__(self, *, threads: int = 1, seed_globals: bool | Literal["auto"] = "auto") -> None:
        hint = "calls of fn that a worker makes at the same time"
        threads = whole_number("WorkerOptions.threads", threads, at_least=1, at_most=MAX_THREADS, hint=hint)
        seed_globals = auto_flag("WorkerOptions.seed_globals", seed_globals)
        if threads > 1 and seed_globals is True:
            raise ArgumentError(
                f"WorkerOptions: seed_globals=True and threads={threads} exclude each other: all threads of a process "
                "share one random and one numpy.random, so no sample can have a state of its own. Have the function "
                "name rng, and draw from that; or set threads=1"
            )
        _set(self, threads=threads, seed_globals=seed_globals)


def check_group(name: str, value: Any, kind: type[_Group], also: str = "") -> _Group | None:
    """An argument of a loader that is a group, or None; `also` says what else might have been given.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if value is None or isinstance(value, kind):
        return value
    raise ArgumentTypeError(
        f"{name} must be a loaderpool.{kind.__name__}({', '.join(_fields(kind))}){also}, got {value!r:.100} of type "
        f"{type(value).__name__}"
    )


def check_restarts(name: str, value: Any) -> tuple[int, float] | None:
    """Deaths of workers that are made good, and within how many seconds; None: no limit.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong value, named.
    """
    if value is None:
        return None
    count, seconds = value if isinstance(value, tuple) and len(value) == 2 else (value, DEFAULT_RESTARTS[1])
    hint = "deaths of workers, or (deaths, seconds), or None for no limit"
    count = whole_number(name, count, at_least=0, at_most=_MOST_RESTARTS, hint=hint)
    window_s = read_seconds(f"{name}' window", seconds)
    if window_s is None:
        raise ArgumentTypeError(f"{name}' window must be a number of seconds, got None ({hint})")
    return count, window_s


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _set(group: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(group, name, value)
