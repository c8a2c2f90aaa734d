"""Dict, list and tuple subclasses of a user's function, if batches can be rebuilt with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from loaderpool.element.structure import Kind, OwnClasses, opened, rebuilt
from loaderpool.system.interrupts import is_of_a_handler

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type)


def own_classes(value: object) -> OwnClasses | None:
    """Return the classes with which values like this one are rebuilt.

    None if plain dicts and tuples are enough.
    """
    kind, keys, parts = opened(value)
    within = {
        key: own
        for key, part in zip(keys, parts, strict=True)
        if (own := own_classes(part)) is not None
    }
    is_own = kind in ("dict", "tuple") and type(value) not in (dict, tuple)
    cls = type(value) if is_own and _can_be_rebuilt(value, kind, keys, parts) else None
    return None if cls is None and not within else OwnClasses(cls, within)


def _can_be_rebuilt(
    value: object, kind: Kind, keys: Sequence[Hashable], parts: Sequence[Any]
) -> bool:
    """Return True if the class makes an equal value from the items alone.

    The new value must contain all items and have no other attributes. It is made of other arrays: a
    constructor must accept any arrays, and must not read their values.
    """
    arrays = [np.zeros(1) for _ in parts]
    try:
        twin = rebuilt(type(value), kind, keys, arrays)
        its_kind, its_keys, its_parts = opened(twin)
        if type(twin) is not type(value) or (its_kind, tuple(its_keys)) != (kind, tuple(keys)):
            return False
        if any(mine is not its for mine, its in zip(arrays, its_parts, strict=True)):
            return False
        counterparts = {id(array): part for array, part in zip(arrays, parts, strict=True)}
        return _is_alike(_attributes(value), _attributes(twin), counterparts)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return False  # the constructor has other parameters


def _attributes(value: object) -> dict[str, Any]:
    slots = {
        name: getattr(value, name)
        for cls in type(value).__mro__
        if cls.__module__ not in ("builtins", "collections")
        for name in _names(vars(cls).get("__slots__", ()))
        if hasattr(value, name)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _names(slots: str | Iterable[str]) -> Sequence[str]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_alike(mine: object, its: object, counterparts: dict[int, Any]) -> bool:
    """Return True if `mine` equals `its`: the same part of the user's value and of its copy.

    The copy has other arrays. `counterparts` maps their ids to the arrays of the user's value.
    """
    if id(its) in counterparts:
        return mine is counterparts[id(its)]
    if type(mine) is not type(its):
        return False
    if isinstance(mine, dict) and isinstance(its, dict):
        return mine.keys() == its.keys() and all(
            _is_alike(mine[key], its[key], counterparts) for key in mine
        )
    if isinstance(mine, (list, tuple)) and isinstance(its, (list, tuple)):
        return len(mine) == len(its) and all(
            _is_alike(*pair, counterparts) for pair in zip(mine, its, strict=True)
        )
    return mine is its or (isinstance(mine, _PLAIN) and mine == its)
