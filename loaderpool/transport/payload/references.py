"""The long lists and dicts that a payload's code comes to, each with every way to it, and the code that may go there.

Runs in: the trainer. Nothing of the user's is called.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from cloudpickle import cloudpickle as internals

from loaderpool.sources.sequence import attributes_of
from loaderpool.system.installed import is_installed
from loaderpool.transport.payload.uses import Scope, codes_within

# Objects that are looked at. More: a function that holds a large graph of objects is looked through for longer than it
# takes to pickle it. Where there are more, nothing is said of any.
_MOST_OBJECTS = 20_000
# Run where an object is made, which is not the one that has travelled, but may be given that one: they count where the
# class is named.
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
# Not asked for in a worker.
_UNASKED = frozenset(
    {"__init_subclass__", "__set_name__", "__del__", "__repr__", "__str__", "__eq__", "__ne__", "__hash__",
     "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__dir__"}
)  # fmt: skip
_PLAIN_KINDS = frozenset({list, tuple, dict, collections.deque})
_HOLDERS = (list, tuple, dict, set, frozenset, collections.deque)
_CODE_KINDS = frozenset({types.FunctionType, types.MethodType, functools.partial})
_LONG_KINDS = (list, tuple, dict, collections.deque, collections.UserList, collections.UserDict)
_NO_CODE = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType, range, slice})
_READ = frozenset({"source", "shards"})
CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})  # of a payload, in the workers
_NOT_THEIRS = frozenset({"", "cloudpickle", "loaderpool", "numpy"})


@dataclass(frozen=True)
class Reference:
    """One way to a long list or dict."""

    path: tuple[str, ...]  # in words: from the payload's key on
    scope: Scope | None  # how code comes to it; None: in some way that is not looked into
    name: str = ""  # the variable's there
    function: types.FunctionType | None = None  # whose variable it is; None: an attribute
    holder: Any = None  # whose attribute it is
    is_source: bool = False  # read by the loader itself


@dataclass
class Found:
    """A long list, tuple or dict, or an object of a class made of one."""

    value: Any
    references: list[Reference] = field(default_factory=list)


def find_long(
    payload: Mapping[str, Any], least_items: int, is_by_value: Callable[[Any], bool]
) -> tuple[list[Found], Callable[[type], list[types.CodeType]], AbstractSet[int]]:
    """Return all of at least so many items; what tells which code may use the attributes of a class's objects; and ids.

    The code is the user's own, and what the class inherits. The ids are those of all other objects that were met.

    Args:
        payload: what is shipped.
        least_items: how many.
        is_by_value: whether a function or class travels itself.
    """
    search = _Search(least_items, is_by_value)
    for name in sorted((CALLED | _READ) & payload.keys()):
        search.visit(payload[name], (name,), is_source=name in _READ)
    is_complete = search.run()
    return (list(search.found.values()) if is_complete else []), search.codes, search.seen.keys()


class _Search:
    def __init__(self, least_items: int, is_by_value: Callable[[Any], bool]) -> None:
        self._least_items, self._is_by_value = least_items, is_by_value
        self.found: dict[int, Found] = {}
        self.seen: dict[int, Any] = {}  # keeps objects made on the way, so that their ids stay theirs
        self._waiting: collections.deque[tuple[Any, tuple[str, ...]]] = collections.deque()
        self._roots: list[types.CodeType] = []
        self._methods: dict[str, list[types.CodeType]] = {}
        self._members: set[int] = set()  # functions whose code is there under a method's name, and what they wrap

    def visit(
        self,
        value: Any,
        path: tuple[str, ...],
        scope: Scope | None = None,
        name: str = "",
        function: types.FunctionType | None = None,
        holder: Any = None,
        is_source: bool = False,
        is_member: bool = False,
    ) -> None:
        """Note a long list, and look into anything else later."""
        kind = type(value)
        if kind in _NO_CODE:
            return
        if is_member:
            self._members.add(id(value))
        elif kind is types.FunctionType and _is_users(value):
            self._roots.append(value.__code__)
        if issubclass(kind, _LONG_KINDS) and _length(value) >= self._least_items:
            found = self.found.setdefault(id(value), Found(value))
            if not found.references and kind in _PLAIN_KINDS:
                self._look_for_code(value, path)
            found.references.append(Reference(path, scope, name, function, holder, is_source))
        elif id(value) not in self.seen:
            self.seen[id(value)] = value
            self._waiting.append((value, path))

    def run(self) -> bool:
        """Look through all that waits; False: it is too much."""
        while self._waiting:
            if len(self.seen) > _MOST_OBJECTS:
                return False
            self._look_into(*self._waiting.popleft())
        return True

    def codes(self, kind: type) -> list[types.CodeType]:
        """Code that may run in a worker: of functions, and of the methods whose names are used in such code."""
        reached: list[types.CodeType] = []
        waiting, methods = list(self._roots), {name: list(codes) for name, codes in self._methods.items()}
        for cls in kind.__mro__:
            if not _is_users(cls):
                self._take_methods(cls, waiting, methods)
        seen: set[str] = set()
        while waiting:
            for code in codes_within(waiting.pop()):
                reached.append(code)
                for name in {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))} - seen:
                    seen.add(name)
                    waiting += methods.pop(name, ())
        return reached

    def _look_for_code(self, many: Any, path: tuple[str, ...]) -> None:
        """What elements of a long list or dict may run: as what is held, they are not looked into."""
        elements = list(many.values()) if type(many) is dict else many
        kinds = set(map(type, elements))
        for cls in {cls for kind in kinds for cls in kind.__mro__ if _is_users(cls)}:
            self.visit(cls, path)
        if not kinds.isdisjoint(_CODE_KINDS):
            for each in elements:
                if type(each) in _CODE_KINDS:
                    self.visit(each, path)

    def _look_into(self, value: Any, path: tuple[str, ...]) -> None:
        kind = type(value)
        if issubclass(kind, _HOLDERS):  # by what it is made of: a class of the user's may tell something else
            of = "dict" if issubclass(kind, dict) else kind.__name__
            keyed = dict.items(value) if issubclass(kind, dict) else enumerate(_base_of(kind).__iter__(value))
            for key, each in keyed:
                self.visit(each, (*path, f"item {key!r:.80} of the {of}"))
        if kind in _HOLDERS:
            return
        if issubclass(kind, types.FunctionType):
            self._look_into_function(value, path)
        elif issubclass(kind, types.MethodType):
            self.visit(value.__self__, path)
            self.visit(value.__func__, path)
        elif issubclass(kind, functools.partial):
            self._look_into_partial(value, path)
        elif issubclass(kind, type):
            self._look_into_class(value, path)
        else:
            self._look_into_instance(value, path)

    def _look_into_function(self, function: types.FunctionType, path: tuple[str, ...]) -> None:
        code, name = function.__code__, function.__qualname__
        is_by_value = self._is_by_value(function)
        if not is_by_value and not _is_users(function):
            return
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            label = f"closure variable {variable!r} of function {name}"
            self.visit(value, (*path, label), "closure", variable, function, is_member=id(function) in self._members)
        for variable in sorted(internals._extract_code_globals(code)):
            if variable in function.__globals__:
                value = function.__globals__[variable]
                if is_by_value:
                    self.visit(value, (*path, f"global {variable!r} used by {name}"), "global", variable, function)
                elif isinstance(value, (types.FunctionType, type)):  # for their code; their data does not travel
                    self.visit(value, path)
                if type(value) is types.ModuleType and _is_users_module(value.__name__):
                    for member in map(vars(value).get, code.co_names):
                        if isinstance(member, (types.FunctionType, type)):
                            self.visit(member, path)
        if is_by_value:
            for parameter, value in _defaults(function):
                self.visit(value, (*path, f"default of {parameter!r} of {name}"), "parameter", parameter, function)
            for key, value in vars(function).items():
                label = f"attribute .{key} of function {name}"  # such as __wrapped__
                self.visit(value, (*path, label), is_member=id(function) in self._members)

    def _look_into_partial(self, partial: functools.partial[Any], path: tuple[str, ...]) -> None:
        function: Any = partial.func
        self.visit(function, path)
        is_known = isinstance(function, types.FunctionType) and type(partial) is functools.partial
        code = function.__code__ if is_known else None
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
        given = [(f"argument {at} of the partial", at, value) for at, value in enumerate(partial.args)]
        named = [(f"argument {key!r} of the partial", key, value) for key, value in partial.keywords.items()]
        for label, at, value in given:
            if code is not None and at < code.co_argcount:
                self.visit(value, (*path, label), "parameter", parameters[at], function)
            else:
                self.visit(value, (*path, label))
        for label, key, value in named:
            if key in parameters:
                self.visit(value, (*path, label), "parameter", key, function)
            else:
                self.visit(value, (*path, label))

    def _look_into_class(self, cls: type, path: tuple[str, ...]) -> None:
        if _is_users(cls):
            self._take_methods(cls, self._roots, self._methods)
        if self._is_by_value(cls):
            for key, value in vars(cls).items():
                functions = list(_functions_of(value))
                for function in functions:
                    self.visit(function, path, is_member=True)
                if not functions and not (key.startswith("__") and key.endswith("__")):
                    self.visit(value, (*path, f"attribute .{key} of class {cls.__qualname__}"))
            for base in cls.__bases__:
                self.visit(base, path)

    @staticmethod
    def _take_methods(cls: type, roots: list[types.CodeType], methods: dict[str, list[types.CodeType]]) -> None:
        """Python's own calls of special methods are not seen in code; others are named where they are called."""
        for name, member in vars(cls).items():
            for function in _functions_of(member):
                code = function.__code__
                is_special = name.startswith("__") and name.endswith("__")
                if name in _CONSTRUCTORS:
                    methods.setdefault(cls.__name__, []).append(code)
                if is_special and name not in _CONSTRUCTORS | _UNASKED:
                    roots.append(code)
                else:
                    methods.setdefault(name, []).append(code)

    def _look_into_instance(self, value: Any, path: tuple[str, ...]) -> None:
        kind = type(value)
        is_ours = kind.__module__.partition(".")[0] == "loaderpool"
        for cls in kind.__mro__:
            if _is_users(cls):
                self.visit(cls, path)
        for member in _wrapped(value):
            self.visit(member, path)
        is_plain = _travels_by_attributes(value)
        try:
            attributes = attributes_of(value)
        except Exception:  # a proxy's own code: what it stands for is not looked into
            return
        for key, each in attributes.items():
            if is_ours:  # a source of ours: what it holds is read by index, and packed as a source
                self.visit(each, path, is_source=True)
            else:
                label = f"attribute .{key} of {kind.__qualname__}"
                self.visit(each, (*path, label), "attribute" if is_plain else None, key, None, value)


def values_of(function: types.FunctionType) -> Iterator[Any]:
    """The values of the variables that a function has from where it was made."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
    for variable in internals._extract_code_globals(function.__code__):
        if variable in function.__globals__:
            yield function.__globals__[variable]
    yield from (value for _, value in _defaults(function))


def _travels_by_attributes(value: Any) -> bool:
    """Whether an object is pickled by Python's own means: its attributes as they are."""
    kind: Any = type(value)
    base: Any = object
    own_state: Any = getattr(object, "__getstate__", None)  # from 3.11 on
    return (
        kind.__reduce_ex__ is base.__reduce_ex__
        and kind.__reduce__ is base.__reduce__
        and getattr(kind, "__getstate__", own_state) is own_state
        and not hasattr(kind, "__setstate__")
        and kind not in copyreg.dispatch_table
    )


def _is_users(named: Any) -> bool:
    """Whether a function or class is of the user's own modules, not of Python's, an installed package's, or ours."""
    return isinstance(named.__module__, str) and _is_users_module(named.__module__)


def _is_users_module(module: str) -> bool:
    top = module.partition(".")[0]
    if top == "__main__":
        return True
    return top not in sys.stdlib_module_names and top not in _NOT_THEIRS and not is_installed(module)


def _length(value: Any) -> int:
    """Return the length of the object that it is made of: a class of the user's may say something else."""
    base = _base_of(type(value))
    return len(getattr(value, "data", ())) if base is object else int(base.__len__(value))


def _base_of(kind: type) -> Any:
    """Return the built-in container that a class is made of, or object."""
    return next((base for base in _HOLDERS if issubclass(kind, base)), object)


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _wrapped(value: Any) -> Iterator[Any]:
    """Functions that an object stands for: of a property, a class method, a cached function."""
    kind = type(value)  # not isinstance: it asks a proxy for what it stands for
    if issubclass(kind, (property, staticmethod, classmethod, functools.cached_property)) or hasattr(
        kind, "cache_info"
    ):
        for name in ("__func__", "__wrapped__", "fget", "fset", "fdel", "func"):
            function = getattr(value, name, None)
            if isinstance(function, (types.FunctionType, types.MethodType)):
                yield function


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """A member of a class, where it is a function, and the functions that its decorators have wrapped."""
    waiting: list[Any] = [member, *_wrapped(member)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        for cell in function.__closure__ or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:
                continue
