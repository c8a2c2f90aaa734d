"""The length of each of a source's items, by which it falls into a bucket: given, or found by the user's function.

The function is called once for each item while the loader is made, by the workers that will serve the loader: none
can say how many batches an epoch has, or which, before the last length is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.checks import check_signature, whole_number
from loaderpool.config import Limits
from loaderpool.errors import (
    ArgumentError,
    LoaderpoolError,
    MemoryLimitError,
    SampleError,
    UnpicklableError,
    WorkerLostError,
    brief,
)
from loaderpool.system.capacity import available_memory_bytes
from loaderpool.system.long_work import LongWork

if TYPE_CHECKING:
    from loaderpool.core.delivery import CheckedArguments
    from loaderpool.trainer.pool import Pool

# Items whose lengths come together. Smaller: more messages for a function that only looks a number up. Larger: a source
# of some hundred slow items is shared less evenly; tickets of slow rows are cut smaller anyway.
_AT_ONCE = 1024
_MAX_LENGTH = 2**63 - 1

Lengths = npt.NDArray[np.unsignedinteger[Any]]


def is_length_function(by: Any) -> bool:
    """Whether it is a function of an item, and not the lengths themselves.

    Raises:
        ArgumentError: a function that does not take one item.
    """
    if not callable(by) or hasattr(by, "__array__"):
        return False
    check_signature("Buckets.by", by, "item", may_take=())
    return True


def read_lengths(by: Any, size: int) -> Lengths:
    """Lengths that the user gave, checked, in memory of their own and as few bytes as hold them.

    Raises:
        ArgumentError: not a list or array of whole numbers, or too many or too few of them, or one below 0.
    """
    try:
        lengths: npt.NDArray[Any] = np.asarray(by)
    except ValueError:  # a list of lists of different length, say
        lengths = np.empty((), object)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and lengths.size):
        kind = f"{lengths.ndim}-d {lengths.dtype}" if lengths.ndim else brief(by)
        raise ArgumentError(
            "Buckets.by must be a function that returns an item's length, or the lengths of all items as a list or "
            f"integer array, got {kind} ({type(by).__name__})"
        )
    if len(lengths) != size:
        raise ArgumentError(
            f"Buckets.by must have one length for each of the {size:,} items of source, got {len(lengths):,}"
        )
    if size and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise ArgumentError(f"Buckets.by[{at}] is {lengths[at]}; lengths must be at least 0")
    if size and int(lengths.max()) > _MAX_LENGTH:
        raise ArgumentError(f"Buckets.by[{int(lengths.argmax())}] is {lengths.max()}; lengths must be below 2**63")
    return _compact(lengths)


def find_lengths(
    checked: CheckedArguments, arguments: Mapping[str, Any], pool: Pool | None, make_loader: Callable[..., Any]
) -> Lengths:
    """Call the user's function for each item of the source. Blocks: until the last length is known.

    Args:
        checked: the arguments, but for the lengths.
        arguments: of `Loader`, by name; `Buckets.by` is the function.
        pool: the loader's, by which it is called; None: in this process.
        make_loader: the class `Loader`, by a loader of which the function is called.

    Raises:
        SampleError: the function raised, or gave what is no length; names the item.
        UnpicklableError, WorkerLostError: it cannot travel, or ended its workers.
        MemoryLimitError: the lengths take more than what is free.
    """
    config, size = checked.config, checked.plan.size
    nbytes, free = 8 * size, available_memory_bytes()
    if nbytes > free:
        raise MemoryLimitError(
            f"Buckets.by: the lengths of all {size:,} items take {nbytes:,} bytes of memory, but only {free:,} bytes "
            "are free. Use a source of fewer items, or use pad=True or ragged=True without buckets"
        )
    try:
        loader = make_loader(
            arguments["source"],
            _LengthFunction(arguments["buckets"].by),
            batch_size=_AT_ONCE,
            seed=config.seed,
            setup=arguments["setup"],
            threads=config.threads,
            limits=Limits(timeout_s=config.limits.timeout_s, restarts_per_item=config.limits.restarts_per_item),
            workers=0 if pool is None else pool,
        )
    except UnpicklableError as error:
        raise UnpicklableError(str(error).replace(_SENT_AS, "Buckets.by")) from error.__cause__
    from loaderpool.core.failures import lost_error, sample_error

    loader._core.tracker.looks_ahead = loader._core.tracker.is_users = False
    lengths, filled = np.empty(size, np.int64), 0

    def count_made() -> int:
        made: int = sum(worker.samples for worker in loader.statistics().workers)
        return max(filled, min(size, made))

    make: Callable[..., LoaderpoolError]
    try:
        with loader, LongWork("loaderpool: calling Buckets.by", size, measure=count_made) as work:
            workers = None if pool is None else pool.worker_pool
            if workers is not None:
                workers.long_work = work
            try:
                for batch in loader:
                    lengths[filled : filled + len(batch)] = batch
                    filled += len(batch)
                    work.tell()
            finally:
                if workers is not None:
                    workers.long_work = None
        return _compact(lengths)
    except SampleError as error:  # first: it may be of any other type, too, that the function has raised
        make, told, cause = sample_error, vars(error)["failure"], error.__cause__
    except WorkerLostError as error:
        if error.index is None:  # no item's length was being asked for
            raise
        make, told, cause = lost_error, vars(error)["report"], None
    raise make(told, preface="Buckets.by: ", can_replay=False) from cause  # there is no loader yet to be replayed


# How a message names the user's function, which travels as a part of this one.
_SENT_AS = "fn → attribute ._function of _LengthFunction"


class _LengthFunction:
    """Calls the user's function, and refuses what is no length, where the item is known."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, item: Any) -> int:
        return whole_number("the length it returns", self._function(item), at_least=0, at_most=_MAX_LENGTH)


def _compact(lengths: npt.NDArray[Any]) -> Lengths:
    most = int(lengths.max()) if len(lengths) else 0
    return lengths.astype(np.min_scalar_type(most))
