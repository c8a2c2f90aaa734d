"""Attributes in which library objects keep results of their last call, such as the parameters that
it drew.

They are found in bytecode: methods of a library assign them in each call, and other methods do not.
No code is run. Called in the main process.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from loaderpool.system.process import is_installed

# Methods that make a sample of an item, or change it.
_CALLS = ("__call__", "__getitem__", "__getitems__")
_MAKERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})

_IS_ITEM = ("LOAD_ATTR", "LOAD_CONST")

# Attribute -> keys of its items that calls assign. None: calls assign the attribute itself.
Kept = Mapping[str, "frozenset[Any] | None"]

_known: weakref.WeakKeyDictionary[type, Kept] = weakref.WeakKeyDictionary()


def kept_by_calls(cls: object) -> Kept:
    """Return the attributes of a class that only calls of its instances assign, in methods of a
    library.
    """
    if not isinstance(cls, type):
        return {}
    if cls not in _known:
        _known[cls] = _find(cls)
    return _known[cls]


def counted_in_passes(cls: type) -> list[str]:
    """Return the attributes that an iteration derives from their previous values, such as a
    count.
    """
    uses = [
        (name, _uses_of(each.__code__)) for base in cls.__mro__ for name, each in _functions(base)
    ]
    begins = [use for name, use in uses if name == "__iter__"]
    counted = {
        attribute
        for name, use in uses
        if name in ("__iter__", "__next__")
        for attribute in use.is_from
    }
    return sorted(counted - {attribute for use in begins for attribute in use.fresh})


class _Uses(NamedTuple):
    """Attributes of its object that a method uses."""

    loads: set[str]
    stores: set[str]
    items: set[tuple[str, Any]]  # attributes whose items it assigns, and the keys
    is_from: set[str]  # attributes that it reads, then assigns, such as a count of calls
    fresh: set[str]  # attributes that it assigns before reading them


def _find(cls: type) -> Kept:
    methods = [(name, each) for base in cls.__mro__ for name, each in _functions(base)]
    uses = [(name, _uses_of(each.__code__), _is_of_library(each)) for name, each in methods]
    called, waiting = set[str](), [*_CALLS]
    while waiting:
        called.add(name := waiting.pop())
        waiting += (
            {each for own, use, _ in uses if own == name for each in use.loads}
            - called
            - {*waiting}
        )
    found, others = dict[str, frozenset[Any] | None](), set[str]()
    other_items = set[tuple[str, Any]]()
    for name, use, is_of_library in uses:
        others |= use.is_from
        if name in called and is_of_library:
            found |= dict.fromkeys(use.stores)
        elif name not in _MAKERS:
            others |= use.stores
            other_items |= use.items
    for name, use, is_of_library in uses:
        for attribute, key in use.items - other_items if name in called and is_of_library else ():
            keys = found.get(attribute, frozenset())
            found[attribute] = None if keys is None else keys | {key}
    return {attribute: keys for attribute, keys in found.items() if attribute not in others}


def _functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, member in vars(cls).items():
        if isinstance(member, property):
            setters = [("", each) for each in (member.fset, member.fdel)]
            parts = [(name, member.fget), *setters]
        else:
            parts = [
                (
                    name,
                    getattr(
                        member,
                        "func" if isinstance(member, functools.cached_property) else "__func__",
                        member,
                    ),
                )
            ]
        for own, each in parts:
            while each is not None:
                if isinstance(each, types.FunctionType):
                    yield own, each
                each = (
                    vars(each).get("__wrapped__") if isinstance(each, types.FunctionType) else None
                )


def _is_of_library(function: types.FunctionType) -> bool:
    module = str(function.__module__)
    return is_installed(module) and module.partition(".")[0] != "loaderpool"


def _uses_of(code: types.CodeType) -> _Uses:
    uses = _Uses(set(), set(), set(), set(), set())
    own = code.co_varnames[0] if code.co_argcount else ""
    read, now = set[str](), set[str]()  # read by earlier statements, and by this one
    before: list[tuple[str, Any]] = [("", None)] * 3  # the three instructions before this one
    for each in dis.get_instructions(code):
        if each.opname == "EXTENDED_ARG":
            continue
        is_own = _loads(before[-1], own)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and is_own:
            uses.loads.add(each.argval)
            now.add(each.argval)
        elif each.opname == "STORE_ATTR" and is_own:
            uses.stores.add(each.argval)
            (uses.is_from if each.argval in read | now else uses.fresh).add(each.argval)
        elif each.opname == "STORE_ATTR" and before[-1][0] in ("SWAP", "ROT_TWO"):
            # `self.count += 1`
            uses.is_from.add(each.argval)
        elif each.opname == "STORE_SUBSCR" and _loads(before[-3], own):  # `self.last["p"] = p`
            uses.items.update(
                [(before[-2][1], before[-1][1])]
                if (before[-2][0], before[-1][0]) == _IS_ITEM
                else []
            )
        if each.opname.startswith("RETURN"):
            now.clear()  # no later assignment uses these values
        elif each.opname.startswith("STORE_") or each.opname == "POP_TOP":
            read |= now
            now.clear()
        before = [*before[1:], (each.opname, each.argval)]
    return uses


def _loads(instruction: tuple[str, Any], name: str) -> bool:
    """Return True if an instruction ends by loading this local variable. Newer Pythons load two at
    once.
    """
    opname, value = instruction
    return ("LOAD_FAST" in opname or opname == "LOAD_DEREF") and name == (
        value[-1] if type(value) is tuple else value
    )
