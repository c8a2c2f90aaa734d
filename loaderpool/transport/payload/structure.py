"""Comparison of two pickles of the same variables by structure instead of bytes.

Pickles of equal objects can differ: in the sharing of equal strings, in the order of attributes and
sets, and in values that objects have computed and cached. So both pickles are unpickled to symbols.
A call of a class or function becomes a `_Node` with its arguments and state. Nothing is imported or
run. Called in the main process.
"""

from __future__ import annotations

import collections
import io
import itertools
import marshal
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cloudpickle import cloudpickle as internals

from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.walk import cached_properties
from loaderpool.transport.payload.kept import Kept, kept_by_calls
from loaderpool.transport.pickling import generator_at

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
# Containers with more items are compared by their marshaled bytes, if they hold only atoms.
_MANY = 16
_MAKES_CLASS = frozenset({"_make_skeleton_class", "_make_skeleton_enum"})
# Functions of cloudpickle that set the state of their first argument, with the attributes to
# ignore. These are modules that were imported meanwhile, as when `numpy.random` is first used, and
# attributes that Python adds to a class.
_SET_STATE = {
    "_function_setstate": frozenset({"_cloudpickle_submodules"}),
    "_class_setstate": frozenset({"__slotnames__", "__annotations_cache__"}),
}
_NO_ARGUMENTS: object = ((), {})
_FUNCTION = (internals.__name__, "_make_function")
_GENERATOR = (generator_at.__module__, generator_at.__name__)

Pairs = list[tuple[int, int]]
_Items = list[Any] | tuple[Any, ...]


class Difference(NamedTuple):
    """The first value that differs."""

    name: str  # name of the value; empty: it has none
    # True if all differences are in results of an object's last call (see `kept`)
    is_kept: bool = False


class Outcome(NamedTuple):
    """Outcome of a comparison of two pickles.

    Attributes:
        difference: the first value that differs; None: there is none.
        arrays: pairs of numbers of arrays beside the two pickles. These arrays must be equal.
        generators: pairs of numbers of generators beside the two pickles. These generators must be
            the same.
    """

    difference: Difference | None
    arrays: Pairs
    generators: Pairs


def means_the_same(before: bytes, now: bytes) -> bool:
    """Return True if two pickles have the same structure."""
    return before == now or compare(before, now).difference is None


def compare(before: bytes, now: bytes) -> Outcome:
    """Compare the structure of two pickles. Arrays and generators beside them are not compared."""
    try:
        old, new = _Symbols(before), _Symbols(now)
    except Exception as error:  # unreadable pickles differ, because their bytes do
        if is_of_a_handler(error):
            raise
        return Outcome(Difference(""), [], [])
    found = _Comparison(old, new).outcome()
    if found.difference is None:
        return found
    without = _Comparison(old, new, counts_kept=False).outcome()
    return (
        found
        if without.difference is not None
        else without._replace(difference=Difference(found.difference.name, True))
    )


def name_of_array(pickled: bytes, number: int) -> str:
    """Return the name of an array beside a pickle."""
    symbols = _Symbols(pickled)
    return _name_of(symbols, lambda value: type(value) is _Buffer and int(value) == number)


class _Buffer(bytes):
    """Number of an array beside the pickle, in place of the array."""


class _Node:
    """Symbol for the result of a class or function."""

    symbols: _Symbols  # symbols of the class
    label: tuple[str, Any]  # label of the class: module and name, or the node that made it
    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    added: list[tuple[str, Any]]  # states and items, in order

    def __new__(cls, *arguments: object, **keywords: object) -> Any:
        node = super().__new__(cls)
        node.number, node.arguments, node.added = len(cls.symbols.nodes), (arguments, keywords), []
        module, name = cls.label
        # nothing refers to the result of this call
        if module == internals.__name__ and name in _SET_STATE:
            target: Any = arguments[0]
            target = target if isinstance(target, _Node) else target.label[1]
            target.added.append((name, arguments[1]))
            return node
        cls.symbols.nodes.append(node)
        if module == internals.__name__ and name in _MAKES_CLASS:
            # A symbol that is a class, because the pickle may create instances of it.
            return cls.symbols.new_class(("", node))
        return node

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return type(self).symbols.called(self, *arguments, **keywords)

    def __setstate__(self, state: object) -> None:
        self.added.append(("state", state))

    def __setitem__(self, key: object, value: object) -> None:
        self.added.append(("item", (key, value)))

    def append(self, value: object) -> None:
        self.added.append(("item", value))

    add = append


class _Symbols(pickle.Unpickler):
    """A pickle, read as symbols, not objects: `value`, and all `nodes` in creation order."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(
            io.BytesIO(pickled), buffers=map(_Buffer, map(b"%d".__mod__, itertools.count()))
        )
        self.nodes: list[_Node] = []
        self._classes: dict[tuple[str, str], type[_Node]] = {}
        self.called = self.new_class(("", "call"))
        self.value = self.load()

    def find_class(self, module: str, name: str) -> type[_Node]:
        if (module, name) not in self._classes:
            self._classes[module, name] = self.new_class((module, name))
        return self._classes[module, name]

    def new_class(self, label: tuple[str, object]) -> type[_Node]:
        return type("symbol", (_Node,), {"symbols": self, "label": label})

    def persistent_load(self, number: object) -> object:
        return self.find_class("", "persistent")(number)


class _Differs(Exception):
    """Two values differ. The optional argument is the key of the attribute."""


class _Comparison:
    """Comparison of two pickles, from their values to all objects these refer to.

    Ignored attributes are left out. `_partners` are nodes, classes, lists, dicts and sets of the
    first pickle, mapped to those of the second, by ids.
    """

    def __init__(self, old: _Symbols, new: _Symbols, counts_kept: bool = True) -> None:
        self._old, self._new, self._counts_kept = old, new, counts_kept
        self._partners: dict[int, int] = {}
        self._taken: set[int] = set()  # ids of partners in the second pickle
        # partners that are still to be compared
        self._waiting = collections.deque[tuple[_Node, _Node]]()
        self._left_out: tuple[list[Any], list[Any]] = [], []
        self._ignored: dict[type, Kept] = {}  # ignored attributes, by class
        self._at: _Node | None = None  # node of the second pickle that is being compared
        self.arrays: Pairs = []
        self.generators: Pairs = []

    def outcome(self) -> Outcome:
        try:
            self._compare(self._old.value, self._new.value)
            self._compare_waiting()
            # Calls of other functions that set a state: nothing refers to their results.
            self._compare_items(self._unmet(self._old, 0), self._unmet(self._new, 1))
            self._compare_waiting()
        except (_Differs, RecursionError) as error:
            return Outcome(Difference(self._name_of_difference(error)), [], [])
        return Outcome(None, self.arrays, self.generators)

    def _compare_waiting(self) -> None:
        while self._waiting:
            before, self._at = self._waiting.popleft()
            self._compare_nodes(before, self._at)

    def _unmet(self, symbols: _Symbols, which: int) -> list[_Node]:
        """Return the nodes that neither the comparison nor an ignored attribute has reached."""
        met = self._taken if which else self._partners
        nodes = [node for node in symbols.nodes if id(node) not in met]
        if nodes:
            held = {id(value) for _, value in _walk([("", self._left_out[which])])}
            nodes = [node for node in nodes if id(node) not in held]
        return nodes

    def _name_of_difference(self, error: Exception) -> str:
        at = self._at
        if at is None:
            return ""
        name = _name_of(self._new, lambda value: value is at)
        return (
            _joined(at, name, str(error.args[0]))
            if name and isinstance(error, _Differs) and error.args
            else name
        )

    def _compare_nodes(self, before: _Node, now: _Node) -> None:
        self._compare(type(before), type(now))
        if now.label == _GENERATOR:
            self.generators.append((before.arguments[0][0], now.arguments[0][0]))
            return
        if before.arguments != _NO_ARGUMENTS or now.arguments != _NO_ARGUMENTS:
            self._compare(before.arguments, now.arguments)
        kind = type(now)
        if kind not in self._ignored:
            cls = _class_of(now)
            kept = {} if self._counts_kept else kept_by_calls(cls)
            self._ignored[kind] = {**kept, **dict.fromkeys(cached_properties(cls))}
        ignored = self._ignored[kind]
        old, new = (self._counting(node, ignored, at) for at, node in enumerate((before, now)))
        self._compare_items([kind for kind, _ in old], [kind for kind, _ in new])
        for (what, first), (_, second) in zip(old, new, strict=True):
            if what == "item":
                self._compare(first, second)
            else:
                self._compare_states(first, second, _SET_STATE.get(what, frozenset()))

    def _counting(self, node: _Node, ignored: Kept, which: int) -> list[tuple[str, Any]]:
        """Return the states and items of a node, without ignored attributes.

        A state with only ignored attributes is left out.
        """
        if not ignored:
            return node.added
        found = list[tuple[str, Any]]()
        for kind, value in node.added:
            # One dict of attributes, or attributes and slots.
            parts = value if type(value) is tuple and len(value) == 2 else (value,)
            if kind != "state" or not {dict, type(None)}.issuperset(map(type, parts)):
                found.append((kind, value))
                continue
            rest = [self._counting_of(part or {}, ignored, self._left_out[which]) for part in parts]
            if any(rest):
                found.append((kind, rest[0] if len(rest) == 1 or not rest[1] else tuple(rest)))
        return found

    def _counting_of(
        self, attributes: dict[str, Any], ignored: Kept, left_out: list[Any]
    ) -> dict[str, Any]:
        rest = dict[str, Any]()
        for key, value in attributes.items():
            keys = ignored.get(key, frozenset())
            if keys and type(value) is dict:
                rest[key] = {name: each for name, each in value.items() if name not in keys}
                left_out += [value, rest[key]]  # kept alive, so that no id is reused
            elif keys is None:
                left_out.append(value)
            else:
                rest[key] = value
        return rest

    def _compare_states(self, before: object, now: object, ignored: frozenset[str]) -> None:
        """Compare the states of two objects, functions or classes. The order of attributes is
        ignored.
        """
        # Both states are pairs of attributes and slots.
        if type(before) is tuple and type(now) is tuple and len(before) == len(now):
            for one, other in zip(before, now, strict=True):
                self._compare_states(one, other, ignored)
        elif type(before) is dict and type(now) is dict:
            for state, left_out in zip((before, now), self._left_out, strict=True):
                left_out.extend(state[key] for key in ignored & state.keys())
            if changed := (before.keys() ^ now.keys()) - ignored:
                raise _Differs(*changed)
            for key in before.keys() - ignored:
                compare = self._compare if key != "__globals__" else self._compare_globals
                try:
                    compare(before[key], now[key])
                except _Differs as error:
                    if not error.args:
                        error.args = (key,)
                    raise
        else:
            self._compare(before, now)

    def _compare_globals(self, before: object, now: object) -> None:
        self._compare_states(before, now, frozenset())

    def _compare(self, before: Any, now: Any) -> None:
        if before is now:  # atoms and empty tuples are shared by both pickles
            return
        kind, is_node = type(before), isinstance(before, _Node)
        if (
            kind is not type(now)
            and not isinstance(before, type)
            and not (is_node and isinstance(now, _Node))
        ):
            raise _Differs
        if kind in (float, complex):  # nan equals nan, and 0.0 differs from -0.0
            if repr(before) != repr(now):
                raise _Differs
        elif kind in _ATOMS:
            if before != now:
                raise _Differs
        elif kind is _Buffer:
            self.arrays.append((int(before), int(now)))
        elif kind is tuple or kind is frozenset:  # the identity of equal ones is ignored
            self._compare_containers(before, now, kind)
        elif id(before) in self._partners or id(now) in self._taken:
            # one object was split in two, or two were merged into one
            if self._partners.get(id(before)) != id(now):
                raise _Differs
        else:
            self._partners[id(before)] = id(now)
            self._taken.add(id(now))
            if is_node:
                self._waiting.append((before, now))
            elif not isinstance(before, type):
                self._compare_containers(before, now, kind)
            elif isinstance(now, type):  # both values are symbols of classes
                self._compare(before.label, now.label)  # type: ignore[attr-defined]
            else:
                raise _Differs

    def _compare_containers(self, before: Any, now: Any, kind: type) -> None:
        if kind is dict:
            self._compare_items([*before], [*now])
            self._compare_items([*before.values()], [*now.values()])
        elif kind in (set, frozenset):  # the order in a set is ignored
            self._compare_items(_nodes_in(before), _nodes_in(now))
            if _others_in(before) != _others_in(now):
                raise _Differs
        elif kind in (list, tuple):
            self._compare_items(before, now)
        elif before != now:  # the values are bytearrays
            raise _Differs

    def _compare_items(self, before: _Items, now: _Items) -> None:
        if len(before) != len(now):
            raise _Differs
        if (
            len(before) > _MANY
            and _ATOMS.issuperset(map(type, before))
            and _ATOMS.issuperset(map(type, now))
        ):
            # Version 2 of marshal writes each item separately, without references.
            if marshal.dumps(before, 2) != marshal.dumps(now, 2):
                raise _Differs
            return
        for one, other in zip(before, now, strict=True):
            self._compare(one, other)


def _nodes_in(items: Iterable[object]) -> list[_Node]:
    return sorted(
        (each for each in items if isinstance(each, _Node)), key=operator.attrgetter("number")
    )


def _others_in(items: Iterable[object]) -> set[tuple[type, object]]:
    return {(type(each), each) for each in items if not isinstance(each, _Node)}


def _class_of(node: _Node) -> object:
    """Return the class of the instance that a node represents, if this process has it."""
    module, name = node.label
    # A class pickled by value. Its number is cloudpickle's last argument but one.
    if isinstance(name, _Node):
        return internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(name.arguments[0][-2])
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


# ---- names of values that differ ----


def _name_of(symbols: _Symbols, is_it: Callable[[object], bool]) -> str:
    """Return the name of a value in a pickle, written as code. Empty if it has none."""
    value = symbols.value
    roots = [*value.items()] if type(value) is dict else [("", value)]
    return next((name for name, each in _walk(roots) if is_it(each)), "")


def _walk(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield names and values: the roots, then all objects that they refer to, nearest first."""
    seen = set[int]()
    waiting = collections.deque(roots)
    while waiting:
        name, value = waiting.popleft()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        waiting.extend(_parts(name, value))


def _parts(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r:.80}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((name, each) for each in value)
    elif isinstance(value, type):
        if isinstance(value.label[1], _Node):  # type: ignore[attr-defined]
            yield name, value.label[1]  # type: ignore[attr-defined]
    elif isinstance(value, _Node):
        items = [each for kind, each in value.added if kind == "item"]
        yield from _parts(
            name, dict(items) if all(type(each) is tuple for each in items) else items
        )
        for state in (state for kind, state in value.added if kind != "item"):
            for part in state if type(state) is tuple else (state,):
                for key, each in part.items() if type(part) is dict else [("", part)]:
                    yield from _of_attribute(value, name, key, each)
        yield from ((name, each) for each in value.arguments[0])
        yield from value.arguments[1].items()
        yield name, type(value)


def _of_attribute(node: _Node, name: str, key: object, value: Any) -> Iterator[tuple[str, Any]]:
    if key == "__globals__":
        yield from value.items()
    elif key == "__closure__" and value:
        # the code's names for the cells
        yield from zip(node.arguments[0][0].arguments[0][-2], value, strict=False)
    else:
        yield _joined(node, name, str(key)), value


def _joined(node: _Node, name: str, key: str) -> str:
    """Return the name of an attribute of an object, or of a variable of a function."""
    if node.label == _FUNCTION and not key.startswith("__"):
        return key
    # Users never see these names.
    is_hidden = key[:2] in ("", "__") or str(node.label[0]).partition(".")[0] == "loaderpool"
    return name if is_hidden else f"{name}.{key}"
