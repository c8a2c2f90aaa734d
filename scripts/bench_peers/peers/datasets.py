"""Hugging Face datasets: `Dataset.to_tf_dataset(num_workers=...)`, which is its way into tf.data; it has no other view.

- The work is done by the `collate_fn`, for whole batches: it is called in the workers.
- `prefetch=True` and `shuffle=False` (the order of the others); `num_test_batches=1`: by the docs of `to_tf_dataset`
  more are more accurate where forms vary, but take longer.
(https://huggingface.co/docs/datasets/use_with_tensorflow and the docstring of `Dataset.to_tf_dataset`, 5.2.)
It turns uint8 into int64, so that a work of uint8 gives no result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np

from benchlib.work import Array, Work, make_batch
from benchlib.works import WORKS

# Its table has a row for each item, and all indices are made when an epoch begins.
BATCHES = 20_000


class Collate:
    """Makes the batch whose items it is given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Array]:
        work = WORKS[self.name]
        return {"sample": make_batch(work, int(rows[0]["item"]) // work.batch_size)}


@contextmanager
def tf(work: Work, workers: int) -> Iterator[Any]:
    work = work.with_batches(BATCHES)
    table = datasets.Dataset.from_dict({"item": np.arange(work.items)})
    yield table.to_tf_dataset(
        batch_size=work.batch_size, collate_fn=Collate(work.name), num_workers=workers, prefetch=True,
        num_test_batches=1,
    )  # fmt: skip
