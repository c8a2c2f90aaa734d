"""The settings of a loader, checked when they are made so that a wrong value fails in the caller's line."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from loaderpool.checks import read_bytes_count, whole_number
from loaderpool.element.padding import check_padding
from loaderpool.errors import ArgumentError, ArgumentTypeError

# The board has one cell per worker; more would only cost address space, but no machine forks as many usefully.
MAX_WORKERS = 1024
# Threads of one worker. More would wait for the one interpreter lock that they share, and workers share none.
MAX_THREADS = 256
# Deaths of workers, and within how many seconds, before a general fault is assumed. Fewer would stop a run on a machine
# short of memory for a moment; with more, a fault that hits every worker goes on for minutes before anybody is told.
DEFAULT_MAX_RESTARTS = (50, 60.0)
# What travels in the messages' 64-bit words must fit them; these bounds are far beyond what anybody means.
_MAX_RESTARTS = 2**31
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 0.001, 10**9  # below: nanoseconds that round to 0 would mean "no timeout"
MAX_EPOCH = 2**62
# Bucket numbers are kept in 16 bits an item, which sort in linear time. Nobody has as many batch shapes.
_MOST_BOUNDARIES = (1 << 16) - 1
_MAX_LENGTH = 2**63 - 1
_MAX_ROWS = 2**31


@dataclasses.dataclass(frozen=True)
class ErrorPolicy:
    """What happens when the user's function raises."""

    action: Literal["raise", "skip", "replace"]  # raise; leave the row out; let the next good row stand in
    budget: int | float | None = None  # errors allowed in a pass: an int is a number, a float a share of the rows

    def allows(self, errors: int, rows: int) -> bool:
        """Whether a pass of `rows` rows may have `errors` errors."""
        if self.budget is None:
            return True
        return errors <= (self.budget if isinstance(self.budget, int) else self.budget * rows)


@dataclasses.dataclass(frozen=True)
class BucketSettings:
    """`boundaries` and `batch_sizes`, checked."""

    boundaries: tuple[int, ...]  # rising; bucket i has the lengths from boundaries[i-1] to below boundaries[i]
    batch_sizes: tuple[int, ...]  # rows of a full batch of each bucket: one more than boundaries

    @staticmethod
    def checked(bucket_by: Any, boundaries: Any, batch_sizes: Any, batch_size: int | None) -> BucketSettings | None:
        """The settings; None where there are no buckets.

        Args:
            bucket_by: only looked at for None.
            boundaries: as the user gave it.
            batch_sizes: likewise; None: `batch_size` for all.
            batch_size: checked.

        Raises:
            ArgumentError, ArgumentTypeError: a wrong value, named.
        """
        if bucket_by is None:
            for name, value in (("boundaries", boundaries), ("batch_sizes", batch_sizes)):
                if value is not None:
                    raise ArgumentError(f"{name} needs bucket_by: the length of an item, as a function or an array")
            return None
        if boundaries is None:
            raise ArgumentError(
                "bucket_by needs boundaries: the lengths at which one bucket ends and the next begins, as [100, 200]"
            )
        edges = _whole_numbers("boundaries", boundaries, at_most=_MAX_LENGTH)
        if not 1 <= len(edges) <= _MOST_BOUNDARIES:
            raise ArgumentError(f"boundaries must be 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}")
        for number in range(1, len(edges)):
            if edges[number] <= edges[number - 1]:
                raise ArgumentError(
                    f"boundaries must rise, but boundaries[{number}]={edges[number]} is not above "
                    f"boundaries[{number - 1}]={edges[number - 1]}"
                )
        if batch_sizes is None:
            if batch_size is None:
                raise ArgumentError("bucket_by needs a batch_size, or batch_sizes: rows of a batch of each bucket")
            return BucketSettings(edges, (batch_size,) * (len(edges) + 1))
        sizes = _whole_numbers("batch_sizes", batch_sizes, at_most=_MAX_ROWS)
        if len(sizes) != len(edges) + 1:
            raise ArgumentError(
                f"batch_sizes must have one number for each bucket, {len(edges) + 1} with {len(edges)} boundaries, "
                f"got {len(sizes)}"
            )
        return BucketSettings(edges, sizes)


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Settings of one loader, as `Loader` takes them, checked and in one form."""

    batch_size: int | None = 32  # rows of a full batch (the most, by length); None: what `fn` returns is one element
    workers: int | Literal["auto"] = "auto"  # processes; 0: in the caller's process
    shuffle: bool = False  # a permutation of all indices, another one each epoch
    shuffle_window: int = 0  # of a stream: how many items are shuffled among each other; 0: none
    seed: int = 0  # keys order and random streams
    drop_remainder: bool = False  # leave out the last, smaller batch
    deterministic: bool = True  # in the plan's order; False: as batches are finished
    num_shards: int = 1  # into how many shares the epoch is cut
    shard_index: int = 0  # which share is this loader's
    pad: Any = False  # True (zeros), a value, or one for each component: samples are padded to the batch's largest
    ragged: bool = False  # components of varied length are ragged
    on_error: ErrorPolicy = ErrorPolicy("raise")
    timeout_s: float | None = None  # seconds for one sample
    memory_limit: int | None = None  # bytes for buffered batches
    seed_globals: bool | Literal["auto"] = "auto"  # reseed `random` and `numpy.random` for each sample
    max_restarts: tuple[int, float] | None = DEFAULT_MAX_RESTARTS  # deaths of workers in so many seconds; None: any
    max_restarts_per_item: int = 3  # deaths of workers over one ticket before it is given up
    buckets: BucketSettings | None = None  # batching by length
    threads_per_worker: int = 1  # calls of the function that a worker makes at the same time

    @staticmethod
    def checked(**settings: Any) -> LoaderConfig:
        """Check and normalise the arguments of `Loader`.

        Raises:
            ArgumentError: a wrong value, named.
            ArgumentTypeError: a wrong type, named.
        """
        batch_size = settings["batch_size"]
        if batch_size is not None:
            hint = "None means: one element per call"
            batch_size = whole_number("batch_size", batch_size, at_least=1, at_most=2**31, hint=hint)
        buckets = BucketSettings.checked(
            settings.get("bucket_by"), settings.get("boundaries"), settings.get("batch_sizes"), batch_size
        )
        if buckets is not None:
            batch_size = max(buckets.batch_sizes)
        num_shards = whole_number("num_shards", settings["num_shards"], at_least=1)
        shard_index = whole_number("shard_index", settings["shard_index"], at_least=0)
        if shard_index >= num_shards:
            raise ArgumentError(
                f"shard_index must be in 0 .. num_shards-1 = {num_shards - 1}, got {shard_index} (shards count from 0)"
            )
        shuffle = _shuffle(settings["shuffle"])
        pad, ragged = check_padding(settings["pad"]), _flag("ragged", settings["ragged"])
        if pad is not False and ragged:
            raise ArgumentError("pad and ragged exclude each other: choose padded batches or ragged ones")
        if batch_size is None and (pad is not False or ragged):
            which = "ragged" if ragged else "pad"
            raise ArgumentError(f"{which} needs a batch_size: with batch_size=None nothing is stacked")
        on_error = _error_policy(settings["on_error"])
        return LoaderConfig(
            batch_size=batch_size,
            workers=check_workers(settings["workers"]),
            shuffle=shuffle is True,
            shuffle_window=0 if isinstance(shuffle, bool) else shuffle,
            seed=whole_number("seed", settings["seed"], at_least=0),
            drop_remainder=_flag("drop_remainder", settings["drop_remainder"]),
            deterministic=_flag("deterministic", settings["deterministic"]),
            num_shards=num_shards,
            shard_index=shard_index,
            pad=pad,
            ragged=ragged,
            on_error=on_error,
            timeout_s=_seconds("timeout_s", settings["timeout_s"]),
            memory_limit=read_bytes_count("memory_limit", settings["memory_limit"]),
            seed_globals=_auto_flag("seed_globals", settings["seed_globals"]),
            max_restarts=check_max_restarts(settings["max_restarts"]),
            max_restarts_per_item=whole_number(
                "max_restarts_per_item", settings["max_restarts_per_item"], at_least=1, at_most=_MAX_RESTARTS
            ),
            buckets=buckets,
            threads_per_worker=_threads(settings.get("threads_per_worker", 1), settings["seed_globals"]),
        )

    @property
    def static_rows(self) -> int | None:
        """Rows that every batch has; None: they differ, as where failing rows are left out."""
        is_one = self.buckets is None or len(set(self.buckets.batch_sizes)) == 1
        is_whole = self.drop_remainder and self.on_error.action != "skip"
        return self.batch_size if is_whole and is_one else None


def check_workers(value: Any, of_pool: bool = False) -> int | Literal["auto"]:
    """The checked `workers` argument: "auto" or a number up to MAX_WORKERS, from 0; of a pool from 1."""
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        raise ArgumentError(f'workers must be a number or "auto", got {value!r}')
    here = "workers=0, in this process, is a setting of a Loader" if of_pool else "0 runs in this process"
    hint = f'{here}, "auto" starts one per usable CPU'
    return whole_number("workers", value, at_least=int(of_pool), at_most=MAX_WORKERS, hint=hint)


def _threads(value: Any, seed_globals: Any) -> int:
    hint = "calls of fn that a worker makes at the same time"
    threads = whole_number("threads_per_worker", value, at_least=1, at_most=MAX_THREADS, hint=hint)
    if threads > 1 and seed_globals is True:
        raise ArgumentError(
            f"seed_globals=True and threads_per_worker={threads} exclude each other: all threads of a process share "
            "one random and one numpy.random, so no sample can have a state of its own. Have the function name rng, "
            "and draw from that; or set threads_per_worker=1"
        )
    return threads


def check_epoch(value: Any) -> int:
    """The checked number of an epoch.

    Raises:
        ArgumentError: below 0, or too large.
        ArgumentTypeError: not a whole number.
    """
    return whole_number("epoch", value, at_least=0, at_most=MAX_EPOCH)


def check_max_restarts(value: Any) -> tuple[int, float] | None:
    """The checked `max_restarts` argument: deaths of workers, and within how many seconds; None: no limit."""
    if value is None:
        return None
    count, seconds = value if isinstance(value, tuple) and len(value) == 2 else (value, DEFAULT_MAX_RESTARTS[1])
    hint = "deaths of workers, or (deaths, seconds), or None for no limit"
    count = whole_number("max_restarts", count, at_least=0, at_most=_MAX_RESTARTS, hint=hint)
    window_s = _seconds("max_restarts' window", seconds)
    if window_s is None:
        raise ArgumentTypeError(f"max_restarts' window must be a number of seconds, got None ({hint})")
    return count, window_s


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or (type(value).__name__ in ("bool_", "bool") and hasattr(value, "dtype")):
        return bool(value)
    raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")


def _shuffle(value: Any) -> bool | int:
    """True, False, or how many items of a stream are shuffled among each other."""
    is_number = isinstance(value, numbers.Integral) or (hasattr(value, "dtype") and hasattr(value, "__index__"))
    if isinstance(value, bool) or not is_number or type(value).__name__ in ("bool_", "bool"):
        try:
            return _flag("shuffle", value)
        except ArgumentTypeError:
            raise ArgumentTypeError(
                f"shuffle must be True or False, or for a stream a number of items, got {value!r}"
            ) from None
    return whole_number("shuffle", value, at_least=1, at_most=2**31, hint="items of a stream that are held")


def _auto_flag(name: str, value: Any) -> bool | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(f'{name} must be True, False or "auto", got {value!r}')


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number of seconds or None, got {value!r}")
    seconds: Any = value  # `Real` has no comparison with numbers, for mypy
    if not _MIN_TIMEOUT_S <= seconds <= _MAX_TIMEOUT_S:  # not NaN either
        raise ArgumentError(
            f"{name} must be seconds from {_MIN_TIMEOUT_S} to {_MAX_TIMEOUT_S}, or None for no limit, got {value!r}"
        )
    return float(value)


def _error_policy(value: Any) -> ErrorPolicy:
    if isinstance(value, ErrorPolicy):
        return value
    action, budget = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(action, str) or action not in ("raise", "skip", "replace"):
        raise ArgumentError(
            'on_error must be "raise", "skip" or "replace", or a pair of one of the last two and a budget '
            f"(a number or a rate per pass), got {value!r}"
        )
    if budget is None:
        return ErrorPolicy(action)  # type: ignore[arg-type]
    if action == "raise":
        raise ArgumentError('on_error="raise" takes no budget')
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise ArgumentTypeError(f"on_error's budget must be a number (int) or a rate (float), got {budget!r}")
    number: Any = budget
    if not 0 <= number <= (math.inf if isinstance(budget, numbers.Integral) else 1):  # not NaN either
        raise ArgumentError(f"on_error's budget must be a number >= 0 or a rate in 0 .. 1, got {budget!r}")
    return ErrorPolicy(action, int(budget) if isinstance(budget, numbers.Integral) else float(budget))  # type: ignore[arg-type]


def _whole_numbers(name: str, value: Any, at_most: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping, AbstractSet)) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{name} must be a list of whole numbers, got {value!r} of type {type(value).__name__}")
    return tuple(
        whole_number(f"{name}[{number}]", each, at_least=1, at_most=at_most) for number, each in enumerate(value)
    )
