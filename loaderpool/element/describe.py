"""How messages name and sketch what elements are built of: components, kinds of values, whole values and structures."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

Kind = Literal["leaf", "tuple", "dict", "namedtuple"]

# Names shown in a message: fewer hide the cause, more bury it.
_SHOWN = 8


def named(path: str) -> str:
    """Return a component as messages name it."""
    return f"component {path}" if path else "the element"


def is_namedtuple(value: Any) -> bool:
    """Whether the value is of a namedtuple class: a tuple with names for all its items, made by `_make`."""
    cls = type(value)
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and hasattr(cls, "_make") and len(fields) == len(value)


def sketch_value(value: Any, depth: int = 3) -> str:
    """Return the value with its classes in place of its leaves, as deep as a message can bear."""
    name = "None" if value is None else type(value).__name__
    if not isinstance(value, (tuple, dict)) or not value:
        return f"an empty {name}" if isinstance(value, (tuple, dict)) else name
    if depth == 0:
        return "..."
    inner: Iterator[Any] = iter(value.values() if isinstance(value, dict) else value)
    kind: Kind = "dict" if isinstance(value, dict) else "namedtuple" if is_namedtuple(value) else "tuple"
    keys = tuple(value) if isinstance(value, dict) else ()
    return sketch_parts(kind, type(value), keys, (sketch_value(child, depth - 1) for child in inner), name)


def sketch_parts(kind: Kind, cls: Any, keys: Sequence[Hashable], inner: Iterator[str], leaf: str) -> str:
    """Return a sketch made of the sketches of what is within."""
    if kind == "leaf":
        return leaf
    parts = list(inner)
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    if kind == "namedtuple":
        fields = zip(cls._fields, parts, strict=True)
        return f"{cls.__name__}({', '.join(f'{field}={part}' for field, part in fields)})"
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def kind_name(value: Any) -> str:
    """Return a tuple or dict by its kind, and its class where that is another."""
    name = type(value).__name__
    if type(value) in (tuple, dict):
        return name
    return f"{'dict' if isinstance(value, dict) else 'tuple'} ({name})"


def with_article(value: Any) -> str:
    """Return the value's class with its article."""
    if value is None:
        return "None"
    if isinstance(value, list):
        return "a list (a list is one array, never structure)"
    name = kind_name(value) if isinstance(value, (tuple, dict)) else type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def listed(keys: Sequence[Hashable]) -> str:
    """Return the first few of the keys, and how many more there are."""
    text = ", ".join(repr(key) for key in keys[:_SHOWN])
    return text + f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN)
