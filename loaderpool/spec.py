"""What an element is made of: specs of its arrays, how a leaf becomes an array, what to say where it does not fit."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, ArgumentTypeError, SpecMismatchError
from loaderpool.structure import Structure, named

__all__ = [
    "ArraySpec",
    "ElementSpec",
    "Text",
    "batched",
    "can_write",
    "convert_leaf",
    "mismatch",
    "read_spec",
    "sample_spec",
    "unbatched",
]

Text = Literal["str", "bytes"]

# What most arrays have; one look into this set and the leaf is done. Not longdouble ("g", "G"): TensorFlow has none.
_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))
_TEXT_KINDS: dict[str, Text] = {"U": "str", "T": "str", "S": "bytes"}
_OBJECT = np.dtype(object)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ArraySpec:
    """Shape and dtype of one component.

    Args:
        shape: lengths of the axes, None where they vary.
        dtype: anything NumPy reads as a dtype; `str` and `bytes` mean text.
        text: what the elements of an object array are.
        ragged: rows of varied length; the ragged axis is None in `shape`.

    Raises:
        ArgumentError: a shape or dtype that no batch can have.
        ArgumentTypeError: not a shape or not a dtype.
    """

    shape: tuple[int | None, ...]  # None: varies
    dtype: np.dtype[Any]  # native byte order; object for text
    text: Text | None  # "str" or "bytes" for text, None for numbers
    ragged: bool  # one axis behind the batch axis is of varied length from row to row

    def __init__(
        self, shape: Iterable[int | None], dtype: npt.DTypeLike, text: Text | None = None, ragged: bool = False
    ) -> None:
        sizes = _read_shape(shape)
        numpy_dtype, text_of_dtype = _read_dtype(dtype)
        if text is None:
            text = text_of_dtype
        elif text not in ("str", "bytes"):
            raise ArgumentError(f'text must be "str", "bytes" or None, got {text!r}')
        elif numpy_dtype != _OBJECT:
            raise ArgumentError(f"text={text!r} goes with dtype object, not {numpy_dtype}")
        if numpy_dtype == _OBJECT and text is None:
            raise ArgumentError('dtype object needs text="str" or text="bytes": no other objects can be batched')
        if ragged and (text is not None or None not in sizes):
            cause = "holds no text" if text is not None else f"has an axis of None, and shape is {sizes}"
            raise ArgumentError(f"a ragged component {cause}")
        for name, value in (("shape", sizes), ("dtype", numpy_dtype), ("text", text), ("ragged", bool(ragged))):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{'ragged ' * self.ragged}{self.text or self.dtype.name}[{', '.join(map(str, self.shape))}]"

    def __repr__(self) -> str:
        return f"ArraySpec({self})"


@dataclasses.dataclass(frozen=True, repr=False)
class ElementSpec:
    """Structure of an element and the spec of each of its components."""

    structure: Structure
    components: tuple[ArraySpec, ...]  # in the order of `structure.paths`

    def __post_init__(self) -> None:
        if len(self.components) != self.structure.num_leaves:
            raise ArgumentError(f"{len(self.components)} components for {self.structure}")

    @property
    def paths(self) -> tuple[str, ...]:
        """Name of each component, as in "['image']"; "" for a bare array."""
        return self.structure.paths

    def pack(self) -> Any:
        """The components in the nested structure of an element."""
        return self.structure.pack(self.components)

    def __repr__(self) -> str:
        return f"ElementSpec({self.pack()!r})"


def sample_spec(sample: Any, given: ElementSpec | None = None) -> ElementSpec:
    """The spec of exactly this sample: no batch axis, all axes known.

    Args:
        sample: what the function returned.
        given: the user's spec; says of an object array without elements whether it is str or bytes.

    Raises:
        SpecMismatchError: no batch can be made of it; names the component.
    """
    structure = Structure.of(sample)
    components = []
    hints: tuple[ArraySpec | None, ...] = (None,) * structure.num_leaves
    if given is not None and given.structure == structure:
        hints = given.components
    for leaf, path, hint in zip(structure.flatten(sample), structure.paths, hints, strict=True):
        array = convert_leaf(leaf, path)
        components.append(ArraySpec(array.shape, array.dtype, _text_of(array, leaf, path, hint.text if hint else None)))
    return ElementSpec(structure, tuple(components))


def batched(spec: ElementSpec, batch_size: int | None) -> ElementSpec:
    """The spec of batches of such samples; `batch_size` None where the batch axis varies."""
    return _with_shapes(spec, [(batch_size, *c.shape) for c in spec.components])


def unbatched(spec: ElementSpec) -> ElementSpec:
    """The spec of one row of such batches.

    Raises:
        ArgumentError: a component has no axis that could be the batch's.
    """
    for path, component in zip(spec.paths, spec.components, strict=True):
        if not component.shape:
            raise ArgumentError(
                f"element_spec{path} is {component}, without a batch axis: a given spec describes a batch, "
                f"as a Dataset's element_spec does; write shape=(None,) for one number per row"
            )
    return _with_shapes(spec, [c.shape[1:] for c in spec.components])


def _with_shapes(spec: ElementSpec, shapes: list[tuple[int | None, ...]]) -> ElementSpec:
    pairs = zip(spec.components, shapes, strict=True)
    return ElementSpec(spec.structure, tuple(dataclasses.replace(c, shape=shape) for c, shape in pairs))


def can_write(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a given spec of dtype `target` takes arrays of dtype `source`: a cast that keeps the kind of number."""
    return bool(np.can_cast(source, target, "same_kind"))


# ---- a leaf ----


def convert_leaf(value: Any, path: str) -> npt.NDArray[Any]:
    """One leaf as a plain ndarray of native byte order; text as an object array of only str or only bytes.

    An array of fitting dtype comes back as it is or as a view: nothing is copied without need.

    Args:
        value: what the function returned in this place.
        path: the component's path, for errors.

    Raises:
        SpecMismatchError: it is no array and does not become one, or of a dtype that no batch can have.
    """
    array = value if type(value) is np.ndarray else _as_array(value, path)
    dtype = array.dtype
    if dtype in _PLAIN:
        return array
    if dtype == _OBJECT or dtype.kind in _TEXT_KINDS:
        return _as_text(array, path)
    refusal = _refusal(dtype)
    if refusal is not None:
        raise SpecMismatchError(f"{named(path)}: {refusal}")
    native = _native(dtype)
    return array if dtype == native else array.astype(native)


def _as_array(value: Any, path: str) -> npt.NDArray[Any]:
    if isinstance(value, (str, bytes)):
        text = np.empty((), object)  # np.array(value) would cut NUL bytes off the end
        text[()] = value
        return text
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, (bool, float, complex)):
        return np.array(value)
    if isinstance(value, int):
        for dtype in (np.int64, np.uint64):
            try:
                return np.array(value, dtype)
            except OverflowError:
                pass
        raise SpecMismatchError(
            f"{named(path)}: an int of {value.bit_length()} bits fits neither int64 nor uint64; return a float or text"
        )
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise SpecMismatchError(
                f"{named(path)}: a masked array would lose its mask; return .filled(x) or two arrays"
            )
        return np.asarray(value)
    if isinstance(value, list):
        return _stack(value, path)
    if value is None or isinstance(value, (tuple, dict)):
        raise SpecMismatchError(f"{named(path)}: got {_kind(value)} where one array is expected")
    has_array = any(hasattr(value, name) for name in ("__array__", "__array_interface__", "__array_struct__"))
    # NumPy would make an array of the mapping's keys.
    if isinstance(value, Mapping) and not has_array:
        raise SpecMismatchError(f"{named(path)}: {_kind(value)} is no array; return dict(value)")
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SpecMismatchError(f"{named(path)}: {_kind(value)} does not become an array ({reason})") from error
    if array.dtype == _OBJECT and array.ndim == 0 and array[()] is value:
        raise SpecMismatchError(f"{named(path)}: {_kind(value)} is no array; {_advice(value)}")
    if array.dtype.kind in _TEXT_KINDS and not has_array:  # a deque of text, say, and perhaps of numbers
        return _stack(list(value), path)
    return array


def _stack(values: list[Any], path: str) -> npt.NDArray[Any]:
    """A list as one array. Text becomes objects at once: NumPy would turn numbers beside it into text in silence."""
    first: Any = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    try:
        array = np.array(values, dtype=object if isinstance(first, (str, bytes)) else None)
        if array.dtype.kind in _TEXT_KINDS:
            array = np.array(values, dtype=object)
    except Exception as error:
        raise SpecMismatchError(
            f"{named(path)}: a list is one array, and this one of {len(values)} does not stack ({error}); make its "
            "items alike (pad them), or return a tuple or dict where they are arrays of their own"
        ) from error
    return array


def _as_text(array: npt.NDArray[Any], path: str) -> npt.NDArray[Any]:
    objects = array if array.dtype == _OBJECT else array.astype(object)
    # An object array may hold millions: the types are collected in C, then looked at once each.
    types = set(map(type, objects.ravel().tolist()))
    if all(issubclass(t, str) for t in types) or all(issubclass(t, bytes) for t in types):
        return objects
    names = ", ".join(sorted(t.__name__ for t in types))
    if any(issubclass(t, (list, tuple, np.ndarray)) for t in types):
        advice = "it does not stack: make its items alike (pad them), or return a tuple or dict of arrays"
    elif any(issubclass(t, (str, bytes)) for t in types):
        advice = "text is all str or all bytes: decode the bytes, make text of numbers, and '' of what is missing"
    elif types == {int}:
        advice = "its ints fit neither int64 nor uint64; use floats or text"
    else:
        advice = "objects cannot be batched: give it a dtype by .astype, or return a dict of arrays"
    raise SpecMismatchError(f"{named(path)}: an array of objects ({names}); {advice}")


def _text_of(array: npt.NDArray[Any], leaf: Any, path: str, given: Text | None) -> Text | None:
    if array.dtype != _OBJECT:
        return None
    if array.size:
        return "str" if isinstance(array.flat[0], str) else "bytes"
    text = _TEXT_KINDS.get(getattr(getattr(leaf, "dtype", None), "kind", "")) or given
    if text is None:
        raise SpecMismatchError(
            f"{named(path)}: the first sample's object array is empty, so whether it is str or bytes is unknown; "
            "say it with element_spec=, or return an array of dtype 'U1' or 'S1'"
        )
    return text


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _advice(value: Any) -> str:
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "the function has a yield in it: return the value instead"
    if inspect.iscoroutine(value):
        return "the function is async: make it a plain function"
    if dataclasses.is_dataclass(value):
        return "return dataclasses.asdict(value)"
    if isinstance(value, AbstractSet):
        return "a set has no order: return sorted(value)"
    if isinstance(value, (datetime.date, datetime.timedelta)):
        return "return a number, such as value.timestamp() or value.total_seconds()"
    if isinstance(value, os.PathLike):
        return "return str(value)"
    for method in ("toarray", "to_tensor", "numpy"):
        if callable(getattr(value, method, None)):
            return f"return value.{method}()"
    return "return arrays, numbers, str or bytes, or a tuple or dict of them"


# ---- dtypes ----


def _refusal(dtype: np.dtype[Any]) -> str | None:
    """Why no batch can have this dtype and what to do, or None. Text and objects are not asked about."""
    if dtype.kind == "M":
        return f"dtype {dtype} has no counterpart in TensorFlow; return .astype('datetime64[s]').astype('int64'), say"
    if dtype.kind == "m":
        return f"dtype {dtype} has no counterpart in TensorFlow; return .astype('timedelta64[s]').astype('int64'), say"
    if dtype.names is not None:
        return f"a structured dtype {dtype}; return a dict of its fields, {{name: a[name] for name in a.dtype.names}}"
    if dtype.type is np.void:
        return f"dtype {dtype} is raw bytes; return .view('uint8')"
    if dtype.kind in "fc" and dtype.char in "gG":  # others' types may have the same letters
        double = "complex128" if dtype.char == "G" else "float64"
        return f"dtype {dtype} has no counterpart in TensorFlow; return .astype('{double}')"
    # Types registered with NumPy by others look like raw bytes (kind V); these are the ones that TensorFlow knows.
    if dtype.type.__module__ != "numpy" and not dtype.type.__module__.startswith("ml_dtypes"):
        return f"dtype {dtype} of {dtype.type.__module__} is unknown to TensorFlow; return .astype('float64'), say"
    return None


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """One dtype object for equal ones: native byte order, no metadata, long where long long is the same."""
    return np.dtype(dtype.newbyteorder("=").str) if dtype.type.__module__ == "numpy" else dtype


def _read_dtype(dtype: Any) -> tuple[np.dtype[Any], Text | None]:
    if dtype is None:
        raise ArgumentTypeError("dtype must be said, got None")
    if getattr(dtype, "name", dtype) == "string":  # tf.string, or as Keras writes it
        return _OBJECT, "bytes"
    try:
        found = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    except Exception as error:  # TensorFlow raises KeyError for tf.variant
        raise ArgumentTypeError(f"dtype {dtype!r} is none that NumPy has ({type(error).__name__}: {error})") from None
    if found.kind in _TEXT_KINDS:
        return _OBJECT, _TEXT_KINDS[found.kind]
    if found == _OBJECT:
        return found, None
    refusal = _refusal(found)
    if refusal is not None:
        raise ArgumentError(refusal)
    return _native(found), None


# ---- a given spec ----


def read_spec(given: Any) -> ElementSpec:
    """The spec that a user's `element_spec` says; as a Dataset's, it describes a batch, batch axis included.

    Args:
        given: nested tuples and dicts of ArraySpec, tf.TensorSpec, tf.RaggedTensorSpec or the like.

    Raises:
        ArgumentError: a spec that no batch can have.
        ArgumentTypeError: something that is no spec.
    """
    if isinstance(given, ElementSpec):
        return given
    try:
        structure = Structure.of(given, origin="element_spec has")
    except SpecMismatchError as error:
        raise ArgumentTypeError(str(error)) from None
    leaves = zip(structure.flatten(given), structure.paths, strict=True)
    return ElementSpec(structure, tuple(_read_array_spec(leaf, f"element_spec{path}") for leaf, path in leaves))


def _read_array_spec(given: Any, name: str) -> ArraySpec:
    if isinstance(given, ArraySpec):
        return given
    hint = " (a list is never structure: write a tuple)" if isinstance(given, list) else ""
    classes = {cls.__name__ for cls in type(given).__mro__}
    is_spec = hasattr(given, "shape") and hasattr(given, "dtype") and not hasattr(given, "__array__")
    is_foreign = type(given).__module__.startswith("tensorflow") and not classes & {"TensorSpec", "RaggedTensorSpec"}
    if not is_spec or is_foreign or isinstance(given, type):
        raise ArgumentTypeError(
            f"{name} must be an ArraySpec, tf.TensorSpec or tf.RaggedTensorSpec, got {type(given).__name__}{hint}"
        )
    ragged_rank = getattr(given, "ragged_rank", 0)
    try:
        spec = ArraySpec(given.shape, given.dtype, ragged=ragged_rank > 0)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if ragged_rank > 1 or (spec.ragged and spec.shape[1:2] != (None,)):
        raise ArgumentError(
            f"{name}: one ragged axis can be made, the one behind the batch axis, with ragged_rank=1 and shape "
            f"(batch, None, ...); got {given!r}"
        )
    if spec.ragged and getattr(getattr(given, "row_splits_dtype", None), "name", "int64") != "int64":
        raise ArgumentError(f"{name}: row splits are int64, got row_splits_dtype={given.row_splits_dtype!r}")
    return spec


def _read_shape(shape: Any) -> tuple[int | None, ...]:
    if shape is None or getattr(shape, "rank", 0) is None:
        raise ArgumentError("shape has an unknown number of axes; write None for each that varies, as in (None, None)")
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise ArgumentTypeError(f"shape must be a tuple such as (None, 3), got {shape!r}")
    sizes: list[int | None] = []
    for size in shape:
        try:
            sizes.append(None if size is None else operator.index(size))
        except TypeError:
            raise ArgumentTypeError(f"shape must be of whole numbers and None, got {shape!r}") from None
        if size is not None and (size < 0 or isinstance(size, bool)):
            raise ArgumentError(f"shape must be of lengths >= 0 and None, got {shape!r} (None where an axis varies)")
    return tuple(sizes)


# ---- words ----


def mismatch(
    path: str,
    index: int | None,
    expected: ArraySpec,
    actual_shape: tuple[int, ...],
    actual_dtype: np.dtype[Any],
) -> SpecMismatchError:
    """The error for a component that came otherwise than its spec says, with the option that allows it.

    Args:
        path: the component's path.
        index: source index of the item, None where it has none.
        expected: what the spec says, batch axis as `actual_shape` has it.
        actual_shape: what came.
        actual_dtype: what came; object for text.
    """
    is_text = actual_dtype == _OBJECT
    actual = f"{'text' if is_text else actual_dtype.name}[{', '.join(map(str, actual_shape))}]"
    advice = []
    if is_text != (expected.text is not None):
        advice.append("text and numbers do not mix: return the same kind for every item")
    elif not is_text and actual_dtype != expected.dtype:
        name, target = actual_dtype.name, expected.dtype.name
        if can_write(actual_dtype, expected.dtype):
            advice.append(f"return .astype({target!r}), or give element_spec= with {target} to have it cast")
        else:
            advice.append(
                f"a cast from {name} to {target} may lose what matters and is not made unasked: "
                f"return .astype({target!r}), or give element_spec= with {name}"
            )
    if len(actual_shape) != len(expected.shape):
        advice.append("the number of axes must not vary: reshape in the function, or use batch_size=None")
    else:
        pairs = zip(expected.shape, actual_shape, strict=True)
        varied = [axis for axis, (size, got) in enumerate(pairs) if size is not None and size != got]
        if varied and is_text:
            advice.append("text is not padded: bring it to one shape in the function, or use batch_size=None")
        elif varied:
            ragged = ", ragged=True keeps each row's own length" * (varied == [0])
            axes = " and ".join(map(str, varied))
            advice.append(
                f"samples of varied shape: pad=True pads to a batch's largest{ragged}, element_spec= says with None "
                f"which axes vary (here {axes}), batch_size=None hands each element on as it is"
            )
    source = "" if index is None else f" of source index {index}"
    text = "; ".join(advice)
    return SpecMismatchError(f"{named(path)}{source}: expected {expected}, got {actual}{': ' * bool(text)}{text}")
