"""What Keras' `ImageDataGenerator.flow...` returns, as a source of batches that does not depend on who makes them.

Such a flow is a `PyDataset` with a state of its own: an order, made again after each epoch, and a count of the batches
that it has made, by which it seeds `numpy.random` for each where it was given a seed. The order is made in the trainer
and sent (`adapters/keras.py`); a batch's count is that of a training in one process. Its lock and its generator stay
behind.
"""

from __future__ import annotations

import threading
from typing import Any

from loaderpool.sources.sequence import BatchSequence

FIRST_BATCH = "_loaderpool_first_batch"  # the attribute by which a flow's copies are told their epoch
_HOMES = frozenset({"keras", "tf_keras", "keras_preprocessing"})
_OWN_TO_A_PROCESS = ("lock", "index_generator")


def is_image_flow(obj: Any) -> bool:
    """Whether it is Keras' image iterator, or of a subclass of it."""
    return any(
        cls.__name__ == "Iterator" and cls.__module__.partition(".")[0] in _HOMES and hasattr(cls, "_set_index_array")
        for cls in type(obj).__mro__
    )


class ImageFlow(BatchSequence):
    """Batch i of a flow's present order, with the random numbers that belong to it."""

    def __getitem__(self, index: int) -> Any:
        flow = self.target
        flow.total_batches_seen = getattr(flow, FIRST_BATCH, 0) + index
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {name: value for name, value in vars(self.target).items() if name not in _OWN_TO_A_PROCESS}
        return _restored, (type(self.target), attributes)


def _restored(cls: type[Any], attributes: dict[str, Any]) -> ImageFlow:
    flow: Any = object.__new__(cls)
    flow.__dict__.update(attributes)
    flow.lock = threading.Lock()
    flow.index_generator = flow._flow_index()
    return ImageFlow(flow)
