"""Values that functions, classes and objects hold, by name.

These are closures, globals, defaults, partials, members, attributes and items. `parts_of` yields
the parts of one value, and `walk` continues from there. No code of the user runs. A loop over one
of the two finds a variable that cannot be pickled, a large list that is captured, or a global that
has changed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from cloudpickle import cloudpickle as internals

from loaderpool.system.annotations import LAZY_ATTRIBUTES, Named
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.system.process import is_library

# Number of values that are entered. Larger: if there are many objects, making a loader takes longer
# than pickling them.
_MOST_ENTERED = 20_000
# Maximum length of containers that are entered. Longer ones are data, whose items are not checked
# one by one.
_MOST_ITEMS = 1000
_PLAIN = frozenset(
    {str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.CodeType}
)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
LruCacheWrapper: type = type(functools.lru_cache(lambda: None))
# Type of the placeholder for a name that `lazy import` binds in Python 3.15, until code uses it.
LazyImport: type | None = getattr(types, "LazyImportType", None)
WRAPPERS = (LruCacheWrapper, staticmethod, classmethod, property, functools.cached_property)
_HOLDERS = (types.MethodType, types.BuiltinFunctionType, functools.partial, *WRAPPERS)
CODE = (type, types.FunctionType, *_HOLDERS)
# Members that Python adds to a class.
_NOT_THE_AUTHORS = frozenset(
    {"__dict__", "__weakref__", "_abc_impl", "__module__", "__doc__", "__slotnames__"}
    | {"__firstlineno__", "__static_attributes__"}
    | LAZY_ATTRIBUTES
)


class Part(NamedTuple):
    """Value that another value holds."""

    # Description, such as "closure variable 'records' of function load".
    label: str
    # Name in code, such as "records". A name such as ".records" or "['records']" is appended to the
    # holder's name. "" if the holder's name stands for this value too.
    name: str
    value: object
    # True for a step within one of loaderpool's wrappers, which users never made. Paths leave it
    # out.
    is_hidden: bool = False


class Found(NamedTuple):
    """Value that a walk has reached."""

    path: tuple[str, ...]  # the root's name, then the labels of the parts on the way
    name: str  # name in code: "records", "dataset.settings.size"
    value: Any
    # Last value on the way that no variable in code names, such as a root.
    base: object = None
    base_label: str = ""  # description of `base`; "": a variable comes after it
    tail: str = ""  # rest of the name in code, from `base` on: ".settings.size"


def walk(
    roots: Mapping[str, object], enters: Callable[[object], bool], most_entered: int = _MOST_ENTERED
) -> Iterator[Found]:
    """Yield the roots and all values that they lead to, nearest first.

    A value is yielded once for each way to it, but it is entered only once.

    Args:
        roots: values by name, such as a loader's arguments.
        enters: returns True if the parts of a function, class or object are wanted (`parts_of`). It
            is not called for text, numbers, modules and containers. Containers of up to
            `_MOST_ITEMS` items are entered.
        most_entered: number of entered values after which the walk ends.
    """
    entered: dict[int, object] = {}  # references to the values, so that no id is used twice
    waiting = collections.deque(
        Found((name,), name, value, value, f"the object that you pass as {name}")
        for name, value in roots.items()
    )
    while waiting and len(entered) < most_entered:
        found = waiting.popleft()
        yield found
        value, kind = found.value, type(found.value)
        if kind in _PLAIN or issubclass(kind, types.ModuleType) or id(value) in entered:
            continue
        is_container = issubclass(kind, (dict, *CONTAINERS))
        if _length(value, kind) > _MOST_ITEMS if is_container else not enters(value):
            continue
        entered[id(value)] = value
        for part in parts_of(value):
            name = part.name if part.name[:1].isidentifier() else f"{found.name}{part.name}"
            path = found.path if part.is_hidden else (*found.path, part.label)
            if not part.name or issubclass(kind, functools.partial):
                base = part.value, found.base_label if part.is_hidden else part.label, ""
            elif part.name[:1].isidentifier():
                base = None, "", ""
            else:
                base = found.base, found.base_label, f"{found.tail}{part.name}"
            waiting.append(Found(path, name, part.value, *base))


def parts_of(value: Any) -> Iterator[Part]:
    """Yield the values that a value holds directly.

    A class of loaderpool with a method `user_parts` is a wrapper. The method returns the user's
    parts of it with labels, or with the label "" for the only one. These parts come first.
    """
    kind = type(value)  # not isinstance, which asks a proxy for its target's class
    if issubclass(kind, types.FunctionType):
        yield from _of_function(value)
    elif issubclass(kind, types.MethodType):
        yield Part(f"the object of the method {value.__qualname__}", "", value.__self__)
        yield Part(f"the method {value.__qualname__}", "", value.__func__)
    elif issubclass(kind, types.BuiltinFunctionType):
        # A method such as `table.get`.
        if not isinstance(value.__self__, (types.ModuleType, type, type(None))):
            yield Part(f"the object of the method {value.__name__}", "", value.__self__)
    elif issubclass(kind, functools.partial):
        yield Part("the function of the partial", "", value.func)
        yield from (
            Part(f"argument {at} of the partial", "", each) for at, each in enumerate(value.args)
        )
        yield from (
            Part(f"argument {key!r} of the partial", key, each)
            for key, each in value.keywords.items()
        )
    elif issubclass(kind, WRAPPERS):
        what = "the cached function" if issubclass(kind, LruCacheWrapper) else "the function"
        for name in ("__wrapped__", "fget", "fset", "fdel", "func"):
            function = getattr(value, name, None)
            if function is not None:
                yield Part(f"{what} {getattr(function, '__qualname__', '')}", "", function)
    elif issubclass(kind, type):
        name = value.__qualname__
        yield from (
            Part(f"base of class {name}", base.__qualname__, base) for base in value.__bases__
        )
        for key, each in vars(value).items():
            if key not in _NOT_THE_AUTHORS:
                yield Part(f"attribute .{key} of class {name}", f"{name}.{key}", each)
    else:
        yield from _of_items(value, kind)
        if kind not in (dict, *CONTAINERS):
            is_ours = kind.__module__.partition(".")[0] == "loaderpool"
            is_wrapper = is_ours and hasattr(kind, "user_parts")
            if is_wrapper:
                for label, each in value.user_parts():
                    yield Part(label, "", each, is_hidden=not label)
            for key, each in attributes_of(value):
                yield Part(
                    f"attribute .{key} of {kind.__qualname__}",
                    "" if is_ours else f".{key}",
                    each,
                    is_wrapper,
                )
            yield Part(f"class {kind.__qualname__}", kind.__qualname__, kind, is_wrapper)


def is_users(value: object) -> bool:
    """Return True if a function, class or object is the user's own, or may hold user code.

    Python's wrappers (such as `functools.partial`) and loaderpool's classes may hold user code.
    """
    kind = type(value)
    if issubclass(kind, (types.FunctionType, type)):
        return not is_library(str(value.__module__))
    if issubclass(kind, _HOLDERS):
        return True
    module = str(kind.__module__)
    return module.partition(".")[0] == "loaderpool" or not is_library(module)


def is_found_by_name(named: Named) -> bool:
    """Return True if another process finds a function or class by its module and name.

    The `__main__` of another process is a different module.
    """
    return named.__module__ != "__main__" and is_global(named)


def is_global(named: Named) -> bool:
    """Return True if a function or class is found in its module under its name."""
    found: object = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


def cached_properties(cls: object) -> frozenset[str]:
    """Return the attributes in which instances of a class store results of `cached_property`."""
    members = (member for each in getattr(cls, "__mro__", ()) for member in vars(each).items())
    return frozenset(name for name, value in members if type(value).__name__ == "cached_property")


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    code, name = function.__code__, function.__qualname__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable is not set yet
            yield Part(
                f"closure variable {variable!r} of function {name}", variable, cell.cell_contents
            )
    # the names include those of inner functions
    for variable in internals._extract_code_globals(code):
        if variable in function.__globals__:
            yield Part(
                f"global {variable!r} used by {name}", variable, function.__globals__[variable]
            )
    defaults = function.__defaults__ or ()
    named = dict(
        zip(
            code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount],
            defaults,
            strict=True,
        )
    )
    for variable, value in {**named, **(function.__kwdefaults__ or {})}.items():
        yield Part(f"default of {variable!r} of {name}", variable, value)
    for key, value in vars(function).items():  # such as __wrapped__
        yield Part(f"attribute .{key} of function {name}", f"{function.__name__}.{key}", value)


def _of_items(value: Any, kind: type) -> Iterator[Part]:
    """Yield the items of a container, with the methods of its base class.

    The methods of a user's subclass may return something else.
    """
    if issubclass(kind, dict):
        for key, item in list(dict.items(value)):
            yield Part(f"item {key!r:.80} of the {kind.__name__}", f"[{key!r:.80}]", item)
    for base in CONTAINERS:
        if issubclass(kind, base):
            items: Iterator[object] = base.__iter__(value)
            for at, item in enumerate(items):
                yield Part(f"item {at} of the {kind.__name__}", f"[{at}]", item)


def attributes_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield the names and attributes of an object. No code of its class is called."""
    attributes: list[tuple[str, object]] = []
    with FailuresIgnored():  # the object has no `__dict__`, or a proxy's own code raises
        attributes = list(object.__getattribute__(value, "__dict__").items())
    yield from attributes
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            for name, member in vars(cls).items():
                if type(member) is types.MemberDescriptorType:
                    with contextlib.suppress(AttributeError):  # the slot was never set
                        yield name, member.__get__(value)


def _length(value: Any, kind: type) -> int:
    base: type[Sized] = next(base for base in (dict, *CONTAINERS) if issubclass(kind, base))
    return base.__len__(value)
