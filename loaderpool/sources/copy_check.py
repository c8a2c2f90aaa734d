"""Whether the copies of a generator can differ: whether it can ask which of them it is.

Looks at code and calls nothing. What it cannot see it takes for code that asks, but for an object that comes up only
while the generator runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from loaderpool.sources.worker_info import worker_info
from loaderpool.system.installed import is_installed

# Functions, classes and objects that are looked at. Fewer: what is behind a large application is not reached; more: the
# line that makes the loader takes longer than a second.
_MOST_LOOKED_AT = 20_000
_MOST_ELEMENTS = 20  # of a container: the others are mostly of the same kind
_CONTAINERS = (list, tuple, set, frozenset)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), range)


def asks_which_copy(make_generator: Callable[..., Any]) -> bool:
    """Whether its code, or what that refers to (functions, classes, captured objects), names `worker_info`.

    Installed packages are followed only where they know loaderpool.
    """
    packages = _Packages()
    waiting: list[Any] = [make_generator]
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is given out again
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        if value is worker_info or len(seen) == _MOST_LOOKED_AT:
            return True
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            names = set(_names_in(value.__code__))
            if "worker_info" in names:
                return True
            if packages.may_ask(value.__module__):
                waiting += _referred_to(value, names)
        else:
            waiting += _held_by(value, packages)
    return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Globals, attributes and modules that code names, with what is defined inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif constant == "worker_info":  # getattr(lp, "worker_info")
            yield "worker_info"


def _referred_to(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    namespaces: list[Mapping[str, Any]] = [function.__globals__, sys.modules]  # the second: what is imported inside
    looked_in: set[int] = set()
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            values.append(cell.cell_contents)
    while values or namespaces:
        if not values:
            namespace = namespaces.pop()
            values = [namespace[name] for name in names if name in namespace]
            continue
        value = values.pop()
        if not isinstance(value, types.ModuleType):
            yield value
        elif id(value) not in looked_in:
            looked_in.add(id(value))
            namespaces.append(_attribute(value, "__dict__"))


def _held_by(value: Any, packages: _Packages) -> Iterable[Any]:
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, type):
        if not packages.may_ask(value.__module__):
            return ()
        own = vars(value).values()
        return *map(_behind, own), *value.__bases__
    if isinstance(value, Mapping) and hasattr(type(value), "__reversed__"):  # a dict, and not what reads a file by key
        return list(value.values())[:_MOST_ELEMENTS]
    if isinstance(value, _CONTAINERS):
        return list(value)[:_MOST_ELEMENTS]
    if isinstance(value, types.ModuleType) and not packages.may_ask(_attribute(value, "__name__")):
        return ()
    held = _attribute(value, "__dict__")
    return type(value), _attribute(value, "__wrapped__"), *(held.values() if isinstance(held, dict) else ())


def _attribute(value: Any, name: str) -> Any:
    """The attribute, or None; not by `getattr`, which makes a lazy module or proxy load, and may raise anything."""
    with contextlib.suppress(Exception):
        return object.__getattribute__(value, name)
    return None


def _behind(attribute: Any) -> Any:
    """Return the function of a method, whatever stands around it."""
    for name in ("__func__", "fget", "func"):
        function = _attribute(attribute, name)
        if isinstance(function, types.FunctionType):
            return function
    return attribute


class _Packages:
    """Which modules may call `worker_info`: the user's own, and those of packages that have it, or loaderpool."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {"loaderpool": False, "__main__": True}

    def may_ask(self, module_name: object) -> bool:
        if not isinstance(module_name, str):
            return True
        package = module_name.partition(".")[0]
        if package not in self._known:
            self._known[package] = self._look(package)
        return self._known[package]

    @staticmethod
    def _look(package: str) -> bool:
        if package in sys.stdlib_module_names:
            return False
        if not is_installed(package):
            return True
        ours = sys.modules["loaderpool"]
        prefix = f"{package}."
        return any(
            value is ours or value is worker_info
            for name, each in list(sys.modules.items())
            if name == package or name.startswith(prefix)
            for value in list(getattr(each, "__dict__", {}).values())
        )
