"""Warnings about large lists and dicts that would be copied to each worker.

Called in the main process. Calls no user code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from loaderpool.system.process import is_library
from loaderpool.system.walk import Found, is_users, walk

# functions of a payload that workers call
CALLED = frozenset({"fn", "augment", "batch_fn", "setup", "make_generator"})
# Elements of a list or dict that cause a warning. Smaller: warnings for copies of a few MB per
# worker. Larger: no warning for large copies.
_MANY = 200_000


def large_data(
    parts: Mapping[str, object], sources: AbstractSet[int], is_by_value: Callable[[Any], bool]
) -> tuple[str, ...]:
    """Return a warning for each large list, tuple or dict that functions and objects hold, with a
    line that fixes it.

    `sources` are ids of lists whose items the loader itself reads. These get no warning.
    """

    def enters(value: object) -> bool:
        return (
            is_by_value(value)
            if issubclass(type(value), (type, types.FunctionType))
            else is_users(value)
        )

    told = dict.fromkeys({*sources, id(parts.get("shards"))}, "")
    for found in walk(parts, enters):
        value, name = found.value, found.name
        if (
            issubclass(type(value), (list, tuple, dict))
            and len(value) >= _MANY
            and id(value) not in told
        ):
            if found.base_label:
                line = _line_of_object(found) if found.tail else "pass lp.share(...) of it instead"
            else:
                line = f"{name} = lp.share({name})"
            told[id(value)] = (
                f"{' → '.join(found.path)} is a {type(value).__name__} of {len(value):,} elements, "
                f"and each worker gets its own copy of it. To share one copy: {line}"
            )
    return tuple(filter(None, told.values()))


def _line_of_object(found: Found) -> str:
    """Return the line that shares an attribute or item of an object.

    It uses the object's variable name, which is searched in the frames of the user's code.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if not is_library(str(frame.f_globals.get("__name__"))):
            for name, value in (*frame.f_locals.items(), *frame.f_globals.items()):
                if value is found.base and not name.startswith("_"):
                    return f"{name}{found.tail} = lp.share({name}{found.tail})"
        frame = frame.f_back
    return f"obj{found.tail} = lp.share(obj{found.tail}), where obj is {found.base_label}"
