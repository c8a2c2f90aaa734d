"""`Loader.as_torch`: PyTorch tensors that look at the workers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loaderpool.adapters.conversion import (
    TEXT_CURE,
    Convert,
    ConvertedBatches,
    Move,
    TensorConversion,
    dtype_refusal,
    is_ml_dtype,
)
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief, shortened
from loaderpool.trainer.loader_core import LoaderCore

# By a name's beginning: NumPy hands these to no other library. Of other small dtypes PyTorch has no arrays of numbers.
_SAME_BITS = {"float8": np.uint8, "bfloat": np.int16}


def as_torch(core: LoaderCore, device: Any, prefetch: Any) -> TorchBatches:
    try:
        place = None if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (
        AssertionError,
        RuntimeError,
        TypeError,
    ) as error:  # not compiled with CUDA; no GPU; no name of a device
        raise ArgumentError(
            f'device must be a device that PyTorch has here, such as "cpu", got {brief(device)}: '
            f"{shortened(str(error))}"
        ) from None
    is_far = place is not None and place.type != "cpu"

    def move(tensors: Sequence[Any]) -> Sequence[Any]:
        # `to` has read a slot when it returns: only from page-locked memory would a copy go on reading.
        return [
            each.to(place, non_blocking=True) if torch.is_tensor(each) else each for each in tensors
        ]

    return TorchBatches(
        core, lambda: TorchConversion("as_torch", move if is_far else None, True), prefetch, is_far
    )


class TorchBatches(ConvertedBatches, torch.utils.data.IterableDataset):  # type: ignore[misc]
    """A loader's batches as an `IterableDataset` of PyTorch."""


class TorchConversion(TensorConversion):
    """Makes tensors that share the arrays' memory; text, of which PyTorch has none, is refused unless it is kept."""

    def __init__(self, view: str, move: Move | None = None, keeps_text: bool = False) -> None:
        super().__init__(view, move)
        self._keeps_text = keeps_text

    def convert_of(self, path: str, component: ArraySpec) -> Convert:
        if component.text is not None:
            if self._keeps_text:
                return lambda text: text
            raise self.refuse(
                path, f"text ({component.text}), and PyTorch has no string tensors", TEXT_CURE
            )
        convert: Convert = torch.from_numpy
        if is_ml_dtype(component.dtype):
            name = component.dtype.name
            bits, dtype = _SAME_BITS.get(name[:6]), getattr(torch, name, None)
            if bits is None or dtype is None:
                raise dtype_refusal(self._view, path, component.dtype, "PyTorch")
            convert = lambda part: torch.from_numpy(part.view(bits)).view(dtype)  # noqa: E731
        if component.ragged:
            join = torch.nested.nested_tensor_from_jagged
            return lambda part: join(convert(part.values), torch.from_numpy(part.row_splits))
        return convert

    def can_take_apart(self, component: ArraySpec) -> bool:
        return True

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        return convert(array).unbind(0)  # type: ignore[no-any-return]
