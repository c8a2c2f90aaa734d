"""A glance at what a loader's functions and objects hold: what has changed of it, as far as 0.1 ms can tell.

Compared are variables of functions, attributes of objects and classes, lengths and some items of lists and dicts, and
some elements of arrays: those first to which few steps lead. Nothing is kept alive for it, and nothing of the user's is
called. Runs in: the trainer.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.errors import brief, warn
from loaderpool.system.process import is_installed
from loaderpool.system.walk import (
    CONTAINERS,
    WRAPPERS,
    attributes_of,
    cached_properties,
    is_found_by_name,
    is_users,
)
from loaderpool.transport.payload.kept import kept_by_calls
from loaderpool.transport.payload.large_data import CALLED
from loaderpool.transport.payload.pickler import FrameworkImports

# Values that are compared. Fewer: a change may be missed. More: an epoch's start takes longer than 0.1 ms.
_MOST_VALUES = 100
# Items of a container, and elements of an array, evenly spread. More: fewer others are compared.
_MOST_ITEMS = 12
# Steps from an argument to objects of packages that are looked into. More: what they keep for themselves is in the way.
_NEAR = 2
_MOST_ATTRIBUTES = 500  # of an object; more are data
_QUICK = frozenset({int, float, bool, type(None)})
_SIMPLE: tuple[type, ...] = (str, bytes, complex, range, np.number, np.bool_, np.dtype, PurePath)
# A longer text is compared by its identity alone: a copy of it is not held for this.
_MOST_TEXT = 1000
_MOST_SHOWN = 40  # characters of a value in a warning
_MOST_CHANGES = 5  # that one warning names
_STORES = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"})
_NOT_THE_AUTHORS = frozenset({
    "__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__slotnames__", "__annotations_cache__",
})  # fmt: skip
_OLD = "These values changed after the loader was created; its workers still use the old ones"
_WHOLE = "()"  # the key of how much a value holds, in place of an item's
_Read = Callable[[Any], dict[Any, Any]]


class _Holder(NamedTuple):
    """A value that is looked into, and what it held."""

    parent: int  # the number of the holder that has it; -1: it is an argument
    key: Any  # under which it is there
    kind: type
    name: str  # as code writes it
    read: _Read  # returns what it holds, by keys
    size: int  # how many it held
    tokens: dict[Any, Any]  # of these, as far as there was time


class Glance:
    """The contents of the functions and objects of one loader at a moment.

    Args:
        parts: the functions and the source, by argument.
        without: the frameworks of their shipment.

    Attributes:
        counts_kept: what library objects keep of their last call counts (`kept`).
    """

    def __init__(self, parts: Mapping[str, Any], without: AbstractSet[str]) -> None:
        self._parts = {
            name: part for name, part in parts.items() if name in CALLED or name == "source"
        }
        self._imports = FrameworkImports(without)
        self._told = set[tuple[str, str]]()
        self.counts_kept = True
        _used.update(part for part in self._parts.values() if type(part) is types.FunctionType)
        self.renew()

    def renew(self) -> None:
        """Compare with what they hold now, from now on."""
        self._holders: list[_Holder] = []
        self._stored = set[str]()  # variables that functions assign themselves, as for a cache
        entered, left = set[int](), _MOST_VALUES
        waiting = [(-1, name, name, part, 0) for name, part in self._parts.items()]
        for parent, key, name, value, depth in waiting:  # which grows meanwhile
            read = None if id(value) in entered else self._reader_of(value, depth)
            if read is None or not left:
                continue
            entered.add(id(value))
            held = read(value)
            compared = {each: held[each] for each in itertools.islice(held, left)}
            if not compared:
                continue
            left -= len(compared)
            tokens = {each: _token(part) for each, part in compared.items()}
            if type(value) is types.FunctionType:
                self._stored.update(_stored_by(value.__code__))
            number = len(self._holders)
            self._holders.append(_Holder(parent, key, type(value), name, read, len(held), tokens))
            depth += not _is_ours(type(value))
            waiting += (
                (number, each, _name_of(value, name, each), part, depth)
                for each, part in compared.items()
                if type(part) not in _QUICK and each != _WHOLE
            )

    def changes(self) -> dict[str, str]:
        """Return the names of what holds something else by now, and what has become of each."""
        found = dict[str, str]()
        seen: list[dict[Any, Any]] = []
        for holder in self._holders:
            parent = self._parts if holder.parent < 0 else seen[holder.parent]
            value = parent.get(holder.key)
            held = (
                holder.read(value) if type(value) is holder.kind else {}
            )  # else its holder has another one
            seen.append(held)
            tokens = {each: _token(held[each]) for each in holder.tokens if each in held}
            if held and (tokens != holder.tokens or len(held) != holder.size):
                found.update(self._told_of(holder, value, held, tokens))
        return found

    def _told_of(
        self, holder: _Holder, value: Any, held: dict[Any, Any], tokens: dict[Any, Any]
    ) -> Iterator[tuple[str, str]]:
        before = holder.tokens
        new = held.keys() - before.keys() if holder.size == len(before) else set[Any]()
        if before.get(_WHOLE) != tokens.get(_WHOLE) or (
            len(held) != holder.size and not new and tokens == before
        ):
            yield holder.name, "has other contents"  # of which others are compared now
            return
        for key in (*before, *new):
            if key in self._stored and holder.kind is types.FunctionType:
                continue
            if key not in tokens or before[key] != tokens[key]:
                yield (
                    _name_of(value, holder.name, key),
                    _become(before.get(key, _NOTHING), held.get(key, _NOTHING)),
                )

    def defined_again(self) -> dict[str, str]:
        """Return the arguments that are functions whose names stand for other ones now, and these names."""
        found = dict[str, str]()
        for argument, part in self._parts.items():
            if type(part) is types.FunctionType and part.__module__ == "__main__":
                now = part.__globals__.get(part.__qualname__)
                is_other = type(now) is types.FunctionType and now.__code__ != part.__code__
                if is_other and now not in _used:  # functions of two loaders may have one name
                    found[argument] = part.__qualname__
        return found

    def warn(self, changes: Mapping[str, str], preface: str = _OLD, advice: str = "") -> None:
        """Warn, in the line of the user's that has led here, of what has changed; of each once.

        Args:
            changes: as `changes` returns them. Functions that were defined again are added.
            preface: the first line.
            advice: the last line; empty: how to use the new values.

        Raises:
            LoaderpoolWarning: where a filter makes an error of it.
        """
        again = self.defined_again()
        named = {**changes, **dict.fromkeys(again.values(), "was defined again")}
        named = {name: what for name, what in named.items() if (preface, name) not in self._told}
        if not named:
            return
        self._told.update((preface, name) for name in named)
        lines = [f"{name}: {what}" for name, what in named.items()]
        more = [f"and {len(lines) - _MOST_CHANGES} more"] if len(lines) > _MOST_CHANGES else []
        shown = "\n  ".join([*lines[:_MOST_CHANGES], *more])
        fix = ", ".join(f"{argument}={name}" for argument, name in again.items() if name in named)
        warn(
            f"{preface}:\n  {shown}\n{advice or f'To use the new values everywhere: loader = loader.replace({fix})'}"
        )

    def _reader_of(self, value: Any, depth: int) -> _Read | None:
        """Return what reads what a value holds; None: it is not looked into. `depth`: steps from an argument to it."""
        kind = type(value)
        if kind in _QUICK or issubclass(kind, (*_SIMPLE, types.ModuleType)):
            return None
        if issubclass(kind, (types.FunctionType, type)):
            if not self._travels(value):
                return None
            return _of_function if issubclass(kind, types.FunctionType) else _of_class
        if issubclass(kind, types.MethodType):
            return _of_method
        if issubclass(kind, functools.partial):
            return _of_partial
        if issubclass(kind, WRAPPERS):
            return _of_wrapper
        if issubclass(kind, np.ndarray):
            return None if issubclass(kind, np.memmap) else _of_array
        if kind.__module__ == "torch" and hasattr(kind, "_version"):
            return _of_tensor
        is_near = depth <= _NEAR and is_installed(
            kind.__module__
        )  # a library's dataset, or what it holds
        if is_near or is_users(value) or issubclass(kind, (dict, *CONTAINERS)):
            return _reader_of_object(kind, self.counts_kept)
        return None

    def _travels(self, code: Any) -> bool:
        """Return whether a function or class is the user's, and is sent itself, not its name."""
        by_name = is_found_by_name(code) and not (
            code.__module__ and self._imports.of(code.__module__)
        )
        return is_users(code) and not by_name


_used: weakref.WeakSet[types.FunctionType] = (
    weakref.WeakSet()
)  # functions that were given to loaders
_NOTHING: Any = object()


def _stored_by(code: types.CodeType) -> Iterator[str]:
    """Yield the variables to which code, or a function inside it, gives another value."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _STORES)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _stored_by(each)


def _token(value: Any) -> Any:
    """Return what a value is compared by: itself, if it is simple; a function's code; else its identity.

    An object at the very place of one that is gone is taken for it; then what it holds tells.
    """
    kind = type(value)
    if kind in _QUICK:
        return kind, value  # True is not 1
    if kind is str or kind is bytes:
        return value if len(value) <= _MOST_TEXT else (kind, id(value))
    if kind is types.FunctionType:
        return value.__code__
    if kind is tuple and len(value) <= _MOST_ITEMS:
        return (tuple, *map(_token, value))
    return value if issubclass(kind, _SIMPLE) else (kind, id(value))


def _become(before: Any, now: Any) -> str:
    """Return what has become of a value with this token."""
    if now is _NOTHING:
        return "was deleted"
    if before is _NOTHING:
        return "is new"
    if issubclass(type(now), (types.FunctionType, type)):
        return "was defined again"
    was = before[1] if type(before) is tuple and before[0] in _QUICK else before
    if all(type(each) in _QUICK or issubclass(type(each), _SIMPLE) for each in (was, now)):
        return f"was {brief(was, _MOST_SHOWN)}, is {brief(now, _MOST_SHOWN)}"
    return f"is now another {type(now).__qualname__}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "loaderpool"


class _Item(NamedTuple):
    """The key of an item, or its number; other keys are names of attributes and variables."""

    key: Any


def _name_of(holder: Any, name: str, key: Any) -> str:
    """Return how code names what a holder of this name has under a key."""
    kind = type(holder)
    if isinstance(key, _Item):
        return f"{name}[{key.key!r:.80}]"
    if issubclass(kind, types.FunctionType):
        return str(key)
    if issubclass(kind, type):
        return f"{holder.__qualname__}.{key}"
    if issubclass(kind, functools.partial) and key in holder.keywords:
        return str(key)
    if issubclass(kind, (types.MethodType, functools.partial)) or _is_ours(kind):
        return name  # what the user never sees
    return f"{name}.{key}"


# ---- what a value holds, by keys


def _of_function(function: types.FunctionType) -> dict[Any, Any]:
    code, variables = function.__code__, function.__globals__
    held = {
        name: variables[name]
        for name in internals._extract_code_globals(code)
        if name in variables and type(variables[name]) is not types.ModuleType
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            held[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held.update(zip(named, defaults, strict=True))
    held.update(function.__kwdefaults__ or {})
    held.update((f"{function.__name__}.{key}", value) for key, value in vars(function).items())
    return held


def _of_class(cls: type) -> dict[Any, Any]:
    members = {key: value for key, value in vars(cls).items() if key not in _NOT_THE_AUTHORS}
    return {**members, **{base.__name__: base for base in cls.__bases__ if base is not object}}


def _of_method(method: types.MethodType) -> dict[Any, Any]:
    return {"__self__": method.__self__, "__func__": method.__func__}


def _of_partial(partial: functools.partial[Any]) -> dict[Any, Any]:
    return {
        "func": partial.func,
        **{_Item(at): each for at, each in enumerate(partial.args)},
        **partial.keywords,
    }


def _of_wrapper(wrapper: Any) -> dict[Any, Any]:
    names = ("__wrapped__", "__func__", "fget", "fset", "fdel", "func")
    return {
        name: getattr(wrapper, name) for name in names if getattr(wrapper, name, None) is not None
    }


def _of_array(array: Any) -> dict[Any, Any]:
    flat = np.asarray(array).flat
    picks = [*range(0, array.size, max(1, array.size // _MOST_ITEMS))]
    if array.dtype.hasobject:
        return {_WHOLE: array.shape, **{_Item(at): flat[at] for at in picks}}
    return {_WHOLE: (array.shape, flat[picks].tobytes())}


def _of_tensor(tensor: Any) -> dict[Any, Any]:
    return {_WHOLE: tensor._version}  # which each write to it counts up


def _of_items(kind: type, value: Any) -> dict[Any, Any]:
    """Items by what a container is made of: a class of the user's may tell something else."""
    if issubclass(kind, dict):
        items = enumerate(itertools.islice(dict.items(value), _MOST_ITEMS))
        named = ((key if type(key) in _KEYS else at, each) for at, (key, each) in items)
        return {_WHOLE: dict.__len__(value), **{_Item(key): each for key, each in named}}
    base: Any = next(base for base in CONTAINERS if issubclass(kind, base))
    length = base.__len__(value)
    if base in (set, frozenset):
        return {_WHOLE: length}
    picks = range(0, length, max(1, length // _MOST_ITEMS))
    return {_WHOLE: length, **{_Item(at): base.__getitem__(value, at) for at in picks}}


_KEYS = (str, int, bytes)


def _reader_of_object(kind: type, counts_kept: bool) -> _Read:
    is_container, travels = issubclass(kind, (dict, *CONTAINERS)), not is_found_by_name(kind)
    if kind in (dict, *CONTAINERS):
        return functools.partial(_of_items, kind)
    left_out = {*cached_properties(kind), *(() if counts_kept else kept_by_calls(kind))}
    has_slots = any("__slots__" in vars(cls) for cls in kind.__mro__)

    def read(value: Any) -> dict[Any, Any]:
        held = _of_items(kind, value) if is_container else {}
        if has_slots:
            held.update(attributes_of(value))
        else:
            with contextlib.suppress(AttributeError):  # it has none
                attributes = object.__getattribute__(value, "__dict__")
                held.update(attributes if len(attributes) <= _MOST_ATTRIBUTES else {})
        for name in left_out:
            held.pop(name, None)
        if travels:
            held["__class__"] = kind
        return held

    return read
