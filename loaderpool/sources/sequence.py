"""Keras' sequences of batches, as sources whose items are whole batches."""

from __future__ import annotations

from typing import Any

from loaderpool.errors import SourceError
from loaderpool.sources.indexing import Indexed
from loaderpool.system.interrupts import is_of_a_handler


class BatchSequence:
    """Batches of a Keras `Sequence` or `PyDataset`, by index.

    The sequence is endless if the object does not state a number of batches. Lists of arrays become
    tuples, because Keras uses lists as structure: `[x, y]`, or `[image, text], y` for a model with
    two inputs. A list of numbers is one array, as in all sources.
    """

    def __init__(self, target: Indexed) -> None:
        self.target = target  # the user's object; a copy of it in other processes

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the user's object, for messages (`walk.parts_of`)."""
        return [("", self.target)]

    @property
    def is_endless(self) -> bool:
        """True if any index has a batch: `num_batches` is None, or the object has no length."""
        try:
            return self._num_batches() is None
        except Exception as error:  # not lost: a later call of `len` raises it again
            if is_of_a_handler(error):
                raise
            return False

    def __len__(self) -> int:
        batches = self._num_batches()
        if batches is None:
            raise SourceError(
                f"{type(self.target).__name__} is endless: its num_batches is None, or it has no "
                "length"
            )
        return int(batches)

    def _num_batches(self) -> int | None:
        """Return the number of batches by the rules of Keras, or None for an endless sequence.

        This is `num_batches` if the object has it, otherwise the length.
        """
        target = self.target
        has_length = hasattr(type(target), "__len__")
        try:
            batches = getattr(target, "num_batches", False)  # False: it has none
            return batches if batches is not False else len(target) if has_length else None
        except NotImplementedError as error:
            if has_length:
                name = type(target).__name__
                raise SourceError(
                    f"{name} does not report its number of batches: give it a __len__"
                ) from error
            return None  # the class overrides neither `num_batches` nor `__len__` of its Keras base

    def __getitem__(self, index: int) -> object:
        return _with_tuples_for_lists(self.target[index])


def _with_tuples_for_lists(value: object) -> object:
    if type(value) is tuple:
        return tuple(map(_with_tuples_for_lists, value))
    if type(value) is dict:
        return {key: _with_tuples_for_lists(part) for key, part in value.items()}
    if type(value) is list:
        parts = [_with_tuples_for_lists(part) for part in value]
        if any(getattr(part, "shape", ()) or isinstance(part, (tuple, dict)) for part in parts):
            return tuple(parts)
    return value
