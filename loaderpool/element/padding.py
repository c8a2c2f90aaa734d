"""What rows of varied shape are filled up with: `pad=` as the user gives it, and the value for each component.

As `padding_values` of tf.data's `padded_batch`, it is one value or the structure of the sample with a value for each
component, and the default is 0 for numbers, an empty text for text. False, which tf.data does not have, says that a
component is not padded.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

from loaderpool.element.leaf import can_write
from loaderpool.element.spec import ArraySpec
from loaderpool.element.structure import Structure, named, sketch
from loaderpool.errors import ArgumentError, SpecMismatchError, brief, shortened


def check_padding(pad: Any, name: str = "pad") -> Any:
    """Return the checked `pad` argument."""
    if isinstance(pad, (tuple, dict)):
        if not pad:
            raise ArgumentError(f"{name} is an empty {type(pad).__name__}: give a value for each component of a sample")
        for key, value in pad.items() if isinstance(pad, dict) else enumerate(pad):
            check_padding(value, f"{name}[{brief(key)}]")
        return pad
    is_default = isinstance(pad, bool) or (pad is None and name != "pad")
    is_value = isinstance(pad, (numbers.Number, str, bytes)) or hasattr(pad, "dtype")
    if not is_default and (not is_value or np.ndim(pad)):
        hint = " (a list is never structure: write a tuple)" if isinstance(pad, list) else ""
        raise ArgumentError(
            f"{name} must be False, True (zeros), a pad value, or the sample's structure of these, got "
            f"{brief(pad)}{hint}"
        )
    return pad


def padding_of(pad: Any, structure: Structure, name: str = "pad") -> list[Any]:
    """Return what each component of a sample is filled up with: a value, None for the default, False for nothing.

    A value in the place of a whole tuple or dict holds for all in it.
    """
    if not isinstance(pad, (tuple, dict)):
        return [None if pad is None or pad is True else pad] * structure.num_leaves
    returned = f"but the function returns {shortened(str(structure))}"
    is_dict = isinstance(pad, dict)
    if is_dict != (structure.kind == "dict") or structure.kind == "leaf":
        raise SpecMismatchError(
            f"{name} is {shortened(sketch(pad))}, {returned} there: give one value, or one for each component"
        )
    keys: Iterable[Any] = structure.keys if is_dict else range(len(structure.children))
    given: Iterable[Any] = pad if is_dict else range(len(pad))
    for key in keys:
        if key not in given:
            raise SpecMismatchError(
                f"{name} has nothing for component [{brief(key)}]: give a pad value, None for the default (0, or an "
                "empty text), or False where it is not to be padded"
            )
    for key in given:
        if key not in keys:
            raise SpecMismatchError(f"{name} has [{brief(key)}], {returned}")
    parts = zip(keys, structure.children, strict=True)
    return [value for key, child in parts for value in padding_of(pad[key], child, f"{name}[{brief(key)}]")]


def fill_value(pad: Any, component: ArraySpec, path: str) -> Any:
    """Return the pad value (None: the default) in the component's dtype; of text a str or bytes."""
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
        f"{named(path)}: the pad value {brief(pad)} does not fit its {what}; give each component its own, as the "
        "sample is built: pad={'x': 0, 'y': -1}"
    )
