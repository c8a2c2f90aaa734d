"""Whether a long list holds plain data only, so that its elements can be taken apart without anything being lost."""

from __future__ import annotations

import datetime
import decimal
import fractions
import gc
import operator
import pathlib
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_NESTS = frozenset({tuple, list, dict, set, frozenset, bytearray})
_CHANGING = frozenset({list, dict, set, bytearray})
_UNORDERED = frozenset({set, frozenset})
# Values that cannot be changed either. Of these types alone: a subclass of the user's may be written to.
_VALUES = frozenset(
    {pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, datetime.date, datetime.time, datetime.datetime,
     datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction, uuid.UUID, range, slice}
)  # fmt: skip
# Objects that are looked into at a time. More: more references to them at once.
_AT_ONCE = 4096
_MOST_AT_ONCE = 1 << 20


class Plainness(NamedTuple):
    """What elements are made of."""

    obstacle: str  # why they are not plain data, to follow "its elements"; empty: they are
    changing: frozenset[int] = frozenset()  # ids of what in them can be changed
    are_frozen: bool = False  # none of it can be changed
    are_exact: bool = False  # they pickle to the same bytes again and again


def plainness_of(elements: Sequence[Any]) -> Plainness:
    """Look through elements and what they hold. Blocks: a tenth of the time that pickling them takes.

    What is neither plain nor immutable, and what can be changed and is held more than once, is an obstacle: elements
    that are made again one by one would no longer share it.
    """
    kinds: set[type] = set()
    seen: set[int] = set()
    for start in range(0, len(elements), _AT_ONCE):
        level = list(elements[start : start + _AT_ONCE])
        while level:
            if len(level) > _MOST_AT_ONCE:  # a tuple of the same tuple, twice, and so on
                return Plainness("hold large things together")
            found = set(map(type, level))
            for kind in found - kinds:
                if not _is_plain(kind):
                    return Plainness(f"hold a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))
            kinds |= found
            if not found.isdisjoint(_CHANGING):
                ids = [id(each) for each in level if type(each) in _CHANGING]
                before = len(seen)
                seen.update(ids)
                if len(seen) - before != len(ids):
                    return Plainness("hold the same list, dict or set several times")
            nests = [each for each in level if type(each) in _NESTS] if not found.isdisjoint(_NESTS) else []
            level = gc.get_referents(*nests)
    is_exact = kinds.isdisjoint(_UNORDERED) and kinds <= _ATOMS | _NESTS
    return Plainness("", frozenset(seen), kinds.isdisjoint(_CHANGING), is_exact)


def changing_in(elements: Sequence[Any]) -> frozenset[int]:
    """Return the ids of the lists, dicts and sets in elements of any kind; the user's objects are not looked into."""
    nests: dict[int, bool] = {}  # by id: whether it can be changed
    for start in range(0, len(elements), _AT_ONCE):
        level = list(elements[start : start + _AT_ONCE])
        while level:
            new = {id(each): each for each in level if type(each) in _NESTS and id(each) not in nests}
            nests.update((key, type(each) in _CHANGING) for key, each in new.items())
            level = gc.get_referents(*new.values())
    return frozenset(key for key, can_change in nests.items() if can_change)


def _is_plain(kind: type) -> bool:
    if kind in _ATOMS or kind in _NESTS or kind in _VALUES:
        return True
    return issubclass(kind, np.generic) and kind.__module__ == "numpy" and not issubclass(kind, np.void)


def are_ints(elements: Sequence[Any]) -> bool:
    """Whether all are Python's own ints."""
    return type(elements[0]) is int and set(map(type, elements)) == {int}


def shorter_form(ints: Sequence[int], name: str) -> str:
    """Return Python for what holds the same numbers in a hundredth, or a fifth, of the memory.

    Args:
        ints: at least two.
        name: what the list is called in it.
    """
    step = ints[1] - ints[0]
    if step and all(map(operator.eq, ints, range(ints[0], ints[0] + step * len(ints), step))):
        first, last = ints[0], ints[0] + step * len(ints)
        if step == 1:
            return f"range({last})" if first == 0 else f"range({first}, {last})"
        return f"range({first}, {last}, {step})"
    return f"np.array({name})"
