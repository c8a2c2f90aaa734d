"""What is said of a payload: which variable of it cannot be pickled, and which large lists each worker would copy."""

from __future__ import annotations

import copyreg
import functools
import itertools
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.system.walk import MOST_ITEMS, is_users, parts_of, walk

# Less than this, pickled, is not worth a warning: as objects it is three to six times as much in each worker.
_MUCH_BYTES = 8 << 20
_TRIED = 64  # elements, of which the size of all is estimated

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


def large_data(
    parts: Mapping[str, Any],
    sources: AbstractSet[int],
    is_by_value: Callable[[Any], bool],
    estimate: Callable[[Sequence[Any]], int],
) -> tuple[str, ...]:
    """A warning for each large list, tuple or dict that functions and objects hold, with the line that mends it.

    Args:
        parts: what travels, by the names that the user knows.
        sources: ids of lists that are not meant: of items that the loader itself reads.
        is_by_value: whether a function or class travels itself.
        estimate: about how many bytes elements take, pickled.
    """

    def enters(value: Any) -> bool:
        return is_by_value(value) if issubclass(type(value), (type, types.FunctionType)) else is_users(value)

    told = dict.fromkeys({*sources, id(parts.get("shards"))}, "")
    for path, name, value, _ in walk(parts, enters):
        if issubclass(type(value), (list, tuple, dict)) and len(value) > MOST_ITEMS and id(value) not in told:
            step = len(value) // _TRIED
            tried = list(itertools.islice(value.items() if isinstance(value, dict) else value, 0, None, step))
            nbytes = estimate(tried) * len(value) // len(tried)
            told[id(value)] = ""
            if nbytes >= _MUCH_BYTES:
                given = f"np.array({name})" if {int} >= set(map(type, tried)) else name
                line = f"{name} = lp.share({given})" if name not in parts else "put lp.share(...) of it in its place"
                told[id(value)] = (
                    f"{' → '.join(path)} is a {type(value).__name__} of {len(value):,} elements, about {nbytes:,} "
                    f"bytes, of which each worker comes to a copy of its own. To have one for all of them: {line}"
                )
    return tuple(filter(None, told.values()))


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
    if not _goes_by_parts(obj):
        return _labelled(_parts_of_instance(obj))
    if isinstance(obj, (type, types.FunctionType)) and internals._should_pickle_by_reference(obj):
        return _labelled([])
    return _labelled([(part.label, part.value) for part in parts_of(obj)])


def _goes_by_parts(obj: Any) -> bool:
    kinds = (type, types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)
    return isinstance(obj, kinds) or hasattr(obj, "cache_parameters")


def _labelled(pairs: list[tuple[str, Any]]) -> _Parts:
    return _Parts([value for _, value in pairs], lambda at: pairs[at][0])


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
