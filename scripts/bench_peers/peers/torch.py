"""PyTorch's DataLoader, in order (its default), with workers that live from epoch to epoch.

- `persistent_workers=True`, as the docs of `torch.utils.data.DataLoader` have it for workers that are used again, and
  `num_workers` as given. `prefetch_factor` stays 2, its default: more changes nothing where all batches cost the same.
- `pin_memory` stays False: the docs advise it for copies to a GPU, and there is none here.
- Samples of NumPy arrays are stacked by the default `collate_fn`, which writes large batches straight into shared
  memory. Small ones are made whole by the dataset, `batch_size=None`: "Disable automatic batching" in
  https://docs.pytorch.org/docs/stable/data.html, for cases in which it is cheaper to make a batch at once; it is here.
- One thread of torch in the trainer, as in the workers: nothing here computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchlib.work import Array, Work, make_batch

# Above it, stacking in shared memory saves more than 32 calls of `as_tensor` cost.
STACKED_BYTES = 2**20


class Samples(Dataset[Any]):
    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.items

    def __getitem__(self, item: int) -> Array:
        return self.work.fn(item)


class Batches(Dataset[Any]):
    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.batches

    def __getitem__(self, position: int) -> torch.Tensor:
        return torch.from_numpy(make_batch(self.work, position))


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    if work.batch_bytes >= STACKED_BYTES:
        yield DataLoader(Samples(work), batch_size=work.batch_size, **settings)
    else:
        yield DataLoader(Batches(work), batch_size=None, **settings)


def as_array(batch: torch.Tensor) -> Array:
    return batch.numpy()
