"""Sequences of batches as Keras has them, and what its `ImageDataGenerator` flows, as sources of whole elements."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.errors import SourceError

_UNSAID = object()
FIRST_BATCH = "_loaderpool_first_batch"  # the attribute by which a flow's copies are told their epoch
_HOMES = frozenset({"keras", "tf_keras", "keras_preprocessing"})
_OWN_TO_A_PROCESS = ("lock", "index_generator")


class BatchSequence:
    """Batch i of a `Sequence` or `PyDataset`, which is endless where it has no number of batches.

    Lists of arrays are structure, as Keras has it (`[x, y]`, or `[image, text], y` for a model of two inputs): they
    become tuples. A list of numbers is one array, as everywhere in loaderpool.
    """

    def __init__(self, target: Any) -> None:
        self.target = target  # the user's object; in the pool its copy, whose attributes are updated after a hook

    @property
    def is_endless(self) -> bool:
        """Whether there is a batch for any number: `num_batches` is None, or there is no length at all."""
        try:
            return self._num_batches() is None
        except Exception:  # `len` tells
            return False

    def __len__(self) -> int:
        batches = self._num_batches()
        if batches is None:
            raise SourceError(f"{type(self.target).__name__} is endless: its num_batches is None, or it has no length")
        return int(batches)

    def _num_batches(self) -> Any:
        """Return the number of batches as Keras has it: `num_batches` where there is one, else the length."""
        target = self.target
        has_length = hasattr(type(target), "__len__")
        try:
            batches = getattr(target, "num_batches", _UNSAID)
            return batches if batches is not _UNSAID else len(target) if has_length else None
        except NotImplementedError as error:
            if has_length:
                name = type(target).__name__
                raise SourceError(f"{name} does not report its number of batches: give it a __len__") from error
            return None  # Keras' base class, of which neither was overridden

    def __getitem__(self, index: int) -> Any:
        return _with_tuples_for_lists(self.target[index])

    def update(self, changes: Mapping[str, Any]) -> None:
        """Make the target's attributes what a hook made them, past any property or `__setattr__`."""
        target, slots = self.target, _slots(type(self.target))
        for name, key in changes["set"].items():
            if name in slots:
                object.__setattr__(target, name, changes[key])
            else:
                target.__dict__[name] = changes[key]
        for name in changes["deleted"]:
            if name not in slots:
                target.__dict__.pop(name, None)  # it may never have travelled: `__getstate__` left it out
            elif hasattr(target, name):
                object.__delattr__(target, name)


def attributes_of(target: Any) -> dict[str, Any]:
    """Return the attributes by which an object can change, whether they lie in its `__dict__` or in slots."""
    in_slots = {name: getattr(target, name) for name in _slots(type(target)) if hasattr(target, name)}
    return {**getattr(target, "__dict__", {}), **in_slots}


# As pickle finds them: of all base classes, with the names that private ones have in truth.
_slots: Callable[[type], list[str]] = copyreg._slotnames  # type: ignore[attr-defined]


def _with_tuples_for_lists(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_with_tuples_for_lists, value))
    if type(value) is dict:
        return {key: _with_tuples_for_lists(part) for key, part in value.items()}
    if type(value) is list:
        parts = [_with_tuples_for_lists(part) for part in value]
        if any(getattr(part, "shape", ()) or isinstance(part, (tuple, dict)) for part in parts):
            return tuple(parts)
    return value


def is_image_flow(obj: Any) -> bool:
    """Whether it is Keras' image iterator, or of a subclass of it."""
    return any(
        cls.__name__ == "Iterator" and cls.__module__.partition(".")[0] in _HOMES and hasattr(cls, "_set_index_array")
        for cls in type(obj).__mro__
    )


class ImageFlow(BatchSequence):
    """Batch i of a flow's present order, with the random numbers that belong to it.

    A flow has an order, made again after each epoch, and a count of its batches, by which it seeds `numpy.random` for
    each where it was given a seed. The order is made in the trainer and sent (`adapters/sequence_hooks.py`); a batch's
    count is that of a training in one process. Its lock and generator stay there.
    """

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
