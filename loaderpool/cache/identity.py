"""What a store on disk is of: the function, what it uses, and the source, as texts that are compared one by one.

Of a function count its bytecode and constants, defaults, captured variables, the globals that it uses, and all of that
of the user's own functions and classes that it calls. Libraries count by name, and so does what cannot be looked into.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from loaderpool.cache.contents import Contents
from loaderpool.sources.recognise import Sized
from loaderpool.system.installed import is_library

_LruCache = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    _LruCache,
)

# What a class has besides what its author wrote. Some come with time: copyreg notes the names of slots when the first
# object is pickled or copied (and `describe` itself takes objects apart that way), and a class without annotations has
# an empty dict of them once it was asked for.
_NOT_THE_AUTHORS = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "__slotnames__"}
)


def describe(fn: Any, setup: Any, source: Any) -> dict[str, str]:
    """Return the function and the source by name; differs where what the function gives may differ.

    Runs in: the trainer. Blocks: while the source is read once, about a second for a million plain items.

    Args:
        fn: the function whose results are kept.
        setup: the loader's hook, which may prepare what the function uses; or None.
        source: as the user gave it.
    """
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}  # each has another bytecode
    for name, function in (("function", fn), ("setup", setup)):
        if function is not None:
            code = _Code()
            code.add(function)
            found[name] = _name_of(function)
            found[f"code of {name}"] = code.hexdigest()
            found |= {f"{what} of {name}": digest for what, digest in code.values.items()}
    code = _Code()
    contents = Contents(code.add)
    contents.feed(source)
    size = f"{len(source)} items" if hasattr(type(source), "__len__") else ""
    given = source.items if isinstance(source, Sized) else source
    found["source"] = f"{type(given).__name__} {size} {contents.hexdigest()}"
    found["code of source"] = code.hexdigest()
    found |= {f"{what} of source": digest for what, digest in code.values.items()}
    return found


def mark_of(fields: dict[str, str]) -> bytes:
    """Eight bytes that stand for all of it."""
    return hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=8).digest()


class _Code:
    """Collects code, and the values that it uses, each once.

    Attributes:
        values: a checksum of each value by its name, for a message that says which one differs.
    """

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=8)
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id comes twice
        self.values: dict[str, str] = {}

    def hexdigest(self) -> str:
        """The checksum of all code that was added."""
        return self._state.hexdigest()

    def add(self, function: Any) -> None:
        """A function, class, or object that can be called, and what it uses."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._kept.append(function)
        if isinstance(function, functools.partial):
            self.add(function.func)
            self._value("arguments of partial", (function.args, function.keywords))
        elif isinstance(function, types.MethodType):
            self.add(function.__func__)
            self._value("self", function.__self__)
        elif isinstance(function, _LruCache):
            self.add(function.__wrapped__)
        elif isinstance(function, type):
            self._add_class(function)
        elif isinstance(function, types.FunctionType):
            self._add_function(function)
        elif isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._mark(_name_of(function))
            owner = getattr(function, "__self__", None)  # `table.get`: what it gives is in the table
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._value("self", owner)
        else:
            self.add(type(function))
            self._value("object", function)

    def _add_class(self, cls: type) -> None:
        self._mark(_name_of(cls))
        if is_library(cls.__module__):
            return
        for base in cls.__bases__:
            self.add(base)
        for name, member in sorted(vars(cls).items()):
            if name in _NOT_THE_AUTHORS or (name == "__annotations__" and not member):
                continue
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, property):
                for each in (member.fget, member.fset):
                    if each is not None:
                        self.add(each)
            elif isinstance(member, functools.cached_property):
                self.add(member.func)
            elif isinstance(member, (types.FunctionType, type)):
                self.add(member)
            elif not inspect.isdatadescriptor(member) and not inspect.ismethoddescriptor(member):
                self._value(f"{cls.__qualname__}.{name}", member)

    def _add_function(self, function: types.FunctionType) -> None:
        self._mark(_name_of(function))
        if is_library(function.__module__):
            return
        self._mark_code(function.__code__)
        if function.__defaults__ or function.__kwdefaults__:
            self._value(f"defaults of {function.__qualname__}", (function.__defaults__, function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            self._use(name, value, function.__code__)
        for code in _codes(function.__code__):
            for name in _globals_of(code):
                if name in function.__globals__:
                    self._use(name, function.__globals__[name], code)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.add(wrapped)

    def _use(self, name: str, value: Any, code: types.CodeType) -> None:
        if isinstance(value, types.ModuleType):
            self._mark(value.__name__)
            if not is_library(value.__name__):
                for attribute in code.co_names:
                    if attribute in vars(value):
                        self._use(f"{name}.{attribute}", vars(value)[attribute], code)
        elif isinstance(value, _FUNCTIONS):
            self.add(value)
        else:
            self._value(name, value)

    def _value(self, name: str, value: Any) -> None:
        contents = Contents(self.add)
        contents.feed(value)
        known = self.values.get(name)
        digest = contents.hexdigest()
        self.values[name] = digest if known in (None, digest) else f"{known} {digest}"

    def _mark_code(self, code: types.CodeType) -> None:
        """What it does; not where it stands, nor its names for what it keeps for itself."""
        self._mark(code.co_code.hex())
        self._mark(repr((code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags)))
        contents = Contents(self.add)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._mark_code(constant)
            else:
                contents.feed(constant)
        self._mark(contents.hexdigest())

    def _mark(self, text: str) -> None:
        self._state.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals_of(code: types.CodeType) -> list[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return sorted(names)


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"partial of {_name_of(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
