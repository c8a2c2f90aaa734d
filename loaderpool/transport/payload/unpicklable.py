"""Which variable of a payload cannot be pickled, found after pickling has failed: the parts are tried one by one."""

from __future__ import annotations

import copyreg
import functools
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as internals

WhyUnpicklable = Callable[[object], "Exception | None"]

# A structure nested this deep has failed by its depth; its levels would not help to find it.
_MOST_STEPS = 40


@dataclass(frozen=True)
class _Parts:
    """What an object is pickled from, in the order of pickling."""

    values: list[Any]
    label: Callable[[int], str]


def describe_offender(payload: dict[str, object], error: Exception, why: WhyUnpicklable) -> str:
    """Return the message: the payload's key, the path from there to the offending object, its type, the reason, advice.

    Runs in: the trainer, never on the good path: whole branches are pickled again. Code of the user's that pickling
    runs (`__reduce__`, `__getstate__`) is run again.

    Args:
        payload: what could not be pickled.
        error: what pickling it raised.
        why: tries to pickle an object; what that raised, or None.
    """
    path: list[str] = []
    offender: Any = payload
    while len(path) < _MOST_STEPS:
        parts = _parts(offender)
        found = _first_failing(parts.values, why)
        if found is None:
            break
        at, reason = found
        if path and _is_too_deep(reason) and type(parts.values[at]) is type(offender):
            break  # the next link of a chain
        path.append(parts.label(at) if path else list(payload)[at])
        offender, error = parts.values[at], reason
    where = " → ".join(path) or "the payload"
    what = f"{where}, of type {_name(type(offender))}"
    return f"Cannot send this to the workers: {what}. {_reason(error)} {_advice(offender, error, path)}"


def describe_shared_file(where: str, handle: Any) -> str:
    """Return the same message for a file that a module opens when it is imported.

    Args:
        where: the way to it.
        handle: itself.
    """
    return (
        f"Cannot send this to the workers: {where}, of type {_name(type(handle))}. Its module opens it when it is "
        "imported, which is before the workers are forked: they would all read through that one handle. "
        f"{_advice_to_open(where)}"
    )


def _first_failing(values: list[Any], why: WhyUnpicklable) -> tuple[int, Exception] | None:
    """Return the index of the first value that cannot be pickled by itself, by bisection, and what that raised."""
    low, high = 0, len(values)
    if high == 0 or why(values) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if why(values[low:middle]) is not None:
            high = middle
        else:
            low = middle
    error = why(values[low])
    return None if error is None else (low, error)


def _parts(obj: Any) -> _Parts:
    kind = type(obj)
    if kind in (list, tuple):
        return _Parts(list(obj), lambda at: f"item {at} of the {kind.__name__}")
    if kind in (set, frozenset):
        return _Parts(list(obj), lambda at: f"a member of the {kind.__name__}")
    if kind is dict:
        keys = list(obj)
        return _Parts(
            [*obj.values(), *keys],
            lambda at: f"item {keys[at]!r:.80} of the dict" if at < len(keys) else "a key of the dict",
        )
    if isinstance(obj, np.ndarray) and obj.dtype.hasobject:
        return _Parts(obj.ravel().tolist(), lambda at: f"item {at} of the array")
    if isinstance(obj, types.FunctionType):
        return _labelled(_parts_of_function(obj))
    if isinstance(obj, types.MethodType):
        name = obj.__qualname__ if hasattr(obj, "__qualname__") else "?"
        return _labelled([(f"the object of the method {name}", obj.__self__), (f"the method {name}", obj.__func__)])
    if isinstance(obj, functools.partial):
        return _labelled(_parts_of_partial(obj))
    if isinstance(obj, (staticmethod, classmethod)):
        return _labelled([(f"the function {obj.__func__.__qualname__}", obj.__func__)])
    if isinstance(obj, property):
        return _labelled([("its function", each) for each in (obj.fget, obj.fset, obj.fdel)])
    if isinstance(obj, type):
        return _labelled(_parts_of_class(obj))
    if hasattr(obj, "__wrapped__") and hasattr(obj, "cache_parameters"):
        return _labelled([(f"the cached function {obj.__wrapped__.__qualname__}", obj.__wrapped__)])
    return _labelled(_parts_of_instance(obj))


def _labelled(pairs: list[tuple[str, Any]]) -> _Parts:
    return _Parts([value for _, value in pairs], lambda at: pairs[at][0])


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    if internals._should_pickle_by_reference(function):
        return []
    name = function.__qualname__
    parts = []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts.append((f"closure variable {variable!r} of function {name}", cell.cell_contents))
        except ValueError:  # not set yet
            pass
    for variable in internals._extract_code_globals(function.__code__):
        if variable in function.__globals__:
            parts.append((f"global {variable!r} used by {name}", function.__globals__[variable]))
    defaults = function.__defaults__ or ()
    with_default = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :] if defaults else ()
    parts += [(f"default of {key!r} of {name}", value) for key, value in zip(with_default, defaults, strict=True)]
    parts += [(f"default of {key!r} of {name}", value) for key, value in (function.__kwdefaults__ or {}).items()]
    parts += [(f"attribute .{key} of function {name}", value) for key, value in vars(function).items()]
    return parts


def _parts_of_partial(partial: functools.partial[Any]) -> list[tuple[str, Any]]:
    return [
        ("the function of the partial", partial.func),
        *((f"argument {at} of the partial", value) for at, value in enumerate(partial.args)),
        *((f"argument {key!r} of the partial", value) for key, value in partial.keywords.items()),
    ]


def _parts_of_class(cls: type) -> list[tuple[str, Any]]:
    if internals._should_pickle_by_reference(cls):
        return []
    skipped = ("__dict__", "__weakref__", "_abc_impl", "__module__", "__doc__")
    attributes = [(f"attribute .{key} of class {cls.__qualname__}", value) for key, value in vars(cls).items()]
    return [
        *((f"base of class {cls.__qualname__}", base) for base in cls.__bases__),
        *(pair for pair, key in zip(attributes, vars(cls), strict=True) if key not in skipped),
    ]


def _parts_of_instance(obj: Any) -> list[tuple[str, Any]]:
    name = type(obj).__qualname__
    try:
        reducer = cloudpickle.Pickler.dispatch_table.get(type(obj)) or copyreg.dispatch_table.get(type(obj))
        reduced = reducer(obj) if reducer is not None else obj.__reduce_ex__(5)
    except Exception:
        return []  # so it is the offender itself
    if not isinstance(reduced, tuple):
        return []
    function, arguments, state, items, pairs = (*reduced, None, None, None, None)[:5]
    parts = list(_attributes(name, state))
    parts += [(f"item {at} of the {name}", item) for at, item in enumerate(items or ())]
    parts += [(f"item {key!r:.80} of the {name}", value) for key, value in pairs or ()]
    parts += [(f"class {name}" if each is type(obj) else f"part of the {name}", each) for each in arguments or ()]
    parts.append((f"what rebuilds the {name}", function))
    return parts


def _attributes(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """Return attributes, in both forms that Python has: a dict, or a dict (or None) with one of the slots beside it."""
    if isinstance(state, tuple) and len(state) == 2 and all(each is None or isinstance(each, dict) for each in state):
        for each in state:
            yield from _attributes(name, each)
    elif isinstance(state, dict):
        for key, value in state.items():
            yield f"attribute .{key} of {name}", value
    elif state is not None:
        yield f"the state of the {name}", state


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


def _advice_to_open(where: str) -> str:
    if where.startswith("make_generator"):
        return "Open or create it in make_generator: each copy of the generator then has its own."
    return "Open or create it in setup=, which runs once in each worker, or inside the function."


def _advice(offender: Any, error: Exception, path: list[str]) -> str:
    if _is_too_deep(error):
        return "Hold the data in a flat list or in arrays, with indices instead of references from one to the next."
    if isinstance(offender, types.GeneratorType):
        return (
            "A generator is in the middle of its work and cannot be copied: pass the generator function, or a list of "
            "its items."
        )
    if path and path[0] == "make_generator":
        return _advice_to_open(path[0])
    packages = {cls.__module__.partition(".")[0] for cls in type(offender).__mro__}
    if "h5py" in packages:
        return (
            "What was opened before a fork must not be read behind it. As the source, give "
            f"loaderpool.HDF5({_hdf5_place(offender)}): each worker then opens the file itself. In a function, open "
            "the file in setup=, which runs once in each worker."
        )
    if "tqdm" in packages:
        return "Leave it out, and show progress where the batches are used: for batch in tqdm(loader)."
    if "sqlite3" in packages:
        return "A connection must not cross a fork: open it in setup=, which runs once in each worker."
    return _advice_to_open(path[0] if path else "")


def _hdf5_place(offender: Any) -> str:
    """Path and name of an h5py object as they would be written, as far as it still knows them."""
    try:
        name = offender.name.lstrip("/") or "key"
        return f"{offender.file.filename!r}, {name!r}"
    except Exception:  # closed
        return "path, key"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
