"""loaderpool and other loaders. Each is a context manager that returns an iterable of batches.

Each `iter()` of it is the next epoch. Processes that can live for several epochs do. Each loader is
set up as its own documentation advises for speed, and its docstring names the advice. If processes
or threads can be chosen, work that waits gets threads, and so does `wide`, whose NumPy call
releases the GIL. Then nothing has to be sent.
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

TINY_CHUNK = 64  # batches in a task, if a task can have several: advised for short tasks


class Epochs:
    """An iterable that starts the next epoch at each iteration."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin())


def own(name: str, work: Work) -> AbstractContextManager[Any]:
    """Return the batches of a peer, or of loaderpool."""
    # separate, because its class must be in a module, and its import takes seconds
    if name == "keras":
        from bench import peer_keras

        return peer_keras.own(work)
    peer: AbstractContextManager[Any] = _PEERS[name](work)
    return peer


def import_what_it_needs(name: str, view: str) -> None:
    """Import the modules of a contestant, if imports are not measured."""
    for module in (_IMPORTS.get(name, name), "tensorflow" if view == "tf" else "numpy"):
        importlib.import_module(module)
    if name == "loaderpool":
        _ = sys.modules[name].Loader  # loaderpool imports a name at its first use


def as_array(batch: Any) -> Array:
    """Return a batch of any contestant as an array, without a copy."""
    if isinstance(batch, tuple):
        batch = batch[0]
    array: Array = batch.numpy() if type(batch).__module__ == "torch" else batch
    return array


@contextmanager
def as_dataset(name: str, work: Work) -> Iterator[Any]:
    """Return a contestant's batches as a `tf.data.Dataset`: by its documented way, otherwise by
    `from_generator`.

    Ends with `prefetch`, as https://www.tensorflow.org/guide/data_performance advises for every
    pipeline.
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
    """loaderpool as in its README: the unchanged function, with a parameter `out` if it can write
    into memory.
    """
    import loaderpool as lp

    fn = scale_into if work.write is not None else work.async_fn or work.fn
    workers = work.workers if workers is None else workers
    return lp.Loader(
        range(work.items), fn, batch_size=work.batch_size, workers=workers, threads=work.threads
    )


@contextmanager
def _serial(work: Work) -> Iterator[Any]:
    """Batches made one after the other in the main process, without a loader."""
    yield Epochs(lambda: (make_batch(work, position) for position in range(work.batches)))


class Samples:
    """Dataset for PyTorch's DataLoader: an item is a sample, or a whole batch."""

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
    """PyTorch's DataLoader with `persistent_workers=True` and the default `prefetch_factor` and
    `pin_memory`.

    The default `collate_fn` stacks large batches in shared memory. Small batches are made whole by
    the dataset, with `batch_size=None`: "Disable automatic batching" in
    https://docs.pytorch.org/docs/stable/data.html, for cases in which it is cheaper to make a batch
    at once. The main process has one torch thread, as the workers have.
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
    """Google's Grain: `.map().batch().to_iter_dataset().mp_prefetch()`. Each batch is passed
    through `finish`.

    `ReadOptions(num_threads=0)`, as its docs recommend for data in memory. Samples that wait get
    the default of 16 threads. Work that releases the GIL gets threads and no processes, as the docs
    of `MultiprocessingOptions` advise. `per_worker_buffer_size=4`: with the default of 1, a worker
    waits while its batch is read.
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
    """Meta's SPDL: a pipeline with one stage that makes batches in order, for all epochs.

    Work that holds the GIL runs in a `ProcessPoolExecutor`. Other work runs in the pipeline's own
    threads: https://facebookresearch.github.io/spdl/0.7.0/getting_started/parallelism.html.
    Processes get twice as many tasks as workers, so that no worker waits for its next task.
    Processes decoded JPEG files 1.2 to 2 times as fast as threads.
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
    """joblib's `Parallel(return_as="generator")` over batches, with `batch_size="auto"` and loky,
    which keeps its workers.

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
    """`multiprocessing.Pool.imap` over batches, or `ThreadPool`, which has the same interface.

    `imap` does not wait for a slow consumer, whose memory would fill up. So a semaphore limits its
    tasks, as is usual.
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
        finally:  # the pool may hang if it is terminated while its workers send something
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
