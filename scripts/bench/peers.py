"""loaderpool and the loaders of others: a context manager each, which gives an iterable of batches.

Each `iter()` of it is an epoch, in order; processes that can live from epoch to epoch do. Each is set up as its own
documentation advises for speed, which its docstring names. Where there are processes or threads to choose from, work
that waits, and `wide`, whose NumPy call lets the GIL go, gets threads: there is nothing to send then.
"""

from __future__ import annotations

import collections
import functools
import importlib
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

from bench.samples import Array
from bench.works import Work, batch_at, make_batch, scale_into

TINY_CHUNK = 64  # batches that go together where a task may have many: documentation advises it for short tasks


class Epochs:
    """An iterable that begins another epoch each time."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin())


def own(name: str, work: Work) -> AbstractContextManager[Any]:
    """The batches of a peer, or of loaderpool."""
    if name == "keras":  # apart: its class must be in a module, and its import takes seconds
        from bench import peer_keras

        return peer_keras.own(work)
    peer: AbstractContextManager[Any] = _PEERS[name](work)
    return peer


def import_what_it_needs(name: str, view: str) -> None:
    """Where imports are not to be measured."""
    for module in (_IMPORTS.get(name, name), "tensorflow" if view == "tf" else "numpy"):
        importlib.import_module(module)
    if name == "loaderpool":
        _ = sys.modules[name].Loader  # which is imported when it is named


def as_array(batch: Any) -> Array:
    """A batch of any of them as an array, without a copy."""
    if isinstance(batch, tuple):
        batch = batch[0]
    array: Array = batch.numpy() if type(batch).__module__ == "torch" else batch
    return array


@contextmanager
def as_dataset(name: str, work: Work) -> Iterator[Any]:
    """The same as a `tf.data.Dataset`: by the peer's own documented way, else by `from_generator`.

    With `prefetch`, as https://www.tensorflow.org/guide/data_performance advises for the end of every pipeline.
    """
    import tensorflow as tf

    with own(name, work) as batches:
        if name == "loaderpool":
            yield batches.as_dataset()
        elif name == "keras":
            yield batches.adapter.get_tf_dataset()
        else:
            signature = tf.TensorSpec(work.batch_shape, tf.as_dtype(work.dtype))
            generate = functools.partial(map, as_array, batches)
            dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
            yield dataset.prefetch(tf.data.AUTOTUNE)


def make_loader(work: Work, workers: Any = None) -> Any:
    """loaderpool as its README has it: the function as it is, `out` named where it can write into memory."""
    import loaderpool as lp

    fn = scale_into if work.write is not None else work.async_fn or work.fn
    workers = work.workers if workers is None else workers
    return lp.Loader(
        range(work.items), fn, batch_size=work.batch_size, workers=workers, threads=work.threads
    )


@contextmanager
def _serial(work: Work) -> Iterator[Any]:
    """Batches made one after the other in the trainer: what there is without a loader."""
    yield Epochs(lambda: (make_batch(work, position) for position in range(work.batches)))


class Samples:
    """For PyTorch's DataLoader: one sample, or a whole batch, at a time."""

    def __init__(self, work: Work, is_whole: bool, is_tuple: bool = False) -> None:
        self.work, self.is_whole, self.is_tuple = work, is_whole, is_tuple

    def __len__(self) -> int:
        return self.work.batches if self.is_whole else self.work.items

    def __getitem__(self, index: int) -> Any:
        import torch

        if self.is_whole:
            return torch.from_numpy(make_batch(self.work, index))
        return (self.work.fn(index),) if self.is_tuple else self.work.fn(index)


@contextmanager
def _torch(work: Work) -> Iterator[Any]:
    """PyTorch's DataLoader with `persistent_workers=True`; `prefetch_factor` and `pin_memory` as they are by default.

    Large batches are stacked by the default `collate_fn`, straight in shared memory. Small ones are made whole by the
    dataset, `batch_size=None`: "Disable automatic batching" in https://docs.pytorch.org/docs/stable/data.html, for
    cases in which it is cheaper to make a batch at once. One thread of torch in the trainer, as in the workers.
    """
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    is_whole = work.batch_bytes < 2**20
    batch_size = None if is_whole else work.batch_size
    samples: Any = Samples(work, is_whole)
    yield DataLoader(
        samples, batch_size=batch_size, num_workers=work.workers, persistent_workers=True
    )


def grain_dataset(work: Work, finish: Callable[[Any], Any] | None = None) -> Any:
    """Google's Grain: `.map().batch().to_iter_dataset().mp_prefetch()`; each batch goes through `finish`.

    `ReadOptions(num_threads=0)`, as its docs recommend for what is in memory; 16, their default, where samples wait.
    Work that lets the GIL go is left to threads, without processes, as the docs of `MultiprocessingOptions` advise.
    `per_worker_buffer_size=4`: the default of 1 has a worker wait while its batch is read.
    """
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["bench"])  # Grain reads settings of absl
    is_scaling = work.suits_threads and work.ideal is None
    threads = work.workers if is_scaling else 16 if work.ideal is not None else 0
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    batches = grain.MapDataset.range(work.items).map(work.fn).batch(work.batch_size)
    dataset = (batches.map(finish) if finish else batches).to_iter_dataset(options)
    if is_scaling:
        return dataset
    return dataset.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=work.workers, per_worker_buffer_size=4)
    )


@contextmanager
def _grain(work: Work) -> Iterator[Any]:
    dataset = grain_dataset(work)

    def epoch() -> Iterator[Any]:
        iterator = iter(dataset)
        try:
            yield from iterator
        finally:
            iterator.close()  # as the docs of `mp_prefetch` recommend

    yield Epochs(epoch)


@contextmanager
def _spdl(work: Work) -> Iterator[Any]:
    """Meta's SPDL: a pipeline whose one stage makes batches, in order, from epoch to epoch.

    What holds the GIL runs in a `ProcessPoolExecutor`, what lets it go or waits in the pipeline's own threads:
    https://facebookresearch.github.io/spdl/0.7.0/getting_started/parallelism.html. With processes twice as many tasks
    as workers, so that none waits for its next one. JPEG files were decoded 1.2 to 2 times as fast in processes.
    """
    from spdl.pipeline import PipelineBuilder

    threads = work.workers * work.threads
    with ExitStack() as stack:
        executor = None
        if not work.suits_threads:
            context = multiprocessing.get_context("forkserver")
            executor = stack.enter_context(ProcessPoolExecutor(work.workers, mp_context=context))
        builder = PipelineBuilder().add_source(range(work.batches), continuous=True)
        builder.pipe(
            functools.partial(batch_at, work.name), executor=executor, output_order="input",
            concurrency=threads if work.suits_threads else 2 * work.workers,
        )  # fmt: skip
        pipeline = builder.add_sink(3).build(num_threads=threads)
        stack.enter_context(pipeline.auto_stop())
        yield Epochs(lambda: pipeline.get_iterator(timeout=60))


@contextmanager
def _mpire(work: Work) -> Iterator[Any]:
    """mpire's `WorkerPool.imap` over batches, `keep_alive=True` (https://sybrenjansen.github.io/mpire)."""
    from mpire import WorkerPool

    pool = WorkerPool(
        work.workers, start_method="threading" if work.suits_threads else "fork", keep_alive=True
    )
    make = functools.partial(batch_at, work.name)
    try:
        yield Epochs(
            lambda: pool.imap(
                make, range(work.batches), iterable_len=work.batches, chunk_size=_chunk(work)
            )
        )
    finally:
        pool.terminate()


@contextmanager
def _joblib(work: Work) -> Iterator[Any]:
    """joblib's `Parallel(return_as="generator")` over batches, `batch_size="auto"`, loky, whose workers are used again.

    (https://joblib.readthedocs.io/en/stable/parallel.html)
    """
    from joblib import Parallel, delayed

    backend = "threading" if work.suits_threads else "loky"

    def epoch() -> Any:
        parallel = Parallel(n_jobs=work.workers, backend=backend, return_as="generator")
        return parallel(delayed(batch_at)(work.name, position) for position in range(work.batches))

    yield Epochs(epoch)


@contextmanager
def _pool_imap(work: Work) -> Iterator[Any]:
    """The standard library's `multiprocessing.Pool.imap` over batches, or `ThreadPool`, which has the same interface.

    `imap` has no back-pressure, so the usual semaphore holds its tasks back: else a slow consumer's memory fills up.
    """
    free = threading.Semaphore(4 * work.workers * _chunk(work))
    is_over = threading.Event()

    def positions() -> Iterator[int]:
        for position in range(work.batches):
            free.acquire()
            if is_over.is_set():
                return
            yield position

    with (ThreadPool if work.suits_threads else multiprocessing.Pool)(work.workers) as pool:
        results: Iterator[Array] = iter(())

        def epoch() -> Iterator[Array]:
            nonlocal results
            results = pool.imap(functools.partial(batch_at, work.name), positions(), _chunk(work))
            for batch in results:
                yield batch
                free.release()

        try:
            yield Epochs(epoch)
        finally:  # the pool may hang when it is terminated while its workers hand something over
            is_over.set()
            free.release()
            collections.deque(results, maxlen=0)


def _chunk(work: Work) -> int:
    return TINY_CHUNK if work.is_tiny and work.batches > 2**10 else 1


_IMPORTS = {
    "torch": "torch.utils.data", "spdl": "spdl.pipeline", "keras": "bench.peer_keras", "serial": "numpy",
    "pool_imap": "multiprocessing",
}  # fmt: skip
_PEERS: dict[str, Callable[[Work], Any]] = {
    "loaderpool": make_loader, "serial": _serial, "torch": _torch, "grain": _grain, "spdl": _spdl, "mpire": _mpire,
    "joblib": _joblib, "pool_imap": _pool_imap,
}  # fmt: skip
