"""What is said of a payload that cannot be pickled: which variable it is, and what to do."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.walk import CODE, CONTAINERS, parts_of
from loaderpool.transport.payload.in_memory import CURE, InMemoryError
from loaderpool.transport.payload.pickler import PayloadPickler, is_multiprocessing
from loaderpool.transport.pickling import out_of_band

# Modules of `multiprocessing` with objects that a process can only get from the one that starts it.
_SHARED_IN = frozenset({"connection", "heap", "queues", "sharedctypes", "synchronize"})
# A structure nested this deep has failed by its depth; its levels would not help to find it.
_MOST_STEPS = 12


def describe_offender(payload: dict[str, object], error: Exception) -> str:
    """Return the message: the payload's key, the path from there to the offending object, its type, the reason, advice.

    Runs in: the trainer, never on the good path: whole branches are pickled again, and code of the user's with them
    (`__reduce__`, `__getstate__`). `error` is what pickling the payload raised.
    """
    path: list[str] = []
    offender, parts = cast(Any, payload), list(payload.items())
    while len(path) < _MOST_STEPS and (found := _first_unpicklable(value for _, value in parts)) is not None:
        label, offender = parts[found[0]]
        error, parts = found[1], _parts(offender)
        path.append(label)
    from loaderpool.transport.reports import shown_name  # which few payloads need

    where = " → ".join(path) or "the payload"
    what = f"{where}, of type {shown_name(type(offender))}. Pickling it raised {type(error).__name__}: {error}"
    return f"Cannot send this to the workers: {what}. {_advice(offender, path, error)}"


def _first_unpicklable(values: Iterable[object]) -> tuple[int, Exception] | None:
    """Return which of these is the first that cannot be pickled by itself, and what that raised.

    Nothing is kept of them and no array is copied.
    """
    pickler = PayloadPickler(_NullFile(), out_of_band(lambda _: None, 0))
    for at, value in enumerate(values):
        try:
            pickler.dump(value)
        except MemoryError:
            raise
        except Exception as error:
            if is_of_a_handler(error):
                raise
            return at, error
        pickler.clear_memo()
    return None


class _NullFile:
    """A file for picklers that keeps nothing."""

    write = len


def _parts(obj: Any) -> list[tuple[str, Any]]:
    """What an object is pickled from, by what each part is called; nothing where that is the affair of its own code."""
    kind = type(obj)
    if isinstance(obj, np.ndarray):
        items = obj.ravel().tolist() if obj.dtype.hasobject else []
        return [(f"item {at} of the array", item) for at, item in enumerate(items)]
    if isinstance(obj, (type, types.FunctionType)):
        is_closed = internals._should_pickle_by_reference(obj)
    elif issubclass(kind, (*CODE, dict, *CONTAINERS)) or str(kind.__module__).startswith("loaderpool.sources."):
        is_closed = False
    else:
        own = ("__reduce_ex__", "__reduce__", "__getstate__")
        is_closed = any(getattr(kind, name, None) is not getattr(object, name, None) for name in own)
    return [] if is_closed else [(part.label, part.value) for part in parts_of(obj)]


def _advice(offender: Any, path: list[str], error: Exception) -> str:
    if isinstance(error, InMemoryError):
        return CURE
    if isinstance(offender, types.GeneratorType):
        return (
            "A generator cannot be copied. Pass the generator function to Loader.from_generator, or pass a list of "
            "its items."
        )
    if path[:1] == ["make_generator"]:
        return "Open or create it in make_generator, so that each replica of the generator has its own."
    if "h5py" in {cls.__module__.partition(".")[0] for cls in type(offender).__mro__}:
        return (
            "An open HDF5 file cannot be sent to the workers. As the source, pass loaderpool.HDF5(path, key), which "
            "each worker opens itself. In a function, open the file in setup=, which runs once in each worker."
        )
    if _is_shared(offender):
        return (
            "Only processes that multiprocessing starts can share it. To share locks, queues and values with workers, "
            "create them with manager = multiprocessing.Manager(), as manager.Lock() or manager.Value('i', 0). Put "
            "shared arrays into a multiprocessing.shared_memory.SharedMemory or a numpy.memmap. A value that changes "
            "between epochs can be a plain attribute, because each epoch uses your objects as they are when it begins."
        )
    if path[-1:] and path[-1].startswith("attribute ._authkey "):
        return "Capture its proxies, such as values = manager.dict(), and not the manager itself."
    return "Open or create it in setup=, which runs once in each worker, or inside the function."


def _is_shared(offender: Any) -> bool:
    """Return whether it is an object of `multiprocessing` that its children share and their forks inherit."""
    kind = type(offender)
    wrapper = type(getattr(offender, "_wrapper", None))  # of a RawValue, the type of which is one of ctypes
    return any(is_multiprocessing(each) and each.__module__.partition(".")[2] in _SHARED_IN for each in (kind, wrapper))
