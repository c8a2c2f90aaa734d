"""Values as bytes, which any process of this loader, or of a later training, reads back: plain ones without pickle.

What is read back is new memory at each reading: a function that writes into it writes into nothing that is kept.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from loaderpool.cache.plain import PLAIN, dump_plain, load_plain


def dump(value: Any) -> bytes:
    """Return the value's bytes: those of `cache.plain`, else a pickle.

    A class of `__main__`, or of a module that travelled by value, goes by its name and is found again among those that
    this process has: cloudpickle would put the class itself into each entry, and another training would read a copy of
    it.

    Raises:
        Exception: it cannot be pickled, or not read back elsewhere; whatever pickle raises.
    """
    plain = dump_plain(value)
    if plain is not None:
        return plain
    with io.BytesIO() as file:
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def load(kept: bytes | memoryview) -> Any:
    """Return the value again, in memory of its own; raises what pickle or `cache.plain` raises.

    A pickle may run any code: what it came from must be this user's alone (`cache.ownership`).
    """
    return load_plain(kept) if kept[0] == PLAIN else pickle.loads(kept)


class _Pickler(pickle.Pickler):
    def reducer_override(self, part: Any) -> Any:
        if not isinstance(part, type) or part in _plain:
            return NotImplemented
        number = _numbers().get(part)
        if number is None and part.__module__ != "__main__":
            if part is _by_import(part.__module__, part.__qualname__):
                _plain.add(part)
            return NotImplemented
        if _find_class(part.__module__, part.__qualname__) is not part:
            raise pickle.PicklingError(
                f"the class {part.__module__}.{part.__qualname__} has no name by which another process finds it; "
                "define it at the top of the script or of a module"
            )
        return _find_class, (part.__module__, part.__qualname__)


_plain: set[type] = set()  # found by import in any process


def _find_class(module: str, name: str) -> type:
    """Return the one class of this name that has come to this process by value, or that is in its own `__main__`.

    Raises:
        pickle.UnpicklingError: there is none.
    """
    found = [cls for cls in list(_numbers()) if cls.__module__ == module and cls.__qualname__ == name]
    named = _by_import(module, name) if len(found) != 1 else found[0]
    if not isinstance(named, type):
        raise pickle.UnpicklingError(f"there is no class {module}.{name} here, or there are several")
    return named


def _by_import(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _numbers() -> Any:
    from cloudpickle import cloudpickle as internals

    return internals._DYNAMIC_CLASS_TRACKER_BY_CLASS
