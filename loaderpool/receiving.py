"""Reads what another of our processes pickled, without touching the classes that this one has."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from cloudpickle import cloudpickle as internals

__all__ = ["receive"]


def receive(pickled: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Anything that cloudpickle or `send` has pickled; classes that were here before stay as they are.

    Those are classes that this process made, or has received already. So what a worker sends back is of the trainer's
    own classes, and these keep their methods. `pickle.loads` would put copies into them, with globals of their own.
    """
    return _Unpickler(io.BytesIO(pickled), buffers=buffers).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, *, buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._known: dict[int, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is internals._make_skeleton_class or found is internals._make_skeleton_enum:
            return functools.partial(self._make_class, found)
        return self._set_class_state if found is internals._class_setstate else found

    def persistent_load(self, name: tuple[str, bytes]) -> Any:
        number, pickled = name
        known = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
        return receive(pickled) if known is None else known

    def _make_class(self, make: Callable[..., type], *arguments: Any) -> type:
        tracker_id = arguments[-2]  # the last one is cloudpickle's reserve, in both functions
        known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if known is None:
            return make(*arguments)
        self._known[id(known)] = known
        return known

    def _set_class_state(self, cls: type, state: Any) -> Any:
        return cls if id(cls) in self._known else internals._class_setstate(cls, state)
