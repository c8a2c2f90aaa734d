"""joblib's `Parallel(return_as="generator")` over batches: in order, as they are ready.

- `batch_size="auto"`, its default, which puts short tasks together; `pre_dispatch` as it is.
- The loky backend, whose workers are used again by later calls; threads for work that waits or scales images, as
  the docs say of what does not hold the GIL: there is nothing to send then.
(https://joblib.readthedocs.io/en/stable/parallel.html and the docstring of `joblib.Parallel`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from joblib import Parallel, delayed

from benchlib.work import Work
from benchlib.works import batch_at


class Epochs:
    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.workers = workers

    def __iter__(self) -> Iterator[Any]:
        backend = "threading" if self.work.suits_threads else "loky"
        parallel = Parallel(n_jobs=self.workers, backend=backend, return_as="generator")
        make = delayed(batch_at)
        return parallel(make(self.work.name, position) for position in range(self.work.batches))


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    yield Epochs(work, workers)
