"""Nested structure of an element: its arrays and their names, flattening, unflattening, messages.

A list is a single array, as in NumPy, not a structure. The exception is a list subclass that
contains arrays: it counts as a tuple. Any mapping counts as a dict. Each leaf is converted to an
array that a batch can contain. If that is impossible, the error says what to do.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SpecMismatchError, brief, shortened
from loaderpool.system.interrupts import is_of_a_handler

if TYPE_CHECKING:
    import torch

Kind = Literal["leaf", "tuple", "dict", "namedtuple"]

# Names shown in a message. Smaller: the cause may be hidden. Larger: the cause is hard to find.
_SHOWN = 8
# Types that can never be a leaf, as exact types: one C call checks all leaves of a flat element.
# `convert_leaf` also refuses subclasses of tuple and dict in a leaf's place.
_NO_LEAVES = frozenset({tuple, dict, type(None)})


class OwnClasses(NamedTuple):
    """Classes of the user's function in a value.

    Attributes:
        cls: class of the value itself; None: a plain dict or tuple, or a leaf.
        children: classes of the values inside, by key.
    """

    cls: type | None
    children: dict[Hashable, OwnClasses]


class Structure:
    """Nesting of an element's leaves; comparable, picklable, never changed.

    Two structures are equal if their kinds, keys in order, fields and namedtuple names are equal.
    So equal structures number their leaves in the same way.

    Attributes:
        kind: "leaf", "tuple", "dict" or "namedtuple".
        keys: a dict's keys in the order first seen, a namedtuple's fields, a tuple's numbers.
        children: the structures inside, in order.
        namedtuple: the class with which `unflatten` builds, otherwise None.
        num_leaves: number of arrays of an element.
        paths: name of each leaf: "" for a bare one, "[0]", "['image']", ".x" in a namedtuple,
            nested "['a'][1]".
        flatten: returns the leaves of a value as a list. If the value has another structure, raises
            SpecMismatchError that names the path.
        unflatten: returns a value of this structure from its `num_leaves` leaves. A dict becomes a
            plain dict.
    """

    __slots__ = (
        "children",
        "flatten",
        "keys",
        "kind",
        "namedtuple",
        "num_leaves",
        "paths",
        "unflatten",
    )

    def __init__(
        self,
        kind: Kind,
        keys: tuple[Hashable, ...] = (),
        children: tuple[Structure, ...] = (),
        namedtuple: type[tuple[Any, ...]] | None = None,
    ) -> None:
        self.kind, self.keys, self.children, self.namedtuple = kind, keys, children, namedtuple
        pairs = zip(keys, children, strict=True)
        self.paths: tuple[str, ...] = tuple(
            _step(kind, key) + path for key, child in pairs for path in child.paths
        ) or ("",)
        self.num_leaves = len(self.paths)
        # Closures made for this structure, not methods, because each sample is flattened once.
        self.flatten = _flattener(self)
        self.unflatten = _unflattener(self)

    @staticmethod
    def of(value: object, *, origin: str = "fn returned", path: str = "") -> Structure:
        """Return the structure of a value. All but tuples, lists of arrays and mappings are leaves.

        Raises:
            SpecMismatchError: the value contains None, or an empty tuple or dict. The message
                begins with `origin`.
        """
        where = f" at {path}" if path else ""
        kind, keys, parts = opened(value)
        if value is None:
            raise none_refusal(origin, where)
        if kind == "leaf":
            return _LEAF
        if not keys:
            name = "dict" if kind == "dict" else "tuple"
            raise SpecMismatchError(
                f"{origin} an empty {name}{where}: at least one array is needed"
            )
        paths = [path + _step(kind, key) for key in keys]
        children = tuple(
            Structure.of(part, origin=origin, path=at)
            for part, at in zip(parts, paths, strict=True)
        )
        cls = type(value) if isinstance(value, tuple) and kind == "namedtuple" else None
        return Structure(kind, keys, children, cls)

    def columns(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the leaves of many values: one sequence per component.

        A leaf may be None, a tuple or a dict, which `flatten` would refuse.

        Raises:
            SpecMismatchError: as `flatten`.
        """
        cls, count = {"dict": dict, "tuple": tuple}.get(self.kind), len(self.keys)
        is_exact = {cls} == set(map(type, values)) and {count} == set(map(len, values))
        if is_exact and has_only_leaves(self):
            with contextlib.suppress(KeyError):
                return [[each[key] for each in values] for key in self.keys]
        return [*zip(*map(self.flatten, values), strict=True)]

    def rebuilder(self, classes: OwnClasses | None) -> Callable[[Sequence[Any]], Any]:
        """Return a variant of `unflatten` that makes these classes, not dicts and tuples."""
        return self.unflatten if classes is None else _unflattener(self, classes)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure) and self._identity() == other._identity()
        )

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        # The name stands for the class. If each call or unpickling defines the class again, the
        # structure is still the same to the user.
        return self.kind, self.keys, self.children, self.namedtuple and self.namedtuple.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.kind, self.keys, self.children, self.namedtuple)

    def __repr__(self) -> str:
        return f"Structure({self})"

    def __str__(self) -> str:
        return sketch(self.unflatten(["*"] * self.num_leaves), str, depth=-1)


def none_refusal(origin: str, where: str = "") -> SpecMismatchError:
    """Return the error for None in the place of a sample, or at a path inside one.

    Args:
        origin: beginning of the message, such as "fn returned".
        where: " at " and the path of a component, or " for " and the name of an item, or empty.
    """
    advice = ": leave it out, or use a value such as 0 or NaN instead"
    if origin.endswith("returned") and not where.startswith(" at "):
        advice = ". Did you forget a return statement?"
    return SpecMismatchError(f"{origin} None{where}{advice}")


def opened(value: object) -> tuple[Kind, tuple[Hashable, ...], Sequence[Any]]:
    """Return the kind of a value, its keys as in `Structure.keys`, and the value of each key."""
    if is_mapping(value):
        keys = tuple(value)
        return "dict", keys, tuple(value[key] for key in keys)
    if isinstance(value, list) and _is_of_arrays(value):
        return "tuple", tuple(range(len(value))), value
    if not isinstance(value, tuple):
        return "leaf", (), ()
    fields = getattr(type(value), "_fields", None)
    if isinstance(fields, tuple) and hasattr(type(value), "_make") and len(fields) == len(value):
        return "namedtuple", fields, value
    return "tuple", tuple(range(len(value))), value


def is_mapping(value: object) -> TypeGuard[Mapping[Hashable, Any]]:
    """Return True if a value is read as a dict: any mapping that is not an array itself."""
    return isinstance(value, dict) or (isinstance(value, Mapping) and not _has_array(value))


def _has_array(value: object) -> bool:
    return any(
        hasattr(value, name) for name in ("__array__", "__array_interface__", "__array_struct__")
    )


def _is_of_arrays(values: list[Any]) -> bool:
    """Return True for a list subclass whose items are all arrays with axes, tuples or mappings."""
    if type(values) is list or not values:
        return False
    return all(
        getattr(each, "shape", ()) or isinstance(each, tuple) or is_mapping(each) for each in values
    )


def _step(kind: Kind, key: Hashable) -> str:
    return f".{key}" if kind == "namedtuple" else f"[{brief(key)}]"


# ---- flatten ----


def _flattener(structure: Structure) -> Callable[[Any], list[Any]]:
    flatten = _quick_flattener(structure)

    def flatten_or_raise(value: object) -> list[Any]:
        leaves = flatten(value)
        # None: the value contains a class of the user's function, for example, or is wrong.
        return _leaves(structure, value) if leaves is None else leaves

    return flatten_or_raise


def _quick_flattener(structure: Structure) -> Callable[[Any], list[Any] | None]:
    """Make a flattener for values of exactly these types. It returns None for all others.

    `_leaves` then has to check the value.
    """
    if structure.kind == "leaf":
        return lambda value: None if value is None or isinstance(value, (tuple, dict)) else [value]
    keys, count = structure.keys, len(structure.children)
    cls = dict if structure.kind == "dict" else structure.namedtuple or tuple
    # One call of itemgetter in C reads all keys. For a single key, it would return no tuple.
    pick: Callable[[Any], tuple[Any, ...]] = (
        tuple
        if cls is not dict
        else operator.itemgetter(*keys)
        if count > 1
        else lambda d: (d[keys[0]],)
    )
    have_leaves, is_flat = _NO_LEAVES.isdisjoint, has_only_leaves(structure)
    flatteners = [_quick_flattener(child) for child in structure.children]

    def flatten(value: object) -> list[Any] | None:
        # The class is exact, because a defaultdict would make a missing key.
        if type(value) is not cls or len(value) != count:
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


def has_only_leaves(structure: Structure) -> bool:
    """Return True if a structure is a leaf, or if all its parts are leaves."""
    return all(child.kind == "leaf" for child in structure.children)


def _leaves(structure: Structure, value: object, *steps: tuple[Kind, Hashable]) -> list[Any]:
    """Return the leaves of a value, also of subclasses.

    Raises:
        SpecMismatchError: the value has another structure; the message names the first difference.
    """
    if structure.kind == "leaf" and not (
        value is None or isinstance(value, tuple) or is_mapping(value)
    ):
        return [value]
    kind, keys, parts = opened(value)
    if kind == structure.kind == "dict" and set(keys) == set(structure.keys):
        found = dict(zip(keys, parts, strict=True))
        parts = [found[key] for key in structure.keys]
    elif kind == "leaf" or kind != structure.kind or keys != structure.keys:
        where = named("".join(_step(*step) for step in steps))
        raise SpecMismatchError(f"{where} has another structure: {_difference(structure, value)}")
    leaves: list[Any] = []
    for key, child, part in zip(structure.keys, structure.children, parts, strict=True):
        leaves += _leaves(child, part, *steps, (kind, key))
    return leaves


def _difference(structure: Structure, value: object) -> str:
    kind, keys, _ = opened(value)
    expected = "one array" if structure.kind == "leaf" else shortened(str(structure))
    got = shortened(sketch(value))
    if kind == structure.kind == "dict":
        missing = [key for key in structure.keys if key not in keys]
        extra = [key for key in keys if key not in structure.keys]
        parts = [f"without {listed(missing)}"] * bool(missing) + [
            f"with extra {listed(extra)}"
        ] * bool(extra)
        expected, got = f"a dict of {listed(structure.keys)}", f"one {' and '.join(parts)}"
    return f"expected {expected}, got {got}; all items must have the same structure"


# ---- unflatten ----


def _unflattener(
    structure: Structure, classes: OwnClasses | None = None
) -> Callable[[Sequence[Any]], Any]:
    if structure.kind == "leaf":
        return operator.itemgetter(0)
    own, within = classes or OwnClasses(None, {})
    keys, together = structure.keys, getattr(structure.namedtuple, "_make", tuple)
    if structure.kind == "dict":
        together = lambda parts: dict(zip(keys, parts, strict=True))  # noqa: E731
    if own is not None:
        together = lambda parts: rebuilt(own, structure.kind, keys, parts)  # noqa: E731
    if has_only_leaves(structure):
        return together
    ends = list(itertools.accumulate((child.num_leaves for child in structure.children), initial=0))
    inner = [
        child.rebuilder(within.get(key))
        for key, child in zip(keys, structure.children, strict=True)
    ]
    parts = [
        (unflatten, slice(*bounds))
        for unflatten, bounds in zip(inner, itertools.pairwise(ends), strict=True)
    ]
    return lambda leaves: together([unflatten(leaves[place]) for unflatten, place in parts])


def rebuilt(own: type, kind: Kind, keys: Sequence[Hashable], parts: Sequence[Any]) -> object:
    """Return an instance of a class of the user's function, made of its items alone."""
    return own(dict(zip(keys, parts, strict=True)) if kind == "dict" else list(parts))


# ---- in messages ----


def named(path: str) -> str:
    """Return the name of a component for messages."""
    return f"component {path}" if path else "the element"


def _class_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def sketch(value: object, leaf: Callable[[Any], str] = _class_name, depth: int = 3) -> str:
    """Return a value's nesting for messages, with a text for each leaf.

    `depth` is the number of levels shown; -1: all.
    """
    kind, keys, parts = opened(value)
    if kind == "leaf":
        return leaf(value)
    if not keys:
        return f"an empty {_class_name(value)}"
    if depth == 0:
        return "..."
    inner = [sketch(part, leaf, depth - 1) for part in parts]
    if kind == "dict":
        return (
            "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, inner, strict=True)) + "}"
        )
    if kind == "namedtuple":
        return (
            f"{_class_name(value)}"
            f"({', '.join(f'{key}={part}' for key, part in zip(keys, inner, strict=True))})"
        )
    return f"({', '.join(inner)}{',' * (len(inner) == 1)})"


def listed(keys: Sequence[Hashable]) -> str:
    """Return the first few of the keys, and the number of the others."""
    text = ", ".join(brief(key, 40) for key in keys[:_SHOWN])
    return text + f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN)


_LEAF = Structure("leaf")


# ---- leaves ----

# Maximum length of a list that may have been meant as a tuple. Only such lists are checked for
# unequal dtypes.
_MOST_PARTS = 16
# Dtypes of most arrays, which one lookup accepts. Not longdouble ("g", "G"), which TensorFlow does
# not have.
_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))

Text = Literal["str", "bytes"]

# NumPy's string dtypes, by kind. In batches, text is always an array of objects.
TEXT_KINDS: dict[str, Text] = {"U": "str", "T": "str", "S": "bytes"}
OBJECT = np.dtype(object)
_IN_NONE = "has no counterpart in TensorFlow, JAX or PyTorch"
_ADVICE = "return arrays, numbers or strings, or a tuple or dict of them"
_OF_SPARSE = (
    "return a dense array of it, such as matrix.toarray(), or its parts as a dict of arrays"
)


def convert_leaf(value: object, path: str) -> npt.NDArray[Any]:
    """Return one leaf as a plain ndarray of native byte order.

    Text becomes an object array of only str or only bytes. An array of a suitable dtype is returned
    itself or as a view. Nothing is copied without need.

    Raises:
        SpecMismatchError: no batch can contain the leaf. The message names the component by its
            path.
    """
    try:
        array = value if type(value) is np.ndarray else _as_array(value)
        dtype = array.dtype
        if dtype in _PLAIN:
            return array
        if dtype == OBJECT or dtype.kind in TEXT_KINDS:
            return _as_text(array)
        native = _native(dtype)
        return array if dtype == native else array.astype(native)
    except (ArgumentError, SpecMismatchError, OverflowError, UnicodeEncodeError) as error:
        raise SpecMismatchError(f"{named(path)}: {error}") from error.__cause__


def _as_array(value: object) -> npt.NDArray[Any]:
    if isinstance(value, (str, bytes)):
        # np.array(value) would remove NUL bytes at the end.
        text = np.empty((), object)
        text[()] = value
        return text
    if isinstance(value, (np.generic, bool, float, complex)):
        return np.asarray(value)
    if isinstance(value, int):
        return np.array(value, np.int64 if value < 2**63 else np.uint64)
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise SpecMismatchError(
                "a masked array would lose its mask: return .filled(x), or two arrays"
            )
        return np.asarray(value)
    if isinstance(value, list):
        return _stack(value)
    kind = "None" if value is None else f"an object of type {type(value).__name__}"
    if value is None or isinstance(value, (tuple, dict)):
        raise SpecMismatchError(f"expected one array, got {kind}")
    has_array = _has_array(value)
    # NumPy would make an array of the keys.
    if isinstance(value, Mapping) and not has_array:
        raise SpecMismatchError(f"{kind} is not an array: {_advice(value)}")
    try:
        array: npt.NDArray[Any] = (
            _small_floats(value) if _is_small_float(value) else np.asarray(value)
        )
    except SpecMismatchError:
        raise
    except Exception as error:
        if is_of_a_handler(error):
            raise
        raise SpecMismatchError(
            f"{kind} cannot be converted to an array ({type(error).__name__}: {error})"
        ) from error
    if array.dtype == OBJECT and array.ndim == 0 and array[()] is value:
        raise SpecMismatchError(f"{kind} is not an array: {_advice(value)}")
    # For example a deque of text, perhaps mixed with numbers.
    if array.dtype.kind in TEXT_KINDS and not has_array:
        return _stack(list(cast(Iterable[object], value)))
    return array


def _advice(value: object) -> str:
    """Return the advice for an object that is not an array."""
    return _OF_SPARSE if hasattr(value, "toarray") or hasattr(value, "todense") else _ADVICE


def _stack(values: list[Any]) -> npt.NDArray[Any]:
    """Return a list as one array. Text becomes an array of objects.

    Otherwise NumPy would silently convert numbers beside text to text.
    """
    # The user meant arrays of different dtypes as a tuple, like PyTorch's `default_collate`.
    # Numbers of Python may be mixed.
    dtypes = {
        str(each.dtype).rpartition(".")[2]
        for each in values[:_MOST_PARTS]
        if hasattr(each, "dtype")
    }
    if len(dtypes) > 1 and len(values) <= _MOST_PARTS:
        raise SpecMismatchError(
            f"a list becomes one array, but its {len(values)} parts have the dtypes "
            f"{' and '.join(sorted(dtypes))}: return a tuple of arrays, or parts of one dtype"
        )
    first: object = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    try:
        parts = _of_small_floats(values) if _is_small_float(first) else values
        array = np.array(parts, dtype=object if isinstance(first, (str, bytes)) else None)
        return np.array(parts, dtype=object) if array.dtype.kind in TEXT_KINDS else array
    except SpecMismatchError:
        raise
    except Exception as error:
        if is_of_a_handler(error):
            raise
        raise SpecMismatchError(
            f"a list becomes one array, but its {len(values)} parts do not stack ({error}). Return "
            "parts of one shape (pad them), or a tuple or dict of arrays"
        ) from error


def _as_text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    objects = array if array.dtype == OBJECT else array.astype(object)
    # An object array may have millions of elements. C collects their types, then each type is
    # checked once.
    pieces = objects.ravel().tolist()
    types = set(map(type, pieces))
    is_str = all(issubclass(t, str) for t in types)
    if is_str and not (text := "".join(pieces)).isascii():
        # Text is encoded like this later. UnicodeEncodeError is raised here already.
        text.encode("utf-8", "surrogateescape")
    if is_str or all(issubclass(t, bytes) for t in types):
        return objects
    names = ", ".join(sorted(t.__name__ for t in types))
    raise SpecMismatchError(
        f"an array of objects ({names}) cannot be batched. Return parts of one shape, which stack, "
        "and of one kind: numbers, only str, or only bytes ('' for missing values)"
    )


# ---- dtypes ----

# Float dtypes of PyTorch that NumPy has only from ml_dtypes, by the beginning of their names.
_SMALL_FLOATS = ("torch.bfloat16", "torch.float8_")


def _is_small_float(value: object) -> TypeGuard[torch.Tensor]:
    is_of_torch = type(value).__module__.partition(".")[0] == "torch"
    return is_of_torch and str(getattr(value, "dtype", "")).startswith(_SMALL_FLOATS)


def _small_floats(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bits of a PyTorch tensor as an array of the same dtype from ml_dtypes."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    advice = "return x.float(), or install the package ml_dtypes, which gives NumPy this dtype"
    try:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise SpecMismatchError(
            f"a tensor of dtype {name} has no NumPy array without ml_dtypes: {advice}"
        ) from None
    bits = tensor.detach().view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    array: npt.NDArray[Any] = bits.numpy()
    return array.view(dtype)


def _of_small_floats(values: object) -> object:
    """Return nested lists in which small-float tensors are replaced by arrays."""
    if isinstance(values, (list, tuple)):
        return [*map(_of_small_floats, values)]
    return _small_floats(values) if _is_small_float(values) else values


def can_write(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return True if a user's spec of dtype `target` accepts arrays of dtype `source`.

    The cast must keep the kind of number.
    """
    return bool(np.can_cast(source, target, "same_kind"))


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the same dtype in native byte order and without metadata.

    Raises:
        ArgumentError: no batch can have this dtype.
    """
    module, reason = dtype.type.__module__, ""
    if dtype.kind in "mM":
        reason = (
            f"{_IN_NONE}: return for example "
            f".astype('{dtype.name.partition('[')[0]}[s]').astype('int64')"
        )
    elif dtype.names is not None:
        reason = (
            "is structured: return a dict of its fields, {name: a[name] for name in a.dtype.names}"
        )
    # Dtypes that other packages register with NumPy look like raw bytes (kind V), or have the
    # letters of long doubles. TensorFlow knows only those of ml_dtypes.
    elif (
        dtype.type is np.void or dtype.char in "gG" or module != "numpy"
    ) and not module.startswith("ml_dtypes"):
        reason = (
            f"{_IN_NONE}: return for example .astype('float64'), or .view('uint8') of raw bytes"
        )
    if reason:
        raise ArgumentError(f"dtype {shortened(str(dtype))} {reason}")
    return np.dtype(dtype.newbyteorder("=").str) if module == "numpy" else dtype


def read_dtype(dtype: npt.DTypeLike) -> tuple[np.dtype[Any], Text | None]:
    """Return the dtype that batches have for a given dtype, and the kind of its text.

    Args:
        dtype: a dtype that NumPy accepts, a `tf.DType`, or "string".
    """
    if dtype is None:
        raise ArgumentError("dtype must be a NumPy dtype, got None")
    if getattr(dtype, "name", dtype) == "string":  # tf.string, or Keras's name of it
        return OBJECT, "bytes"
    try:
        found = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    except Exception as error:  # TensorFlow raises KeyError for tf.variant
        if is_of_a_handler(error):
            raise
        raise ArgumentError(
            f"dtype must be a NumPy dtype, got {brief(dtype)} ({type(error).__name__}: "
            f"{shortened(str(error))})"
        ) from None
    text = TEXT_KINDS.get(found.kind)
    return (OBJECT, text) if text is not None or found == OBJECT else (_native(found), None)
