"""Random generators that a loader's functions and objects hold: where they are, and under which key each is seeded.

The pickler meets those that travel. Those of modules that workers import are found by a walk, here
and where the modules are imported. With `workers=0` the walk finds all of them.

Runs in: the main process (`Registry`), the processes that load a payload (`arrived`).
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaderpool.config import LoaderConfig
from loaderpool.plan.generators import (
    MOST_GENERATORS,
    CapturedGenerators,
    is_generator,
    is_generator_kind,
    key_of,
    number_of_global,
)
from loaderpool.system.process import is_library
from loaderpool.system.walk import CODE, CONTAINERS, attributes_of, is_found_by_name

# Objects that are looked into. With more, making a loader takes longer. With fewer, generators deep
# inside an object are not found with `workers=0`, or in modules.
_MOST_ENTERED = 5_000
# Items of a container that are looked into. A longer one is data, whose items are of a kind.
_MOST_ITEMS = 1_000
_PLAIN = frozenset({
    str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, types.CodeType,
    type(NotImplemented), type(...), types.BuiltinFunctionType, np.dtype,
})  # fmt: skip

Home = tuple[str, str]  # a module, and the dotted name of one of its variables


class ModuleGenerators(NamedTuple):
    """The generators under a variable of a module, which travel by name."""

    home: Home
    keys: list[bytes]


class Registry:
    """The generators of one loader, each with the key that it had when it was first seen.

    Runs in: the main process. A key stays, whatever is drawn from the generator later.

    Args:
        roots: the functions, the source and the hook, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id; holds the generators, not their owners
        self._in_modules = list[tuple[Home, list[Any]]]()
        for home, generators in find_all(roots.values()):
            self.look_up(generators)
            if home is not None and generators:
                self._in_modules.append((home, generators))
        self.of_modules = [ModuleGenerators(home, self.look_up(generators)) for home, generators in self._in_modules]

    def look_up(self, generators: Iterable[Any]) -> list[bytes]:
        """Return the generators' keys. One that was not seen before gets the key of its present state."""
        keys = list[bytes]()
        for generator in generators:
            if id(generator) not in self._known:
                self._known[id(generator)] = generator, key_of(generator)
            keys.append(self._known[id(generator)][1])
        return keys

    @property
    def pairs(self) -> list[tuple[Any, bytes]]:
        """The generators of this process with their keys."""
        return list(self._known.values())

    def adopt(self, saved: Sequence[str]) -> bool:
        """Take over the keys of a saved state; return whether that changed any.

        A generator without a seed has another state in each process. With the keys of the first one,
        a training that is resumed draws the same numbers.
        """
        before = self.saved()
        keys = [*map(bytes.fromhex, saved), *[key for _, key in self.pairs][len(saved) :]]
        for (generator, _), key in zip(self.pairs, keys, strict=False):
            self._known[id(generator)] = generator, key
        self.of_modules = [ModuleGenerators(home, self.look_up(generators)) for home, generators in self._in_modules]
        return self.saved() != before

    def saved(self) -> list[str]:
        """Return the keys as a saved state has them."""
        return [key.hex() for _, key in self.pairs]

    def __len__(self) -> int:
        return len(self._known)

    def names(self) -> list[str]:
        """Return the names of generators, as far as a walk comes to them: for a warning."""
        from loaderpool.system.walk import walk  # which few loaders need

        def enters(value: Any) -> bool:
            is_code = issubclass(type(value), (type, types.FunctionType))
            return not (is_code and is_library(str(value.__module__)))

        names = dict[int, str]()
        for found in walk(self._roots, enters, most_entered=_MOST_ENTERED):
            if is_generator(found.value) and number_of_global(found.value) is None:
                names.setdefault(id(found.value), " → ".join(found.path))
        return list(names.values())


def find_all(roots: Iterable[Any]) -> Iterator[tuple[Home | None, list[Any]]]:
    """Yield the generators that values hold, with None; then those of each variable of a module that they use."""
    generators, homes = find_generators(roots)
    yield None, generators
    waiting, seen = collections.deque(homes.items()), set(homes)
    while waiting and len(seen) < _MOST_ENTERED:
        home, value = waiting.popleft()
        generators, homes = find_generators([value])
        yield home, generators
        waiting.extend((each, value) for each, value in homes.items() if each not in seen)
        seen |= homes.keys()


def find_generators(roots: Iterable[Any]) -> tuple[list[Any], dict[Home, Any]]:
    """Return the generators that values hold, nearest first; and variables of modules that they use.

    Functions and classes are looked into if they are the user's, other objects always. The variables
    of functions and classes that travel by name are not looked into: they come with their names.
    """
    generators, homes = list[Any](), dict[Home, Any]()
    entered: dict[int, Any] = {}  # holds them, so that no id comes twice
    are_generators: dict[type, bool] = {}
    waiting = collections.deque(roots)
    while waiting and len(entered) < _MOST_ENTERED:
        value = waiting.popleft()
        kind = type(value)
        if kind in _PLAIN or id(value) in entered:
            continue
        entered[id(value)] = value
        if kind not in are_generators:
            are_generators[kind] = is_generator_kind(kind)
        if are_generators[kind]:
            if is_generator(value) and number_of_global(value) is None:
                generators.append(value)
            continue
        waiting.extend(_parts(value, kind, homes))
    return generators, homes


def _parts(value: Any, kind: type, homes: dict[Home, Any]) -> Iterator[Any]:
    """Yield what a value holds; note variables of modules instead of yielding them."""
    if issubclass(kind, types.FunctionType):
        yield from _parts_of_function(value, homes)
    elif issubclass(kind, type):
        if is_library(str(value.__module__)):
            return
        members = {name: each for name, each in vars(value).items() if name not in _OF_EACH_CLASS}
        if is_found_by_name(value):
            code = {name for name, each in members.items() if issubclass(type(each), CODE)}
            data = {f"{value.__qualname__}.{name}": members.pop(name) for name in members.keys() - code}
            _note(homes, value.__module__, data)
        yield from members.values()
        yield from value.__bases__
    elif issubclass(kind, types.ModuleType):
        return  # only what code uses of it (`_parts_of_function`)
    elif issubclass(kind, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif issubclass(kind, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif issubclass(kind, CODE):
        yield from (getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func", "__self__"))
    elif issubclass(kind, dict):
        yield from _items(dict.values(value))
        if kind is not dict:
            yield from _of_object(value, kind)
    elif issubclass(kind, np.ndarray):
        if value.dtype == object:
            yield from _items(value.flat)
    else:
        for base in CONTAINERS:
            if issubclass(kind, base):
                yield from _items(base.__iter__(value))
        if kind not in CONTAINERS:
            yield from _of_object(value, kind)


def _items(items: Iterable[Any]) -> Iterator[Any]:
    return (item for item in list(itertools.islice(items, _MOST_ITEMS)) if type(item) not in _PLAIN)


def _of_object(value: Any, kind: type) -> Iterator[Any]:
    yield from (each for _, each in attributes_of(value))
    yield kind


_OF_EACH_CLASS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__slotnames__"})


def _parts_of_function(function: types.FunctionType, homes: dict[Home, Any]) -> Iterator[Any]:
    if is_library(str(function.__module__)):
        return
    names = set(_names(function.__code__))
    used = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    captured = list(_captured(function))
    for module in [*captured, *used.values()]:
        if type(module) is types.ModuleType and not is_library(module.__name__):  # `augment.rng.random()`
            _note(homes, module.__name__, {name: vars(module)[name] for name in names & vars(module).keys()})
    yield from captured
    if is_found_by_name(function):
        _note(homes, function.__module__, used)
    else:
        yield from used.values()


def _captured(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _note(homes: dict[Home, Any], module: str, variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        if type(value) not in _PLAIN and type(value) is not types.ModuleType:
            homes.setdefault((module, name), value)


def roots_of(payload: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
    """Return what of a payload is the user's, by the names of the arguments."""
    source = payload["source"] if stream is None else stream.items
    parts = getattr(source, "payload_parts", None)  # of generators
    roots = {"source": source} if parts is None else parts
    return {name: payload[name] for name in ("fn", "augment", "batch_fn", "setup")} | roots


# ---- where a payload is loaded ----


def arrived(travelled: Iterable[tuple[Any, bytes]], of_modules: Iterable[ModuleGenerators]) -> list[tuple[Any, bytes]]:
    """Return the generators of a payload with their keys: those in its pickle, and those of modules here."""
    pairs = list(travelled)
    for (module, name), keys in of_modules:
        try:
            value = operator.attrgetter(name)(sys.modules[module])
        except (KeyError, AttributeError):  # it is not imported here: its functions travelled by value
            continue
        found, _ = find_generators([value])
        pairs += zip(found, keys, strict=False)
    return pairs


def made_by_setup(payload: Mapping[str, Any], known: Iterable[tuple[Any, bytes]]) -> Iterator[tuple[Any, bytes]]:
    """Yield the generators that the hook `setup` has made, with keys by their order.

    Their states say nothing: each process makes its own.
    """
    found = [each for _, generators in find_all(roots_of(payload).values()) for each in generators]
    seen = {id(generator) for generator, _ in known}
    for number, generator in enumerate(each for each in found if id(each) not in seen):
        yield generator, f"setup {number}".encode()


def seeder(pairs: list[tuple[Any, bytes]], config: LoaderConfig) -> CapturedGenerators | None:
    """Return what seeds generators for each sample; None: there are none, or too many, or threads share them."""
    is_wanted = config.seed_globals is not False and config.threads == 1
    if not pairs or not is_wanted or len(pairs) > MOST_GENERATORS:
        return None
    return CapturedGenerators(pairs, config.seed)
