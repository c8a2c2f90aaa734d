"""tensorpack's `MultiProcessMapDataZMQ` over batches, in strict mode: each once, in any order.

- `strict=True`, as its docs say that without it an epoch may have samples of the next one.
- `buffer_size=200`, its default, for small batches; for large ones twice as many as workers, as its docs say that it is
  held in memory.
- The runner (`MultiProcessRunnerZMQ`) is faster but delivers samples more than once, by its docs.
(https://tensorpack.readthedocs.io/tutorial/performance-tuning.html and /modules/dataflow.html, docstrings of 0.11.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorpack.dataflow import DataFlow, MultiProcessMapDataZMQ

from benchlib.work import Array, Work, make_batch

IS_ORDERED = False
BUFFER = 200
SMALL_BYTES = 2**16


class Positions(DataFlow):  # type: ignore[misc]
    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.batches

    def __iter__(self) -> Iterator[list[int]]:
        return ([position] for position in range(self.work.batches))


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    buffer = BUFFER if work.batch_bytes <= SMALL_BYTES and work.is_tiny else 2 * workers
    flow = MultiProcessMapDataZMQ(
        Positions(work), workers, lambda point: [make_batch(work, point[0])], buffer_size=buffer, strict=True
    )
    flow.reset_state()
    yield flow


def as_array(batch: list[Array]) -> Array:
    return batch[0]
