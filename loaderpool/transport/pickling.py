"""Pickles what our processes say to each other: a class that both have is named, and stays as it is."""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

from cloudpickle import Pickler, dumps
from cloudpickle import cloudpickle as internals

from loaderpool.system.interrupts import is_of_a_handler

# cloudpickle would make bytes of it, without its format and shape.
VIEW_REFUSED = "cannot pickle a memoryview; convert it with numpy.asarray(...)"


def send(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle anything that cloudpickle can, for `receive`; arrays go to `buffer_callback`, as pickle's own has it.

    Classes that have gone by value from one process to another (those of `__main__`, or made in a function, or of a
    module that imports TensorFlow) go by a number that both know. So a worker looks for instances of the very class
    that its function makes. Beside the number is the class, for a process that has not met it: another worker may have
    made it.
    """
    with io.BytesIO() as file:
        _Sender(file, buffer_callback).dump(value)
        return file.getvalue()


def out_of_band(keep: Callable[[memoryview], object], least_bytes: int) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a buffer callback of pickle: arrays of so many bytes are given to `keep`, and are not in the pickle."""

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        flat = buffer.raw()
        if flat.nbytes < least_bytes:
            return True
        keep(flat)
        return False

    return is_in_band


class _Sender(Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        # A dict: cloudpickle's chain of two dicts makes each object take three times as long.
        self.dispatch_table = {**copyreg.dispatch_table, **Pickler._dispatch_table}
        super().__init__(file, 5, buffer_callback)
        self._usual: set[type] = set()  # whose instances pickle itself can do: asked once, not for each of them

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in self._usual:
            return NotImplemented
        if kind is memoryview:
            raise TypeError(VIEW_REFUSED)
        if issubclass(kind, type):
            number = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if number is not None:
                return _known_class, (number, _by_itself(obj))
        elif kind is not types.FunctionType:
            self._usual.add(kind)
        return super().reducer_override(obj)


def _by_itself(cls: type) -> bytes:
    try:
        return bytes(dumps(cls))
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return b""  # `ship` can send what this cannot, and has: the process that asks has the class


def _known_class(number: str, pickled: bytes) -> Any:
    known = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    return receive(pickled) if known is None else known


def receive(pickled: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Unpickle what cloudpickle or `send` has pickled; classes that were here before stay as they are.

    So what a worker sends back is of the trainer's own classes, and these keep their methods. `pickle.loads` would put
    copies into them, with globals of their own. `buffers` are the arrays that the pickle does not hold, in their order.
    """
    pickled = bytes(pickled)
    if b"cloudpickle" not in pickled:  # a stream's items, say: in C alone
        return pickle.loads(pickled, buffers=buffers)
    return _Unpickler(io.BytesIO(pickled), buffers=buffers).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._known: dict[int, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is internals._make_skeleton_class or found is internals._make_skeleton_enum:
            return functools.partial(self._make_class, found)
        return self._set_class_state if found is internals._class_setstate else found

    def _make_class(self, make: Callable[..., type], *arguments: Any) -> type:
        tracker_id = arguments[-2]  # the last one is cloudpickle's reserve, in both functions
        known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if known is None:
            return make(*arguments)
        self._known[id(known)] = known
        return known

    def _set_class_state(self, cls: type, state: Any) -> Any:
        return cls if id(cls) in self._known else internals._class_setstate(cls, state)
