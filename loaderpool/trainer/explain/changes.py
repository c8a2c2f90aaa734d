"""Changes as code that can be pasted; what must hold for one stands behind it, as a comment."""

from __future__ import annotations


def with_workers(workers: int) -> str:
    """Other worker processes."""
    return f"lp.Loader(..., workers={workers})"


def with_most_workers(workers: int) -> str:
    """Another bound of the number of worker processes."""
    return f"lp.Loader(..., workers=(1, {workers}))"


def with_threads(threads: int) -> str:
    """Other threads of each worker."""
    return f"lp.Loader(..., threads={threads})"


def with_memory(nbytes: int) -> str:
    """Another limit of buffered batches, rounded up to what is easily read."""
    unit, name = (1 << 30, "GiB") if nbytes >= 8 << 30 else (1 << 20, "MiB")
    return f'lp.Loader(..., limits=lp.Limits(memory="{-(-nbytes // unit)}{name}"))'


def with_batch_size(rows: int) -> str:
    """Larger batches."""
    return f"lp.Loader(..., batch_size={rows})  # if the training allows larger batches"


def with_batch_fn() -> str:
    """A function that makes a whole batch."""
    return "lp.Loader(..., batch_fn=make_batch)  # instead of fn: make_batch(items) returns a whole batch"


def with_cache() -> str:
    """What the function gives is kept for later epochs."""
    return 'lp.Loader(..., cache="memory")  # a random part of fn goes into augment='


def in_any_order() -> str:
    """Batches are handed over as they are finished."""
    return "lp.Loader(..., deterministic=False)  # if the order of batches may differ between runs"


def read_in_parts(workers: int = 0) -> str:
    """Workers, so many of them where that is another number, read parts of what one reader reads now."""
    number = f", workers={workers}" if workers else ""
    return f"lp.Loader.from_generator(read_part, shards=parts{number})  # read_part(part) yields the items of one part"


def without_tf_data() -> str:
    """Keras takes batches without tf.data in between."""
    return "model.fit(loader.for_keras())  # instead of as_dataset(); in your own loop: loader.tensors()"


def without_epoch_ends() -> str:
    """One pass that never ends, of which workers make what comes next."""
    return "loader.as_dataset(epochs=None)  # and steps_per_epoch=len(loader) in fit"
