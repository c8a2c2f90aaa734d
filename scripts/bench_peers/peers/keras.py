"""Keras' PyDataset with `use_multiprocessing=True`, through the adapter by which `fit` reads it.

- `workers` as given; by the docs of `keras.utils.PyDataset` processes are "necessary to gain compute-level (rather than
  I/O level) benefits", so work that waits or lets the GIL go gets threads.
- `max_queue_size` is 10 by default, and caps the batches under way: raised to twice the workers where that is more.
(https://keras.io/api/utils/python_utils/#pydataset-class)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from benchlib.work import Array, Work, make_batch


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, work: Work, workers: int) -> None:
        super().__init__(
            workers=workers, use_multiprocessing=not work.suits_threads, max_queue_size=max(10, 2 * workers)
        )
        self.work = work

    def __len__(self) -> int:
        return self.work.batches

    def __getitem__(self, position: int) -> tuple[Array]:
        return (make_batch(self.work, position),)


class Epochs:
    """What `fit` does around each epoch."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def __iter__(self) -> Iterator[Any]:
        self.adapter.on_epoch_begin()
        yield from self.adapter.get_numpy_iterator()
        self.adapter.on_epoch_end()


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    yield Epochs(PyDatasetAdapter(Batches(work, workers)))


@contextmanager
def tf(work: Work, workers: int) -> Iterator[Any]:
    yield PyDatasetAdapter(Batches(work, workers)).get_tf_dataset()


def as_array(batch: tuple[Array]) -> Array:
    return batch[0]
