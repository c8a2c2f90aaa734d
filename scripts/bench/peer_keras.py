"""Keras' PyDataset with `use_multiprocessing=True`, through the adapter by which `fit` reads it.

The docs of `keras.utils.PyDataset` say that processes are "necessary to gain compute-level (rather
than I/O level) benefits". So work that waits or releases the GIL gets threads. `max_queue_size`
limits the batches in progress. It is the default of 10, or twice the number of workers if that is
more. (https://keras.io/api/utils/python_utils/#pydataset-class)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from bench.samples import Array
from bench.works import Work, make_batch


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, work: Work, use_multiprocessing: bool) -> None:
        super().__init__(
            workers=work.workers,
            use_multiprocessing=use_multiprocessing,
            max_queue_size=max(10, 2 * work.workers),
        )
        self.work = work

    def __len__(self) -> int:
        return self.work.batches

    def __getitem__(self, position: int) -> tuple[Array]:
        return (make_batch(self.work, position),)


class _Epochs:
    """Iterable that does what `fit` does around each epoch."""

    def __init__(self, work: Work) -> None:
        self.adapter = PyDatasetAdapter(Batches(work, not work.suits_threads))

    def __iter__(self) -> Iterator[Any]:
        self.adapter.on_epoch_begin()
        yield from self.adapter.get_numpy_iterator()
        self.adapter.on_epoch_end()


@contextmanager
def own(work: Work) -> Iterator[Any]:
    yield _Epochs(work)
