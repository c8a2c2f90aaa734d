"""The settings of a loader, checked when they are made so that a wrong value fails in the caller's line."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from loaderpool.checks import read_bytes_count, read_seconds, whole_number, whole_numbers
from loaderpool.element.spec import check_padding
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only

if TYPE_CHECKING:
    import numpy.typing as npt

# Deaths of workers, and within how many seconds, before a general fault is assumed. Fewer would stop a run on a machine
# short of memory for a moment; with more, a fault that hits every worker goes on for minutes before anybody is told.
DEFAULT_RESTARTS = (50, 60.0)
# What travels in the messages' 64-bit words must fit them; these bounds are far beyond what anybody means.
MAX_EPOCH, _MOST_RESTARTS = 2**62, 2**31
# The board has one cell per worker; more would only cost address space, but no machine forks as many usefully.
MAX_WORKERS = 1024
# Threads of one worker. More would wait for the one interpreter lock that they share, and workers share none.
MAX_THREADS = 256
# Bucket numbers are kept in 16 bits an item, which sort in linear time. No loader has as many batch shapes.
_MOST_BOUNDARIES = (1 << 16) - 1
_MAX_LENGTH = 2**63 - 1
_MAX_ROWS = 2**31
# What one call of the function makes: a row, a batch of several items, or a whole batch of one item.
UnitKind = Literal["sample", "batch", "element"]

_Group = TypeVar("_Group")


@dataclasses.dataclass(
    frozen=True, init=False, eq=False
)  # `by` may be an array, which has no plain equality
class Buckets:
    """Batches of items of similar length, like `tf.data.Dataset.bucket_by_sequence_length`.

    Args:
        by: Length of each item of the source, as a list or integer array.
        boundaries: Increasing lengths. Bucket `i` has the lengths from `boundaries[i-1]` to below `boundaries[i]`.
        batch_sizes: Batch size of each bucket, one more than `boundaries`. Default: the loader's `batch_size`.

    Example:
        >>> import numpy as np
        >>> import loaderpool as lp
        >>> items = [np.ones(n) for n in (3, 9, 4, 8)]
        >>> buckets = lp.Buckets([len(item) for item in items], boundaries=[5])

        >>> with lp.Loader(items, batch_size=2, buckets=buckets, pad=True, workers=2) as loader:
        ...     print([batch.shape for batch in loader])
        [(2, 4), (2, 9)]
    """

    by: Sequence[int] | npt.ArrayLike
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None

    @known_names_only
    def __init__(
        self,
        by: Sequence[int] | npt.ArrayLike,
        boundaries: Sequence[int],
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        if callable(by) and not hasattr(by, "__len__"):
            name = getattr(by, "__name__", "")
            length = name if name.isidentifier() else "length"
            raise ArgumentError(
                "Buckets.by must be the lengths of all items, got a function. Write lp.Buckets("
                f"[{length}(item) for item in source], ...). If this is slow, let workers compute them: "
                f"lengths = numpy.concatenate([*lp.Loader(source, {length}, batch_size=1000)])"
            )
        edges = whole_numbers("Buckets.boundaries", boundaries, at_most=_MAX_LENGTH)
        if not 1 <= len(edges) <= _MOST_BOUNDARIES:
            raise ArgumentError(
                f"Buckets.boundaries must be 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}"
            )
        for number, (before, edge) in enumerate(itertools.pairwise(edges), start=1):
            if edge <= before:
                at, below = f"boundaries[{number}]={edge}", f"boundaries[{number - 1}]={before}"
                raise ArgumentError(
                    f"Buckets.boundaries must increase, but {at} is not above {below}"
                )
        sizes = (
            None
            if batch_sizes is None
            else whole_numbers("Buckets.batch_sizes", batch_sizes, at_most=_MAX_ROWS)
        )
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
            raise ArgumentError(
                f"Shard.index must be from 0 to {num_shards - 1} (num_shards - 1), got {index}"
            )
        _set(self, num_shards=num_shards, index=index)


@dataclasses.dataclass(frozen=True, init=False)
class Limits:
    """Resource limits of a loader: memory for buffered batches, time per sample, and worker restarts.

    Args:
        memory: Bytes for buffered batches, or a string such as `"512MiB"`. Default: 25 % of free memory, up to 2 GiB;
            divided by the processes of a distributed training on this machine.
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
    raise ArgumentError(
        f"{name} must be {wanted}, got {brief(value)} of type {type(value).__name__}"
    )


def check_restarts(name: str, value: Any) -> tuple[int, float] | None:
    """Deaths of workers that are made good, and within how many seconds; None: no limit."""
    if value is None:
        return None
    count, seconds = (
        value if isinstance(value, tuple) and len(value) == 2 else (value, DEFAULT_RESTARTS[1])
    )
    hint = "a number of restarts, (restarts, seconds), or None for no limit"
    count = whole_number(name, count, at_least=0, at_most=_MOST_RESTARTS, hint=hint)
    window_s = read_seconds(f"{name}[1]", seconds)
    if window_s is None:
        raise ArgumentError(f"{name}[1] must be a number of seconds, got None ({hint})")
    return count, window_s


def _set(group: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(group, name, value)


class ErrorPolicy(NamedTuple):
    """What happens when the user's function raises."""

    action: Literal[
        "raise", "skip", "replace"
    ]  # raise; leave the row out; let the next good row stand in
    budget: int | float | None = (
        None  # errors allowed in a pass: an int is a number, a float a share of the rows
    )

    def allows(self, errors: int, rows: int) -> bool:
        """Whether a pass of `rows` rows may have `errors` errors."""
        if self.budget is None:
            return True
        return errors <= (self.budget if isinstance(self.budget, int) else self.budget * rows)


class BucketSettings(NamedTuple):
    """What workers know of `Buckets`."""

    boundaries: tuple[
        int, ...
    ]  # rising; bucket i has the lengths from boundaries[i-1] to below boundaries[i]
    batch_sizes: tuple[int, ...]  # rows of a full batch of each bucket: one more than boundaries


class Auto(NamedTuple):
    """Bounds within which a pool finds its number of workers while training runs; `workers="auto"` is `Auto()`."""

    fewest: int = 1
    most: int | None = (
        None  # None: four for each CPU, and at least 32 on a machine: workers may wait for a disk
    )

    def bounds(self, cpus: int, processes: int = 1) -> tuple[int, int]:
        """The fewest and the most workers with so many CPUs, beside other processes that have pools, too."""
        return self.fewest, self.most or min(
            MAX_WORKERS, max(4 * cpus, 32 // processes, self.fewest)
        )

    def first(self, cpus: int, processes: int = 1) -> int:
        """How many there are at first."""
        fewest, most = self.bounds(cpus, processes)
        return min(most, max(fewest, cpus))


class LoaderConfig(NamedTuple):
    """Settings of one loader, as `Loader` takes them, checked and in one form."""

    batch_size: (
        int | None
    )  # rows of a full batch (the most, by length); None: what `fn` returns is one element
    workers: int | Auto  # processes; 0: in the caller's process; `Auto` also where a pool is shared
    shuffle: bool  # a permutation of all indices, another one each epoch
    shuffle_window: int  # of a stream: how many items are shuffled among each other; 0: none
    seed: int  # keys order and random streams
    drop_remainder: bool  # leave out the last, smaller batch
    deterministic: bool  # in the plan's order; False: as batches are finished
    shard: Shard  # which share of the epoch is this loader's
    pad: Any  # True (zeros), a value, or one for each component: samples are padded to the batch's largest
    ragged: bool  # components of varied length are ragged
    on_error: ErrorPolicy
    buckets: BucketSettings | None  # batching by length
    threads: int  # calls that each worker makes at the same time
    seed_globals: (
        bool | Literal["auto"]
    )  # reseed global generators for each sample; "auto": where one is drawn from
    limits: Limits

    @staticmethod
    def checked(arguments: Mapping[str, Any]) -> LoaderConfig:
        """Check and normalise the settings among the arguments of `Loader`, all of which are in `arguments` by name."""
        batch_size = arguments["batch_size"]
        if batch_size is not None:
            hint = "None: do not batch"
            batch_size = whole_number(
                "batch_size", batch_size, at_least=1, at_most=2**31, hint=hint
            )
        given = check_group("buckets", arguments["buckets"], Buckets)
        buckets = None
        if given is not None:
            sizes = given.batch_sizes
            if sizes is None and batch_size is None:
                raise ArgumentError(
                    "buckets needs a batch_size, or Buckets(batch_sizes=...) with one for each bucket"
                )
            buckets = BucketSettings(
                given.boundaries, sizes or (batch_size or 0,) * (len(given.boundaries) + 1)
            )
            batch_size = max(buckets.batch_sizes)
        shuffle = _shuffle(arguments["shuffle"])
        pad, ragged = check_padding(arguments["pad"]), flag("ragged", arguments["ragged"])
        if pad is not False and ragged:
            raise ArgumentError("pad and ragged cannot be combined: choose one of them")
        if batch_size is None and (pad is not False or ragged):
            which = "ragged" if ragged else "pad"
            raise ArgumentError(
                f"{which} needs a batch_size: with batch_size=None, samples are not batched"
            )
        hint = "calls of fn that a worker makes at the same time"
        threads = whole_number(
            "threads", arguments["threads"], at_least=1, at_most=MAX_THREADS, hint=hint
        )
        seed_globals = arguments["seed_globals"]
        if not isinstance(seed_globals, bool) and not (
            isinstance(seed_globals, str) and seed_globals == "auto"
        ):
            raise ArgumentError(
                f'seed_globals must be True, False or "auto", got {brief(seed_globals)}'
            )
        if threads > 1 and seed_globals is True:
            raise ArgumentError(
                f"seed_globals=True and threads={threads} cannot be combined, as threads share the global generators. "
                "Give the function a parameter rng and draw from it, or set threads=1"
            )
        return LoaderConfig(
            batch_size=batch_size,
            workers=check_workers(arguments["workers"]),
            shuffle=shuffle is True,
            shuffle_window=0 if isinstance(shuffle, bool) else shuffle,
            seed=whole_number("seed", arguments["seed"], at_least=0),
            drop_remainder=flag("drop_remainder", arguments["drop_remainder"]),
            deterministic=flag("deterministic", arguments["deterministic"]),
            shard=check_group("shard", arguments["shard"], Shard, ' or "auto"') or Shard(1, 0),
            pad=pad,
            ragged=ragged,
            on_error=_error_policy(arguments["on_error"]),
            buckets=buckets,
            threads=threads,
            seed_globals=seed_globals,  # type: ignore[arg-type]  # as checked above
            limits=check_group("limits", arguments["limits"], Limits) or Limits(),
        )

    @property
    def static_rows(self) -> int | None:
        """Rows that every batch has; None: they differ, as where failing rows are left out."""
        is_one = self.buckets is None or len(set(self.buckets.batch_sizes)) == 1
        is_whole = self.drop_remainder and self.on_error.action != "skip"
        return self.batch_size if is_whole and is_one else None


def unit_of(config: LoaderConfig, batch_fn: object) -> UnitKind:
    """Return what one call of the function makes."""
    if batch_fn is not None:
        return "batch"
    return "sample" if config.batch_size is not None else "element"


def check_workers(value: Any, of_pool: bool = False) -> int | Auto:
    """The checked `workers` argument: `Auto`, or a number up to MAX_WORKERS, from 0; of a pool from 1."""
    if isinstance(value, tuple) and len(value) == 2:
        least = whole_number("workers[0]", value[0], at_least=1, at_most=MAX_WORKERS)
        most = (
            None
            if value[1] is None
            else whole_number("workers[1]", value[1], at_least=least, at_most=MAX_WORKERS)
        )
        return Auto(least, most)
    if isinstance(value, str) and value == "auto":
        return Auto()
    if isinstance(value, tuple) or (isinstance(value, str) and not value.isdecimal()):
        raise ArgumentError(
            f'workers must be a number, "auto" or a pair (fewest, most), got {brief(value)}'
        )
    hint = (
        'of a Loader also 0: run in the main process, or a loaderpool.Pool; "auto": find the number'
    )
    return whole_number("workers", value, at_least=int(of_pool), at_most=MAX_WORKERS, hint=hint)


def flag(name: str, value: Any, also: str = "") -> bool:
    """A checked argument that is True or False."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False{also}, got {brief(value)}")


def _shuffle(value: Any) -> bool | int:
    """True, False, or how many items of a stream are shuffled among each other."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return flag("shuffle", value, ", or for a stream a number of items")
    return whole_number(
        "shuffle", value, at_least=1, at_most=2**31, hint="the shuffle window of a stream, in items"
    )


def _error_policy(value: Any) -> ErrorPolicy:
    action, budget = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(action, str) or action not in ("raise", "skip", "replace"):
        raise ArgumentError(
            'on_error must be "raise", "skip", "replace", or a pair with the errors allowed per epoch, such as '
            f'("skip", 10) or ("skip", 0.01), got {brief(value)}'
        )
    if budget is None:
        return ErrorPolicy(action)  # type: ignore[arg-type]
    is_count = isinstance(budget, numbers.Integral)
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if (
        action == "raise" or not is_number or not 0 <= budget <= (math.inf if is_count else 1)
    ):  # not NaN either
        raise ArgumentError(
            f'on_error[1], of "skip" or "replace", must be a number of errors (int) >= 0 or a fraction (float) from 0 '
            f"to 1, got {brief(budget)}"
        )
    return ErrorPolicy(action, int(budget) if is_count else float(budget))  # type: ignore[arg-type]
