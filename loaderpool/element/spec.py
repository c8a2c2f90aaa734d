"""What an element is made of: the specs of its arrays, and what to say of an array that does not fit its spec."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.element.describe import is_namedtuple, named, sketch_parts
from loaderpool.element.dtypes import OBJECT, TEXT_KINDS, Text, can_write, read_dtype
from loaderpool.element.leaf import convert_leaf
from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SpecMismatchError
from loaderpool.plan.generator_positions import item_name

# Where an expected shape comes from, which decides what the user can do about another one: the first sample; the first
# few samples ("seen"), for a component that is padded, or that `pad` says False for ("unpadded"); the user's
# element_spec, as it is or as a length to pad to; the other rows of the batch, or of a ragged component; or it is that
# of a whole batch (or element), which one call makes and nothing is stacked with.
Origin = Literal["first", "seen", "unpadded", "given", "length", "rows", "ragged", "whole"]


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
        numpy_dtype, text_of_dtype = read_dtype(dtype)
        if text is None:
            text = text_of_dtype
        elif text not in ("str", "bytes"):
            raise ArgumentError(f'text must be "str", "bytes" or None, got {text!r}')
        elif numpy_dtype != OBJECT:
            raise ArgumentError(f"text={text!r} goes with dtype object, not {numpy_dtype}")
        if numpy_dtype == OBJECT and text is None:
            raise ArgumentError('dtype object needs text="str" or text="bytes": no other objects can be batched')
        if not isinstance(ragged, bool):
            raise ArgumentTypeError(f"ragged must be True or False, got {ragged!r}")
        if ragged and None not in sizes[1:]:
            raise ArgumentError(f"a ragged component has the shape (batch, None, ...), not {sizes}")
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
        """Return the components in the nested structure of an element."""
        return self.structure.unflatten(self.components)

    def __repr__(self) -> str:
        return f"ElementSpec({self.pack()!r})"


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


def as_code(spec: ElementSpec) -> str:
    """Return the spec as Python that a user can give for `element_spec`, with loaderpool as `lp`."""
    return _code_of(spec.pack())


def widening_code(spec: ElementSpec, component: int, shape: tuple[int | None, ...]) -> str:
    """Return Python of an `element_spec` that allows what came as well, as `as_code` gives it.

    Args:
        spec: that it does not fit, of a batch.
        component: which component came otherwise.
        shape: of that, with the batch axis and as many axes as the spec has.
    """
    components = list(spec.components)
    own = components[component]
    open_axes = (size if size == got else None for size, got in zip(own.shape, shape, strict=True))
    components[component] = ArraySpec(open_axes, own.dtype, own.text)
    return as_code(ElementSpec(spec.structure, tuple(components)))


def _code_of(value: Any) -> str:
    if isinstance(value, ArraySpec):
        return f"lp.ArraySpec({value.shape}, {value.text or value.dtype.name!r})"
    if isinstance(value, dict):
        return sketch_parts("dict", dict, tuple(value), map(_code_of, value.values()), "")
    return sketch_parts("namedtuple" if is_namedtuple(value) else "tuple", type(value), (), map(_code_of, value), "")


def sample_spec(sample: Any, given: ElementSpec | None = None, origin: str = "fn returned") -> ElementSpec:
    """Return the spec of exactly this sample: no batch axis, all axes known.

    Args:
        sample: what the function returned.
        given: the user's spec; says of an object array without elements whether it is str or bytes.
        origin: begins the messages: who made the sample.

    Raises:
        SpecMismatchError: no batch can be made of it; names the component.
    """
    structure = Structure.of(sample, origin=origin)
    components = []
    hints: tuple[ArraySpec | None, ...] = (None,) * structure.num_leaves
    if given is not None and given.structure == structure:
        hints = given.components
    for leaf, path, hint in zip(structure.flatten(sample), structure.paths, hints, strict=True):
        array = convert_leaf(leaf, path)
        components.append(ArraySpec(array.shape, array.dtype, _text_of(array, leaf, path, hint.text if hint else None)))
    return ElementSpec(structure, tuple(components))


def widened(spec: ElementSpec, other: ElementSpec) -> ElementSpec:
    """`spec` with None for each axis in which `other` has another length.

    A component with another number of axes stays as it is, and all of them where the structure is another one: whose
    turn it is to become a row is refused there, where its index can be named.
    """
    if spec.structure != other.structure:
        return spec
    components = []
    for mine, its in zip(spec.components, other.components, strict=True):
        if len(mine.shape) == len(its.shape) and mine.shape != its.shape:
            shape = (size if size == got else None for size, got in zip(mine.shape, its.shape, strict=True))
            mine = ArraySpec(shape, mine.dtype, mine.text)
        components.append(mine)
    return ElementSpec(spec.structure, tuple(components))


def _text_of(array: npt.NDArray[Any], leaf: Any, path: str, given: Text | None) -> Text | None:
    if array.dtype != OBJECT:
        return None
    if array.size:
        return "str" if isinstance(array.flat[0], str) else "bytes"
    text = TEXT_KINDS.get(getattr(getattr(leaf, "dtype", None), "kind", "")) or given
    if text is None:
        raise SpecMismatchError(
            f"{named(path)}: the first sample's object array is empty, so whether it is str or bytes is unknown; "
            "say it with element_spec=, or return an array of dtype 'U1' or 'S1'"
        )
    return text


def mismatch(
    path: str,
    index: int | None,
    expected: ArraySpec,
    actual_shape: tuple[int, ...],
    actual_dtype: np.dtype[Any],
    origin: Origin,
    cure: str = "",
) -> SpecMismatchError:
    """Return the error for a component that came otherwise than its spec says, with the option that allows it.

    Args:
        path: the component's path.
        index: source index of the item, None where it has none.
        expected: what the spec says, batch axis as `actual_shape` has it.
        actual_shape: what came.
        actual_dtype: what came; object for text.
        origin: where the expected shape comes from: an option that is set already is no advice.
        cure: Python of an `element_spec` that would allow it, where there is one.
    """
    is_text = actual_dtype == OBJECT
    # "text" on both sides: what came may be str or bytes or some of each, and either is taken.
    wanted = f"text[{', '.join(map(str, expected.shape))}]" if expected.text is not None else str(expected)
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
        advice.append(_advice_on_axes(len(expected.shape), origin))
    else:
        pairs = zip(expected.shape, actual_shape, strict=True)
        varied = [axis for axis, (size, got) in enumerate(pairs) if size is not None and size != got]
        if origin == "length":  # what is shorter is filled up
            varied = [axis for axis in varied if actual_shape[axis] > (expected.shape[axis] or 0)]
        if varied:
            advice.append(_advice_on_sizes(varied, origin, cure))
    source = "" if index is None else f" of {item_name(index)}"
    text = "; ".join(advice)
    return SpecMismatchError(f"{named(path)}{source}: expected {wanted}, got {actual}{': ' * bool(text)}{text}")


def _advice_on_axes(count: int, origin: Origin) -> str:
    must = f"the number of axes must not vary: reshape in the function, so that all have {count}"
    return f"{must}, or correct element_spec=" if origin in ("given", "length") else must


def _advice_on_sizes(varied: list[int], origin: Origin, cure: str) -> str:
    ragged = ", ragged=True keeps each row's own length" * (varied == [0])
    axes = f"{'axis' if len(varied) == 1 else 'axes'} {' and '.join(map(str, varied))}"
    here, of_a_sample = f"here {axes}", f"{axes} of a sample"
    if origin == "whole":
        return f"element_spec= says with None which axes vary ({here}){cure and f', as element_spec={cure}'}"
    if origin == "seen" or (origin == "ragged" and varied == [0]):
        return (
            f"the first samples, which tell which axes vary, are alike in {of_a_sample}: say that it varies, by "
            f"element_spec={cure}"
        )
    if origin == "unpadded":
        return f"pad= has False for this component, so its samples must be alike in {of_a_sample}: give it a pad value"
    if origin == "length":
        return (
            f"a batch is padded to that length ({of_a_sample}), as element_spec= has a number there: give a larger "
            "one, or give None to pad to a batch's largest"
        )
    if origin == "ragged":
        return (
            "of a ragged component only the first axis of a sample may vary: bring the others to one size in the "
            f"function ({here}), or use pad=True instead of ragged=True, which pads all axes"
        )
    if origin == "given":
        return (
            f"element_spec= has a fixed length there (here {of_a_sample}): give None for it, and pad=True to pad to a "
            f"batch's largest{ragged}"
        )
    if origin == "rows":
        return (
            f"rows of one batch differ, which element_spec= alone does not allow: pad=True pads to a batch's largest"
            f"{ragged}, batch_size=None hands each element on as it is"
        )
    return (
        f"samples of varied shape: pad=True pads to a batch's largest{ragged} (beside it element_spec= may say with "
        f"None which axes vary, here {of_a_sample}), batch_size=None hands each element on as it is"
    )
