"""Reads the spec that the user gives as `element_spec`."""

from __future__ import annotations

from typing import Any

from loaderpool.element.spec import ArraySpec, ElementSpec
from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SpecMismatchError


def read_spec(given: Any) -> ElementSpec:
    """Return the spec that a user's `element_spec` says; as a Dataset's, it describes a batch, batch axis included.

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
