"""`Glance`: finds changes in a loader's functions and objects, as far as possible in 0.1 ms.

It compares variables of functions, attributes of objects and classes, lengths and some items of
lists and dicts, and some elements of arrays. Values that are few steps away come first. It keeps
nothing alive, and calls no user code. Called in the main process.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.errors import brief, warn
from loaderpool.system.annotations import Named
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

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

# Values that are compared. Smaller: a change may be missed. Larger: the start of an epoch takes
# more than 0.1 ms.
_MOST_VALUES = 100
# Items of a container, and elements of an array, evenly spaced. Smaller: a change may be missed.
# Larger: fewer other values are compared.
_MOST_ITEMS = 12
# Steps from an argument to objects of packages that are read. Larger: the packages' internal values
# use up the limit.
_NEAR = 2
_MOST_ATTRIBUTES = 500  # attributes of an object; an object with more is treated as data
_QUICK = frozenset({int, float, bool, type(None)})
_SIMPLE: tuple[type, ...] = (str, bytes, complex, range, np.number, np.bool_, np.dtype)
# Longer texts are compared only by identity, because no copy of them is kept.
_MOST_TEXT = 1000
_MOST_SHOWN = 40  # characters of a value in a warning
_MOST_CHANGES = 5  # changes in one warning
_STORES = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"})
_NOT_THE_AUTHORS = frozenset({
    "__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__slotnames__",
    "__annotations_cache__",
})  # fmt: skip
_OLD = "These values changed after the loader was created; its workers still use the old ones"
_WHOLE = "()"  # key for the size of a value, in place of an item's key
_Read = Callable[[Any], dict[Any, Any]]


class _Holder(NamedTuple):
    """A value whose contents are read, and its contents at the time."""

    parent: int  # number of the holder of this value; -1: it is an argument
    key: object  # key in the parent
    kind: type
    name: str  # name, as in code
    read: _Read  # returns the contents by key
    size: int  # number of values in the holder
    tokens: dict[Any, Any]  # tokens of its values, as many as the limit allows


class Glance:
    """Contents of the functions and objects of one loader at a given time.

    Args:
        parts: the functions and the source, by argument.
        without: the frameworks of their shipment.

    Attributes:
        counts_kept: True if a change in results of a library object's last call counts (see
            `kept`).
    """

    def __init__(self, parts: Mapping[str, object], without: AbstractSet[str]) -> None:
        self._parts = {
            name: part for name, part in parts.items() if name in CALLED or name == "source"
        }
        self._imports = FrameworkImports(without)
        self._told = set[tuple[str, str]]()
        self.counts_kept = True
        _used.update(part for part in self._parts.values() if type(part) is types.FunctionType)
        self.renew()

    def renew(self) -> None:
        """Read the present contents. Later calls of `changes` compare with these."""
        self._holders: list[_Holder] = []
        # variables that functions assign themselves, for example as a cache
        self._stored = set[str]()
        entered, left = set[int](), _MOST_VALUES
        waiting = [(-1, name, name, part, 0) for name, part in self._parts.items()]
        for parent, key, name, value, depth in waiting:  # the list grows in the loop
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
        """Return the names of changed values, each with a description of the change."""
        found = dict[str, str]()
        seen: list[dict[Any, Any]] = []
        for holder in self._holders:
            parent: Mapping[Any, object] = self._parts if holder.parent < 0 else seen[holder.parent]
            value = parent.get(holder.key)
            # If the type differs, the parent reports the change.
            held = holder.read(value) if type(value) is holder.kind else {}
            seen.append(held)
            tokens = {each: _token(held[each]) for each in holder.tokens if each in held}
            if held and (tokens != holder.tokens or len(held) != holder.size):
                found.update(self._told_of(holder, value, held, tokens))
        return found

    def _told_of(
        self, holder: _Holder, value: object, held: dict[Any, Any], tokens: dict[Any, Any]
    ) -> Iterator[tuple[str, str]]:
        before = holder.tokens
        new = held.keys() - before.keys() if holder.size == len(before) else set[Any]()
        if before.get(_WHOLE) != tokens.get(_WHOLE) or (
            len(held) != holder.size and not new and tokens == before
        ):
            yield holder.name, "has other contents"  # another sample of its items is compared now
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
        """Return the arguments whose functions were defined again, with the functions' names."""
        found = dict[str, str]()
        for argument, part in self._parts.items():
            if type(part) is types.FunctionType and part.__module__ == "__main__":
                now = part.__globals__.get(part.__qualname__)
                is_other = type(now) is types.FunctionType and now.__code__ != part.__code__
                if is_other and now not in _used:  # two loaders may have functions of the same name
                    found[argument] = part.__qualname__
        return found

    def warn(self, changes: Mapping[str, str], preface: str = _OLD, advice: str = "") -> None:
        """Warn about changes, once for each. The warning refers to the user's line that led here.

        Args:
            changes: result of `changes`. Functions that were defined again are added.
            preface: the first line.
            advice: the last line; empty: how to use the new values.

        Raises:
            LoaderpoolWarning: a warnings filter makes it an error.
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
            f"{preface}:\n"
            f"  {shown}\n"
            f"{advice or f'To use the new values everywhere: loader = loader.replace({fix})'}"
        )

    def _reader_of(self, value: Any, depth: int) -> _Read | None:
        """Return a function that reads the contents of a value, or None if they are not read.

        `depth` is the number of steps from an argument to the value.
        """
        kind = type(value)
        if kind in _QUICK or _is_simple(kind) or issubclass(kind, types.ModuleType):
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
        # A library's dataset, or an object in it.
        is_near = depth <= _NEAR and is_installed(kind.__module__)
        if is_near or is_users(value) or issubclass(kind, (dict, *CONTAINERS)):
            return _reader_of_object(kind, self.counts_kept)
        return None

    def _travels(self, code: Named) -> bool:
        """Return True if a function or class is the user's and is pickled by value."""
        by_name = is_found_by_name(code) and not (
            code.__module__ and self._imports.of(code.__module__)
        )
        return is_users(code) and not by_name


# functions that were passed to loaders
_used: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
_NOTHING: object = object()


def _stored_by(code: types.CodeType) -> Iterator[str]:
    """Yield the variables that code, or a function inside it, assigns."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _STORES)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _stored_by(each)


def _token(value: Any) -> object:
    """Return a token to compare a value by.

    The token is the value itself if that is simple, a function's code, or the identity of any other
    object. A new object at the address of a deleted one looks the same; its contents then show the
    change.
    """
    kind = type(value)
    if kind in _QUICK:
        return kind, value  # with the type, because True differs from 1
    if kind is str or kind is bytes:
        return value if len(value) <= _MOST_TEXT else (kind, id(value))
    if kind is types.FunctionType:
        return value.__code__
    if kind is tuple and len(value) <= _MOST_ITEMS:
        return (tuple, *map(_token, value))
    return value if _is_simple(kind) else (kind, id(value))


def _is_simple(kind: type) -> bool:
    """Return True if values of this class do not change, and are compared by `==`."""
    # Not imported here, because the first batch would wait 8 ms for it. Without the module, there
    # are no paths.
    pathlib = sys.modules.get("pathlib")
    return issubclass(kind, _SIMPLE) or (pathlib is not None and issubclass(kind, pathlib.PurePath))


def _become(before: object, now: object) -> str:
    """Return a description of the change from a value with the token `before` to `now`."""
    if now is _NOTHING:
        return "was deleted"
    if before is _NOTHING:
        return "is new"
    if issubclass(type(now), (types.FunctionType, type)):
        return "was defined again"
    was = before[1] if type(before) is tuple and before[0] in _QUICK else before
    if all(type(each) in _QUICK or _is_simple(type(each)) for each in (was, now)):
        return f"was {brief(was, _MOST_SHOWN)}, is {brief(now, _MOST_SHOWN)}"
    return f"is now another {type(now).__qualname__}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "loaderpool"


class _Item(NamedTuple):
    """Key or index of an item in a container, as opposed to names of attributes and variables."""

    key: object


def _name_of(holder: Any, name: str, key: object) -> str:
    """Return the name, as in code, of the value under a key of this holder."""
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
        return name  # attributes that users never see
    return f"{name}.{key}"


# ---- contents of a value, by key ----


def _of_function(function: types.FunctionType) -> dict[Any, Any]:
    code, variables = function.__code__, function.__globals__
    held = {
        name: variables[name]
        for name in internals._extract_code_globals(code)
        if name in variables and type(variables[name]) is not types.ModuleType
    }
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable is not set yet
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


def _of_wrapper(wrapper: object) -> dict[Any, Any]:
    names = ("__wrapped__", "__func__", "fget", "fset", "fdel", "func")
    return {
        name: getattr(wrapper, name) for name in names if getattr(wrapper, name, None) is not None
    }


def _of_array(array: npt.NDArray[Any]) -> dict[Any, Any]:
    flat = np.asarray(array).flat
    picks = [*range(0, array.size, max(1, array.size // _MOST_ITEMS))]
    if array.dtype.hasobject:
        return {_WHOLE: array.shape, **{_Item(at): flat[at] for at in picks}}
    return {_WHOLE: (array.shape, flat[picks].tobytes())}


def _of_tensor(tensor: torch.Tensor) -> dict[Any, Any]:
    if not tensor.is_inference():
        return {_WHOLE: tensor._version}  # each write to the tensor increments it
    try:
        values = tensor.flatten()[:: max(1, tensor.numel() // _MOST_ITEMS)].tolist()
        text = f"{tensor.shape} {values}"  # in a text, NaN equals NaN
    except RuntimeError:  # a sparse, quantized or nested tensor, or one without data
        text = repr(tensor)
    return {_WHOLE: text}


def _of_items(kind: type, value: Any) -> dict[Any, Any]:
    """Return some items of a container, and its length.

    Calls the methods of the built-in base class, because a user's subclass may override them.
    """
    if issubclass(kind, dict):
        items = enumerate(itertools.islice(dict.items(value), _MOST_ITEMS))
        named = ((key if type(key) in _KEYS else at, each) for at, (key, each) in items)
        return {_WHOLE: dict.__len__(value), **{_Item(key): each for key, each in named}}
    base: type[Any] = next(base for base in CONTAINERS if issubclass(kind, base))
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

    def read(value: object) -> dict[Any, Any]:
        held = _of_items(kind, value) if is_container else {}
        if has_slots:
            held.update(attributes_of(value))
        else:
            with contextlib.suppress(AttributeError):  # the object has no attributes
                attributes = object.__getattribute__(value, "__dict__")
                held.update(attributes if len(attributes) <= _MOST_ATTRIBUTES else {})
        for name in left_out:
            held.pop(name, None)
        if travels:
            held["__class__"] = kind
        return held

    return read
