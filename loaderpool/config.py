"""Settings of a loader, checked when they are made: errors point to the caller's line."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from loaderpool.checks import (
    check_signature,
    flag,
    one_of,
    or_none,
    read_bytes_count,
    read_seconds,
    whole_number,
    whole_numbers,
)
from loaderpool.element.spec import check_padding
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only

if TYPE_CHECKING:
    import numpy.typing as npt

# Limit of worker deaths, and the seconds within which they count. More deaths are taken for a
# general fault. Smaller: a machine that is short of memory for a moment would stop a run. Larger: a
# fault that stops every worker would stay unreported for minutes.
DEFAULT_RESTARTS = (50, 60.0)
# Bounds of values in the 64-bit words of messages. They are far above any useful value.
MAX_EPOCH, _MOST_RESTARTS = 2**62, 2**31
# Most workers of a pool. The board has a cell for each. Larger: more address space, but no machine
# runs that many processes usefully.
MAX_WORKERS = 1024
# Number of a training's first steps that have a snapshot each. Code compiles in these, and caches
# fill.
FIRST_STEPS = 3
# Concurrent calls of one worker. Larger: more calls wait for the one interpreter lock that they
# share. Workers share none.
MAX_THREADS = 256
# Bucket numbers take 16 bits per item, which sort in linear time. No loader has that many batch
# shapes.
_MOST_BOUNDARIES = (1 << 16) - 1
_MAX_LENGTH = 2**63 - 1
# Largest number of samples of an item. The head of the item's place has a number for each sample,
# and every read of a sample reads the whole head. Larger: this takes longer than reading a small
# sample.
_MOST_SAMPLES = 1 << 16
# Number of samplers that are wrapped in each other. Larger: an object with any attribute, such as a
# mock, takes longer.
_MOST_SAMPLERS = 16
# Default window of `Blocks`, and of `shuffle=True` with `samples_per_item`. Smaller: rows of fewer
# blocks are mixed. Larger: more memory is used.
DEFAULT_WINDOW = 16
_MAX_ROWS = 2**31


class _NotGiven(int):
    """Default value of an argument. Its identity shows that the user has not set the argument."""


# Default batch size. It does not apply if the order determines the batches.
DEFAULT_BATCH_SIZE: int = _NotGiven(32)
# Result of one call of the function: a row, a batch of several items, or a whole batch of one item.
UnitKind = Literal["sample", "batch", "element"]

_Group = TypeVar("_Group")


# `by` may be an array, which has no plain equality.
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Buckets:
    """Batches of items of similar length, like `tf.data.Dataset.bucket_by_sequence_length`.

    Args:
        by: Length of each item of the source, as a list or integer array.
        boundaries: Increasing lengths. Bucket `i` has the lengths from `boundaries[i-1]` to below
            `boundaries[i]`.
        batch_sizes: Batch size of each bucket, one more than `boundaries`. Default: the loader's
            `batch_size`.

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
        _set(self, locals())
        edges, sizes = self.boundaries, self.batch_sizes
        if sizes is not None and len(sizes) != len(edges) + 1:
            raise ArgumentError(
                f"Buckets.batch_sizes must have one number for each bucket, {len(edges) + 1} with "
                f"{len(edges)} boundaries, got {len(sizes)}"
            )

    def __repr__(self) -> str:
        return _short_repr(self)


# `weights` may be an array, which has no plain equality.
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Weighted:
    """Order of items drawn by their weights, like `torch.utils.data.WeightedRandomSampler`.

    The order is the same for all shards, which share it.

    Args:
        weights: Weight of each item of the source, at least 0; or a function `weights(epoch)` that
            returns them. Read when an epoch begins, so training may change them.
        num_samples: Number of items of an epoch. Default: as many as the source has.
        replacement: Set to `False` to draw no item twice in an epoch. Default: `True`.

    Example:
        >>> import loaderpool as lp
        >>> order = lp.Weighted([0, 1, 0, 3], num_samples=8)
        >>> with lp.Loader(range(4), batch_size=8, order=order, workers=0) as loader:
        ...     print(*loader)
        [3 1 3 3 3 1 3 3]
    """

    weights: npt.ArrayLike | Callable[[int], npt.ArrayLike]
    num_samples: int | None
    replacement: bool

    @known_names_only
    def __init__(
        self,
        weights: npt.ArrayLike | Callable[[int], npt.ArrayLike],
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        _set(self, locals())

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclasses.dataclass(frozen=True, init=False)
class Blocks:
    """Shuffle for sources that store rows in blocks, such as chunks of HDF5 or zarr.

    The blocks are shuffled, and then the rows of each window of blocks. So rows that are stored
    together are read at about the same time. Each worker keeps the decoded blocks of a window, up
    to half of the free memory divided by the number of CPUs.

    Args:
        rows: Rows of a block, at least 1. Blocks begin again in each file. Default: from the
            source, if it is `HDF5`, `ParquetRows`, or an array in chunks, such as one of zarr.
        window: Number of blocks whose rows are shuffled together, at least 1. Default: 16.
    """

    rows: int | None
    window: int

    @known_names_only
    def __init__(self, rows: int | None = None, window: int = DEFAULT_WINDOW) -> None:
        _set(self, locals())


# `lengths` may be an array, which has no plain equality.
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class TokenBudget:
    """Batches of items of similar length, each as large as a number of tokens allows.

    The size of a batch is its rows times the length of its longest item, as after padding. The
    items of an epoch are shuffled and cut into windows. The items of a window are sorted by length
    and cut into batches, which are then shuffled. Leave out the loader's `batch_size`.

    Args:
        lengths: Length of each item of the source, as a list or integer array; or a function
            `lengths(epoch)` that returns them. Read when an epoch begins.
        max_tokens: Largest number of tokens in a batch, padding included, at least 1. Instead of
            tokens, count frames or anything else, if `lengths` does.
        max_rows: Largest number of rows in a batch, at least 1. Default: `None`, no limit.
        window: Number of items that are sorted by length together, at least 1. Default: 10000.
        shuffle: Set to `False` to take windows in the order of the source, and the batches of each
            window from long to short. Default: `True`.

    Example:
        >>> import numpy as np
        >>> import loaderpool as lp
        >>> items = [np.ones(n) for n in (3, 9, 4, 8, 2, 5)]
        >>> order = lp.TokenBudget([len(item) for item in items], max_tokens=18)

        >>> with lp.Loader(items, order=order, pad=True, workers=2) as loader:
        ...     print([batch.shape for batch in loader])
        [(3, 5), (2, 9), (1, 2)]
    """

    lengths: npt.ArrayLike | Callable[[int], npt.ArrayLike]
    max_tokens: int
    max_rows: int | None
    window: int
    shuffle: bool

    @known_names_only
    def __init__(
        self,
        lengths: npt.ArrayLike | Callable[[int], npt.ArrayLike],
        max_tokens: int,
        max_rows: int | None = None,
        window: int = 10_000,
        shuffle: bool = True,
    ) -> None:
        _set(self, locals())

    def __repr__(self) -> str:
        return _short_repr(self)


# `lengths` may be an array, which has no plain equality.
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Packed:
    """Batches whose rows have one length. Each row contains several items.

    Each component of the samples in a row is joined along the first axis, and padded with zeros, or
    with the loader's `pad`. A batch gets two more components. They are added to the sample's dict,
    or to the dict that is the first part of a tuple. An array instead of this dict becomes a dict
    with the key `"values"`.

    - `"segment_ids"`, `int32[batch_size, length]`: number of the item within its row, from 1; 0 for
      padding.
    - `"positions"`, `int32[batch_size, length]`: place within the item, from 0; 0 for padding.

    Args:
        lengths: Length of each item's sample, as a list or integer array; or a function
            `lengths(epoch)` that returns them. Read when an epoch begins.
        length: Length of each row, at least 1. No item may be longer.
        window: Number of items that are packed together, at least 1. Larger: rows are fuller.
            Default: 10000.
        shuffle: Set to `False` to keep the order of the source as far as packing allows. Default:
            `True`.

    Example:
        >>> import numpy as np
        >>> import loaderpool as lp
        >>> items = [np.full(n, n) for n in (3, 5, 1, 2)]
        >>> order = lp.Packed([len(item) for item in items], length=6, shuffle=False)

        >>> with lp.Loader(items, batch_size=2, order=order, workers=2) as loader:
        ...     batch = next(iter(loader))
        >>> for key in batch:
        ...     print(key, *batch[key])
        values [3 3 3 1 2 2] [5 5 5 5 5 0]
        segment_ids [1 1 1 2 3 3] [1 1 1 1 1 0]
        positions [0 1 2 0 0 1] [0 1 2 3 4 0]
    """

    lengths: npt.ArrayLike | Callable[[int], npt.ArrayLike]
    length: int
    window: int
    shuffle: bool

    @known_names_only
    def __init__(
        self,
        lengths: npt.ArrayLike | Callable[[int], npt.ArrayLike],
        length: int,
        window: int = 10_000,
        shuffle: bool = True,
    ) -> None:
        _set(self, locals())

    def __repr__(self) -> str:
        return _short_repr(self)


# Classes of settings that users pass as `order`.
ORDERS = (Weighted, Blocks, TokenBudget, Packed)


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
        _set(self, locals())
        if self.index >= self.num_shards:
            raise ArgumentError(
                f"Shard.index must be from 0 to {self.num_shards - 1} (num_shards - 1), got "
                f"{self.index}"
            )


@dataclasses.dataclass(frozen=True, init=False)
class Limits:
    """Resource limits of a loader: memory for buffered batches, time per sample, and worker
    restarts.

    Args:
        memory: Bytes for buffered batches, or a string such as `"512MiB"`. Default: 25 % of free
            memory, up to 2 GiB; divided by the processes of a distributed training on this machine.
        timeout_s: Time limit in seconds for one sample, or for one read of many rows. If it takes
            longer, it is an error. Default: `None`, no limit.
        restarts: Worker restarts allowed in 60 s, or a pair of a number and seconds; `None`: any.
            Default: `(50, 60)`.
        restarts_per_item: Crashes of one task before it is given up, at least 2. The last two must
            be at the same sample. That sample is an error, or skipped if `on_error` allows it.
            Default: 3.
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
        _set(self, locals())


def check_group(name: str, value: object, kind: type[_Group], also: str = "") -> _Group | None:
    """Return a loader's argument if it is a `kind` or None.

    Args:
        name: of the argument, for the error.
        value: the argument.
        kind: the class of settings.
        also: other accepted values, for the error.
    """
    if value is None or isinstance(value, kind):
        return value
    wanted = f"a loaderpool.{kind.__name__}({', '.join(kind.__annotations__)}){also}"
    raise ArgumentError(
        f"{name} must be {wanted}, got {brief(value)} of type {type(value).__name__}"
    )


def check_restarts(name: str, value: object) -> tuple[int, float] | None:
    """Return the limit of worker deaths, and its window in seconds. None if there is no limit."""
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


class ErrorPolicy(NamedTuple):
    """Reaction to an exception of the user's function."""

    # Raise the exception, leave the row out, or use the next good row instead.
    action: Literal["raise", "skip", "replace"]
    # Errors allowed in a pass; an int is a number, a float a fraction of the rows.
    budget: int | float | None = None

    def allows(self, errors: int, rows: int) -> bool:
        """Return True if a pass of `rows` rows may have `errors` errors."""
        if self.budget is None:
            return True
        return errors <= (self.budget if isinstance(self.budget, int) else self.budget * rows)


class BucketSettings(NamedTuple):
    """The part of `Buckets` that workers need."""

    # Increasing; bucket i has the lengths from boundaries[i-1] to below boundaries[i].
    boundaries: tuple[int, ...]
    # Rows of a full batch of each bucket: one more than `boundaries`.
    batch_sizes: tuple[int, ...]


class Auto(NamedTuple):
    """Bounds within which a pool finds its number of workers during training.

    `workers="auto"` is `Auto()`.
    """

    fewest: int = 1
    # None: four per CPU, and at least 32 on a machine, because workers may wait for a disk.
    most: int | None = None

    def bounds(self, cpus: int, processes: int = 1) -> tuple[int, int]:
        """Return the smallest and largest number of workers for `cpus` CPUs.

        `processes` is the number of processes that have pools on this machine.
        """
        return self.fewest, self.most or min(
            MAX_WORKERS, max(4 * cpus, 32 // processes, self.fewest)
        )

    def first(self, cpus: int, processes: int = 1) -> int:
        """Return the number of workers at the start."""
        fewest, most = self.bounds(cpus, processes)
        return min(most, max(fewest, cpus))


class LoaderConfig(NamedTuple):
    """Checked settings of one loader, in one form. `Loader` documents them."""

    # The largest of all batches, with buckets. None: a return value of `fn` is one element.
    batch_size: int | None
    # If a pool is shared, this is `Auto`, too.
    workers: int | Auto
    shuffle: bool  # another permutation of all indices in each epoch
    # Number of a stream's items that are shuffled among each other; 0: none.
    shuffle_window: int
    order: str  # class of the user's order; empty: the order is that of the other settings
    samples_per_item: int | None  # samples that `fn` returns for an item; None: one, not in a list
    seed: int
    drop_remainder: bool
    deterministic: bool
    shard: Shard
    pad: object
    ragged: bool
    on_error: ErrorPolicy
    buckets: BucketSettings | None
    threads: int
    seed_globals: bool | Literal["auto"]
    batch_indices: bool
    limits: Limits

    @staticmethod
    def checked(arguments: Mapping[str, Any]) -> LoaderConfig:
        """Return the checked settings among all `arguments` of `Loader`."""
        given = {
            name: check_setting(name, arguments[name]) for name in SETTINGS if name in arguments
        }
        batch_size, buckets, shuffle = given["batch_size"], given["buckets"], given["shuffle"]
        order = given["order"]
        if order is not None and (shuffle or buckets is not None):
            which = "buckets=" if buckets is not None else f"shuffle={shuffle}"
            raise ArgumentError(
                f"order and {which} cannot be combined, because both order the items: remove one "
                "of them"
            )
        if given["samples_per_item"] is not None:
            if buckets is not None:
                raise ArgumentError(
                    "samples_per_item and buckets cannot be combined, because samples of one item "
                    "would be far from each other: remove one of them"
                )
            if isinstance(order, Blocks) and order.rows is not None:
                raise ArgumentError(
                    f"samples_per_item and Blocks(rows={order.rows}) cannot be combined, because "
                    f"the samples of an item are a block: write Blocks(window={order.window})"
                )
        if isinstance(order, Packed):
            _check_packed(arguments, given)
        if buckets is not None:
            sizes = buckets.batch_sizes
            if sizes is None and batch_size is None:
                raise ArgumentError(
                    "buckets needs a batch_size, or Buckets(batch_sizes=...) with one for each "
                    "bucket"
                )
            buckets = BucketSettings(
                buckets.boundaries, sizes or (batch_size,) * (len(buckets.boundaries) + 1)
            )
            batch_size = max(buckets.batch_sizes)
        is_padded, ragged, threads = given["pad"] is not False, given["ragged"], given["threads"]
        if is_padded and ragged:
            raise ArgumentError("pad and ragged cannot be combined: choose one of them")
        if batch_size is None and (is_padded or ragged):
            which = "ragged" if ragged else "pad"
            raise ArgumentError(
                f"{which} and batch_size=None cannot be combined, because samples are not batched. "
                "Remove batch_size="
            )
        if threads > 1 and given["seed_globals"] is True:
            raise ArgumentError(
                f"seed_globals=True and threads={threads} cannot be combined, as concurrent calls "
                "share the global generators. Give the function a parameter rng and draw from it, "
                "or set threads=1"
            )
        given.update(
            batch_size=batch_size,
            buckets=buckets,
            shuffle=shuffle is True,
            shuffle_window=0 if isinstance(shuffle, bool) else shuffle,
            order="" if order is None else type(order).__name__,
            shard=given["shard"] or Shard(1, 0),
            limits=given["limits"] or Limits(),
        )
        return LoaderConfig(**given)

    @property
    def static_rows(self) -> int | None:
        """Number of rows of every batch; None if it varies, as when failing rows are left out."""
        is_one = self.buckets is None or len(set(self.buckets.batch_sizes)) == 1
        is_whole = self.drop_remainder and self.on_error.action != "skip"
        return self.batch_size if is_whole and is_one else None


def _check_packed(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` if a setting cannot be combined with `Packed`.

    Args:
        arguments: All arguments of `Loader`.
        given: Checked settings.
    """
    policy = given["on_error"].action
    for is_wrong, what, why in (
        (given["batch_size"] is None, "batch_size=None", "batch_size is the rows of a batch"),
        (arguments["batch_fn"] is not None, "batch_fn", "fn makes each item's sample"),
        (given["ragged"], "ragged=True", "all rows have one length"),
        (
            given["batch_indices"],
            "batch_indices=True",
            "a row has several items. Write loader.indices(epoch, batch)",
        ),
        (
            policy == "replace",
            'on_error="replace"',
            'another item may not fit in the place. Set on_error="skip"',
        ),
        (
            arguments["element_spec"] is not None,
            "element_spec",
            "lengths are known. Convert dtypes in fn",
        ),
    ):
        if is_wrong:
            raise ArgumentError(f"order=Packed(...) and {what} cannot be combined: {why}")


def unit_of(config: LoaderConfig, batch_fn: object) -> UnitKind:
    """Return the kind of result of one call of the function."""
    if batch_fn is not None:
        return "batch"
    return "sample" if config.batch_size is not None else "element"


def check_workers(name: str, value: object, *, at_least: int) -> int | Auto:
    """Return the checked `workers` argument: `Auto`, or a number up to MAX_WORKERS."""
    if isinstance(value, tuple) and len(value) == 2:
        check = partial(whole_number, at_least=1, at_most=MAX_WORKERS)
        least, most = check(f"{name}[0]", value[0]), or_none(f"{name}[1]", value[1], check=check)
        if most is not None and most < least:
            raise ArgumentError(
                f"{name}=({least}, {most}) must be (fewest, most), with most at least {least}"
            )
        return Auto(least, most)
    if isinstance(value, str) and value == "auto":
        return Auto()
    if isinstance(value, tuple) or (isinstance(value, str) and not value.isdecimal()):
        raise ArgumentError(
            f'{name} must be a number, "auto" or a pair (fewest, most), got {brief(value)}'
        )
    hint = '"auto": as many as training needs'
    if not at_least:
        hint = f"0: load in the main process; {hint}; or a loaderpool.Pool"
    return whole_number(name, value, at_least=at_least, at_most=MAX_WORKERS, hint=hint)


def _check_shuffle(name: str, value: object) -> bool | int:
    """Return True, False, or the number of a stream's items that are shuffled among each other."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return flag(name, value, also=", or for a stream a number of items")
    return whole_number(
        name,
        value,
        at_least=1,
        at_most=2**31,
        hint="the shuffle window of a stream, in items; shuffle=False: keep the order",
    )


def is_array_of_indices(order: object) -> bool:
    """Return True if an `order` has all its indices, as an array, a list or a range."""
    return isinstance(order, (list, tuple, range)) or hasattr(order, "__array__")


def is_function_of_epoch(order: object) -> bool:
    """Return True if an `order` is called with an epoch. A sampler may be callable, too."""
    return callable(order) and not hasattr(order, "__iter__")


def samplers_in(order: object) -> list[object]:
    """Return a sampler, and the samplers and batch samplers that it wraps."""
    found = [order]
    for each in found:  # the list grows during the loop
        for name in ("sampler", "batch_sampler"):
            inner = getattr(each, name, None)
            if inner is not None and len(found) < _MOST_SAMPLERS:
                found.append(inner)
    return found


def _check_order(name: str, value: Any) -> Any:
    """Return the checked `order` argument. Its indices are checked when a pass begins."""
    if value is None or isinstance(value, ORDERS):
        return value
    if isinstance(value, type):
        raise ArgumentError(f"{name} is the class {value.__name__}: write {value.__name__}(...)")
    if type(value).__module__.startswith("loaderpool.sources."):
        raise ArgumentError(f"{name} is {brief(value)}, which is a source: pass it as source=")
    if is_function_of_epoch(value):
        check_signature(name, value, "epoch", ())
    for each in samplers_in(value):
        kinds = {kind.__name__ for kind in type(each).__mro__}
        parts = [getattr(each, field, 1) for field in ("num_replicas", "num_processes")]
        if "DistributedSampler" in kinds or parts != [1, 1]:
            raise ArgumentError(
                f"{name} is a {type(each).__name__}, which gives one process its part, but the "
                'loader shards each epoch itself. Pass shard="auto" with shuffle=True, or with a '
                "sampler of the whole epoch"
            )
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not (
        callable(value) or hasattr(value, "__iter__")
    ):
        advice = ""
        if isinstance(value, (bool, str)):
            advice = ". To shuffle, write shuffle=True; for the order of the source, remove order="
        elif isinstance(value, Buckets):
            advice = ". Write buckets=Buckets(...)"
        raise ArgumentError(
            f"{name} must be an array of source indices, a function of the epoch, a sampler, "
            f"Weighted, Blocks, TokenBudget or Packed, got {brief(value)} of type "
            f"{type(value).__name__}{advice}"
        )
    # The form of an array is checked with the number of items.
    if hasattr(value, "__iter__") and not is_array_of_indices(value):
        try:
            len(value)
        except (TypeError, NotImplementedError):
            raise ArgumentError(
                f"{name} is a {type(value).__name__} without a length. Pass a function that takes "
                "the indices of one epoch from it, such as order=lambda epoch: "
                "itertools.islice(sampler, n)"
            ) from None
    return value


def _check_error_policy(name: str, value: object) -> ErrorPolicy:
    """Return the checked `on_error` argument."""
    action, budget = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(action, str) or action not in ("raise", "skip", "replace"):
        raise ArgumentError(
            f'{name} must be "raise", "skip", "replace", or a pair with the errors allowed per '
            f'epoch, such as ("skip", 10) or ("skip", 0.01), got {brief(value)}'
        )
    if budget is None:
        return ErrorPolicy(action)  # type: ignore[arg-type]
    is_count = isinstance(budget, numbers.Integral)
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    # The bounds also refuse NaN.
    if action == "raise" or not is_number or not 0 <= budget <= (math.inf if is_count else 1):
        raise ArgumentError(
            f'{name}[1], of "skip" or "replace", must be a number of errors (int) >= 0 or a '
            f"fraction (float) from 0 to 1, got {brief(budget)}"
        )
    return ErrorPolicy(action, int(budget) if is_count else float(budget))  # type: ignore[arg-type]


def _check_lengths(name: str, by: object) -> object:
    """Return the lengths of a source's items. Their number is checked with the source."""
    if callable(by) and not hasattr(by, "__len__"):
        own = getattr(by, "__name__", "")
        length = own if own.isidentifier() else "length"
        raise ArgumentError(
            f"{name} must be the lengths of all items, got a function. Write "
            f"lp.Buckets([{length}(item) for item in source], ...). If this is slow, let "
            f"workers compute them: lengths = numpy.concatenate([*lp.Loader(source, {length}, "
            "batch_size=1000)])"
        )
    return by


def _check_numbers(name: str, value: Any, *, what: str) -> Any:
    """Return numbers for all items, or a function. The numbers are checked when a pass begins."""
    if callable(value):
        check_signature(name, value, "epoch", ())
        return value
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping)):
        return value
    raise ArgumentError(
        f"{name} must be a {what} for each item of the source, or a function of the epoch that "
        f"returns them, got {brief(value)} of type {type(value).__name__}"
    )


def _check_boundaries(name: str, value: object) -> tuple[int, ...]:
    """Return increasing lengths."""
    edges = whole_numbers(name, value, at_most=_MAX_LENGTH)
    if not 1 <= len(edges) <= _MOST_BOUNDARIES:
        raise ArgumentError(f"{name} must be 1 to {_MOST_BOUNDARIES} numbers, got {len(edges)}")
    for number, (before, edge) in enumerate(itertools.pairwise(edges), start=1):
        if edge <= before:
            at, below = f"boundaries[{number}]={edge}", f"boundaries[{number - 1}]={before}"
            raise ArgumentError(f"{name} must increase, but {at} is not above {below}")
    return edges


# The settings of a loader, each with the check that returns its value in one form or raises an
# ArgumentError. Messages use the setting's name in this table. The defaults are in the signatures
# of the public classes, and the texts in their docstrings, where editors show them. A test compares
# both with this table.
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "batch_size": partial(
        or_none, check=whole_number, at_least=1, at_most=_MAX_ROWS, hint="None: do not batch"
    ),
    "workers": partial(check_workers, at_least=0),
    "shuffle": _check_shuffle,
    "order": _check_order,
    "samples_per_item": partial(
        or_none,
        check=whole_number,
        at_least=1,
        at_most=_MOST_SAMPLES,
        hint="length of the list that fn returns for an item",
    ),
    "seed": partial(
        whole_number,
        at_least=0,
        hint="for other numbers in each run, pass seed=secrets.randbits(32)",
    ),
    "drop_remainder": flag,
    "deterministic": flag,
    "shard": partial(check_group, kind=Shard, also=' or "auto"'),
    "pad": lambda name, value: check_padding(value, name),
    "ragged": flag,
    "on_error": _check_error_policy,
    "buckets": partial(check_group, kind=Buckets),
    "threads": partial(
        whole_number,
        at_least=1,
        at_most=MAX_THREADS,
        hint="calls of fn that a worker makes at the same time",
    ),
    "seed_globals": partial(one_of, values=(True, False, "auto")),
    "batch_indices": flag,
    "limits": partial(check_group, kind=Limits),
    "cycle_length": partial(or_none, check=whole_number, at_least=1, hint="shards open at once"),
    "copies": partial(or_none, check=whole_number, at_least=1, hint="replicas of the generator"),
    "Buckets.by": _check_lengths,
    "Buckets.boundaries": _check_boundaries,
    "Buckets.batch_sizes": partial(or_none, check=whole_numbers, at_most=_MAX_ROWS),
    "Weighted.weights": partial(_check_numbers, what="weight"),
    "Weighted.num_samples": partial(or_none, check=whole_number, at_least=1, at_most=_MAX_LENGTH),
    "Weighted.replacement": flag,
    "Blocks.rows": partial(or_none, check=whole_number, at_least=1, at_most=_MAX_LENGTH),
    "Blocks.window": partial(whole_number, at_least=1, at_most=_MAX_LENGTH),
    "TokenBudget.lengths": partial(_check_numbers, what="length"),
    "TokenBudget.max_tokens": partial(whole_number, at_least=1, at_most=_MAX_LENGTH),
    "TokenBudget.max_rows": partial(or_none, check=whole_number, at_least=1, at_most=_MAX_ROWS),
    "TokenBudget.window": partial(whole_number, at_least=1, at_most=_MAX_LENGTH),
    "TokenBudget.shuffle": flag,
    "Packed.lengths": partial(_check_numbers, what="length"),
    "Packed.length": partial(whole_number, at_least=1, at_most=_MAX_ROWS),
    "Packed.window": partial(whole_number, at_least=1, at_most=_MAX_LENGTH),
    "Packed.shuffle": flag,
    "Shard.num_shards": partial(whole_number, at_least=1),
    "Shard.index": partial(whole_number, at_least=0),
    "Limits.memory": read_bytes_count,
    "Limits.timeout_s": read_seconds,
    "Limits.restarts": check_restarts,
    "Limits.restarts_per_item": partial(
        whole_number,
        at_least=2,
        at_most=_MOST_RESTARTS,
        hint="a single crash does not show which sample caused it",
    ),
}


def check_setting(name: str, value: object) -> Any:
    """Return the checked value of a setting, in one form.

    Raises:
        ArgumentError: The value is wrong.
    """
    return SETTINGS[name](name, value)


def _set(
    group: Buckets | Weighted | Blocks | TokenBudget | Packed | Limits | Shard,
    given: Mapping[str, Any],
) -> None:
    """Store the checked values of a group's settings, which are among `given`."""
    for field in dataclasses.fields(group):
        checked = check_setting(f"{type(group).__name__}.{field.name}", given[field.name])
        object.__setattr__(group, field.name, checked)


def _short_repr(group: Buckets | Weighted | TokenBudget | Packed) -> str:
    """Return a short repr of a settings group whose fields may contain millions of numbers."""
    names = (field.name for field in dataclasses.fields(group))
    shown = (f"{name}={brief(getattr(group, name))}" for name in names)
    return f"{type(group).__name__}({', '.join(shown)})"
