"""Pickles what our processes say to each other: a class that both have is named, and stays as it is.

A value goes by `send` and `receive`, or through the arena by `put_object` and `get_object`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from cloudpickle import Pickler, dumps
from cloudpickle import cloudpickle as internals

from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import Extent


def put_object(arena: Arena, value: Any) -> tuple[Extent, int]:
    """Pickle an object, by `send`, into an extent of its own; returns it and the pickle's length."""
    blob = send(value)
    return arena.put(blob), len(blob)


def get_object(arena: Arena, offset: int, nbytes: int) -> Any:
    """Return the object that `put_object` stored."""
    return receive(arena.map[offset : offset + nbytes])


def send(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle anything that cloudpickle can, for `receive`.

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
    except Exception:  # `ship` can send what this cannot, and has: the process that asks has the class
        return b""


# Told the name of a module that is about to be imported; the import runs in the context that it returns.
Importing = Callable[[str], contextlib.AbstractContextManager[None]]


def unwatched(_module: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of an import that is of no interest."""
    return contextlib.nullcontext()


def receive(pickled: bytes | memoryview, buffers: Sequence[memoryview] = (), importing: Importing = unwatched) -> Any:
    """Unpickle what cloudpickle or `send` has pickled; classes that were here before stay as they are.

    Those are classes that this process made, or has received already. So what a worker sends back is of the trainer's
    own classes, and these keep their methods. `pickle.loads` would put copies into them, with globals of their own.

    Args:
        pickled: what.
        buffers: the contents of the arrays that the pickle does not hold, in their order.
        importing: the context of each import that the pickle itself asks for; those of its modules are inside.
    """
    return _Unpickler(io.BytesIO(pickled), buffers, importing).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[memoryview], importing: Importing) -> None:
        super().__init__(file, buffers=buffers)
        self._importing = importing
        self._known: dict[int, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        with self._importing(module):
            found = super().find_class(module, name)
        if found is internals.subimport:
            return self._subimport
        if found is internals._make_skeleton_class or found is internals._make_skeleton_enum:
            return functools.partial(self._make_class, found)
        return self._set_class_state if found is internals._class_setstate else found

    def _subimport(self, module: str) -> Any:
        with self._importing(module):
            return internals.subimport(module)

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
