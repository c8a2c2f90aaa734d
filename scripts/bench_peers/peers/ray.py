"""Ray Data: `range().map_batches().iter_batches()`, in order.

- `preserve_order` is set, as the others deliver in order.
- `batch_size` of both steps is the work's, and a block holds one batch, or 64 tiny ones: a block is what a task makes,
  so larger ones would delay the first batch, and smaller ones cost a task each.
- `prefetch_batches=2`: "Advanced: Prefetching batches" in https://docs.ray.io/en/latest/data/performance-tips.html.
- For tensors `to_tf` needs a feature and a label, so `iter_tf_batches` stands in a `from_generator`.
- One CPU for each worker, an object store of 1.5 GB, no dashboard, no usage report.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray

from benchlib.work import Array, Work
from benchlib.works import WORKS

STORE_BYTES = 1_500_000_000
TINY_BLOCK = 64
PREFETCH = 2
# The plan of an epoch has an entry for each block.
BATCHES, TINY_BATCHES = 2000, 64_000


class Make:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rows: dict[str, Array]) -> dict[str, Array]:
        work = WORKS[self.name]
        return {"sample": np.stack([work.fn(item) for item in rows["id"].tolist()])}


class Epochs:
    def __init__(self, dataset: Any, work: Work) -> None:
        self.dataset = dataset
        self.work = work

    def __iter__(self) -> Iterator[Any]:
        return iter(
            self.dataset.iter_batches(batch_size=self.work.batch_size, prefetch_batches=PREFETCH, batch_format="numpy")
        )


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    ray.init(
        num_cpus=workers, object_store_memory=STORE_BYTES, include_dashboard=False, logging_level=logging.ERROR,
        log_to_driver=False,
    )  # fmt: skip
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    work = work.with_batches(TINY_BATCHES if work.is_tiny else BATCHES)
    blocks = max(1, work.batches // (TINY_BLOCK if work.is_tiny else 1))
    dataset = ray.data.range(work.items, override_num_blocks=blocks)
    made = dataset.map_batches(Make(work.name), batch_size=work.batch_size, batch_format="numpy")
    try:
        yield Epochs(made, work)
    finally:
        ray.shutdown()


def as_array(batch: dict[str, Array]) -> Array:
    return batch["sample"]
