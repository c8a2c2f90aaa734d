"""Google's Grain: a `MapDataset` with batches, read by worker processes.

- `.map().batch().to_iter_dataset().mp_prefetch()`: by the docs of `mp_prefetch` workers get slices of what stands
  before `to_iter_dataset`, so batches made there are the same, in the same order, for any number of workers.
- `ReadOptions(num_threads=0)`, as its docs recommend for what is in memory ("to avoid Python GIL contention"); 16,
  their default, where samples wait. Work that lets the GIL go is left to the threads, without processes, which the docs
  of `MultiprocessingOptions` advise for what is "bottlenecked on the CPython's GIL".
- `per_worker_buffer_size=4`: the default of 1 has a worker wait while its batch is read. "These are elements after all
  transformations", whole batches here, so not more.
(Docstrings of grain 0.2.18: `grain.ReadOptions`, `grain.MultiprocessingOptions`, `IterDataset.mp_prefetch`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grain
from absl import flags

from benchlib.work import Work

THREADS = 16
BUFFERED_BATCHES = 4


class Closing:
    """Each epoch's iterator is closed at its end, as the docs of `mp_prefetch` recommend."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.dataset)
        try:
            yield from iterator
        finally:
            iterator.close()


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["bench"])  # Grain reads settings of absl
    is_scaling = work.suits_threads and work.ideal is None
    threads = workers if is_scaling else THREADS if work.ideal is not None else 0
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    dataset = grain.MapDataset.range(work.items).map(work.fn).batch(work.batch_size).to_iter_dataset(options)
    if is_scaling:
        yield Closing(dataset)
        return
    processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=BUFFERED_BATCHES)
    yield Closing(dataset.mp_prefetch(processes))
