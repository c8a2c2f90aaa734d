"""Check the arguments of `Loader`, and build its plan and the payload for its workers.

Runs in: the main process, on the thread that makes the loader.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from loaderpool.cache.setting import Cache, as_cache
from loaderpool.checks import check_signature, is_async, open_parameter
from loaderpool.config import DEFAULT_BATCH_SIZE, DEFAULT_RESTARTS, Auto, Blocks, LoaderConfig
from loaderpool.element.spec import read_spec
from loaderpool.engine.delivery import CheckedArguments
from loaderpool.errors import ArgumentError, SourceError, brief, counted
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.sources.indexing import Indexed
from loaderpool.sources.mixed import Mix
from loaderpool.sources.recognise import as_source, warn_of_columns, whole_batches
from loaderpool.sources.sequence import BatchSequence
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from loaderpool.trainer.pool import Pool, first_workers, shared_pool
from loaderpool.transport.payload.record import WorkerPayload

if TYPE_CHECKING:
    from loaderpool.trainer.draws import Draws
    from loaderpool.worker.lanes import LaneItems


def check_arguments(arguments: dict[str, Any]) -> CheckedArguments:
    """Check all arguments of `Loader`, given by name. Called by the constructor of `LoaderCore`.

    Raises:
        ArgumentError: An argument is wrong, or two of them cannot be combined.
        SourceError: The source can be neither indexed nor iterated, or its items are whole batches.
    """
    pool = shared_pool(arguments)
    config = LoaderConfig.checked(arguments if pool is None else {**arguments, "workers": "auto"})
    if pool is not None and config.limits.restarts != DEFAULT_RESTARTS:
        raise ArgumentError(
            f"workers=pool and Limits(restarts={config.limits.restarts}) cannot be combined: pass "
            "restarts= to Pool"
        )
    cache: Cache | None = None
    if arguments["cache"] is not None:
        cache = as_cache(arguments["cache"])
    source = as_source(arguments["source"])
    # First: if a setting does not apply to the source, changing the functions would not help.
    if isinstance(source, (StreamSource, ReplicatedSource)):
        _check_unindexed(source, cache, config, arguments["order"])
    _check_functions(arguments, cache is not None, config)
    if config.samples_per_item is not None:
        _check_samples_per_item(arguments)
    given_spec = None if arguments["element_spec"] is None else read_spec(arguments["element_spec"])
    # With batch_size=None, each array of a list may be a batch.
    if config.batch_size is not None and type(arguments["source"]) is list:
        has_function = arguments["fn"] is not None or arguments["batch_fn"] is not None
        warn_of_columns(arguments["source"], has_function)
    if config.batch_size is not None and (reason := whole_batches(arguments["source"])) is not None:
        raise SourceError(f"source {reason}")
    plan: Plan
    draws: Draws | None = None
    items: object = source
    if isinstance(source, (StreamSource, ReplicatedSource)):
        if isinstance(source, ReplicatedSource):
            config, plan, items = _generators(source, config, pool)
        else:
            from loaderpool.worker.tickets import StreamedItems

            plan, items = _open_plan(config), StreamedItems()
    elif isinstance(source, BatchSequence) and source.is_endless:
        if arguments["order"] is not None:
            raise ArgumentError(
                f"order orders the batches of an epoch, but {type(source.target).__name__} is "
                "endless. Give it a num_batches, or remove order="
            )
        if config.samples_per_item is not None:
            raise ArgumentError(
                f"samples_per_item needs a source with a length, but "
                f"{type(source.target).__name__} is endless. Give it a num_batches"
            )
        if config.shuffle or config.shuffle_window:
            raise ArgumentError(
                f"shuffle={config.shuffle_window or True} shuffles the batches of an epoch, but "
                f"{type(source.target).__name__} (its num_batches is None, or it has no length) is "
                "endless. Shuffle in its __getitem__, or give it a num_batches"
            )
        plan = _open_plan(config, is_endless=True)
    else:
        if config.shuffle_window:
            raise ArgumentError(
                f"shuffle={config.shuffle_window} is a window for streams, but this source can be "
                "indexed. Set shuffle=True to shuffle all items"
            )
        config, plan, draws = _indexed_plan(arguments, source, config)
        items = source.records if isinstance(source, Mix) else source
    if plan.is_open and isinstance(config.on_error.budget, float):
        raise ArgumentError(
            "on_error[1] must be an integer for a stream, generators or an endless sequence, whose "
            f"number of rows is unknown, got the fraction {config.on_error.budget}"
        )
    fn, augment, batch_fn = arguments["fn"], arguments["augment"], arguments["batch_fn"]
    if cache is not None and config.threads > 1 and not (is_async(fn) or is_async(augment)):
        raise ArgumentError(
            f"cache and threads={config.threads} cannot be combined, because each worker uses the "
            "cache on one thread. Remove one of them; for more parallel reads, set a larger "
            "workers=, or declare fn with `async def`"
        )
    functions = {"fn": fn, "augment": augment, "batch_fn": batch_fn}
    takes_rng = frozenset(
        name for name, function in functions.items() if open_parameter(function, "rng") is not None
    )
    # Only the last function that is called for a sample may write into the batch.
    is_written = cache is None and config.samples_per_item is None
    writer = augment if augment is not None else fn if is_written else None
    payload = WorkerPayload(
        **functions,
        source=items,
        setup=arguments["setup"],
        config=config,
        plan=plan,
        given_spec=given_spec,
        takes_rng=takes_rng,
        # For generators always: to find out whether one uses `numpy.random`, it would have to run
        # a second time.
        needs_numpy_random=bool(takes_rng)
        or config.seed_globals is True
        or isinstance(source, ReplicatedSource),
        takes_out=config.batch_size is not None and open_parameter(writer, "out") is not None,
    )
    stream = source if isinstance(source, StreamSource) else None
    hooks = arguments["_hooks"]
    has_epoch_begin = hooks is not None and "on_epoch_begin" in hooks.overridden
    return CheckedArguments(
        config, plan, payload.unit, given_spec, stream, payload, cache, has_epoch_begin, draws
    )


def _check_functions(arguments: dict[str, Any], is_cached: bool, config: LoaderConfig) -> None:
    """Check the user's functions: each alone, together, and against the settings.

    A function whose signature cannot be read is accepted.
    """
    fn, augment, batch_fn = arguments["fn"], arguments["augment"], arguments["batch_fn"]
    if fn is not None and batch_fn is not None:
        raise ArgumentError(
            "fn and batch_fn cannot be combined: fn returns a sample, batch_fn a whole batch. Pass "
            "one"
        )
    for name, example, *may_take in _CALLS:
        function = arguments[name]
        if function is not None and not callable(function):
            are_labels = (
                name == "fn"
                and hasattr(type(function), "__len__")
                and not isinstance(function, (str, bytes))
            )
            advice = (
                ". To load arrays of features and labels, pass one source: Loader((x, y))"
                * are_labels
            )
            is_of = f"{brief(function)} of type {type(function).__name__}"
            raise ArgumentError(f"{name} must be callable, got {is_of}{advice}")
        if function is not None:
            if inspect.isasyncgenfunction(function):
                raise ArgumentError(
                    f"{name} is an async generator function, but a call must return one value. "
                    "Use return, not yield, in it"
                )
            check_signature(name, function, example, (*may_take,))
    if batch_fn is not None:
        if config.batch_size is None:
            raise ArgumentError(
                "batch_fn requires batch_size, the number of items per call, got None"
            )
        if config.pad is not False or config.ragged:
            raise ArgumentError(
                "pad and ragged do not apply to batch_fn, which builds the batch itself"
            )
        if augment is not None:
            raise ArgumentError(
                "augment is called for each sample and cannot be combined with batch_fn. Augment "
                "the batch in batch_fn (it can take rng too), or use fn"
            )
        if is_cached:
            raise ArgumentError(
                "cache stores single samples and cannot be combined with batch_fn, whose batches "
                "differ in each epoch. Use fn, or remove cache="
            )
    if not is_cached:
        return
    if fn is None:
        raise ArgumentError(
            "cache stores the results of fn, but no fn was given. Pass fn, or remove cache="
        )
    if open_parameter(fn, "rng") is not None:
        raise ArgumentError(
            "fn takes `rng`, but with cache= it is called only once per item, so all epochs would "
            "have the same random numbers. Move the random part to augment=, which gets the result "
            "of fn in every epoch and can take `rng`"
        )


def _check_samples_per_item(arguments: dict[str, Any]) -> None:
    """Check that the functions can be used with `samples_per_item`.

    Raises:
        ArgumentError: There is no `fn`, or it is async or has a parameter `out`.
    """
    fn, augment = arguments["fn"], arguments["augment"]
    if fn is None:
        own = "batch_fn returns whole batches" * (arguments["batch_fn"] is not None)
        raise ArgumentError(
            f"samples_per_item needs fn, which returns a list of samples, but "
            f"{own or 'no fn was given'}. Pass fn, or remove samples_per_item="
        )
    if is_async(fn) or is_async(augment):
        raise ArgumentError(
            "samples_per_item does not work with async functions. Declare fn and augment without "
            "`async`, or remove samples_per_item="
        )
    if open_parameter(fn, "out") is not None:
        raise ArgumentError(
            "fn takes `out`, but with samples_per_item= it returns a list of samples. Move the "
            "part that fills `out` to augment=, which is called for each sample"
        )


# Name of each function, its positional arguments as an error shows them, and the optional
# parameters that are passed if the function declares them.
_CALLS = (
    ("fn", "item", "rng", "out"),
    ("batch_fn", "list_of_items", "rng"),
    ("setup", ""),
    ("augment", "sample", "rng", "out"),
)


def _check_unindexed(
    source: StreamSource | ReplicatedSource,
    cache: Cache | None,
    config: LoaderConfig,
    order: object,
) -> None:
    """Raise if settings do not apply to a stream or to generators.

    Raises:
        ArgumentError: Buckets, an order, a cache, a shuffle or threads do not work with this
            source.
    """
    if order is not None:
        raise ArgumentError(
            f"order needs a source with __len__ and __getitem__, got {source.kind}. Remove order="
        )
    if config.batch_indices:
        raise ArgumentError(
            f"batch_indices=True needs a source with __len__ and __getitem__, got {source.kind}, "
            "whose items have no index. Remove batch_indices="
        )
    if config.samples_per_item is not None:
        raise ArgumentError(
            "samples_per_item needs a source with __len__ and __getitem__, got "
            f"{source.kind}. Yield the samples one by one from a generator, or from the stream"
        )
    if config.buckets is not None:
        raise ArgumentError(
            f"buckets needs a source with __len__ and __getitem__, got {source.kind}"
        )
    if config.shuffle and isinstance(source, StreamSource):
        raise ArgumentError(
            f"shuffle=True needs a source with __len__ and __getitem__, got a stream "
            f"({source.kind}). Set shuffle=n to shuffle within a window of n items"
        )
    if config.shuffle and isinstance(source, ReplicatedSource) and source.shards is None:
        raise ArgumentError(
            f"shuffle=True shuffles the order of shards, but {source.kind} has no shards. Pass "
            "shards=, or set shuffle=n to shuffle within a window of n items"
        )
    if cache is not None:
        is_of_files = isinstance(source, ReplicatedSource) and source.reads_files
        got = (
            "compressed files or URLs, whose records cannot be read by index. Decompress the files"
            if is_of_files
            else "a stream or generator. Pass a source that can be indexed, such as a list of files"
        )
        raise ArgumentError(
            f"cache needs a source with __len__ and __getitem__, got {got}, or remove cache="
        )
    if isinstance(source, ReplicatedSource) and config.threads > 1:
        raise ArgumentError(
            f"threads={config.threads} is not supported with {source.kind}, which runs on one "
            "thread in each worker. Remove threads=, and set workers= to the number of generators "
            "that run at the same time"
        )


def _generators(
    source: ReplicatedSource, config: LoaderConfig, pool: Pool | None
) -> tuple[LoaderConfig, Plan, LaneItems]:
    """Build the plan and the items for generators, and return them with the settings.

    If the number of workers was not given, the settings have at most as many workers as there are
    lanes.

    Raises:
        ArgumentError: Workers cannot read the source, or no batch is left of its stated items.
    """
    from loaderpool.worker.lanes import Generators, LaneItems, stated_batches

    is_chosen = pool is None and not isinstance(config.workers, Auto)
    workers = pool.workers if pool is not None else max(1, first_workers(config.workers))
    lanes = source.lanes(workers, is_chosen, config.shard.num_shards)
    if source.only_here is not None and (pool is not None or config.workers != 0):
        raise ArgumentError(
            f"source: {source.only_here} is in the memory of this process, from which workers "
            "cannot read. Set workers=0, or write the data to a file"
        )
    if pool is None and not is_chosen:
        config = config._replace(workers=min(workers, lanes))
    plan, window = _open_plan(config, lanes=lanes), config.shuffle_window
    if source.shard_lengths is not None:
        plan = dataclasses.replace(plan, stated_batches=stated_batches(plan, source.shard_lengths))
        if not plan.stated_batches:
            reason = "drop_remainder=True leaves no batches, or " * config.drop_remainder
            raise ArgumentError(
                f"{reason}shard_lengths states no items for this loader: "
                f"{sum(source.shard_lengths)}"
            )
    shuffle = source.shards is not None and (config.shuffle or window > 0)
    made = source.make_generator, source.takes, source.shards
    generators = Generators(*made, plan, shuffle, window, source.shard_lengths)
    return config, plan, LaneItems(generators, config.seed_globals)


def _plan_fields(config: LoaderConfig) -> dict[str, Any]:
    """Return the fields of a plan that do not depend on the order."""
    shard = config.shard
    sizes = {"batch_size": config.batch_size, "drop_remainder": config.drop_remainder}
    return {**sizes, "num_shards": shard.num_shards, "shard_index": shard.index}


def _open_plan(config: LoaderConfig, lanes: int = 0, is_endless: bool = False) -> Plan:
    order, fields = Order(MAX_SIZE, seed=config.seed), _plan_fields(config)
    return Plan(order, **fields, is_open=True, lanes=lanes, is_endless=is_endless)


def _indexed_plan(
    arguments: dict[str, Any], source: Indexed, config: LoaderConfig
) -> tuple[LoaderConfig, Plan, Draws | None]:
    """Make the plan of a source that is read by index, from the order that the arguments determine.

    Returns:
        The settings, of which a batch sampler determines the batch size; the plan; and the object
        that draws the orders of epochs, None if they are not drawn.

    Raises:
        ArgumentError: The order does not fit the source or the settings, or leaves no batches.
    """
    size = len(source) * (config.samples_per_item or 1)
    value = arguments["order"] if arguments["buckets"] is None else arguments["buckets"]
    if config.shuffle and config.samples_per_item is not None:
        value = Blocks()
    fields = {**_plan_fields(config), "mix": source.order if isinstance(source, Mix) else None}
    plan: Plan | Draws
    if value is None:
        plan = Plan(Order(size, config.shuffle, config.seed), **fields)
    else:
        # Imported here, because few loaders need it.
        from loaderpool.trainer.orders import Wanted, plan_of

        is_sized = arguments["batch_size"] is not DEFAULT_BATCH_SIZE
        plan = plan_of(Wanted(value, source, size, config, fields, is_sized))
    if not isinstance(plan, Plan):
        return config._replace(batch_size=plan.plan.batch_size), plan.plan, plan
    if not plan.batches_per_epoch:
        rows = f"batch_size={config.batch_size}"
        if config.buckets is not None:
            rows = f"no bucket fills a batch of batch_sizes={list(config.buckets.batch_sizes)}"
        raise ArgumentError(
            f"drop_remainder=True leaves no batches: {counted(size, 'item')}, {rows}, "
            f"num_shards={config.shard.num_shards}"
        )
    return config, plan, None
