"""What a loader's arguments come to: each is checked, and what the workers need is put together."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.config import Auto, LoaderConfig, unit_of
from loaderpool.core.delivery import CheckedArguments
from loaderpool.element.spec import read_spec
from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.plan.order import Plan
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.settings.checks import check_signature, open_parameter
from loaderpool.settings.groups import DEFAULT_RESTARTS
from loaderpool.sources.recognise import Source, as_source, whole_batches
from loaderpool.sources.sequence import BatchSequence
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.trainer.pool import Pool, first_workers, shared_pool

if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.settings.groups import Buckets
    from loaderpool.trainer.lengths import Lengths
    from loaderpool.worker.lanes import LaneItems


def check_functions(fn: Any, batch_fn: Any, setup: Any, config: LoaderConfig) -> None:
    """Check the functions alone, together and against the settings; one without a readable signature passes.

    Raises:
        ArgumentError: they exclude each other, or one does not go with a setting, or not a function, or not one that
            takes what it will be given.
    """
    if fn is not None and batch_fn is not None:
        raise ArgumentError("fn and batch_fn cannot be combined: fn returns a sample, batch_fn a whole batch. Pass one")
    for name, function, example, may_take in (
        ("fn", fn, "item", ("rng", "out")),
        ("batch_fn", batch_fn, "list_of_items", ("rng",)),
        ("setup", setup, "", ()),
    ):
        if function is not None:
            _check_callable(name, function, example, may_take)
    if batch_fn is not None:
        if config.batch_size is None:
            raise ArgumentError("batch_fn requires batch_size, the number of items per call, got None")
        if config.pad is not False or config.ragged:
            raise ArgumentError("pad and ragged do not apply to batch_fn, which builds the batch itself")


def check_augment(augment: Any, fn: Any, batch_fn: Any) -> None:
    """Check the function that is called with what `fn` gave, and whether it goes with the others; None passes.

    Raises:
        ArgumentError: it does not go with them, or not a function of one sample.
    """
    if augment is None:
        return
    _check_callable("augment", augment, "sample", ("rng", "out"))
    if batch_fn is not None:
        raise ArgumentError(
            "augment is called for each sample and cannot be combined with batch_fn. Augment the batch in batch_fn (it "
            "can take rng too), or use fn"
        )
    if _needs_out(fn):
        raise ArgumentError("fn requires `out`, which only augment can take when both are given. Return the sample")


def check_cached(fn: Any, batch_fn: Any) -> None:
    """Check whether what the function gives can be kept.

    Raises:
        ArgumentError: there is no such function, or it is random, or it makes batches.
    """
    if batch_fn is not None:
        raise ArgumentError(
            "cache stores single samples and cannot be combined with batch_fn, whose batches differ in each epoch. "
            "Use fn, or remove cache="
        )
    if fn is None:
        raise ArgumentError("cache stores the results of fn, but no fn was given. Pass fn, or remove cache=")
    if open_parameter(fn, "rng") is not None:
        raise ArgumentError(
            "fn takes `rng`, but with cache= it is called only once per item, so all epochs would have the same random "
            "numbers. Move the random part to augment=, which gets the result of fn in every epoch and can take `rng`"
        )
    if _needs_out(fn):
        raise ArgumentError("fn requires `out`, which is not supported with cache=. Return the sample instead")


def _check_callable(name: str, function: Any, example: str, may_take: tuple[str, ...]) -> None:
    if not callable(function):
        are_labels = name == "fn" and hasattr(type(function), "__len__") and not isinstance(function, (str, bytes))
        advice = ". To load arrays of features and labels, pass one source: Loader((x, y))" * are_labels
        advice = f". Did you mean batch_size={brief(function)}?" if name == "fn" and type(function) is int else advice
        raise ArgumentError(f"{name} must be callable, got {brief(function)} of type {type(function).__name__}{advice}")
    check_signature(name, function, example, may_take)


def _needs_out(function: Any) -> bool:
    """Whether it cannot be called without `out`; one that can is, as many of NumPy's can."""
    parameter = open_parameter(function, "out")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def check_arguments(arguments: Mapping[str, Any]) -> CheckedArguments:
    """Check the arguments of `Loader`, all of which are in `arguments` by name.

    Raises:
        SourceError: the source cannot be read by index.
    """
    pool = shared_pool(arguments)
    config = LoaderConfig.checked(arguments if pool is None else {**arguments, "workers": "auto"})
    if pool is not None and config.limits.restarts != DEFAULT_RESTARTS:
        raise ArgumentError(
            f"workers=pool and Limits(restarts={config.limits.restarts}) cannot be combined: pass restarts= to Pool"
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
            "cache needs a source with __len__ and __getitem__, got a stream or generator. Pass a source that can be "
            "indexed, such as a list of files, or remove cache="
        )
    _check_threads(source, cache, config)
    plan: Plan
    needs_lengths = False
    if isinstance(source, StreamSource):
        from loaderpool.worker.jobs import StreamedItems

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
    # The last one that is called for each batch may write into it.
    writer = augment if augment is not None else fn if cache is None else None
    takes_out = config.batch_size is not None and open_parameter(writer, "out") is not None
    takes_rng = frozenset(name for name, function in functions.items() if open_parameter(function, "rng") is not None)
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
        "needs_numpy_random": bool(takes_rng) or config.seed_globals is True or isinstance(source, ReplicatedSource),
        "takes_out": takes_out,
        "cache": cache,  # the engine puts what comes of it in its place
    }
    hooks = arguments["_hooks"]
    has_epoch_begin = hooks is not None and hooks.has_epoch_begin
    has_hooks = hooks is not None
    unit = unit_of(config, batch_fn)
    return CheckedArguments(config, plan, unit, given_spec, stream, payload, has_epoch_begin, has_hooks, needs_lengths)


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


def _check_order(source: Source | StreamSource | ReplicatedSource, config: LoaderConfig) -> None:
    """Whether the source can be read in the order, and by the rules, that are asked for."""
    if isinstance(source, BatchSequence) and _is_endless(source):
        _check_endless(source, config)
        return
    if not isinstance(source, (StreamSource, ReplicatedSource)):
        if config.shuffle_window:
            raise ArgumentError(
                f"shuffle={config.shuffle_window} is a window for streams, but this source can be indexed. "
                "Set shuffle=True to shuffle all items"
            )
        return
    if config.buckets is not None:
        raise ArgumentError(f"buckets needs a source with __len__ and __getitem__, got {source.kind}")
    if config.shuffle and isinstance(source, StreamSource):
        raise ArgumentError(
            f"shuffle=True needs a source with __len__ and __getitem__, got a stream ({source.kind}). Set shuffle=n to "
            "shuffle within a window of n items"
        )
    if config.shuffle and isinstance(source, ReplicatedSource) and source.shards is None:
        raise ArgumentError(
            f"shuffle=True shuffles the order of shards, but {source.kind} has no shards. Pass shards=, or set "
            "shuffle=n to shuffle within a window of n items"
        )
    if isinstance(config.on_error.budget, float):
        raise ArgumentError(
            "on_error[1] must be an integer for a stream or generators, whose length is unknown, got the fraction "
            f"{config.on_error.budget}"
        )


def _is_endless(source: Source | StreamSource | ReplicatedSource) -> bool:
    return isinstance(source, BatchSequence) and source.is_endless


def _check_endless(sequence: BatchSequence, config: LoaderConfig) -> None:
    what = f"{type(sequence.target).__name__} (its num_batches is None, or it has no length) is endless"
    if config.shuffle or config.shuffle_window:
        raise ArgumentError(
            f"shuffle={config.shuffle_window or True} shuffles the batches of an epoch, but {what}. Shuffle in its "
            "__getitem__, or give it a num_batches"
        )
    if isinstance(config.on_error.budget, float):
        raise ArgumentError(
            f"on_error[1] must be an integer, got the fraction {config.on_error.budget}: {what}, so its number of "
            "rows is unknown"
        )


def _check_threads(source: Source | StreamSource | ReplicatedSource, cache: Cache | None, config: LoaderConfig) -> None:
    """Whether threads can share the work as it is asked for."""
    threads = config.threads
    if threads == 1:
        return
    if isinstance(source, ReplicatedSource):
        raise ArgumentError(
            f"threads={threads} is not supported with {source.kind}, which runs on one thread in each worker. "
            "Remove threads=, and set workers= to the number of generators that run at the same time"
        )
    if cache is not None:
        raise ArgumentError(
            f"cache and threads={threads} cannot be combined, because each worker uses the cache on one thread. "
            "Remove one of them; for more parallel reads, set a larger workers="
        )


def _lanes_of(source: ReplicatedSource, config: LoaderConfig, pool: Pool | None) -> tuple[LoaderConfig, Plan]:
    """How many generators run at once, and no more workers for them than that where their number is ours to choose."""
    is_chosen = pool is None and not isinstance(config.workers, Auto)
    workers = pool._sure_workers if pool is not None else max(1, first_workers(config.workers))
    lanes = source.lanes(workers, is_chosen, config.shard.num_shards)
    if pool is None and not is_chosen:
        config = config._replace(workers=min(workers, lanes))
    return config, _open_plan(config, lanes)


def _lane_items(source: ReplicatedSource, plan: Plan, config: LoaderConfig) -> LaneItems:
    from loaderpool.worker.lanes import LaneItems

    return LaneItems(
        source.make_generator,
        source.takes,
        source.shards,
        plan,
        shuffle=source.shards is not None and (config.shuffle or config.shuffle_window > 0),
        window=config.shuffle_window,
        seed_globals=config.seed_globals,
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


def _plan(size: int, config: LoaderConfig, lengths: Lengths | None) -> Plan:
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
    from loaderpool.plan.buckets import BucketPlan, ItemBuckets  # which `import loaderpool` shall not wait for

    buckets = ItemBuckets.of(lengths, config.buckets.boundaries)
    return BucketPlan(*settings, buckets=buckets, batch_sizes=config.buckets.batch_sizes)


def _refuse_empty(plan: Plan, config: LoaderConfig) -> None:
    if config.buckets is None:
        rows = f"batch_size={config.batch_size}"
    else:
        rows = f"no bucket fills a batch of batch_sizes={list(config.buckets.batch_sizes)}"
    raise ArgumentError(
        f"drop_remainder=True leaves no batches: {plan.size} items, {rows}, num_shards={config.shard.num_shards}"
    )
