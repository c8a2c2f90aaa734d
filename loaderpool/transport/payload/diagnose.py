"""What is said of a payload: which variable of it cannot be pickled, and of which each worker would have a copy."""

from __future__ import annotations

import itertools
import random
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any, cast

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.system.walk import CODE, CONTAINERS, MOST_ITEMS, is_users, parts_of, walk
from loaderpool.transport.payload.pickler import why_unpicklable

# Less than this, pickled, is not worth a warning: as objects it is three to six times as much in each worker.
_MUCH_BYTES = 8 << 20
_TRIED = 64  # elements, of which the size of all is estimated

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
        found = _first_failing([value for _, value in parts])
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


def large_data(
    parts: Mapping[str, Any],
    sources: AbstractSet[int],
    is_by_value: Callable[[Any], bool],
    estimate: Callable[[Sequence[Any]], int],
) -> tuple[str, ...]:
    """A warning for each large list, tuple or dict that functions and objects hold, with the line that mends it.

    Not for `sources`, ids of lists whose items the loader itself reads. `estimate`: bytes that elements take.
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
                line = f"{name} = lp.share({given})" if name not in parts else "pass lp.share(...) of it instead"
                told[id(value)] = (
                    f"{' → '.join(path)} is a {type(value).__name__} of {len(value):,} elements, about {nbytes:,} "
                    f"bytes, and each worker gets its own copy of it. To share one copy: {line}"
                )
    return tuple(filter(None, told.values()))


def copied_generators(parts: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning for each generator of random numbers that functions hold, besides those that are seeded anyway."""
    kinds: tuple[type, ...] = (random.Random,)
    told = {id(random.random.__self__): ""}  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:  # else: NumPy imports it when it is named
        kinds += (np.random.Generator, np.random.RandomState)
        told[id(np.random.rand.__self__)] = ""  # type: ignore[attr-defined]
    roots = {key: parts[key] for key in ("fn", "augment", "batch_fn") if key in parts}  # which may name rng
    for path, name, value, _ in walk(roots, is_users, most_entered=1000):  # 8 to 33 ms for 1,000 objects or more
        if isinstance(value, kinds) and id(value) not in told:
            told[id(value)] = (
                f"{' → '.join(path)} is a random number generator. Each worker gets a copy of it, so workers repeat "
                f"the same numbers. Add a parameter rng to the function, and use it in place of {name}"
            )
    return tuple(filter(None, told.values()))


def _first_failing(values: list[Any]) -> tuple[int, Exception] | None:
    """Return the index of the first value that cannot be pickled by itself, by bisection, and what that raised."""
    low, high = 0, len(values)
    if high == 0 or why_unpicklable(values) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if why_unpicklable(values[low:middle]) is not None:
            high = middle
        else:
            low = middle
    error = why_unpicklable(values[low])
    return None if error is None else (low, error)


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
