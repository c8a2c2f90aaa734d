"""Specs of an element's arrays, padding, and the errors for values that do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import operator
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from loaderpool.element.structure import (
    OBJECT,
    TEXT_KINDS,
    Structure,
    Text,
    can_write,
    convert_leaf,
    named,
    read_dtype,
    sketch,
)
from loaderpool.errors import ArgumentError, SpecMismatchError, brief, shortened
from loaderpool.hints import known_names_only
from loaderpool.plan.item_names import item_name

# Source of an expected shape. It decides what the user can do about another shape. "rows": the
# other rows of the batch. "spec": the first samples, or the user's spec of whole batches. "given":
# the user's spec of samples. "unpadded": a component that `pad` leaves out. "length": the length to
# pad to in the user's spec. "ragged": other rows of a ragged component. "packed": other samples of
# a packed row.
Origin = Literal["rows", "spec", "given", "unpadded", "length", "ragged", "packed"]
_ADVICE: dict[Origin, str] = {
    "rows": "Samples differ in {axes}, but all samples of a batch must have the same shape. "
    "Choose one:\n    pad=True: pad to the longest sample of each batch{ragged_line}\n    "
    "batch_size=None: do not batch",
    "spec": "Lengths must not vary in {axes}. To allow it, pass {cure}",
    "given": "element_spec has a fixed length for {axes} of a sample. To allow others, also set "
    "pad=True{ragged}, and pass {cure}",
    "unpadded": "Samples differ in {axes}, but pad is False for this component, which does not "
    "pad it. None pads with zeros, empty strings, or False for a mask",
    "length": "Batches are padded to the length that element_spec has for {axes} of a sample. Set "
    "a larger one. To pad to the longest sample of each batch, pass {cure}",
    "ragged": "With ragged=True, only the first axis of a sample may vary, not {axes}. Return "
    "samples of one length there, or use pad=True instead",
    "packed": "Samples are packed along their first axis, so {axes} must not vary. Return samples "
    "of one length there",
}


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ArraySpec:
    """Shape and dtype of one component of a batch.

    Args:
        shape: Length of each axis, with the batch axis first; `None` for an axis that varies.
        dtype: NumPy dtype; `str` and `bytes` stand for strings.
        text: `"str"` or `"bytes"`, for dtype `object`. Default: `None`.
        ragged: Set to `True` if the second axis, `None` in `shape`, varies from row to row.
            Default: `False`.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]  # NumPy dtype in native byte order; object for strings.
    text: Text | None
    ragged: bool

    @known_names_only
    def __init__(
        self,
        shape: Iterable[int | None],
        dtype: npt.DTypeLike,
        text: Text | None = None,
        ragged: bool = False,
    ) -> None:
        sizes = _read_shape(shape)
        numpy_dtype, text_of_dtype = read_dtype(dtype)
        if text is None:
            text = text_of_dtype
        elif text not in ("str", "bytes"):
            raise ArgumentError(f'text must be "str", "bytes" or None, got {brief(text)}')
        elif numpy_dtype != OBJECT:
            raise ArgumentError(f"text={brief(text)} needs dtype object, got {numpy_dtype}")
        if numpy_dtype == OBJECT and text is None:
            raise ArgumentError(
                'dtype object needs text="str" or text="bytes": no other objects can be batched'
            )
        if not isinstance(ragged, bool):
            raise ArgumentError(f"ragged must be True or False, got {brief(ragged)}")
        if ragged and None not in sizes[1:]:
            raise ArgumentError(f"shape must be (batch, None, ...) with ragged=True, got {sizes}")
        for name, value in (
            ("shape", sizes),
            ("dtype", numpy_dtype),
            ("text", text),
            ("ragged", ragged),
        ):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return (
            f"{'ragged ' * self.ragged}{self.text or self.dtype.name}"
            f"[{', '.join(map(str, self.shape))}]"
        )

    def __repr__(self) -> str:
        return f"ArraySpec({self})"


@dataclasses.dataclass(frozen=True, repr=False)
class ElementSpec:
    """Structure of an element and the spec of each of its components."""

    structure: Structure
    components: tuple[ArraySpec, ...]  # in the order of `structure.paths`

    @property
    def paths(self) -> tuple[str, ...]:
        """Name of each component, such as "['image']"; "" for a bare array."""
        return self.structure.paths

    def pack(self) -> object:
        """Return the component specs in the nested structure of an element."""
        return self.structure.unflatten(self.components)

    def __repr__(self) -> str:
        return f"ElementSpec({self.pack()!r})"


class RaggedArray:
    """Batch of rows of different length.

    Row `i` is `values[row_splits[i]:row_splits[i + 1]]`, as in `tf.RaggedTensor`.

    Attributes:
        values: All rows, one after the other: `dtype[sum of lengths, ...]`.
        row_splits: Start of each row, then the end of the last one: `int64[rows + 1]`.
    """

    __slots__ = ("row_splits", "values")

    def __init__(self, values: npt.NDArray[Any], row_splits: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.row_splits = row_splits

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Size of `values` and `row_splits` in bytes."""
        return self.values.nbytes + self.row_splits.nbytes

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        row = range(len(self))[operator.index(row)]  # IndexError if there is no such row
        return self.values[self.row_splits[row] : self.row_splits[row + 1]]

    def __repr__(self) -> str:
        return (
            f"RaggedArray({len(self)} rows, {self.dtype}[{', '.join(map(str, self.values.shape))}])"
        )


def _read_shape(shape: Iterable[SupportsIndex | None]) -> tuple[int | None, ...]:
    # TensorFlow raises ValueError for a shape with an unknown number of axes.
    with contextlib.suppress(TypeError, ValueError):
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
        if all(size is None or size >= 0 for size in sizes):
            return sizes
    raise ArgumentError(
        "shape must be a tuple of integers >= 0, with None for axes that vary, such as (None, 3), "
        f"got {brief(shape)}"
    )


def read_spec(given: object) -> ElementSpec:
    """Return the spec that a user's `element_spec` describes.

    Like a Dataset's, it describes a batch and includes the batch axis.

    Raises:
        ArgumentError: no batch can have this spec, or it is not a spec.
    """
    try:
        structure = Structure.of(given, origin="element_spec has")
    except SpecMismatchError as error:
        raise ArgumentError(str(error)) from None
    leaves = zip(structure.flatten(given), structure.paths, strict=True)
    return ElementSpec(
        structure, tuple(_read_array_spec(leaf, f"element_spec{path}") for leaf, path in leaves)
    )


def _read_array_spec(given: object, name: str) -> ArraySpec:
    if isinstance(given, ArraySpec):
        return given
    if (
        not (hasattr(given, "shape") and hasattr(given, "dtype"))
        or hasattr(given, "__array__")
        or isinstance(given, type)
        or type(given).__name__ == "SparseTensorSpec"
    ):
        raise ArgumentError(
            f"{name} must be an ArraySpec, tf.TensorSpec or tf.RaggedTensorSpec, got "
            f"{type(given).__name__}"
        )
    ragged_rank = getattr(given, "ragged_rank", 0)
    try:
        spec = ArraySpec(given.shape, given.dtype, ragged=ragged_rank > 0)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from None
    splits = getattr(getattr(given, "row_splits_dtype", None), "name", "int64")
    if ragged_rank > 1 or (spec.ragged and (spec.shape[1:2] != (None,) or splits != "int64")):
        raise ArgumentError(
            f"{name}: only the axis after the batch axis can be ragged, with ragged_rank=1, "
            f"row_splits_dtype int64 and shape (batch, None, ...), got {brief(given)}"
        )
    return spec


def code_to_allow(spec: ElementSpec, component: int, shape: tuple[int | None, ...]) -> str:
    """Return Python code of `spec`, changed so that this component may also have this shape.

    In the code, loaderpool is `lp`.
    """
    components = list(spec.components)
    components[component] = _with_open_axes(components[component], shape)
    ragged = (", ragged=True" * each.ragged for each in components)
    code = [
        f"lp.ArraySpec({each.shape}, {each.text or each.dtype.name!r}{more})"
        for each, more in zip(components, ragged, strict=True)
    ]
    return f"element_spec={sketch(spec.structure.unflatten(code), str, depth=-1)}"


def _with_open_axes(spec: ArraySpec, shape: tuple[int | None, ...]) -> ArraySpec:
    if len(spec.shape) != len(shape):
        return spec
    sizes = (size if size == other else None for size, other in zip(spec.shape, shape, strict=True))
    return ArraySpec(sizes, spec.dtype, spec.text, spec.ragged)


def widened(spec: ElementSpec, other: ElementSpec) -> ElementSpec:
    """Return `spec` with None for each axis in which `other` has another length.

    A sample with another structure or number of axes is refused later, when it becomes a row,
    because its index is known then.
    """
    if spec.structure != other.structure:
        return spec
    pairs = zip(spec.components, other.components, strict=True)
    return ElementSpec(
        spec.structure, tuple(_with_open_axes(mine, its.shape) for mine, its in pairs)
    )


def sample_spec(
    sample: object, given: ElementSpec | None = None, origin: str = "fn returned"
) -> ElementSpec:
    """Return the spec of exactly this sample: no batch axis, all axes known.

    If an object array has no elements, the user's spec `given` decides between str and bytes.

    Raises:
        SpecMismatchError: no batch can be made of the sample. The message names the component.
    """
    structure = Structure.of(sample, origin=origin)
    texts: list[Text | None] = [None] * structure.num_leaves
    if given is not None and given.structure == structure:
        texts = [component.text for component in given.components]
    components = []
    for leaf, path, text in zip(structure.flatten(sample), structure.paths, texts, strict=True):
        array = convert_leaf(leaf, path)
        components.append(ArraySpec(array.shape, array.dtype, _text_of(array, leaf, path, text)))
    return ElementSpec(structure, tuple(components))


def _text_of(array: npt.NDArray[Any], leaf: object, path: str, given: Text | None) -> Text | None:
    if array.dtype != OBJECT:
        return None
    if array.size:
        return "str" if isinstance(array.flat[0], str) else "bytes"
    text = TEXT_KINDS.get(getattr(getattr(leaf, "dtype", None), "kind", "")) or given
    if text is None:
        raise SpecMismatchError(
            f"{named(path)}: the object array of the first sample is empty, so its type, str or "
            "bytes, is unknown. Return an array of dtype 'U1' or 'S1', or pass element_spec."
        )
    return text


def mismatch(
    path: str,
    index: int | None,
    expected: ArraySpec,
    actual_shape: tuple[int, ...],
    actual_dtype: np.dtype[Any],
    origin: Origin,
    cure: str = "an element_spec with None there",
) -> SpecMismatchError:
    """Return the error for a component that differs from its spec, with the option that allows it.

    `expected` has a batch axis if `actual_shape` has one. `cure` is code for an element_spec that
    allows the component.
    """
    is_text = actual_dtype == OBJECT
    # "string" on both sides. The actual values may be str, bytes or both, and either is accepted.
    wanted = (
        f"string[{', '.join(map(str, expected.shape))}]"
        if expected.text is not None
        else str(expected)
    )
    actual = f"{'string' if is_text else actual_dtype.name}[{', '.join(map(str, actual_shape))}]"
    reasons = ""
    if is_text != (expected.text is not None):
        reasons += ". Strings and numbers cannot be mixed: return the same kind for every item"
    elif not is_text and actual_dtype != expected.dtype:
        name, target = actual_dtype.name, expected.dtype.name
        reasons += (
            f". loaderpool does not cast {name} to {target} implicitly. "
            f"Return x.astype({target!r}), or pass "
        )
        reasons += f"element_spec with {name}"
    if len(actual_shape) != len(expected.shape):
        reasons += (
            f". The number of axes must always be {len(expected.shape)}: reshape in the function"
        )
    else:
        pairs = zip(expected.shape, actual_shape, strict=True)
        varied = [
            axis for axis, (size, got) in enumerate(pairs) if size is not None and size != got
        ]
        if origin == "length":  # shorter components are padded
            varied = [axis for axis in varied if actual_shape[axis] > (expected.shape[axis] or 0)]
        if origin == "rows" and _are_channels(expected.shape, actual_shape, varied):
            reasons += (
                f". Images have {expected.shape[-1]} and {actual_shape[-1]} channels, "
                "but all images of a batch "
            )
            reasons += (
                "must have the same. Convert them in the function, "
                'with image.convert("RGB") for example'
            )
        elif varied:
            text = _ADVICE["spec" if origin == "ragged" and varied == [0] else origin]
            axes = f"{'axis' if len(varied) == 1 else 'axes'} {' and '.join(map(str, varied))}"
            may_be_ragged = varied == [0]
            ragged_line = "\n    ragged=True: keep the length of each sample" * may_be_ragged
            ragged = " or ragged=True" * may_be_ragged
            reasons += (
                f". {text.format(axes=axes, ragged_line=ragged_line, ragged=ragged, cure=cure)}"
            )
    source = "" if index is None else f" of {item_name(index)}"
    return SpecMismatchError(f"{named(path)}{source}: expected {wanted}, got {actual}{reasons}")


def _are_channels(
    expected: tuple[int | None, ...], actual: tuple[int, ...], varied: list[int]
) -> bool:
    """Return True if samples are images that differ only in their channels, the last axis."""
    are_images = len(actual) == 3 and varied == [2]
    return are_images and {expected[2], actual[2]} <= {1, 2, 3, 4} and min(actual[:2]) > 4


# ---- padding ----

# Like `padding_values` of tf.data's `padded_batch`, `pad=` is one value, or the structure of the
# sample with a value for each component. False, which tf.data does not have, means that a component
# is not padded.


def check_padding(pad: object, name: str = "pad") -> object:
    """Return the checked `pad` argument."""
    if isinstance(pad, (tuple, dict)):
        for key, value in pad.items() if isinstance(pad, dict) else enumerate(pad):
            check_padding(value, f"{name}[{brief(key)}]")
        return pad
    is_default = isinstance(pad, bool) or (pad is None and name != "pad")
    is_value = isinstance(pad, (numbers.Number, str, bytes)) or hasattr(pad, "dtype")
    if not is_default and (not is_value or getattr(pad, "ndim", 0) > 0):
        raise ArgumentError(
            f"{name} must be False, True (zeros), a pad value, or a tuple or dict of these in the "
            f"structure of a sample, got {brief(pad)}"
        )
    return pad


def padding_of(pad: object, structure: Structure, name: str = "pad") -> list[Any]:
    """Return the padding of each component: a value, None for the default, False for no padding.

    A value in the place of a whole tuple or dict applies to all components in it.
    """
    if not isinstance(pad, (tuple, dict)):
        return [None if pad is None or pad is True else pad] * structure.num_leaves
    shown = "one component" if structure.kind == "leaf" else shortened(str(structure))
    returned = f"but the function returns {shown}"
    is_dict = isinstance(pad, dict)
    if is_dict != (structure.kind == "dict") or structure.kind == "leaf":
        raise SpecMismatchError(
            f"{name} is {shortened(sketch(pad))}, {returned} there: give one value, or one for "
            "each component"
        )
    keys: Iterable[Any] = structure.keys if is_dict else range(len(structure.children))
    given: Iterable[Any] = pad if is_dict else range(len(pad))
    for key in keys:
        if key not in given:
            raise SpecMismatchError(
                f"{name} has no value for component [{brief(key)}]: give a pad value, None for the "
                "default (0, or an empty string), or False for no padding"
            )
    for key in given:
        if key not in keys:
            raise SpecMismatchError(f"{name} has [{brief(key)}], {returned}")
    parts = zip(keys, structure.children, strict=True)
    return [
        value
        for key, child in parts
        for value in padding_of(pad[key], child, f"{name}[{brief(key)}]")
    ]


def fill_value(pad: object, component: ArraySpec, path: str) -> object:
    """Return the pad value (None: the default) in the component's dtype, or as str or bytes.

    Raises:
        SpecMismatchError: the value does not fit the dtype.
    """
    if component.text is not None:
        text = "" if pad is None else pad
        if isinstance(text, str):
            return text if component.text == "str" else text.encode("utf-8", "surrogateescape")
        if isinstance(text, bytes):
            return text if component.text == "bytes" else text.decode("utf-8", "surrogateescape")
    elif not isinstance(pad, (str, bytes)) and (
        np.isrealobj(np.asarray(pad)) or component.dtype.kind == "c"
    ):
        value = np.asarray(0 if pad is None else pad)
        # Values such as 0.1 have no exact float32.
        may_round = value.dtype.kind in "fc" and can_write(value.dtype, component.dtype)
        try:
            # No warning is needed for NaN cast to an int: the comparison below refuses it.
            with np.errstate(over="ignore", invalid="ignore"):
                cast = value.astype(component.dtype)
            if (
                cast == value
                or (value != value and cast != cast)
                or (may_round and np.isfinite(cast))
            ):
                return cast
        except (TypeError, ValueError, OverflowError):
            pass
    dtype, what, advice = component.dtype, f"type {component.text}", "Pass a string"
    if component.text is None:
        what, advice = f"dtype {dtype}", "Pass a number"
        if dtype.kind in "iu":
            what += f" ({np.iinfo(dtype).min} to {np.iinfo(dtype).max})"
        own = np.min_scalar_type(np.asarray(pad))
        if own.kind in "biufc" and dtype.kind in "biufc":
            advice = f"Return x.astype({np.result_type(own, dtype).name!r})"
    if path:
        advice = "Give each component its own value, such as pad={'x': 0, 'y': -1}"
    raise SpecMismatchError(
        f"{named(path)}: the pad value {brief(pad)} does not fit its {what}. {advice}"
    )
