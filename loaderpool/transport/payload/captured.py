"""Long lists and dicts that the user's functions and objects hold: packed where that cannot be noticed, else told of.

As objects they would be copied by each worker that reads them, page by page, as reference counts change. A packed one
stands in memory once, as a packed source does. It takes the place of the list only where all code that comes to it
reads single elements (`uses`), and where they are plain data. Runs in: the trainer.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from loaderpool.sources.packed_captured import Elements, PackedDict, PackedList
from loaderpool.system.installed import is_library_file
from loaderpool.transport.payload.item_packing import LEAST_ITEMS, ItemPacking
from loaderpool.transport.payload.plain_data import are_ints, changing_in, plainness_of, shorter_form
from loaderpool.transport.payload.references import Found, Reference, find_long, values_of
from loaderpool.transport.payload.uses import codes_within, other_use

# Less than this, pickled, is not worth a warning: three to six times as much in each worker.
_MUCH_BYTES = 8 << 20
# A list of as many ints is better off as numbers: smaller, it is packed in less than half a second.
_MANY_INTS = 1_000_000
# By these, code comes to variables and attributes that it does not name.
_BY_OTHER_NAMES = {
    "attribute": frozenset(
        {"__dict__", "__getattribute__", "asdict", "astuple", "attrgetter", "deepcopy", "eval", "exec", "f_locals",
         "getattr", "getmembers", "vars"}
    ),
    "other": frozenset({"__globals__", "eval", "exec", "f_globals", "f_locals", "getclosurevars", "globals", "locals"}),
}  # fmt: skip
_HELD_ELSEWHERE = "something that is not looked into holds it, too, or some of its elements"


@dataclass(frozen=True)
class CapturedData:
    """A long list or dict that a function or an object holds."""

    name: str
    """The way to it, such as "fn → closure variable 'records' of function <lambda>"."""
    length: int
    nbytes: int
    """Of its pickles; estimated from some of them where it is not packed."""
    left_because: str = ""
    """Why it is not packed; empty where it is."""
    cure: str = ""

    def __str__(self) -> str:
        size = f"{self.length:,} elements, {'about ' if self.left_because else ''}{self.nbytes:,} bytes"
        why = f", is not packed: {self.left_because}; {self.cure}" if self.left_because else ""
        return f"{self.name}: {size}{why}"


class Captured:
    """What takes the place of long lists and dicts in one pickle, and what is to be said of them.

    Attributes:
        stand_ins: by the id of what they stand for.
        holders: ids of the objects of which attributes are such lists.
        looked_at: ids of all objects that were looked into.
        data: packed ones, and those of the others that take much.
        hints: advice for lists of very many ints, the source or packed.

    Args:
        payload: what is shipped.
        packing: of the same attempt.
        is_by_value: whether a function or class travels itself.
        known: what was packed in an earlier attempt at the same payload; this adds to it.
    """

    def __init__(
        self,
        payload: Mapping[str, Any],
        packing: ItemPacking,
        is_by_value: Callable[[Any], bool],
        known: dict[int, Any],
    ) -> None:
        self.stand_ins: dict[int, _CapturedStandIn] = {}
        self.holders: set[int] = set()
        self.data: list[CapturedData] = []
        self.hints: list[str] = []
        self._advise("source", payload.get("source"))
        self._packing, self._known = packing, known
        found, self._codes, self.looked_at = find_long(payload, LEAST_ITEMS, is_by_value)
        self._found = [each for each in found if not all(way.is_source for way in each.references)]
        self._changing: dict[int, frozenset[int]] = {}  # what can be changed in a list, by its id
        for each in self._found:
            self._decide(each)

    def withdraw(self, strangers: Sequence[types.FunctionType], pickled: AbstractSet[int]) -> bool:
        """Leave the lists as they are that the pickle shows to be held elsewhere, too; True: there are some.

        The search does not look into objects of every kind; what pickles them comes to all that they hold.

        Args:
            strangers: functions that were not looked into, and travel by value.
            pickled: ids of what the pickle holds as it is.
        """
        names = set().union(*(_names(function.__code__) for function in strangers))
        held = {id(value) for function in strangers for value in values_of(function)} | pickled
        is_any = False
        for found in self._found:
            packed = self.stand_ins.get(id(found.value))
            if packed is not None and (
                id(found.value) in held
                or not held.isdisjoint(packed.changing)
                or any(way.scope == "attribute" and way.name in names for way in found.references)
            ):
                self._known[id(found.value)] = None, _HELD_ELSEWHERE
                is_any = True
        return is_any

    def _decide(self, found: Found) -> None:
        ways = [each for each in found.references if not each.is_source]
        why = self._why_left(found.value, ways)
        packed = None
        if not why:
            packed, why = self._packed(found.value)
        name = " → ".join(ways[0].path)
        if packed is not None:
            self.stand_ins[id(found.value)] = packed
            self.holders.update(id(each.holder) for each in ways if each.scope == "attribute")
            self.data.append(CapturedData(name, len(found.value), packed.nbytes))
            self._advise(name, found.value)
            return
        nbytes = self._packing.estimate(_elements_of(found.value))
        if nbytes >= _MUCH_BYTES and why:
            cure = _cure(found.value)
            self.data.append(CapturedData(name, len(found.value), nbytes, why, cure))

    def _advise(self, name: str, value: Any) -> None:
        if type(value) in (list, tuple) and len(value) >= _MANY_INTS and are_ints(value):
            what = f"{name} is a {type(value).__name__} of {len(value):,} ints, which are pickled one by one"
            self.hints.append(f"{what}: make it {shorter_form(value, 'it')}")

    def _why_left(self, value: Any, ways: Sequence[Reference]) -> str:
        kind = type(value)
        if kind not in (list, tuple, dict):
            return f"it is a {kind.__qualname__}, not a plain list or dict"
        for way in ways:
            if way.scope is None:
                return f"it is {way.path[-1]}, where its use is not looked into"
            found = self._other_use(way, kind is dict)
            if found is not None:
                read = "value by value, by its key" if kind is dict else "element by element, by its index"
                return f"{found[0]} (line {found[1]}) does not read it {read}"
        return ""

    def _other_use(self, way: Reference, is_mapping: bool) -> tuple[str, int] | None:
        assert way.scope is not None
        function: Any = way.function
        codes = self._codes(type(way.holder)) if function is None else [function.__code__]
        namespace = {} if function is None else function.__globals__
        unclear = _BY_OTHER_NAMES.get(way.scope, _BY_OTHER_NAMES["other"])
        for code in [*codes, *self._codes(object)] if way.scope == "global" else codes:
            if is_library_file(code.co_filename):  # a class of the user's inherits it
                continue
            if not unclear.isdisjoint(_names(code)):
                return code.co_name, code.co_firstlineno
        for code in codes:
            if way.function is None and way.name not in code.co_names:
                continue
            found = other_use(code, way.name, way.scope, namespace, is_mapping=is_mapping)
            if found is not None:
                return found
        return None

    def _packed(self, value: Any) -> tuple[_CapturedStandIn | None, str]:
        """Return what stands for it, or why there is nothing; empty where it is too small to be worth it."""
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = self._pack(value)
        found: tuple[_CapturedStandIn | None, str] = known
        return found

    def _pack(self, value: Any) -> tuple[_CapturedStandIn | None, str]:
        is_dict = type(value) is dict
        elements, keys = (list(value.values()), list(value)) if is_dict else (value, [])
        plainness, of_keys = plainness_of(elements), plainness_of(keys)
        if plainness.obstacle:
            return None, f"its elements {plainness.obstacle}"
        if of_keys.obstacle or not of_keys.are_frozen or float in set(map(type, keys)):
            return None, "its keys are not all text, bytes, whole numbers or tuples"
        self._changing[id(value)] = plainness.changing
        holder = self._also_held_by(value, plainness.changing)
        if holder:
            return None, f"{holder} holds some of its elements, too"
        tried = _elements_of(value)
        if not self._packing.estimate(tried):  # one cannot be pickled: what pickles the whole says so
            return None, ""
        if not self._packing.is_worth_it(tried):
            is_little = self._packing.estimate(tried) < _MUCH_BYTES
            return None, "" if is_little else "its elements hold large things together"
        packed, packed_keys = self._packing.pack_plain(elements), self._packing.pack_plain(keys)
        if packed is None or packed_keys is None:
            return None, ""
        held = Elements(packed, plainness.are_frozen, plainness.are_exact)
        if is_dict:
            nbytes = packed.nbytes + packed_keys.nbytes
            return _CapturedStandIn(PackedDict, (packed_keys, held), nbytes, plainness.changing), ""
        return _CapturedStandIn(PackedList, (held, type(value)), packed.nbytes, plainness.changing), ""

    def _also_held_by(self, value: Any, changing: frozenset[int]) -> str:
        """What else the function comes to that holds what can be changed in a list: it would no longer be the same."""
        if not changing.isdisjoint(self.looked_at):
            return "another variable"
        for other in self._found:
            if other.value is value or not changing:
                continue
            theirs = self._changing.get(id(other.value))
            if theirs is None:
                theirs = self._changing[id(other.value)] = changing_in(_elements_of(other.value))
            if not changing.isdisjoint(theirs):
                return other.references[0].path[-1]
        return ""


class _CapturedStandIn:
    """Arrives as the packed list or dict; one object, however many ways lead to it."""

    def __init__(self, kind: type, arguments: tuple[Any, ...], nbytes: int, changing: frozenset[int]) -> None:
        self._reduced = kind, arguments
        self.nbytes, self.changing = nbytes, changing

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _elements_of(value: Any) -> Sequence[Any]:
    """Return what is tried of it, to know how large it is: of a dict, pairs of key and value."""
    if isinstance(value, (list, tuple)):
        return value
    data = value if isinstance(value, (dict, collections.deque)) else value.data
    return _Pairs(data) if isinstance(data, dict) else list(data)


class _Pairs(Sequence[Any]):
    """Keys and values of a dict, each pair made when it is looked at."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self._keys, self._values = list(dict.keys(table)), list(dict.values(table))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: Any) -> Any:
        return self._keys[at], self._values[at]


def _cure(value: Any) -> str:
    elements = _elements_of(value)
    if not isinstance(value, dict) and are_ints(elements):
        return f"make it {shorter_form(elements, 'it')}, which all workers share"
    if isinstance(value, dict):
        return (
            "each worker comes to a copy of its own. Read it only by table[key], table.get(key) and key in table, or "
            "put its values into arrays, which all workers share"
        )
    return (
        "each worker comes to a copy of its own. Make it the source, so that the function is given its elements; or "
        "read it only by x[i] and len(x); or put it into arrays, which all workers share"
    )


def _names(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes, those of functions within it, too."""
    names: set[str] = set()
    for each in codes_within(code):
        names.update(each.co_names, each.co_varnames, each.co_freevars, each.co_cellvars)
    return names
