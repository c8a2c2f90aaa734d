"""Pickles what our processes say to each other: a class that both have is named, not sent again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from cloudpickle import Pickler, dumps
from cloudpickle import cloudpickle as internals

__all__ = ["send"]


def send(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Anything that cloudpickle can pickle, for `receive`.

    Classes that have gone by value from one process to another (those of `__main__`, or made in a function, or of a
    module that imports TensorFlow) have a number that both know. They go by it, so that a worker looks for instances of
    the very class that its function makes, and imports nothing for it. Beside the number is the class itself, for who
    has not met it: another worker's function may have made it.

    Args:
        value: what.
        buffer_callback: as pickle's own: is given arrays, and keeps those that it returns False for.
    """
    with io.BytesIO() as file:
        _Sender(file, protocol=5, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()


class _Sender(Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def persistent_id(self, part: Any) -> tuple[str, bytes] | None:
        if not isinstance(part, type):
            return None
        number = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(part)
        return None if number is None else (number, _by_itself(part))


def _by_itself(cls: type) -> bytes:
    try:
        return bytes(dumps(cls))
    except Exception:  # `ship` can send what this cannot, and has: whoever asks has the class
        return b""
