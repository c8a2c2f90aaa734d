"""One leaf of what the function returned, as an array that can lie in a batch, and which dtypes can; else advice."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.element.structure import named
from loaderpool.errors import ArgumentError, SpecMismatchError, brief, shortened

_MOST_PARTS = 16  # that a list has which is meant as a tuple
# What most arrays have; one look into this set and the leaf is done. Not longdouble ("g", "G"): TensorFlow has none.
_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))

Text = Literal["str", "bytes"]

# NumPy's own text, by kind. In batches text is always an array of objects.
TEXT_KINDS: dict[str, Text] = {"U": "str", "T": "str", "S": "bytes"}
OBJECT = np.dtype(object)
_IN_NONE = "has no counterpart in TensorFlow, JAX or PyTorch"
# Of no sparse matrix a batch is made; this makes an array of one.
_DENSE = {"scipy": "value.toarray()", "jax": "value.todense()", "tensorflow": "tf.sparse.to_dense(value)"}
_SPARSE_ADVICE = "return {}, or its indices, values and shape as a tuple of arrays (batches are dense)"
_INSTEAD: tuple[tuple[Any, str], ...] = (
    (Mapping, "return dict(value)"),
    ((GeneratorType, AsyncGeneratorType), "return the values in a list, without yield"),
    (CoroutineType, "define the function without async"),
    (AbstractSet, "return sorted(value), because a set has no order"),
    ((datetime.date, datetime.timedelta), "return a number, such as value.timestamp() or value.total_seconds()"),
    (os.PathLike, "return str(value)"),
)


def convert_leaf(value: Any, path: str) -> npt.NDArray[Any]:
    """Return one leaf as a plain ndarray of native byte order; text as an object array of only str or only bytes.

    An array of fitting dtype comes back as it is or as a view: nothing is copied without need.

    Raises:
        SpecMismatchError: no batch can have it; the message names the component by its path.
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
    except (ArgumentError, SpecMismatchError) as error:
        raise SpecMismatchError(f"{named(path)}: {error}") from error.__cause__


def _as_array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, (str, bytes)):
        text = np.empty((), object)  # np.array(value) would cut NUL bytes off the end
        text[()] = value
        return text
    if isinstance(value, (np.generic, bool, float, complex)):
        return np.asarray(value)
    if isinstance(value, int):
        try:
            return np.array(value, np.int64 if value < 2**63 else np.uint64)
        except OverflowError:
            what = f"an int of {value.bit_length()} bits"
            raise SpecMismatchError(f"{what} fits neither int64 nor uint64: return a float or a string") from None
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise SpecMismatchError("a masked array would lose its mask: return .filled(x), or two arrays")
        return np.asarray(value)
    if isinstance(value, list):
        return _stack(value)
    kind = "None" if value is None else f"an object of type {type(value).__name__}"
    if value is None or isinstance(value, (tuple, dict)):
        raise SpecMismatchError(f"expected one array, got {kind}")
    has_array = any(hasattr(value, name) for name in ("__array__", "__array_interface__", "__array_struct__"))
    # NumPy would make an array of the mapping's keys, and one of objects of a sparse matrix of JAX.
    if dense_of(type(value)) or (isinstance(value, Mapping) and not has_array):
        raise SpecMismatchError(f"{kind} is not an array: {_advice(value)}")
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except Exception as error:
        of_torch = _of_torch(value)
        if of_torch is not None:
            return of_torch
        raise SpecMismatchError(f"{kind} cannot be converted to an array ({type(error).__name__}: {error})") from error
    if array.dtype == OBJECT and array.ndim == 0 and array[()] is value:
        raise SpecMismatchError(f"{kind} is not an array: {_advice(value)}")
    if array.dtype.kind in TEXT_KINDS and not has_array:  # a deque of text, say, and perhaps of numbers
        return _stack(list(value))
    return array


def _of_torch(tensor: Any) -> npt.NDArray[Any] | None:
    """Return an array of what torch makes none of: a view still to be computed, or a dtype that ml_dtypes has."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor) or tensor.requires_grad:
        return None
    name = str(tensor.dtype).rpartition(".")[2]
    try:
        tensor = tensor.resolve_conj().resolve_neg()
        if hasattr(np, name):
            return np.asarray(tensor)
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        bits: npt.NDArray[Any] = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy()
        return bits.view(dtype)
    except ImportError:
        advice = "return x.float(), or install ml_dtypes"
        raise SpecMismatchError(f"a torch tensor of {name} cannot be converted to an array: {advice}") from None
    except Exception:  # torch's first error says what is the matter
        return None


def _stack(values: list[Any]) -> npt.NDArray[Any]:
    """A list as one array. Text becomes objects at once: NumPy would turn numbers beside it into text in silence."""
    # Arrays of unlike dtypes are meant as a tuple, as by PyTorch's `default_collate`. Python's numbers may be mixed.
    dtypes = {str(each.dtype).rpartition(".")[2] for each in values[:_MOST_PARTS] if hasattr(each, "dtype")}
    if len(dtypes) > 1 and len(values) <= _MOST_PARTS:
        raise SpecMismatchError(
            f"a list becomes one array, but its {len(values)} parts have the dtypes {' and '.join(sorted(dtypes))}: "
            "return a tuple of arrays, or parts of one dtype"
        )
    first: Any = values
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    try:
        array = np.array(values, dtype=object if isinstance(first, (str, bytes)) else None)
        return np.array(values, dtype=object) if array.dtype.kind in TEXT_KINDS else array
    except Exception as error:
        raise SpecMismatchError(
            f"a list becomes one array, but its {len(values)} parts do not stack ({error}). Return parts of one shape "
            "(pad them), or a tuple or dict of arrays"
        ) from error


def _as_text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    objects = array if array.dtype == OBJECT else array.astype(object)
    # An object array may hold millions: the types are collected in C, then looked at once each.
    types = set(map(type, objects.ravel().tolist()))
    if all(issubclass(t, str) for t in types) or all(issubclass(t, bytes) for t in types):
        return objects
    names = ", ".join(sorted(t.__name__ for t in types))
    dense = next(filter(None, map(dense_of, types)), "")
    if dense:
        advice = _SPARSE_ADVICE.format(dense)
    elif any(issubclass(t, (list, tuple, np.ndarray)) for t in types):
        advice = "return parts of one shape, which stack (pad them), or a tuple or dict of arrays"
    elif any(issubclass(t, (str, bytes)) for t in types):
        advice = "return only str or only bytes, with '' for missing values"
    elif types == {int}:
        advice = "return floats or strings, because its integers fit neither int64 nor uint64"
    else:
        advice = "convert it with .astype, or return a dict of arrays"
    raise SpecMismatchError(f"an array of objects ({names}) cannot be batched: {advice}")


def _advice(value: Any) -> str:
    if dense := dense_of(type(value)):
        return _SPARSE_ADVICE.format(dense)
    if dataclasses.is_dataclass(value):
        return "return dataclasses.asdict(value)"
    for classes, advice in _INSTEAD:
        if isinstance(value, classes):
            return advice
    for method in ("toarray", "todense", "to_tensor", "numpy"):  # as in SciPy, JAX and TensorFlow
        if callable(getattr(value, method, None)):
            return f"return value.{method}()"
    return "return arrays, numbers or strings, or a tuple or dict of them"


def dense_of(cls: type) -> str:
    """Return Python that makes an array of such a `value`, if it is sparse, else ""."""
    homes = {part for base in cls.__mro__ for part in base.__module__.split(".")}
    if homes.isdisjoint(("sparse", "sparse_tensor")):
        return ""
    return next((dense for home, dense in _DENSE.items() if home in homes), "")


# ---- dtypes ----


def can_write(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether a given spec of dtype `target` takes arrays of dtype `source`: a cast that keeps the kind of number."""
    return bool(np.can_cast(source, target, "same_kind"))


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return one dtype for equal ones: native byte order, no metadata; ArgumentError where no batch can have it."""
    module, reason = dtype.type.__module__, ""
    if dtype.kind in "mM":
        reason = f"{_IN_NONE}: return for example .astype('{dtype.name.partition('[')[0]}[s]').astype('int64')"
    elif dtype.names is not None:
        reason = "is structured: return a dict of its fields, {name: a[name] for name in a.dtype.names}"
    elif dtype.type is np.void:
        reason = "is raw bytes: return .view('uint8')"
    elif dtype.kind in "fc" and dtype.char in "gG":  # others' types may have the same letters
        reason = f"{_IN_NONE}: return .astype('{'complex128' if dtype.char == 'G' else 'float64'}')"
    # Types registered with NumPy by others look like raw bytes (kind V); these are the ones that TensorFlow knows.
    elif module != "numpy" and not module.startswith("ml_dtypes"):
        reason = f"of {module} is unknown to TensorFlow: return for example .astype('float64')"
    if reason:
        raise ArgumentError(f"dtype {shortened(str(dtype))} {reason}")
    return np.dtype(dtype.newbyteorder("=").str) if module == "numpy" else dtype


def read_dtype(dtype: Any) -> tuple[np.dtype[Any], Text | None]:
    """Return a given dtype (as NumPy reads it, a `tf.DType`, or "string") as batches have it, and which text it is."""
    if dtype is None:
        raise ArgumentError("dtype must be a NumPy dtype, got None")
    if getattr(dtype, "name", dtype) == "string":  # tf.string, or as Keras writes it
        return OBJECT, "bytes"
    try:
        found = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    except Exception as error:  # TensorFlow raises KeyError for tf.variant
        raise ArgumentError(
            f"dtype must be a NumPy dtype, got {brief(dtype)} ({type(error).__name__}: {shortened(str(error))})"
        ) from None
    text = TEXT_KINDS.get(found.kind)
    return (OBJECT, text) if text is not None or found == OBJECT else (_native(found), None)
