"""Search for random generators in functions and objects, and in the user's modules that code uses.

Each generator has a path. It consists of the names of attributes, items and variables that lead to
the generator from an argument ("source/items/rng") or from a variable of a module
("project.augment:RNG"). All processes with the payload have the same paths. They use these to match
generators that are not pickled. No user code is called.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from loaderpool.plan.generators import is_generator, is_generator_kind, number_of_global
from loaderpool.system.annotations import Named
from loaderpool.system.process import is_library
from loaderpool.system.walk import CONTAINERS, WRAPPERS, attributes_of

_ITEMS_PER_ENTERED = 5  # most items are numbers and text, which are not entered
_PLAIN = frozenset({
    str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.CodeType,
    type(NotImplemented), type(...), np.dtype,
})  # fmt: skip
# Types that lead to all running code, or to whole libraries.
_NEVER_ENTERED = (
    types.ModuleType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
    types.FrameType, types.TracebackType,
)  # fmt: skip
_KEYS = (str, int, bytes)
# Containers that no other thread may change during an iteration.
_WATCHED = (set, frozenset, collections.deque)
_OF_EACH_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__slotnames__"}
)
# attributes of properties and wrappers
_MEMBERS = ("__wrapped__", "__func__", "fget", "fset", "fdel", "func")
_IS_HEAP_TYPE = 1 << 9  # type flag; most types of C code do not have it
_POINTER_BYTES = 8

_Path = tuple[object, object]  # path of the holder of a value, and the value's name in it
_Parts = Iterable[tuple[object, object]]  # names and values


class Search:
    """Search for random generators, which the constructor runs.

    Functions and classes are searched if they are the user's; other objects always. Each variable
    of a module is searched on its own. So the paths of its generators do not depend on other
    objects that hold them.

    Attributes:
        found: the generators by path, nearest first.
        entered: number of values that were entered.
        is_complete: True if the search ended before its limits.
        missing: modules that functions import when they run, and that are not imported yet.

    Args:
        roots: the functions, the source and the hook, by name.
        most_entered: limit of values that are entered.
        most_items: limit of items of one container; None: proportional to `most_entered`.
    """

    def __init__(
        self, roots: Mapping[str, object], most_entered: int, most_items: int | None = None
    ) -> None:
        self.found: dict[str, object] = {}
        self.missing: dict[str, None] = {}
        self.entered, self._most = 0, most_entered
        self._most_items = most_items or most_entered * _ITEMS_PER_ENTERED
        self._readers: dict[type, Callable[[Any], _Parts] | None] = {}
        self._are_libraries: dict[str, bool] = {}
        self._are_generators: dict[type, bool] = {}
        self._classes: set[type] = set()  # classes of libraries whose attributes were noted
        self._homes = collections.deque[tuple[str, Any]]()
        # searched objects; kept alive, so that no id is reused
        self._seen: dict[tuple[str, int], Any] = {}
        self._has_skipped = False  # True if contents were skipped, because too many values wait
        self._search((None, name, value) for name, value in roots.items())
        while self._homes and self.entered < most_entered:
            path, value = self._homes.popleft()
            if issubclass(type(value), (type, types.FunctionType)):
                of_code = self._of_class if issubclass(type(value), type) else self._of_function
                self._search((path, name, part) for name, part in of_code(value))
            else:
                self._search([(None, path, value)])
        self.is_complete = self.entered < most_entered and not self._has_skipped

    def _search(self, roots: Iterable[tuple[Any, Any, Any]]) -> None:
        """Search breadth first.

        Args:
            roots: tuples of the path of the value's holder, the value's name in it, and the value.
        """
        waiting = collections.deque(roots)
        entered: dict[int, Any] = {}
        while waiting and self.entered < self._most:
            holder, name, value = waiting.popleft()
            kind = type(value)
            if kind in _PLAIN or id(value) in entered:
                continue
            entered[id(value)] = value
            self.entered += 1
            try:
                read = self._readers[kind]
            except KeyError:
                read = self._readers[kind] = self._reader_of(kind)
            path = holder, name
            if read is None:
                if (
                    is_generator_kind(kind)
                    and is_generator(value)
                    and number_of_global(value) is None
                ):
                    self._add(path, value)
            elif len(waiting) < 2 * self._most:
                for name, part in read(value):
                    if type(part) not in _PLAIN:
                        waiting.append((path, name, part))
            else:
                self._has_skipped = True

    def _add(self, path: _Path, generator: object) -> None:
        names: list[str] = []
        at: object = path
        while isinstance(at, tuple):
            # Other keys may be instances of the user's classes, whose code must not be called.
            names.append(str(at[1]) if type(at[1]) in _KEYS else type(at[1]).__name__)
            at = at[0]
        if isinstance(at, str):
            names.append(at)
        text = full = "/".join(reversed(names))
        for number in itertools.count(2):
            if full not in self.found:
                break
            full = f"{text}#{number}"
        self.found[full] = generator

    # ---- contents of a value, by type ----

    def _reader_of(self, kind: type) -> Callable[[Any], _Parts] | None:
        """Return a function that yields the contents of a value of this type.

        None if such values are not searched.
        """
        if is_generator_kind(kind) or issubclass(kind, _NEVER_ENTERED):
            return None
        if issubclass(kind, (type, types.FunctionType)):
            return self._note_code
        if issubclass(kind, np.ndarray):
            return lambda array: self._first(enumerate(array.flat)) if array.dtype == object else ()
        if issubclass(kind, WRAPPERS):
            return lambda value: ((name, getattr(value, name, None)) for name in _MEMBERS)
        if kind in (dict, *CONTAINERS):
            return functools.partial(self._items, kind)
        return self._reader_of_objects(kind)

    def _reader_of_objects(self, kind: type) -> Callable[[Any], _Parts]:
        container = next((base for base in (dict, *CONTAINERS) if issubclass(kind, base)), None)
        is_of_c = container is None and _is_of_c(kind)
        attributes = _reader_of_attributes(kind)
        self._note_code(kind)
        if container is None and not is_of_c:
            return attributes

        def read(value: Any) -> Iterator[tuple[Any, Any]]:
            if container is not None:
                yield from self._items(container, value)
            yield from attributes(value)
            if is_of_c:  # objects held by C code have no names
                yield from enumerate(gc.get_referents(value))
            elif issubclass(kind, collections.defaultdict):
                yield "default_factory", value.default_factory

        return read

    def _items(self, base: type[Any], value: Any) -> _Parts:
        if base is dict:
            return self._first(list(dict.items(value)))
        if base in _WATCHED:
            return self._first(enumerate(list(base.__iter__(value))))
        return self._first(enumerate(base.__iter__(value)))

    def _first(self, items: Iterable[tuple[Any, Any]]) -> _Parts:
        rest = iter(items)
        yield from itertools.islice(rest, self._most_items)
        # Items of a list are usually of one type, so the next item shows if the others matter.
        self._has_skipped |= any(type(part) not in _PLAIN for _, part in itertools.islice(rest, 1))

    # ---- code, and the modules that it uses ----

    def _note_code(self, code: Named) -> _Parts:
        """Queue a user's function or class for a separate search.

        For a class of a library, only its generators are noted.
        """
        if not self._is_library(code.__module__):
            self._note(f"{code.__module__}:{code.__qualname__}", code)
        elif isinstance(code, type):
            self._note_shared(code)
        return ()

    def _note_shared(self, cls: type) -> None:
        """Note generators that are attributes of a library's class, because all its instances share
        them.
        """
        for each in cls.__mro__:
            if each not in self._classes:
                self._classes.add(each)
                for name, value in list(vars(each).items()):
                    if self._is_generator_kind(type(value)):
                        self._note(f"{each.__module__}:{each.__qualname__}/{name}", value)

    def _is_generator_kind(self, kind: type) -> bool:
        if kind not in self._are_generators:
            self._are_generators[kind] = is_generator_kind(kind)
        return self._are_generators[kind]

    def _note(self, path: str, value: Any) -> None:
        if type(value) in _PLAIN or issubclass(type(value), types.ModuleType):
            return
        if issubclass(type(value), (type, types.FunctionType)):
            if self._is_library(value.__module__):
                return
            path = f"{value.__module__}:{value.__qualname__}"
        if (path, id(value)) not in self._seen:
            self._seen[path, id(value)] = value
            self._homes.append((path, value))

    def _is_library(self, module: object) -> bool:
        name = str(module)
        if name not in self._are_libraries:
            self._are_libraries[name] = is_library(name)
        return self._are_libraries[name]

    def _of_class(self, cls: type) -> Iterator[tuple[Any, Any]]:
        for name, member in list(vars(cls).items()):
            if name not in _OF_EACH_CLASS:
                yield name, member
        yield from enumerate((*cls.__bases__, type(cls)))

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
        code, variables = function.__code__, function.__globals__
        captured = dict(_captured(function))
        yield from captured.items()
        module = variables.get("__name__")
        if self._is_library(module):  # `__module__` may be copied by `functools.wraps`
            return
        names, texts = list[str](), list[str]()
        _collect_names(code, names, texts)
        used = {name: variables[name] for name in dict.fromkeys(names) if name in variables}
        for name, value in used.items():
            self._note(f"{module}:{name}", value)
        modules = [
            each
            for each in (*captured.values(), *used.values())
            if issubclass(type(each), types.ModuleType)
        ]
        for name in _imported_by(code, str(variables.get("__package__") or "")):
            imported = sys.modules.get(name)
            if imported is None:
                self.missing[name] = None
            elif issubclass(type(imported), types.ModuleType):
                modules.append(imported)
        if modules:
            self._note_variables(modules, dict.fromkeys((*names, *texts)))

    def _note_variables(self, modules: list[types.ModuleType], names: Iterable[str]) -> None:
        """Queue variables of the user's modules, and of modules that these refer to, for a search
        of their own.
        """
        seen = set[int]()
        while modules:
            module = modules.pop()
            # Not getattr, which would load a lazy module.
            variables = object.__getattribute__(module, "__dict__")
            home = variables.get("__name__")
            if id(module) in seen or self._is_library(home):
                continue
            seen.add(id(module))
            for name in names:
                value = variables.get(name)
                if issubclass(type(value), types.ModuleType):
                    modules.append(value)
                else:
                    self._note(f"{home}:{name}", value)


def module_of(path: str) -> str:
    """Return the module at the start of a path, or "" if the path starts with an argument."""
    module, colon, _ = path.partition("/")[0].partition(":")
    return module if colon else ""


def _is_of_c(kind: type) -> bool:
    """Return True if C code may keep objects in instances of this class."""
    if any(not base.__flags__ & _IS_HEAP_TYPE for base in kind.__mro__ if base is not object):
        return True
    slots = sum(
        type(member) is types.MemberDescriptorType
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for member in vars(cls).values()
    )
    # Python code adds slots, and a pointer each for `__dict__` and weak references.
    return kind.__basicsize__ > object.__basicsize__ + _POINTER_BYTES * (slots + 2)


def _reader_of_attributes(kind: type) -> Callable[[Any], _Parts]:
    """Return a function like `attributes_of` that has looked up the class's slots once."""
    slots = [
        (name, member.__get__)
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if type(member) is types.MemberDescriptorType
    ]
    attributes = next(
        (vars(cls)["__dict__"] for cls in kind.__mro__ if "__dict__" in vars(cls)), None
    )
    if attributes is not None and type(attributes) is not types.GetSetDescriptorType:
        return attributes_of
    of_dict = None if attributes is None else attributes.__get__
    if of_dict is not None and not slots:
        return lambda value: list(of_dict(value).items())

    def read(value: object) -> Iterator[tuple[Any, Any]]:
        if of_dict is not None:
            yield from list(of_dict(value).items())
        for name, get in slots:
            with contextlib.suppress(AttributeError):  # the slot was never set
                yield name, get(value)

    return read


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable is not set yet
            continue
    yield from zip(
        code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True
    )
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _collect_names(code: types.CodeType, names: list[str], texts: list[str]) -> None:
    """Collect the names that code uses, and its text constants that may be names, as for
    `getattr`.
    """
    names += code.co_names
    for constant in code.co_consts:
        if type(constant) is str and constant.isidentifier():
            texts.append(constant)
        elif isinstance(constant, types.CodeType):
            _collect_names(constant, names, texts)


def _imported_by(code: types.CodeType, package: str) -> Iterator[str]:
    """Yield names of modules that a function imports when it runs. Some may be names of variables
    instead.
    """
    for level, name, members in _imports_in(code):
        base = ".".join(package.split(".")[: -(level - 1) or None]) if level else ""
        full = ".".join(filter(None, (base, name)))
        yield from (full, full.partition(".")[0], *(f"{full}.{member}" for member in members))


_IMPORT = dis.opmap["IMPORT_NAME"]


def _imports_in(code: types.CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the level, the module and the names of each import in a function and its inner
    functions.
    """
    if _IMPORT in code.co_code[::2]:
        loaded: list[Any] = [0, None]
        for each in dis.get_instructions(code):
            if each.opname == "IMPORT_NAME":
                level, names = loaded[-2:]
                yield (level if type(level) is int else 0), str(each.argval), (names or ())
            elif each.opname.startswith("LOAD_"):
                loaded.append(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports_in(constant)
