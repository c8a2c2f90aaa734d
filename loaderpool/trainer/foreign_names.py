"""Names of arguments that people bring from other loaders: what they are called here, or what there is instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from loaderpool.errors import ArgumentTypeError

# What it is called here.
_OURS = {
    "workers": (
        "num_workers", "worker_count", "n_workers", "nworkers", "max_workers", "num_proc", "num_procs", "num_processes",
        "processes", "n_jobs", "concurrency", "parallelism", "num_parallel_calls", "parallel_calls",
    ),
    "element_spec": ("output_signature", "signature", "output_types", "output_shapes", "spec"),
    "drop_remainder": ("drop_last", "drop_last_batch", "drop_incomplete"),
    "setup": ("worker_init_fn", "worker_init", "initializer", "init_fn", "on_worker_start"),
    "timeout_s": ("timeout",),
    "batch_size": ("batch", "batchsize", "bs", "batch_dim", "rows_per_batch"),
    "fn": (
        "transform", "transforms", "map", "map_fn", "map_func", "map_function", "function", "func", "load_fn",
        "process", "preprocess", "preprocessing_function", "preprocess_fn", "preprocessor", "operations",
    ),
    "augment": ("augmentation", "augmentations", "augment_fn", "augmenter"),
    "seed": ("random_seed", "shuffle_seed", "random_state", "base_seed", "generator", "rng"),
    "deterministic": ("ordered", "in_order", "preserve_order", "sloppy", "is_ordered"),
    "num_shards": ("world_size", "num_replicas", "shard_count", "num_input_pipelines"),
    "shard_index": ("rank", "shard_id", "input_pipeline_id", "process_index"),
    "threads_per_worker": ("num_threads", "threads", "num_threads_per_worker", "worker_threads"),
    "pad": ("padding", "padded_shapes", "padding_values", "padding_value", "pad_value"),
    "cache": ("cache_dir", "cache_path", "cache_filename"),
    "bucket_by": ("element_length_func", "length_fn", "length_func", "lengths"),
    "boundaries": ("bucket_boundaries",),
    "batch_sizes": ("bucket_batch_sizes",),
    "on_error": ("ignore_errors", "errors", "error_policy", "handler"),
    "memory_limit": ("max_memory", "memory", "ram_budget"),
    "cycle_length": ("num_open", "max_open"),
    "epochs": ("num_epochs", "repeat", "count"),
}  # fmt: skip
# What others call by the same name, or have not.
_SAME = frozenset(
    ("source", "batch_fn", "shuffle", "ragged", "pool", "seed_globals", "max_restarts", "max_restarts_per_item")
)
_FOREIGN = {foreign: ours for ours, names in _OURS.items() for foreign in names}

_READY = (
    "batches are made ahead as far as memory_limit allows, and as_dataset(prefetch=n) says how many tf.data keeps ready"
)
_ORDER = (
    "the order is shuffle's and seed's; for one of your own give the indices as the source, and read the item in fn"
)
_PROCESSES = "workers are always processes, forked from one without TensorFlow: leave it away"
_SHUFFLE = "shuffle=True shuffles all of a source that is read by index; of a stream shuffle=n holds n items"
_BATCH_FN = "batch_fn gets the list of a batch's items and gives the batch; fn gives one sample, and rows are stacked"
_SHARES = "num_shards and shard_index say which share of each epoch this process has"
# What there is instead.
_INSTEAD = {
    **dict.fromkeys(
        ("prefetch_factor", "max_queue_size", "queue_size", "prefetch_size", "prefetch_batches", "buffer",
         "prefetch_buffer_size", "num_prefetch", "worker_buffer_size", "read_options", "max_prefetch"), _READY
    ),
    **dict.fromkeys(("sampler", "batch_sampler", "index_sampler"), _ORDER),
    **dict.fromkeys(
        ("use_multiprocessing", "multiprocessing", "multiprocessing_context", "mp_context", "start_method"), _PROCESSES
    ),
    **dict.fromkeys(
        ("shuffle_buffer", "shuffle_buffer_size", "buffer_size", "local_shuffle_buffer_size", "shuffle_size",
         "reshuffle_each_iteration"), _SHUFFLE
    ),
    **dict.fromkeys(("collate_fn", "collate", "collator", "batch_format"), _BATCH_FN),
    **dict.fromkeys(("shard", "shard_options", "sharding"), _SHARES),
    "persistent_workers": "workers live from epoch to epoch anyway: leave it away",
    **dict.fromkeys(
        ("pin_memory", "pin_memory_device", "device_id"), 'as_dataset(device="/GPU:0") prefetches to a device'
    ),
    **dict.fromkeys(
        ("steps_per_epoch", "steps", "verbose", "callbacks"),
        "it is for model.fit, which takes as_dataset(): for a number of steps, as_dataset(epochs=None)",
    ),
    "checkpointable": (
        "it is gone: loaderpool.adapters.tensorflow.LoaderState saves the loader's place in a tf.train.Checkpoint"
    ),
    "class_weight": "it is for model.fit",
    "sample_weight": "have fn give it, as in (x, y, sample_weight)",
}  # fmt: skip

# Whose argument each of ours is. A test holds it against the signatures.
_OWNERS = {
    **dict.fromkeys(("epochs", "prefetch", "device"), "loader.as_dataset"),
    **dict.fromkeys(("shards", "copies", "cycle_length"), "Loader.from_generator"),
}


def unknown_arguments(owner: str, unknown: Iterable[str], known: Collection[str]) -> ArgumentTypeError:
    """The error for names that a function does not have: each with what was probably meant.

    Args:
        owner: the function, such as "Loader".
        unknown: what it was given.
        known: names of its arguments.
    """
    names = sorted(unknown)
    told = "; ".join(f"{name}: {meant}" for name in names if (meant := _meant(name, known)))
    return ArgumentTypeError(f"{owner} has no argument named {', '.join(names)}" + (f". {told}" if told else ""))


def _meant(name: str, known: Collection[str]) -> str:
    folded = name.lower()
    if folded in _INSTEAD:
        return _INSTEAD[folded]
    public = [each for each in known if each[0] != "_"]
    is_ours = folded in public or folded in _OURS or folded in _SAME or folded in _OWNERS
    ours = folded if is_ours else _FOREIGN.get(folded)
    if ours is None:
        near = difflib.get_close_matches(folded, [*public, *_FOREIGN, *_OURS, *_SAME, *_OWNERS], 1, cutoff=0.75)
        if not near:
            return ""
        if near[0] in _INSTEAD:
            return _INSTEAD[near[0]]
        ours = _FOREIGN.get(near[0], near[0])
    if ours in public:
        return f"did you mean {ours}?"
    return f"did you mean {ours}=, which is an argument of {_OWNERS.get(ours, 'Loader')}?"
