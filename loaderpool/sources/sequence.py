"""A Keras-like sequence of batches as a source of whole elements."""

from __future__ import annotations

from typing import Any

from loaderpool.errors import SourceError

__all__ = ["BatchSequence"]


class BatchSequence:
    """Batch i of a `Sequence` or `PyDataset`; `num_batches` is honoured where Keras 3 has it.

    Attributes:
        target: the user's object; in the pool its copy, whose attributes are updated after a hook.

    Raises:
        SourceError: the sequence has no length (an endless PyDataset).
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __len__(self) -> int:
        length = getattr(self.target, "num_batches", None)
        if length is None:
            if not hasattr(type(self.target), "__len__"):
                raise SourceError(
                    f"{type(self.target).__name__} has no __len__ (and num_batches is None): how many batches?"
                )
            try:
                length = len(self.target)
            except NotImplementedError as error:
                raise SourceError(f"len() of {type(self.target).__name__} is not implemented") from error
        return int(length)

    def __getitem__(self, index: int) -> Any:
        return self.target[index]
