"""What a loader's code refers to: which names stand for something else by now, and of what each worker has a copy.

Workers have the state of the moment at which it was pickled. Variables of functions that travel by value are compared,
attributes of objects that these and the source lead to, and the code of functions; what lists and dicts hold is not
looked at. Nothing is kept alive for it. Runs in: the trainer. Nothing of the user's is called.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import brief, warn
from loaderpool.system.walk import MOST_ITEMS, is_users, parts_of, walk
from loaderpool.transport.payload.pickler import FrameworkImports, is_found_by_name

CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})  # of a payload, in the workers
# Names that are compared at each pass, a microsecond each. Fewer: a change may be missed. More: it takes longer.
_MOST_NAMES = 400
_SIMPLE = (str, bytes, int, float, complex, range, type(None), np.generic, np.dtype, PurePath)
# A longer text is compared by its identity alone: a copy of it is not held for this.
_MOST_TEXT = 1000
_MOST_CHANGES = 5  # that one warning names
_MOST_SHOWN = 40  # characters of a value
_MISSING: Any = object()
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL"})
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})


class Change(NamedTuple):
    """A name that stands for something else than when the loader was made."""

    name: str  # as it would be written: "size", or "dataset.k"
    what: str  # has become of it
    root: str = ""  # the loader's argument that was defined again under the same name

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class _KnownValue:
    """What a name stood for: told by its id, and by a weak reference where there can be one."""

    def __init__(self, value: Any) -> None:
        self.was_told = self.is_ignored = False
        self._ident, self._code = id(value), _code_of(value)
        self._simple = value if _is_simple(value) else _MISSING
        # A list has no weak references: another one at the very place of one that is gone is taken for it.
        self._reference = None
        if self._simple is _MISSING:
            with contextlib.suppress(TypeError):
                self._reference = weakref.ref(value)

    @property
    def is_new(self) -> bool:
        return self._ident == id(_MISSING)

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
        if self.is_new:
            return f"was set to {brief(value, _MOST_SHOWN)}" if _is_simple(value) else "was set"
        if self._simple is not _MISSING and _is_simple(value):
            return f"was {brief(self._simple, _MOST_SHOWN)}, is {brief(value, _MOST_SHOWN)}"
        if _is_code(value):
            return "was defined again"
        return f"is now another {type(value).__qualname__}"


class CapturedState:
    """What is compared for one loader: its `parts`, by argument; `without`: the frameworks of its shipment."""

    def __init__(self, parts: Mapping[str, Any], without: AbstractSet[str]) -> None:
        self._parts = {name: part for name, part in parts.items() if name in CALLED | {"source"}}
        self._imports = FrameworkImports(without)
        # Functions, classes, and objects with attributes: a weak reference, what each is called, what it has by name.
        self._holders: list[tuple[Callable[[], Any], str, dict[str, _KnownValue]]] = []
        count, seen = 0, set[int]()
        for found in walk(self._parts, self._travels):
            value = found.value
            if id(value) in seen or not self._has_names(value):
                continue
            seen.add(id(value))
            known = {name: _KnownValue(each) for name, each in _names_in(value, found.name)}
            with contextlib.suppress(TypeError):  # it has slots, and no place for weak references
                self._holders.append((weakref.ref(value), found.name, known))
                count += len(known)
            if count >= _MOST_NAMES:
                break
        self._functions = {name: _KnownValue(part) for name, part in self._parts.items() if _is_of_script(part)}
        _used.update(self._parts[name] for name in self._functions)

    def changes(self, all_of_them: bool = False) -> list[Change]:
        """Return what has changed and was not told before; `all_of_them`: that, too."""
        found: dict[str, Change] = {}
        for reference, called, known_by_name in self._holders:
            owner = reference()
            if owner is None:  # what held it has another one, which is told
                continue
            with contextlib.suppress(Exception):  # changed by another thread meanwhile, say
                for name, value in _names_in(owner, called):
                    known = known_by_name.get(name)
                    if known is None:
                        if _is_code(owner):
                            continue
                        known = known_by_name[name] = _KnownValue(_MISSING)
                    if not known.is_same(value) and self._is_due(known, owner, name, all_of_them):
                        found[name] = Change(name, known.become(value))
        for argument, known in self._functions.items():
            function = self._parts[argument]
            value = function.__globals__.get(function.__qualname__)
            is_other_loaders = type(value) is not types.FunctionType or (value is not function and value in _used)
            if not is_other_loaders and not known.is_same(value) and (all_of_them or not known.was_told):
                known.was_told |= not all_of_them
                found[argument] = Change(function.__qualname__, "was defined again", argument)
        return list(found.values())

    def warn(self, in_replay: bool = False) -> None:
        """Warn, in the line of the user's that has led here, of what has changed; of each once.

        Args:
            in_replay: said of a replay, which has the present values; then all is told, again, too.

        Raises:
            LoaderpoolWarning: where a filter makes an error of it.
        """
        changes = self.changes(all_of_them=in_replay)
        if in_replay:  # of the loader's own function it has the one that the workers have
            changes = [change for change in changes if not change.root]
        if not changes:
            return
        more = [f"and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
        lines = "\n  ".join([*map(str, changes[:_MOST_CHANGES]), *more])
        roots = ", ".join(f"{change.root}={change.name}" for change in changes if change.root)
        users = "this replay uses the new values, but the workers" if in_replay else "its workers"
        what = f"These values changed after the loader was created; {users} still use the old ones:\n  {lines}"
        warn(f"{what}\nTo use the new values everywhere: loader = loader.replace({roots})")

    def _is_due(self, known: _KnownValue, owner: Any, name: str, all_of_them: bool) -> bool:
        if not known.was_told and not known.is_ignored:
            known.is_ignored = not self._is_read_only(owner, name.rpartition(".")[2], known.is_new)
        if known.is_ignored or (known.was_told and not all_of_them):
            return False
        known.was_told |= not all_of_them
        return True

    def _is_read_only(self, owner: Any, name: str, is_new: bool) -> bool:
        """Whether a worker's code reads this name, and does not itself give it another value (as a cache does)."""
        if is_new and hasattr(vars(type(owner)).get(name), "__get__"):  # a cached property
            return False
        is_read = _is_code(owner)
        for code in _codes_of_workers(self._parts):
            is_read |= name in code.co_names or name in code.co_consts
            if any(each.opname in _STORES and each.argval == name for each in dis.get_instructions(code)):
                return False
        return is_read

    def _travels(self, value: Any) -> bool:
        """Whether a value is the user's and its state is in the pickle: not where it is found by its name."""
        if not _is_code(value):
            return is_users(value)
        return not is_found_by_name(value) or bool(value.__module__ and self._imports.of(value.__module__))

    def _has_names(self, value: Any) -> bool:
        if _is_code(value):
            return self._travels(value)
        return not issubclass(type(value), types.ModuleType) and is_users(type(value))


_used: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()  # functions of scripts that were given to loaders


def _is_of_script(function: Any) -> bool:
    """Whether it is a global function of a script or notebook, which may be defined again under the same name."""
    if type(function) is not types.FunctionType or function.__module__ != "__main__":
        return False
    return function.__globals__.get(function.__qualname__) is function


def _names_in(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Variables and attributes of a function, class or object, by their names as code would write them."""
    for part in parts_of(owner):
        if part.name[:1] not in ("", "[") and type(part.value) is not types.ModuleType:
            yield (f"{name}{part.name}" if part.name.startswith(".") else part.name), part.value


def _codes_of_workers(parts: Mapping[str, Any]) -> Iterator[types.CodeType]:
    """The user's code that may run in a worker: functions, and the methods whose names are used in such code.

    Special methods count, but for constructors: Python's own calls of them are not seen in code.
    """
    waiting: list[types.CodeType] = []
    methods: dict[str, list[types.CodeType]] = {}
    names_of_members: dict[int, str] = {}
    for found in walk(parts, is_users):
        value = found.value
        if not _is_code(value) or not is_users(value):
            continue
        if isinstance(value, type):
            for name, member in vars(value).items():
                inner = () if type(member) is types.FunctionType else (part.value for part in parts_of(member))
                names_of_members.update((id(each), name) for each in (member, *inner))
            continue
        name = names_of_members.get(id(value), "")
        is_called = not name or (name.startswith("__") and name.endswith("__") and name not in _CONSTRUCTORS)
        (waiting if is_called else methods.setdefault(name, [])).append(value.__code__)
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in (*code.co_names, *(each for each in code.co_consts if isinstance(each, str))):
            waiting += methods.pop(name, ())


def _is_code(value: Any) -> bool:
    return issubclass(type(value), (types.FunctionType, type))


def _code_of(value: Any) -> types.CodeType | None:
    return value.__code__ if type(value) is types.FunctionType else None


def _is_simple(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= 20 and all(map(_is_simple, value))
    return issubclass(type(value), _SIMPLE) and not (type(value) in (str, bytes) and len(value) > _MOST_TEXT)


# ---- what each worker would have a copy of ----

# Less than this, pickled, is not worth a warning: as objects it is three to six times as much in each worker.
_MUCH_BYTES = 8 << 20
_TRIED = 64  # elements, of which the size of all is estimated


def large_data(
    parts: Mapping[str, Any],
    sources: AbstractSet[int],
    is_by_value: Callable[[Any], bool],
    met: AbstractSet[int],
) -> tuple[str, ...]:
    """A warning for each large list, tuple or dict that functions and objects hold, with the line that mends it.

    Not for `sources`, ids of lists whose items the loader itself reads. `met`: as `ItemPacking` has it.
    """

    def enters(value: Any) -> bool:
        return is_by_value(value) if issubclass(type(value), (type, types.FunctionType)) else is_users(value)

    told = dict.fromkeys({*sources, id(parts.get("shards"))}, "")
    for path, name, value, _ in walk(parts, enters):
        if issubclass(type(value), (list, tuple, dict)) and len(value) > MOST_ITEMS and id(value) not in told:
            step = len(value) // _TRIED
            tried = list(itertools.islice(value.items() if isinstance(value, dict) else value, 0, None, step))
            from loaderpool.transport.payload.packing import nbytes_of  # few loaders have such data

            nbytes = nbytes_of(tried, met) * len(value) // len(tried)
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
