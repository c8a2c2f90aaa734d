"""What a user's `PyDataset`, or `Dataset` of torch, derives from in the supervisor: its class needs neither there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_Item_co = TypeVar("_Item_co", covariant=True)


class PyDatasetStandIn:
    """All that a subclass may use of `keras.utils.PyDataset` (and of the older `Sequence`) works here too.

    The behaviour is that of Keras 3.15 (`keras/src/trainers/data_adapters/py_dataset_adapter.py`), with the instance
    attributes of the same names: instances are made in the trainer by the real class, and only their `__dict__` comes.
    A class that uses more of its base than is defined here is not shipped with this stand-in (see `by_value`).
    """

    def __init__(self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10) -> None:
        self._workers = workers
        self._use_multiprocessing = use_multiprocessing
        self._max_queue_size = max_queue_size

    # Class attributes, because a constructor that forgets super().__init__() is common and Keras only warns of it.
    _workers = 1
    _use_multiprocessing = False
    _max_queue_size = 10

    @property
    def workers(self) -> int:
        return self._workers

    @workers.setter
    def workers(self, value: int) -> None:
        self._workers = value

    @property
    def use_multiprocessing(self) -> bool:
        return self._use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        self._use_multiprocessing = value

    @property
    def max_queue_size(self) -> int:
        return self._max_queue_size

    @max_queue_size.setter
    def max_queue_size(self, value: int) -> None:
        self._max_queue_size = value

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        count: int | None = None
        try:
            count = self.num_batches
        except NotImplementedError:
            pass
        for index in itertools.count() if count is None else range(count):
            yield self[index]

    @property
    def num_batches(self) -> int | None:
        # No __len__ of its own: Keras' base has none, and hasattr() is how users ask.
        if hasattr(self, "__len__"):
            return len(self)
        raise NotImplementedError("a PyDataset needs __len__ or the property num_batches")

    def on_epoch_begin(self) -> None:
        """Do nothing, as in Keras."""

    def on_epoch_end(self) -> None:
        """Do nothing, as in Keras."""


class DatasetStandIn(Generic[_Item_co]):
    """What a subclass may use of `torch.utils.data.Dataset` works here too, but for the sum of two of them."""

    def __getitem__(self, index: Any) -> _Item_co:
        raise NotImplementedError("a Dataset needs __getitem__")


# By the framework, as `frameworks` names it, and the name of the class.
_STAND_INS: dict[tuple[str, str], type] = {
    ("TensorFlow", "PyDataset"): PyDatasetStandIn,
    ("TensorFlow", "Sequence"): PyDatasetStandIn,
    ("torch", "Dataset"): DatasetStandIn,
}


def stand_in_of(framework: str, name: str) -> type | None:
    """Return what a framework's class of this name is turned into; None: there is nothing for it."""
    return _STAND_INS.get((framework, name))
