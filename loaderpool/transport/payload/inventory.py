"""What of a payload's code travels itself, and what by name: for people who want to know what workers import."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from loaderpool.transport.payload.by_value import FrameworkFreePickler
from loaderpool.transport.payload.pickler import PayloadPickler

# Imported in a supervisor whatever the payload is.
_ALWAYS_THERE = frozenset({"builtins", "cloudpickle", "loaderpool", "numpy"})


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Code of a payload, each name once, in the order in which pickling met it."""

    by_value: tuple[str, ...]  # functions and classes that are in the pickle themselves, as module.name
    imported: tuple[str, ...]  # modules that loading it imports, without those that are there anyway


def list_code(payload: dict[str, object], *, is_framework_free: bool) -> Inventory:
    """Pickle the payload once more, to nowhere, and note the code that is met.

    Args:
        payload: what was shipped.
        is_framework_free: `Shipment.is_framework_free` of it.
    """
    kind: Any = FrameworkFreePickler if is_framework_free else PayloadPickler
    by_value: dict[str, None] = {}
    imported: dict[str, None] = {}

    class Listing(kind):  # type: ignore[misc]  # of either pickler
        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
                module = getattr(obj, "__module__", None) or "builtins"
                if isinstance(reduced, tuple) and module != "builtins":  # of these only the way to find them again
                    by_value[f"{module}.{obj.__qualname__}"] = None
                elif reduced is NotImplemented and module.partition(".")[0] not in _ALWAYS_THERE:
                    imported[module] = None
            elif isinstance(obj, types.ModuleType) and obj.__name__.partition(".")[0] not in _ALWAYS_THERE:
                imported[obj.__name__] = None
            return reduced

    keywords = {"buffer_callback": lambda buffer: None} | ({} if is_framework_free else {"protocol": 5})
    Listing(_NullFile(), **keywords).dump(payload)
    return Inventory(tuple(by_value), tuple(imported))


class _NullFile:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)
