"""What the values of a result's leaves are like, in a few words: for people who look at one sample."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class LeafSummary:
    """One leaf's values; each text is empty where there is nothing to say."""

    minimum: str
    maximum: str
    remark: str  # NaNs and infinities, a text's beginning, emptiness


def summarise_leaf(array: npt.NDArray[Any]) -> LeafSummary:
    """The smallest and largest number, NaN left out; of text the first piece."""
    if not array.size:
        return LeafSummary("", "", "empty")
    if array.dtype.kind in "OSU":
        return LeafSummary("", "", _text(array))
    if array.dtype.kind == "c":
        return LeafSummary("", "", "complex")
    remarks = []
    values = array.ravel()
    if array.dtype.kind not in "biu":  # float16 to float64, and those of ml_dtypes
        is_nan = np.isnan(values)
        is_infinite = np.isinf(values)
        remarks = [f"{np.count_nonzero(mask):,} {word}" for mask, word in ((is_nan, "NaN"), (is_infinite, "inf"))
                   if mask.any()]  # fmt: skip
        values = values[~is_nan]
    if not values.size:
        return LeafSummary("", "", ", ".join(remarks))
    if values.size > 1 and bool((values == values[0]).all()):
        remarks.append("all equal")
    return LeafSummary(_number(values.min()), _number(values.max()), ", ".join(remarks))


def _number(value: Any) -> str:
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return str(value)
    return f"{float(value):.6g}"


def _text(array: npt.NDArray[Any]) -> str:
    first = reprlib.repr(array.flat[0])
    return first if array.size == 1 else f"{first}, ... {array.size - 1} more"
