"""The nested structure of an element: which arrays there are, how they are named, and the way apart and together again.

A list is never structure: what a function returns as a list is one array, as NumPy has it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from loaderpool.element.describe import (
    Kind,
    is_namedtuple,
    kind_name,
    listed,
    named,
    sketch_parts,
    sketch_value,
    with_article,
)
from loaderpool.errors import SpecMismatchError

# What can never be a leaf, by exact type: one C call looks at all leaves of a flat element. Subclasses of tuple and
# dict in a leaf's place are left to `convert_leaf`, which refuses them too.
_NO_LEAVES = frozenset({tuple, dict, type(None)})


class Structure:
    """How an element is built of leaves; immutable, comparable, picklable.

    Two are equal where kinds, keys in their order, fields and namedtuple names are, so that equal structures number
    their leaves alike.

    Attributes:
        kind: "leaf", "tuple", "dict" or "namedtuple".
        keys: a dict's keys in the order first seen, else empty.
        children: the structures within, in order.
        namedtuple: the class that `unflatten` builds with, else None.
        num_leaves: how many arrays an element has.
        paths: name of each leaf: "" for a bare one, "[0]", "['image']", ".x" in a namedtuple, nested "['a'][1]".
        flatten: the leaves of a value, as a list; SpecMismatchError, naming the path, where it is not built so.
        unflatten: a value of this structure from its `num_leaves` leaves; a dict comes back as a plain dict.
    """

    __slots__ = ("children", "flatten", "keys", "kind", "namedtuple", "num_leaves", "paths", "unflatten")

    kind: Kind
    keys: tuple[Hashable, ...]
    children: tuple[Structure, ...]
    namedtuple: Any
    num_leaves: int
    paths: tuple[str, ...]
    # Closures made for this very structure, not methods: taking elements apart is done once for each sample.
    flatten: Callable[[Any], list[Any]]
    unflatten: Callable[[Sequence[Any]], Any]

    def __init__(
        self,
        kind: Kind,
        keys: tuple[Hashable, ...] = (),
        children: tuple[Structure, ...] = (),
        namedtuple: Any = None,
    ) -> None:
        put = object.__setattr__
        put(self, "kind", kind)
        put(self, "keys", keys)
        put(self, "children", children)
        put(self, "namedtuple", namedtuple)
        put(self, "num_leaves", sum(child.num_leaves for child in children) if kind != "leaf" else 1)
        steps = _steps(self)
        nested = tuple(step + path for step, child in zip(steps, children, strict=True) for path in child.paths)
        put(self, "paths", nested if kind != "leaf" else ("",))
        put(self, "flatten", _flattener(self))
        put(self, "unflatten", _unflattener(self))

    @staticmethod
    def of(value: Any, *, origin: str = "fn returned") -> Structure:
        """Return the structure of a value.

        Args:
            value: anything; what is neither tuple nor dict is a leaf.
            origin: begins the messages: who made the value.

        Raises:
            SpecMismatchError: None, or an empty tuple or dict, somewhere in it.
        """
        return _structure_of(value, "", origin)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Structure cannot be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Structure cannot be changed ({name})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        # Not the class itself: a new one made in each call, or by an unpickling, is the same structure to the user.
        cls = self.namedtuple
        return self.kind, self.keys, self.children, cls and (cls.__name__, cls._fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.kind, self.keys, self.children, self.namedtuple)

    def __repr__(self) -> str:
        return f"Structure({self._sketch()})"

    def _sketch(self) -> str:
        return sketch_parts(self.kind, self.namedtuple, self.keys, (child._sketch() for child in self.children), "*")


# ---- from a value ----


def _structure_of(value: Any, path: str, origin: str) -> Structure:
    where = f" at {path}" if path else ""
    if value is None:
        is_call = not path and origin.endswith("returned")
        advice = "is a return missing?" if is_call else "leave it out, or use a value such as 0 or NaN for 'nothing'"
        raise SpecMismatchError(f"{origin} None{where}: an element is made of arrays; {advice}")
    if isinstance(value, dict):
        if not value:
            raise SpecMismatchError(f"{origin} an empty dict{where}: an element needs at least one array")
        children = tuple(_structure_of(child, f"{path}[{key!r}]", origin) for key, child in value.items())
        return Structure("dict", tuple(value), children)
    if isinstance(value, tuple):
        if not value:
            raise SpecMismatchError(f"{origin} an empty tuple{where}: an element needs at least one array")
        if is_namedtuple(value):
            cls = type(value)
            steps = [f"{path}.{field}" for field in cls._fields]  # type: ignore[attr-defined]
            pairs = zip(value, steps, strict=True)
            return Structure("namedtuple", (), tuple(_structure_of(child, step, origin) for child, step in pairs), cls)
        return Structure(
            "tuple", (), tuple(_structure_of(child, f"{path}[{i}]", origin) for i, child in enumerate(value))
        )
    return _LEAF


# ---- apart ----


def _flattener(structure: Structure) -> Callable[[Any], list[Any]]:
    flatten = _quick_flattener(structure)

    def flatten_or_raise(value: Any) -> list[Any]:
        leaves = flatten(value)
        if leaves is None:  # an OrderedDict, say, or a mistake
            leaves = []
            _walk(structure, value, "", leaves, (structure, value))
        return leaves

    return flatten_or_raise


def _quick_flattener(structure: Structure) -> Callable[[Any], list[Any] | None]:
    """Make a flattener for values of exactly these types; its None tells that a closer look is needed."""
    if structure.kind == "leaf":
        return lambda value: None if value is None or isinstance(value, (tuple, dict)) else [value]
    keys, count = structure.keys, len(structure.children)
    cls = dict if structure.kind == "dict" else structure.namedtuple or tuple
    # itemgetter looks up all keys in one C call, but does not wrap a single one.
    pick: Any = tuple if cls is not dict else operator.itemgetter(*keys) if count > 1 else lambda d: (d[keys[0]],)
    have_leaves = _NO_LEAVES.isdisjoint

    def flatten_flat(value: Any) -> list[Any] | None:
        if type(value) is not cls or len(value) != count:  # nor a defaultdict, which would invent a missing key
            return None
        try:
            leaves = pick(value)
        except KeyError:
            return None
        return list(leaves) if have_leaves(map(type, leaves)) else None

    def flatten_nested(value: Any) -> list[Any] | None:
        if type(value) is not cls or len(value) != count:
            return None
        try:
            parts = pick(value)
        except KeyError:
            return None
        leaves: list[Any] = []
        for flatten, part in zip(flatteners, parts, strict=True):
            inner = flatten(part)
            if inner is None:
                return None
            leaves += inner
        return leaves

    flatteners = [_quick_flattener(child) for child in structure.children]
    return flatten_flat if _is_flat(structure) else flatten_nested


def _is_flat(structure: Structure) -> bool:
    return all(child.kind == "leaf" for child in structure.children)


def _walk(structure: Structure, value: Any, path: str, leaves: list[Any], whole: tuple[Structure, Any]) -> None:
    """Append the leaves of `value`, or raise for the first place where it is not built as `structure`."""
    if structure.kind == "leaf":
        if value is None:
            raise _differs(path, "one array", "None", whole)
        if isinstance(value, (tuple, dict)):
            raise _differs(path, "one array", f"a {kind_name(value)}", whole)
        leaves.append(value)
        return
    if structure.kind == "dict":
        if not isinstance(value, dict):
            raise _differs(path, "a dict", with_article(value), whole)
        missing = [key for key in structure.keys if key not in value]
        extra = [key for key in value if key not in structure.keys]
        if missing or extra:
            parts = [f"without {listed(missing)}"] * bool(missing) + [f"with {listed(extra)} besides"] * bool(extra)
            raise _differs(path, f"a dict of {listed(structure.keys)}", f"one {' and '.join(parts)}", whole)
        values: Any = [value[key] for key in structure.keys]
    elif structure.kind == "namedtuple":
        cls = structure.namedtuple
        if not is_namedtuple(value) or type(value)._fields != cls._fields:
            raise _differs(path, f"a {cls.__name__}({', '.join(cls._fields)})", with_article(value), whole)
        values = value
    else:
        count = len(structure.children)
        if not isinstance(value, tuple) or is_namedtuple(value):
            raise _differs(path, f"a tuple of {count}", with_article(value), whole)
        if len(value) != count:
            raise _differs(path, f"a tuple of {count}", f"a tuple of {len(value)}", whole)
        values = value
    for child, step, inner in zip(structure.children, _steps(structure), values, strict=True):
        _walk(child, inner, path + step, leaves, whole)


def _steps(structure: Structure) -> list[str]:
    if structure.kind == "dict":
        return [f"[{key!r}]" for key in structure.keys]
    if structure.kind == "namedtuple":
        return [f".{field}" for field in structure.namedtuple._fields]
    return [f"[{position}]" for position in range(len(structure.children))]


# ---- together ----


def _unflattener(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    if structure.kind == "leaf":
        return operator.itemgetter(0)
    keys, children = structure.keys, structure.children
    together: Callable[[Any], Any] = tuple
    if structure.kind == "namedtuple":
        together = structure.namedtuple._make
    elif structure.kind == "dict":
        together = lambda parts: dict(zip(keys, parts, strict=True))  # noqa: E731
    if _is_flat(structure):
        return together
    bounds: list[tuple[Callable[[Sequence[Any]], Any], int, int]] = []
    end = 0
    for child in children:
        bounds.append((child.unflatten, end, end + child.num_leaves))
        end += child.num_leaves
    return lambda leaves: together([unflatten(leaves[start:stop]) for unflatten, start, stop in bounds])


def _differs(path: str, expected: str, actual: str, whole: tuple[Structure, Any]) -> SpecMismatchError:
    structure, value = whole
    return SpecMismatchError(
        f"{named(path)} is built differently: expected {expected}, got {actual}. The whole element should be "
        f"{structure._sketch()} and is {sketch_value(value)}; every item must give the same structure"
    )


_LEAF = Structure("leaf")
