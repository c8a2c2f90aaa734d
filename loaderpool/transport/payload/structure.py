"""Comparison of two pickles of the same variables by their structure, not their bytes.

Pickles of equal objects differ: by which of two equal strings are one object, by the order of attributes and of sets,
and by what objects have computed and kept. So both are unpickled to symbols: a call of a class or function is a
`_Node` that has its arguments and its state, and nothing is imported or run. Runs in: the trainer.
"""

from __future__ import annotations

import io
import itertools
import marshal
import operator
import pickle
import sys
from typing import Any

from cloudpickle import cloudpickle as internals

from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.walk import cached_properties

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
# Containers with more items are compared by their marshaled bytes, if they hold atoms alone.
_MANY = 16
_MAKES_CLASS = frozenset({"_make_skeleton_class", "_make_skeleton_enum"})
# What Python adds to a class when it is asked for something; no author wrote it.
_ADDED_TO_CLASSES = frozenset({"__slotnames__", "__annotations_cache__"})


def means_the_same(before: bytes, now: bytes) -> bool:
    """Return whether two pickles have the same structure. Arrays that they do not hold count by their order alone."""
    if before == now:
        return True
    try:
        old, new = _Symbols(before), _Symbols(now)
    except Exception as error:  # what cannot be read so differs, as its bytes do
        if is_of_a_handler(error):
            raise
        return False
    return _Comparison().are_equal(old, new)


class _Node:
    """A stand-in for the result of a class or function."""

    symbols: _Symbols  # of the class
    label: tuple[str, Any]  # of the class: module and name, or the node that made it
    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    added: list[tuple[str, Any]]  # states and items, in their order

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        node = super().__new__(cls)
        node.number, node.arguments, node.added = len(cls.symbols.nodes), (arguments, keywords), []
        cls.symbols.nodes.append(node)
        module, name = cls.label
        if module == internals.__name__ and name in _MAKES_CLASS:
            return cls.symbols.new_class(("", node))  # instances are made of it, so it must be a class
        return node

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return type(self).symbols.called(self, *arguments, **keywords)

    def __setstate__(self, state: Any) -> None:
        self.added.append(("state", state))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.added.append(("item", (key, value)))

    def append(self, value: Any) -> None:
        self.added.append(("item", value))

    add = append


class _Symbols(pickle.Unpickler):
    """A pickle as symbols: `value`, and all `nodes` in the order in which they are made."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled), buffers=map(b"%d".__mod__, itertools.count()))
        self.nodes: list[_Node] = []
        self._classes: dict[tuple[str, str], Any] = {}
        self.called = self.new_class(("", "call"))
        self.value = self.load()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            self._classes[module, name] = self.new_class((module, name))
        return self._classes[module, name]

    def new_class(self, label: tuple[str, Any]) -> Any:
        return type("symbol", (_Node,), {"symbols": self, "label": label})

    def persistent_load(self, number: Any) -> Any:
        return self.find_class("", "persistent")(number)


class _Differs(Exception):
    """Something differs."""


class _Comparison:
    """One comparison: `_partners` are the lists, dicts and sets of the one pickle and of the other, by their ids."""

    def __init__(self) -> None:
        self._partners: dict[int, int] = {}
        self._taken: set[int] = set()  # of the other

    def are_equal(self, old: _Symbols, new: _Symbols) -> bool:
        if len(old.nodes) != len(new.nodes):
            return False
        try:
            for before, now in zip(old.nodes, new.nodes, strict=True):
                self._compare_nodes(before, now)
            self._compare(old.value, new.value)
        except (_Differs, RecursionError):
            return False
        return True

    def _compare_nodes(self, before: _Node, now: _Node) -> None:
        self._compare(type(before), type(now))
        (one, _), (other, _) = before.arguments, now.arguments
        if now.label in _SET_STATE and len(one) == len(other) == 2:
            self._compare(one[0], other[0])
            self._compare_states(one[1], other[1], _SET_STATE[now.label])
            return
        self._compare(before.arguments, now.arguments)
        self._compare_items([kind for kind, _ in before.added], [kind for kind, _ in now.added])
        for (kind, first), (_, second) in zip(before.added, now.added, strict=True):
            if kind == "item":
                self._compare(first, second)
            else:
                self._compare_states(first, second, _computed_by(now))

    def _compare_states(self, before: Any, now: Any, ignored: frozenset[str]) -> None:
        """Compare the states of two objects, functions or classes: the order of attributes does not count."""
        if type(before) is tuple and type(now) is tuple and len(before) == len(now):  # attributes, and slots
            for one, other in zip(before, now, strict=True):
                self._compare_states(one, other, ignored)
        elif type(before) is dict and type(now) is dict:
            if before.keys() - ignored != now.keys() - ignored:
                raise _Differs
            for key in before.keys() - ignored:
                compare = self._compare if key != "__globals__" else self._compare_globals
                compare(before[key], now[key])
        else:
            self._compare(before, now)

    def _compare_globals(self, before: Any, now: Any) -> None:
        self._compare_states(before, now, frozenset())

    def _compare(self, before: Any, now: Any) -> None:
        kind = type(before)
        if isinstance(before, _Node) or isinstance(now, _Node):
            if not (isinstance(before, _Node) and isinstance(now, _Node)) or before.number != now.number:
                raise _Differs
        elif isinstance(before, type) and isinstance(now, type):  # symbols both
            self._compare(before.label, now.label)  # type: ignore[attr-defined]
        elif kind is not type(now):
            raise _Differs
        elif kind in (float, complex):  # nan is as good as nan, and 0.0 is not -0.0
            if repr(before) != repr(now):
                raise _Differs
        elif kind in _ATOMS:
            if before != now:
                raise _Differs
        elif kind is tuple or kind is frozenset:  # which of two equal ones it is does not count
            self._compare_containers(before, now, kind)
        elif id(before) in self._partners or id(now) in self._taken:
            if self._partners.get(id(before)) != id(now):  # two that were one, or are one now
                raise _Differs
        else:
            self._partners[id(before)] = id(now)
            self._taken.add(id(now))
            self._compare_containers(before, now, kind)

    def _compare_containers(self, before: Any, now: Any, kind: type) -> None:
        if kind is dict:
            self._compare_items([*before], [*now])
            self._compare_items([*before.values()], [*now.values()])
        elif kind in (set, frozenset):  # in any order
            self._compare_items(_nodes_in(before), _nodes_in(now))
            if _others_in(before) != _others_in(now):
                raise _Differs
        elif kind in (list, tuple):
            self._compare_items(before, now)
        elif before != now:  # a bytearray
            raise _Differs

    def _compare_items(self, before: Any, now: Any) -> None:
        if len(before) != len(now):
            raise _Differs
        if len(before) > _MANY and _ATOMS.issuperset(map(type, before)) and _ATOMS.issuperset(map(type, now)):
            if marshal.dumps(before, 2) != marshal.dumps(now, 2):  # this version writes each item by itself
                raise _Differs
            return
        for one, other in zip(before, now, strict=True):
            self._compare(one, other)


def _nodes_in(items: Any) -> list[_Node]:
    return sorted((each for each in items if isinstance(each, _Node)), key=operator.attrgetter("number"))


def _others_in(items: Any) -> set[tuple[type, Any]]:
    return {(type(each), each) for each in items if not isinstance(each, _Node)}


def _computed_by(node: _Node) -> frozenset[str]:
    """Return the attributes in which instances of a class keep what a `cached_property` has computed."""
    module, name = node.label
    if isinstance(name, _Node):  # a class that goes by value: its number is cloudpickle's last argument but one
        found: Any = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(name.arguments[0][-2])
    else:
        found = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
    return cached_properties(found)


# Functions of cloudpickle's that set the state of their first argument, and what does not count of it.
_SET_STATE: dict[tuple[str, Any], frozenset[str]] = {
    (internals.__name__, "_function_setstate"): frozenset(),
    (internals.__name__, "_class_setstate"): _ADDED_TO_CLASSES,
}
