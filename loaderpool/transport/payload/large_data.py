"""Large lists and dicts of which each worker would have a copy. Runs in: the trainer; calls nothing of the user's."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from loaderpool.system.walk import is_users, walk

CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})  # of a payload, in the workers
# Elements of a list or dict. Fewer: a warning where a copy in each worker is a few MB; more: none where it is much.
_MANY = 200_000


def large_data(
    parts: Mapping[str, Any], sources: AbstractSet[int], is_by_value: Callable[[Any], bool]
) -> tuple[str, ...]:
    """A warning for each large list, tuple or dict that functions and objects hold, with the line that mends it.

    Not for `sources`, ids of lists whose items the loader itself reads.
    """

    def enters(value: Any) -> bool:
        return is_by_value(value) if issubclass(type(value), (type, types.FunctionType)) else is_users(value)

    told = dict.fromkeys({*sources, id(parts.get("shards"))}, "")
    for found in walk(parts, enters):
        value, name = found.value, found.name
        if issubclass(type(value), (list, tuple, dict)) and len(value) >= _MANY and id(value) not in told:
            line = f"{name} = lp.share({name})" if name not in parts else "pass lp.share(...) of it instead"
            told[id(value)] = (
                f"{' → '.join(found.path)} is a {type(value).__name__} of {len(value):,} elements, and each worker "
                f"gets its own copy of it. To share one copy: {line}"
            )
    return tuple(filter(None, told.values()))
