"""The standard library's `multiprocessing.Pool.imap` over batches, in order.

- Its `ThreadPool`, with the same interface, for work that waits or lets the GIL go: there is nothing to send then.
- `chunksize`: 1, and 64 for tiny batches: "using a large value for chunksize can make the job complete much faster"
  (https://docs.python.org/3/library/multiprocessing.html).
- `imap` has no back-pressure, so the usual semaphore holds its tasks back: else a slow consumer's memory fills up.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

from benchlib.work import Array, Work
from benchlib.works import batch_at

TINY_CHUNK = 64
AHEAD = 4  # chunks for each worker


class Epochs:
    def __init__(self, pool: Any, work: Work, workers: int) -> None:
        self.pool = pool
        self.work = work
        self.chunk = TINY_CHUNK if work.is_tiny and work.batches > 2**10 else 1
        self.free = threading.Semaphore(AHEAD * workers * self.chunk)
        self.is_over = False

    def __iter__(self) -> Iterator[Array]:
        make = functools.partial(batch_at, self.work.name)
        for batch in self.pool.imap(make, self._positions(), self.chunk):
            yield batch
            self.free.release()

    def _positions(self) -> Iterator[int]:
        for position in range(self.work.batches):
            self.free.acquire()
            if self.is_over:
                return
            yield position

    def stop(self) -> None:
        """Let the pool's thread that asks for positions go."""
        self.is_over = True
        self.free.release()


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    with (ThreadPool if work.suits_threads else multiprocessing.Pool)(workers) as pool:
        epochs = Epochs(pool, work, workers)
        try:
            yield epochs
        finally:
            epochs.stop()
