"""What a loader's code refers to: which names stand for something else by now, and of what each worker has a copy.

Workers have the state of the moment at which it was pickled. Variables of functions that travel by value are compared,
and the code of functions; attributes of objects, and what lists and dicts hold, are not looked at. Nothing is kept
alive for it. Runs in: the trainer. Nothing of the user's is called.
"""

from __future__ import annotations

import contextlib
import dis
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

import numpy as np

from loaderpool.errors import brief, warn
from loaderpool.system.walk import is_found_by_name, is_users, parts_of, walk
from loaderpool.transport.payload.pickler import FrameworkImports

CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})  # of a payload, in the workers
# Names that are compared at each pass, a microsecond each. Fewer: a change may be missed. More: it takes longer.
_MOST_NAMES = 400
_SIMPLE = (str, bytes, int, float, complex, range, type(None), np.generic, np.dtype, PurePath)
# A longer text is compared by its identity alone: a copy of it is not held for this.
_MOST_TEXT = 1000
_MOST_CHANGES = 5  # that one warning names
_MOST_SHOWN = 40  # characters of a value
_MISSING: Any = object()
_STORES = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"})


class _KnownValue:
    """What a name stood for: told by its id, and by a weak reference where there can be one."""

    def __init__(self, value: Any) -> None:
        self._ident, self._code = id(value), _code_of(value)
        self._simple = value if _is_simple(value) else _MISSING
        # A list has no weak references: another one at the very place of one that is gone is taken for it.
        self._reference = None
        if self._simple is _MISSING:
            with contextlib.suppress(TypeError):
                self._reference = weakref.ref(value)

    def is_same(self, value: Any) -> bool:
        """Whether it is the same, or as good as that: an equal number, a function with the same code."""
        if self._code is not None and (code := _code_of(value)) is not None:
            return code == self._code
        if id(value) == self._ident and (self._reference is None or self._reference() is value):
            return True
        if self._simple is _MISSING or type(value) is not type(self._simple) or not _is_simple(value):
            return False
        return bool(self._simple == value or repr(self._simple) == repr(value))  # nan

    def become(self, value: Any) -> str:
        if self._simple is not _MISSING and _is_simple(value):
            return f"was {brief(self._simple, _MOST_SHOWN)}, is {brief(value, _MOST_SHOWN)}"
        is_code = issubclass(type(value), (types.FunctionType, type))
        return "was defined again" if is_code else f"is now another {type(value).__qualname__}"


class CapturedState:
    """What is compared for one loader: its `parts`, by argument; `without`: the frameworks of its shipment."""

    def __init__(self, parts: Mapping[str, Any], without: AbstractSet[str]) -> None:
        imports = FrameworkImports(without)

        def travels(value: Any) -> bool:
            """Whether a value is the user's and its state is in the pickle: not where it is found by its name."""
            if not issubclass(type(value), (types.FunctionType, type)):
                return is_users(value)
            return not is_found_by_name(value) or bool(value.__module__ and imports.of(value.__module__))

        # The functions, and what each of their variables stood for.
        self._known: weakref.WeakKeyDictionary[types.FunctionType, dict[str, _KnownValue]]
        self._known, count = weakref.WeakKeyDictionary(), 0
        parts = {name: part for name, part in parts.items() if name in CALLED | {"source"}}
        for found in walk(parts, travels):
            if type(found.value) is types.FunctionType and travels(found.value):
                known = {name: _KnownValue(each) for name, each in _names(found.value)}
                self._known[found.value] = known
                count += len(known)
                if count >= _MOST_NAMES:
                    break
        self._roots = {name: part for name, part in parts.items() if type(part) is types.FunctionType}
        _used.update(self._roots.values())
        self._told = set[str]()

    def warn(self) -> None:
        """Warn, in the line of the user's that has led here, of what has changed; of each once.

        Raises:
            LoaderpoolWarning: where a filter makes an error of it.
        """
        changed = dict(self._changed())
        if not changed:
            return
        self._told.update(changed)
        lines = [f"{name}: {what}" for name, what in changed.items()]
        more = [f"and {len(lines) - _MOST_CHANGES} more"] if len(lines) > _MOST_CHANGES else []
        shown = "\n  ".join([*lines[:_MOST_CHANGES], *more])
        again = ((argument, part.__qualname__) for argument, part in self._roots.items())
        fix = ", ".join(f"{argument}={name}" for argument, name in again if name in changed)
        warn(
            f"These values changed after the loader was created; its workers still use the old ones:\n  {shown}\n"
            f"To use the new values everywhere: loader = loader.replace({fix})"
        )

    def _changed(self) -> Iterator[tuple[str, str]]:
        """Names that now stand for something else, and what has become of each."""
        for function, known in list(self._known.items()):
            for name, value in _names(function):
                if name not in known or name in self._told or known[name].is_same(value):
                    continue
                if name == function.__qualname__ and type(value) is types.FunctionType and value in _used:
                    continue  # functions of two loaders may have one name
                if not any(_stores(each.__code__, name) for each in self._known):  # as for a cache
                    yield name, known[name].become(value)


_used: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()  # functions that were given to loaders


def _names(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables of a function, and its own name in a script or notebook, where it may be defined again."""
    for part in parts_of(function):
        if part.name.isidentifier() and type(part.value) is not types.ModuleType:
            yield part.name, part.value
    name = function.__qualname__
    if function.__module__ == "__main__" and name in function.__globals__:
        yield name, function.__globals__[name]


def _stores(code: types.CodeType, name: str) -> bool:
    """Whether code, or a function inside it, gives a variable another value."""
    if any(each.opname in _STORES and each.argval == name for each in dis.get_instructions(code)):
        return True
    return any(_stores(each, name) for each in code.co_consts if isinstance(each, types.CodeType))


def _code_of(value: Any) -> types.CodeType | None:
    return value.__code__ if type(value) is types.FunctionType else None


def _is_simple(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= 20 and all(map(_is_simple, value))
    return issubclass(type(value), _SIMPLE) and not (type(value) in (str, bytes) and len(value) > _MOST_TEXT)


# ---- what each worker would have a copy of ----

# Elements of a list or dict. Fewer: a warning where a copy in each worker is a few MB; more: none where it is much.
_MANY = 200_000


def large_data(
    parts: Mapping[str, Any], sources: AbstractSet[int], is_by_value: Callable[[Any], bool]
) -> tuple[str, ...]:
    """A warning for each large list, tuple or dict that functions and objects hold, with the line that mends it.

    Not for `sources`, ids of lists whose items the loader itself reads.
    """

    def enters(value: Any) -> bool:
        return is_by_value(value) if issubclass(type(value), (type, types.FunctionType)) else is_users(value)

    told = dict.fromkeys({*sources, id(parts.get("shards"))}, "")
    for found in walk(parts, enters):
        value, name = found.value, found.name
        if issubclass(type(value), (list, tuple, dict)) and len(value) >= _MANY and id(value) not in told:
            line = f"{name} = lp.share({name})" if name not in parts else "pass lp.share(...) of it instead"
            told[id(value)] = (
                f"{' → '.join(found.path)} is a {type(value).__name__} of {len(value):,} elements, and each worker "
                f"gets its own copy of it. To share one copy: {line}"
            )
    return tuple(filter(None, told.values()))
