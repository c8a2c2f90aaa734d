"""What is said of a payload that cannot be pickled: which variable it is, and what to do."""

from __future__ import annotations

import traceback
import types
from pathlib import PurePath
from typing import Any, cast

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.system.walk import CODE, CONTAINERS, parts_of
from loaderpool.transport.payload.pickler import first_unpicklable

# A structure nested this deep has failed by its depth; its levels would not help to find it.
_MOST_STEPS = 40


def describe_offender(payload: dict[str, object], error: Exception) -> str:
    """Return the message: the payload's key, the path from there to the offending object, its type, the reason, advice.

    Runs in: the trainer, never on the good path: whole branches are pickled again, and code of the user's with them
    (`__reduce__`, `__getstate__`). `error` is what pickling the payload raised.
    """
    path: list[str] = []
    offender, parts = cast(Any, payload), list(payload.items())
    while len(path) < _MOST_STEPS:
        found = first_unpicklable(value for _, value in parts)
        if found is None:
            break
        (label, value), reason = parts[found[0]], found[1]
        if path and _is_too_deep(reason) and type(value) is type(offender):
            break  # the next link of a chain
        path.append(label)
        offender, error, parts = value, reason, _parts(value)
    from loaderpool.transport.reports import shown_name  # which few payloads need

    where = " → ".join(path) or "the payload"
    what = f"{where}, of type {shown_name(type(offender))}"
    return f"Cannot send this to the workers: {what}. {_reason(error)} {_advice(offender, error, path)}"


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


def _is_too_deep(error: BaseException | None) -> bool:
    """A RecursionError, which cloudpickle puts into a PicklingError."""
    return isinstance(error, RecursionError) or (error is not None and isinstance(error.__cause__, RecursionError))


def _reason(error: Exception) -> str:
    if _is_too_deep(error):
        return "It is nested too deeply to be pickled (RecursionError)."
    text = f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ is not None else None
    if frame is not None and frame.name.startswith("__"):  # __reduce__, __getstate__, __reduce_ex__ of the user's
        return f"Its {frame.name} raised {text} ({PurePath(frame.filename).name}, line {frame.lineno})."
    return f"Pickling it raised {text}."


def _advice(offender: Any, error: Exception, path: list[str]) -> str:
    if _is_too_deep(error):
        return "Store the data in a flat list or in arrays, with indices instead of references between objects."
    if isinstance(offender, types.GeneratorType):
        return (
            "A generator cannot be copied. Pass the generator function to Loader.from_generator, or pass a list of "
            "its items."
        )
    if path[:1] == ["make_generator"]:
        return "Open or create it in make_generator, so that each replica of the generator has its own."
    packages = {cls.__module__.partition(".")[0] for cls in type(offender).__mro__}
    if "h5py" in packages:
        return (
            "An open HDF5 file cannot be sent to the workers. As the source, pass "
            f"loaderpool.HDF5({_hdf5_place(offender)}), which each worker opens itself. In a function, open "
            "the file in setup=, which runs once in each worker."
        )
    if "tqdm" in packages:
        return "Remove it, and show progress in the training loop: for batch in tqdm(loader)."
    if "sqlite3" in packages:
        return "A connection cannot be shared by processes. Open it in setup=, which runs once in each worker."
    return "Open or create it in setup=, which runs once in each worker, or inside the function."


def _hdf5_place(offender: Any) -> str:
    """Path and name of an h5py object as they would be written, as far as it still knows them."""
    try:
        return f"{offender.file.filename!r}, {offender.name.lstrip('/') or 'key'!r}"
    except Exception:  # closed
        return "path, key"
