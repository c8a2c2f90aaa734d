"""Pickles the items of a stream, batch by batch, for the workers that will make the batches.

Runs in: wherever a stream is read: a thread of the trainer, or a process of its own.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from loaderpool.errors import UnpicklableError
from loaderpool.memory.feed_table import Pickling

__all__ = ["Frame", "frames"]

_NOT_PLAIN = (type, types.FunctionType, types.ModuleType)


class Frame(NamedTuple):
    """The items of one batch, pickled."""

    first: int  # position of the first one
    rows: int
    pickling: int
    pickled: bytes


def frames(batches: Iterator[tuple[int, list[Any]]]) -> Iterator[Frame]:
    """A frame for each batch of `sources.stream.read_batches`.

    Raises:
        UnpicklableError: an item cannot travel.
        Exception: whatever reading the stream raises.
    """
    for first, items in batches:
        yield Frame(first, len(items), *_pickled(items, first))


def _pickled(items: list[Any], first: int) -> tuple[Pickling, bytes]:
    try:
        with io.BytesIO() as file:
            _PlainPickler(file, protocol=5).dump(items)
            return Pickling.PLAIN, file.getvalue()
    except Exception:  # of a class that this process alone has, say; or it cannot be pickled at all
        pass
    from loaderpool.sending import send

    try:
        return Pickling.OURS, send(items)
    except Exception as error:
        raise _unpicklable(items, first) or error from error


class _NotPlainError(Exception):
    """Something that only means the same in this process."""


class _PlainPickler(pickle.Pickler):
    """Pickles what any process can read, in C; `send` can pickle more and takes ten times as long.

    Raises:
        _NotPlainError: there is more.
    """

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._usual: set[type] = set()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind not in self._usual:
            if issubclass(kind, _NOT_PLAIN):
                if not _is_importable(obj):
                    raise _NotPlainError
                return NotImplemented
            if not _is_importable(kind):
                raise _NotPlainError
            self._usual.add(kind)
        return NotImplemented


def _is_importable(named: Any) -> bool:
    """Whether every process finds it by its name, as the same thing."""
    from cloudpickle import cloudpickle as internals

    if isinstance(named, types.ModuleType) or getattr(named, "__module__", None) in (None, "__main__"):
        return False
    return not isinstance(named, type) or internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(named) is None


def _unpicklable(items: list[Any], first: int) -> UnpicklableError | None:
    """The error that names the item; None where each of them alone can be pickled."""
    from loaderpool.sending import send

    for position, item in enumerate(items, first):
        try:
            send(item)
        except Exception as error:
            return UnpicklableError(
                f"the item at position {position} of the source's stream, a {type(item).__name__}, cannot travel to "
                f"the workers: {type(error).__name__}: {error}"
            )
    return None
