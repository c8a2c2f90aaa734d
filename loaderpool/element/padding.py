"""What rows of varied shape are filled up with: `pad=` as the user gives it, and the value for each component.

As `padding_values` of tf.data's `padded_batch`, it is one value or the structure of the sample with a value for each
component, and the default is 0 for numbers, an empty text for text. False, which tf.data does not have, says that a
component is not padded.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from loaderpool.element.describe import named, sketch_value
from loaderpool.element.dtypes import can_write
from loaderpool.element.spec import ArraySpec
from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SpecMismatchError


def check_padding(pad: Any, name: str = "pad") -> Any:
    """Return the checked `pad` argument.

    Raises:
        ArgumentTypeError: neither a bool nor a value, nor a tuple or dict of them.
        ArgumentError: an empty tuple or dict.
    """
    if isinstance(pad, (tuple, dict)):
        if not pad:
            raise ArgumentError(f"{name} is an empty {type(pad).__name__}: give a value for each component of a sample")
        for step, value in _parts(pad):
            check_padding(value, name + step)
        return pad
    is_default = isinstance(pad, bool) or (pad is None and name != "pad")
    is_value = isinstance(pad, (numbers.Number, str, bytes)) or hasattr(pad, "dtype")
    if not is_default and (not is_value or np.ndim(pad)):
        hint = " (a list is never structure: write a tuple)" if isinstance(pad, list) else ""
        raise ArgumentTypeError(
            f"{name} must be False, True (zeros), a pad value, or the sample's structure of these, got {pad!r}{hint}"
        )
    return pad


def padding_of(pad: Any, structure: Structure) -> list[Any]:
    """Return what each component of a sample is filled up with: a value, None for the default, False for nothing.

    A value in the place of a whole tuple or dict holds for all in it.

    Raises:
        SpecMismatchError: `pad` is built otherwise than the sample.
    """
    return list(_walk(pad, structure, "pad"))


def _walk(pad: Any, structure: Structure, name: str) -> Iterator[Any]:
    if not isinstance(pad, (tuple, dict)):
        default = pad is None or pad is True
        yield from [None if default else pad] * structure.num_leaves
        return
    keys: Sequence[Any] = structure.keys if structure.kind == "dict" else range(len(structure.children))
    if isinstance(pad, dict) != (structure.kind == "dict") or structure.kind == "leaf":
        raise SpecMismatchError(
            f"{name} is {sketch_value(pad)}, but the function returns {structure} there: give one value, or one for "
            "each component"
        )
    given = list(pad) if isinstance(pad, dict) else range(len(pad))
    missing = [key for key in keys if key not in given]
    unknown = [key for key in given if key not in keys]
    if missing:
        raise SpecMismatchError(
            f"{name} has nothing for component [{missing[0]!r}]: give a pad value, None for the default (0, or an "
            "empty text), or False where it is not to be padded"
        )
    if unknown:
        raise SpecMismatchError(f"{name} has [{unknown[0]!r}], but the function returns {structure}")
    for key, child in zip(keys, structure.children, strict=True):
        yield from _walk(pad[key], child, f"{name}[{key!r}]")


def fill_value(pad: Any, component: ArraySpec, path: str) -> Any:
    """Return the pad value in the component's dtype; of text a str or bytes.

    Args:
        pad: a value, or None for the default.
        component: what it goes into.
        path: the component's path, for errors.

    Raises:
        SpecMismatchError: the dtype cannot hold it.
    """
    if component.text is not None:
        text = "" if pad is None else pad
        if isinstance(text, str):
            return text if component.text == "str" else text.encode("utf-8", "surrogateescape")
        if isinstance(text, bytes):
            return text if component.text == "bytes" else text.decode("utf-8", "surrogateescape")
    elif not isinstance(pad, (str, bytes)) and (np.isrealobj(pad) or component.dtype.kind == "c"):
        value = np.asarray(0 if pad is None else pad)
        may_round = value.dtype.kind in "fc" and can_write(value.dtype, component.dtype)  # 0.1 has no float32
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # NaN into an int is caught by the comparison
                cast = value.astype(component.dtype)
            if cast == value or (value != value and cast != cast) or (may_round and np.isfinite(cast)):
                return cast
        except (TypeError, ValueError, OverflowError):
            pass
    what = f"{component.text} text" if component.text is not None else f"dtype {component.dtype}"
    raise SpecMismatchError(
        f"{named(path)}: the pad value {pad!r} does not fit its {what}; give each component its own, as the sample is "
        "built: pad={'x': 0, 'y': -1}"
    )


def _parts(pad: Any) -> Iterator[tuple[str, Any]]:
    pairs = pad.items() if isinstance(pad, dict) else enumerate(pad)
    for key, value in pairs:
        yield f"[{key!r}]", value
