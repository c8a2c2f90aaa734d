"""What a loader's arguments come to: each is checked, and what the workers need is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.config import LoaderConfig
from loaderpool.element.given_spec import read_spec
from loaderpool.errors import ArgumentError, SourceError
from loaderpool.memory.batch_form import unit_of
from loaderpool.plan.base import BasePlan
from loaderpool.plan.order import Plan
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.settings.checks import parameters_of
from loaderpool.settings.groups import DEFAULT_RESTARTS, Auto
from loaderpool.sources import Source, as_source
from loaderpool.sources.advice import whole_batches
from loaderpool.sources.replicated import ReplicatedSource
from loaderpool.sources.sequence import BatchSequence
from loaderpool.sources.stream import StreamSource
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.functions import check_augment, check_cached, check_functions
from loaderpool.trainer.pool import Pool, first_workers, shared_pool

# What streams, generators and caches need comes with the first of them: `import loaderpool` is not to wait for it.
if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.settings.groups import Buckets
    from loaderpool.trainer.lengths import Lengths
    from loaderpool.worker.lanes import LaneItems


def check_arguments(arguments: Mapping[str, Any]) -> CheckedArguments:
    """Check the arguments of `Loader`, all of which are in `arguments` by name.

    Raises:
        ArgumentError, ArgumentTypeError: a wrong argument, named.
        SourceError: the source cannot be read by index.
    """
    pool = shared_pool(arguments)
    config = LoaderConfig.checked(arguments if pool is None else {**arguments, "workers": "auto"})
    if pool is not None and config.limits.restarts != DEFAULT_RESTARTS:
        raise ArgumentError(
            f"workers=pool and Limits(restarts={config.limits.restarts}) exclude each other: give restarts to the Pool"
        )
    fn, batch_fn, setup = arguments["fn"], arguments["batch_fn"], arguments["setup"]
    augment, cache = arguments["augment"], _cache(arguments["cache"])
    check_functions(fn, batch_fn, setup, config)
    check_augment(augment, fn, batch_fn)
    if cache is not None:
        check_cached(fn, batch_fn)
    element_spec = arguments["element_spec"]
    given_spec = read_spec(element_spec) if element_spec is not None else None
    source = as_source(arguments["source"])
    if config.batch_size is not None and (reason := whole_batches(arguments["source"])) is not None:
        raise SourceError(f"source {reason}")
    stream = source if isinstance(source, StreamSource) else None
    _check_order(source, config)
    items: Any = source
    if cache is not None and isinstance(source, (StreamSource, ReplicatedSource)):
        raise ArgumentError(
            "cache keeps what fn gives for an index of the source, and a stream or generator has none: give a source "
            "that can be read by index, such as a list of files, or leave cache= away"
        )
    _check_threads(source, cache, config)
    plan: BasePlan
    needs_lengths = False
    if isinstance(source, StreamSource):
        from loaderpool.worker.items import StreamedItems

        plan, items = _open_plan(config), StreamedItems()
    elif isinstance(source, ReplicatedSource):
        config, open_plan = _lanes_of(source, config, pool)
        plan, items = open_plan, _lane_items(source, open_plan, config)
    elif _is_endless(source):
        plan = dataclasses.replace(_open_plan(config), is_endless=True)
    else:
        lengths = arguments["_lengths"]
        if lengths is None:
            lengths = _lengths_given(arguments["buckets"], len(source))
        needs_lengths = config.buckets is not None and lengths is None
        plan = _plan(len(source), config, lengths)
        if not plan.batches_per_epoch and not needs_lengths:
            _refuse_empty(plan, config)
    functions = {"fn": fn, "augment": augment, "batch_fn": batch_fn}
    parameters = {name: parameters_of(function) for name, function in functions.items()}
    # The last one that is called for each batch may write into it.
    writer = "augment" if augment is not None else "fn" if cache is None else None
    takes_out = config.batch_size is not None and writer is not None and "out" in parameters[writer]
    takes_rng = frozenset(name for name in functions if "rng" in parameters[name])
    payload = {
        "source": items,
        "fn": fn,
        "augment": augment,
        "batch_fn": batch_fn,
        "setup": setup,
        "config": config,
        "plan": plan,
        "given_spec": given_spec,
        "takes_rng": takes_rng,
        # Generators, too: to have a look at them again means to run them again.
        "needs_numpy_random": bool(takes_rng)
        or config.worker_options.seed_globals is True
        or isinstance(source, ReplicatedSource),
        "takes_out": takes_out,
        "cache": cache,  # the engine puts what comes of it in its place
    }
    hooks = arguments["_hooks"]
    has_epoch_begin = hooks is not None and hooks.has_epoch_begin
    unit = unit_of(config, batch_fn)
    return CheckedArguments(config, plan, unit, given_spec, stream, payload, has_epoch_begin, needs_lengths)


def _cache(given: Any) -> Cache | None:
    if given is None:
        return None
    from loaderpool.cache.setting import as_cache

    return as_cache(given)


def _lengths_given(buckets: Buckets | None, size: int) -> Lengths | None:
    """The items' lengths, if the user gave them and no function."""
    if buckets is None:
        return None
    from loaderpool.trainer.lengths import (  # which `import loaderpool` shall not wait for
        is_length_function,
        read_lengths,
    )

    return None if is_length_function(buckets.by) else read_lengths(buckets.by, size)


def with_lengths(
    checked: CheckedArguments, arguments: dict[str, Any], make_loader: Callable[..., Any]
) -> tuple[CheckedArguments, Pool | None]:
    """The same when `Buckets.by` has told the items' lengths, which it writes into `arguments`.

    Ownership: as `lengths.find_lengths`, which is given `make_loader`.
    """
    from loaderpool.trainer.lengths import find_lengths

    arguments["_lengths"], pool = find_lengths(checked.config, arguments, checked.plan.size, make_loader)
    try:
        return check_arguments(arguments), pool
    except BaseException:
        if pool is not None:
            pool.close()
        raise


def payload_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What travels to the workers of a loader with these arguments, put together: the loader keeps none."""
    return check_arguments(arguments).payload


def _check_order(source: Source | StreamSource | ReplicatedSource, config: LoaderConfig) -> None:
    """Whether the source can be read in the order, and by the rules, that are asked for."""
    if isinstance(source, BatchSequence) and _is_endless(source):
        _check_endless(source, config)
        return
    if not isinstance(source, (StreamSource, ReplicatedSource)):
        if config.shuffle_window:
            raise ArgumentError(
                f"shuffle={config.shuffle_window} is a window for streams; over a source with an index all is "
                "shuffled: shuffle=True"
            )
        return
    if config.buckets is not None:
        raise ArgumentError(f"buckets needs a source with __len__ and __getitem__, not {source.kind}")
    if config.shuffle and isinstance(source, StreamSource):
        raise ArgumentError(
            f"shuffle=True needs a source with __len__ and __getitem__; a stream ({source.kind}) is shuffled within a "
            "window: shuffle=n, with n the number of items that are held"
        )
    if config.shuffle and isinstance(source, ReplicatedSource) and source.shards is None:
        raise ArgumentError(
            f"shuffle=True gives shards another order each epoch; {source.kind} has none: give shards=, or a window, "
            "shuffle=n, with n the number of items that each copy holds"
        )
    if isinstance(config.on_error.budget, float):
        raise ArgumentError(
            f"on_error's budget must be a number for a stream or generators, got the rate {config.on_error.budget}: of "
            "how many rows is not known before the end"
        )


def _is_endless(source: Source | StreamSource | ReplicatedSource) -> bool:
    return isinstance(source, BatchSequence) and source.is_endless


def _check_endless(sequence: BatchSequence, config: LoaderConfig) -> None:
    what = f"{type(sequence.target).__name__} (its num_batches is None, or it has no length) is endless"
    if config.shuffle or config.shuffle_window:
        raise ArgumentError(
            f"shuffle={config.shuffle_window or True} orders the batches of an epoch, and {what}: draw in its "
            "__getitem__, by the index, or give it a num_batches"
        )
    if isinstance(config.on_error.budget, float):
        raise ArgumentError(
            f"on_error's budget must be a number here, got the rate {config.on_error.budget}: {what}, and so has no "
            "number of rows to take it of"
        )


def _check_threads(source: Source | StreamSource | ReplicatedSource, cache: Cache | None, config: LoaderConfig) -> None:
    """Whether threads can share the work as it is asked for."""
    threads = config.worker_options.threads
    if threads == 1:
        return
    if isinstance(source, ReplicatedSource):
        raise ArgumentError(
            f"WorkerOptions(threads={threads}) is for functions of items, and {source.kind} runs on one thread in each "
            "worker: set workers to how many generators shall wait at the same time, and leave threads away"
        )
    if cache is not None:
        raise ArgumentError(
            f"cache and WorkerOptions(threads={threads}) exclude each other: a worker reads and fills the cache on one "
            "thread. Leave one of them away; more workers wait at the same time, too"
        )


def _lanes_of(source: ReplicatedSource, config: LoaderConfig, pool: Pool | None) -> tuple[LoaderConfig, Plan]:
    """How many generators run at once, and no more workers for them than that where their number is ours to choose."""
    is_chosen = pool is None and not isinstance(config.workers, Auto)
    workers = pool._sure_workers if pool is not None else max(1, first_workers(config.workers))
    lanes = source.lanes(workers, is_chosen, config.shard.num_shards)
    if pool is None and not is_chosen:
        config = dataclasses.replace(config, workers=min(workers, lanes))
    return config, _open_plan(config, lanes)


def _lane_items(source: ReplicatedSource, plan: Plan, config: LoaderConfig) -> LaneItems:
    from loaderpool.worker.lanes import LaneItems

    return LaneItems(
        source.make_generator,
        source.takes_rng,
        source.shards,
        plan,
        shuffle=source.shards is not None and (config.shuffle or config.shuffle_window > 0),
        window=config.shuffle_window,
        seed_globals=config.worker_options.seed_globals,
    )


def _open_plan(config: LoaderConfig, lanes: int = 0) -> Plan:
    return Plan(
        MAX_SIZE,
        config.batch_size,
        seed=config.seed,
        drop_remainder=config.drop_remainder,
        num_shards=config.shard.num_shards,
        shard_index=config.shard.index,
        lanes=lanes,
        is_open=True,
    )


def _plan(size: int, config: LoaderConfig, lengths: Lengths | None) -> BasePlan:
    settings = (
        size,
        config.batch_size,
        config.shuffle,
        config.seed,
        config.drop_remainder,
        config.shard.num_shards,
        config.shard.index,
    )
    if config.buckets is None or lengths is None:
        return Plan(*settings)
    from loaderpool.plan.bucket_order import ItemBuckets  # which `import loaderpool` shall not wait for
    from loaderpool.plan.buckets import BucketPlan

    buckets = ItemBuckets.of(lengths, config.buckets.boundaries)
    return BucketPlan(*settings, buckets=buckets, batch_sizes=config.buckets.batch_sizes)


def _refuse_empty(plan: BasePlan, config: LoaderConfig) -> None:
    if config.buckets is None:
        rows = f"batch_size={config.batch_size}"
    else:
        rows = f"no bucket has enough for batch_sizes={list(config.buckets.batch_sizes)}"
    raise ArgumentError(
        f"drop_remainder=True leaves no batch at all: {plan.size} items, {rows}, num_shards={config.shard.num_shards}"
    )
