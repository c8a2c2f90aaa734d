"""Whether several results or items look at one memory: a buffer that is filled again and again, or a constant.

`rows` has a way of its own for what is written at once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Of these no item can be changed under us; an object of any other class is the user's own affair.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_BASE = operator.attrgetter("base")


def comes_again(items: Sequence[Any]) -> bool:
    """Whether an array, list or dict stands in more than one of the items, or may: a view may look at what others do.

    Loops in C over columns of equal types, so that it costs little beside reading the items.
    """
    kinds = set(map(type, items))
    if kinds <= _IMMUTABLE:
        return False
    if len(kinds) > 1:
        return any(comes_again([item for item in items if type(item) is kind]) for kind in kinds)
    kind = kinds.pop()
    if kind is np.ndarray:
        return set(map(type, map(_BASE, items))) != {type(None)} or _share(items)
    if issubclass(kind, tuple):
        return any(map(comes_again, _columns(items)))
    if kind is list:
        return _share(items) or any(map(comes_again, _columns(items)))
    if kind is dict:
        return _share(items) or any(map(comes_again, _columns([tuple(item.values()) for item in items])))
    return False


def copy_of(item: Any) -> Any:
    """Return the item, with arrays, lists and dicts of its own."""
    if isinstance(item, np.ndarray):
        return item.copy()
    kind = type(item)
    if kind is dict:
        return {key: copy_of(value) for key, value in item.items()}
    if kind is list or kind is tuple:
        return kind(map(copy_of, item))
    if isinstance(item, tuple) and hasattr(item, "_make"):
        return item._make(map(copy_of, item))
    return item


def share_arrays(rows: Sequence[Sequence[npt.NDArray[Any]] | None]) -> bool:
    """Whether an array stands twice among the leaves of a batch's rows; a row that stands in for others counts once."""
    distinct = {id(leaves): leaves for leaves in rows if leaves is not None}
    return _share(list(itertools.chain.from_iterable(distinct.values())))


def share_memory(results: Iterable[Any], but: Iterable[Any] = ()) -> bool:
    """Whether a writable array, a list or a dict stands in more than one of the results, itself or behind a view.

    Args:
        results: what several calls gave.
        but: arrays whose memory may be shared.
    """
    seen: set[int] = set()
    allowed = {root for array in but for root in _roots(array)}
    for result in results:
        roots = set(_roots(result)) - allowed
        if not seen.isdisjoint(roots):
            return True
        seen |= roots
    return False


def _share(items: Sequence[Any]) -> bool:
    return len(set(map(id, items))) < len(items)


def _columns(items: Sequence[Sequence[Any]]) -> Any:
    if len(set(map(len, items))) == 1:
        return zip(*items, strict=True)
    return ([part] for item in items for part in item)


def _roots(value: Any) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.flags.writeable:
            yield id(value if value.base is None else value.base)
    elif isinstance(value, dict):
        yield id(value)
        for part in value.values():
            yield from _roots(part)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield id(value)
        for part in value:
            if isinstance(part, (np.ndarray, dict, list, tuple)):
                yield from _roots(part)
