"""The nested structure of an element: which arrays there are, their names, the way apart and together, in messages too.

A list is never structure: what a function returns as a list is one array, as NumPy has it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

from loaderpool.errors import SpecMismatchError, brief, shortened

Kind = Literal["leaf", "tuple", "dict", "namedtuple"]

# Names shown in a message: fewer hide the cause, more bury it.
_SHOWN = 8
# What can never be a leaf, by exact type: one C call looks at all leaves of a flat element. Subclasses of tuple and
# dict in a leaf's place are left to `convert_leaf`, which refuses them too.
_NO_LEAVES = frozenset({tuple, dict, type(None)})


class Structure:
    """How an element is built of leaves; comparable, picklable, never changed.

    Two are equal where kinds, keys in their order, fields and namedtuple names are, so that equal structures number
    their leaves alike.

    Attributes:
        kind: "leaf", "tuple", "dict" or "namedtuple".
        keys: a dict's keys in the order first seen, a namedtuple's fields, a tuple's numbers.
        children: the structures within, in order.
        namedtuple: the class that `unflatten` builds with, else None.
        num_leaves: how many arrays an element has.
        paths: name of each leaf: "" for a bare one, "[0]", "['image']", ".x" in a namedtuple, nested "['a'][1]".
        flatten: the leaves of a value, as a list; SpecMismatchError, naming the path, where it is not built so.
        unflatten: a value of this structure from its `num_leaves` leaves; a dict comes back as a plain dict.
    """

    __slots__ = ("children", "flatten", "keys", "kind", "namedtuple", "num_leaves", "paths", "unflatten")

    def __init__(
        self,
        kind: Kind,
        keys: tuple[Hashable, ...] = (),
        children: tuple[Structure, ...] = (),
        namedtuple: Any = None,
    ) -> None:
        self.kind, self.keys, self.children, self.namedtuple = kind, keys, children, namedtuple
        pairs = zip(keys, children, strict=True)
        self.paths: tuple[str, ...] = tuple(
            _step(kind, key) + path for key, child in pairs for path in child.paths
        ) or ("",)
        self.num_leaves = len(self.paths)
        # Closures made for this very structure, not methods: taking elements apart is done once for each sample.
        self.flatten = _flattener(self)
        self.unflatten = _unflattener(self)

    @staticmethod
    def of(value: Any, *, origin: str = "fn returned", path: str = "") -> Structure:
        """Return the structure of a value; what is neither tuple nor dict is a leaf.

        Raises:
            SpecMismatchError: None, or an empty tuple or dict, somewhere in it; begins with `origin`.
        """
        where = f" at {path}" if path else ""
        kind, keys, parts = _opened(value)
        if value is None:
            advice = ": leave it out, or use a value such as 0 or NaN instead"
            if not path and origin.endswith("returned"):
                advice = ". Did you forget a return statement?"
            raise SpecMismatchError(f"{origin} None{where}{advice}")
        if kind == "leaf":
            return _LEAF
        if not keys:
            name = "dict" if kind == "dict" else "tuple"
            raise SpecMismatchError(f"{origin} an empty {name}{where}: at least one array is needed")
        paths = [path + _step(kind, key) for key in keys]
        children = tuple(Structure.of(part, origin=origin, path=at) for part, at in zip(parts, paths, strict=True))
        return Structure(kind, keys, children, type(value) if kind == "namedtuple" else None)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        # Not the class itself: a new one made in each call, or by an unpickling, is the same structure to the user.
        return self.kind, self.keys, self.children, self.namedtuple and self.namedtuple.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.kind, self.keys, self.children, self.namedtuple)

    def __repr__(self) -> str:
        return f"Structure({self})"

    def __str__(self) -> str:
        return sketch(self.unflatten(["*"] * self.num_leaves), str, depth=-1)


def _opened(value: Any) -> tuple[Kind, tuple[Hashable, ...], Sequence[Any]]:
    """Return a value's kind, its keys as `Structure` has them, and what is at each."""
    if isinstance(value, dict):
        return "dict", tuple(value), tuple(value.values())
    if not isinstance(value, tuple):
        return "leaf", (), ()
    fields = getattr(type(value), "_fields", None)
    if isinstance(fields, tuple) and hasattr(type(value), "_make") and len(fields) == len(value):
        return "namedtuple", fields, value
    return "tuple", tuple(range(len(value))), value


def _step(kind: Kind, key: Hashable) -> str:
    return f".{key}" if kind == "namedtuple" else f"[{brief(key)}]"


# ---- apart ----


def _flattener(structure: Structure) -> Callable[[Any], list[Any]]:
    flatten = _quick_flattener(structure)

    def flatten_or_raise(value: Any) -> list[Any]:
        leaves = flatten(value)
        if leaves is None:  # an OrderedDict, say, or a mistake
            try:
                leaves = _leaves(structure, value)
            except SpecMismatchError as error:
                raise SpecMismatchError(
                    f"{error}. The whole element should be {shortened(str(structure))} and is "
                    f"{shortened(sketch(value))}; all items must have the same structure"
                ) from None
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
    have_leaves, is_flat = _NO_LEAVES.isdisjoint, _is_flat(structure)
    flatteners = [_quick_flattener(child) for child in structure.children]

    def flatten(value: Any) -> list[Any] | None:
        if type(value) is not cls or len(value) != count:  # nor a defaultdict, which would invent a missing key
            return None
        try:
            parts = pick(value)
        except KeyError:
            return None
        if is_flat:
            return list(parts) if have_leaves(map(type, parts)) else None
        leaves: list[Any] = []
        for flatten_part, part in zip(flatteners, parts, strict=True):
            inner = flatten_part(part)
            if inner is None:
                return None
            leaves += inner
        return leaves

    return flatten


def _is_flat(structure: Structure) -> bool:
    return all(child.kind == "leaf" for child in structure.children)


def _leaves(structure: Structure, value: Any, *steps: tuple[Kind, Hashable]) -> list[Any]:
    """Return the leaves of a value, also of subclasses; raise for the first place that is built otherwise."""
    if structure.kind == "leaf" and not (value is None or isinstance(value, (tuple, dict))):
        return [value]
    kind, keys, parts = _opened(value)
    if kind == structure.kind == "dict" and value.keys() == set(structure.keys):
        parts = [value[key] for key in structure.keys]
    elif kind == "leaf" or kind != structure.kind or keys != structure.keys:
        where = named("".join(_step(*step) for step in steps))
        raise SpecMismatchError(f"{where} has another structure: {_difference(structure, value)}")
    leaves: list[Any] = []
    for key, child, part in zip(structure.keys, structure.children, parts, strict=True):
        leaves += _leaves(child, part, *steps, (kind, key))
    return leaves


def _difference(structure: Structure, value: Any) -> str:
    kind, keys, _ = _opened(value)
    expected, got = "one array", _with_article(value)
    if structure.kind == "dict":
        expected = f"a dict of {listed(structure.keys)}"
        if kind == "dict":
            missing = [key for key in structure.keys if key not in keys]
            extra = [key for key in keys if key not in structure.keys]
            parts = [f"without {listed(missing)}"] * bool(missing) + [f"with extra {listed(extra)}"] * bool(extra)
            got = f"one {' and '.join(parts)}"
    elif structure.kind == "namedtuple":
        expected = f"a {structure.namedtuple.__name__}({', '.join(map(str, structure.keys))})"
    elif structure.kind == "tuple":
        expected = f"a tuple of {len(structure.keys)}"
        got = f"a tuple of {len(keys)}" if kind == "tuple" else got
    return f"expected {expected}, got {got}"


# ---- together ----


def _unflattener(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    if structure.kind == "leaf":
        return operator.itemgetter(0)
    keys, together = structure.keys, structure.namedtuple._make if structure.namedtuple else tuple
    if structure.kind == "dict":
        together = lambda parts: dict(zip(keys, parts, strict=True))  # noqa: E731
    if _is_flat(structure):
        return together
    ends = list(itertools.accumulate((child.num_leaves for child in structure.children), initial=0))
    pairs = zip(structure.children, itertools.pairwise(ends), strict=True)
    parts = [(child.unflatten, slice(*bounds)) for child, bounds in pairs]
    return lambda leaves: together([unflatten(leaves[place]) for unflatten, place in parts])


# ---- in messages ----


def named(path: str) -> str:
    """Return a component as messages name it."""
    return f"component {path}" if path else "the element"


def _class_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def sketch(value: Any, leaf: Callable[[Any], str] = _class_name, depth: int = 3) -> str:
    """Return a value as messages show it: its nesting with a text for each leaf, `depth` levels of it, or all (-1)."""
    kind, keys, parts = _opened(value)
    if kind == "leaf":
        return leaf(value)
    if not keys:
        return f"an empty {_class_name(value)}"
    if depth == 0:
        return "..."
    inner = [sketch(part, leaf, depth - 1) for part in parts]
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, inner, strict=True)) + "}"
    if kind == "namedtuple":
        return f"{_class_name(value)}({', '.join(f'{key}={part}' for key, part in zip(keys, inner, strict=True))})"
    return f"({', '.join(inner)}{',' * (len(inner) == 1)})"


def _with_article(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, list):
        return "a list (which becomes one array)"
    name = type(value).__name__
    base = "dict" if isinstance(value, dict) else "tuple" if isinstance(value, tuple) else name
    return f"{'an' if base[:1].lower() in 'aeiou' else 'a'} {base}{f' ({name})' * (name != base)}"


def listed(keys: Sequence[Hashable]) -> str:
    """Return the first few of the keys, and how many more there are."""
    text = ", ".join(brief(key, 40) for key in keys[:_SHOWN])
    return text + f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN)


_LEAF = Structure("leaf")
