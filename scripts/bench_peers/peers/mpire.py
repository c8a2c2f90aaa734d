"""mpire's `WorkerPool.imap` over batches, in order.

- `keep_alive=True`: workers live from epoch to epoch (https://sybrenjansen.github.io/mpire, "Keep alive").
- `chunk_size`: 1, and 64 for tiny batches, as its docs advise larger chunks for short tasks ("Task chunking").
- `max_tasks_active` stays at its default, twice as many as workers.
- Work that waits, or lets the GIL go, runs in threads (`start_method="threading"`), with nothing to send.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpire import WorkerPool

from benchlib.work import Work
from benchlib.works import batch_at

TINY_CHUNK = 64


class Epochs:
    def __init__(self, pool: WorkerPool, work: Work) -> None:
        self.pool = pool
        self.work = work

    def __iter__(self) -> Iterator[Any]:
        chunk = TINY_CHUNK if self.work.is_tiny and self.work.batches > 2**10 else 1
        return self.pool.imap(
            functools.partial(batch_at, self.work.name), range(self.work.batches), iterable_len=self.work.batches,
            chunk_size=chunk,
        )  # fmt: skip


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    method = "threading" if work.suits_threads else "fork"
    pool = WorkerPool(workers, start_method=method, keep_alive=True)
    try:
        yield Epochs(pool, work)
    finally:
        pool.terminate()
