"""`Loader.as_torch`: PyTorch tensors that look at the workers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError as missing:
    raise ImportError("as_torch needs PyTorch, which is not installed: pip install torch") from missing

from loaderpool.adapters.conversion import (
    TEXT_CURE,
    BatchView,
    Convert,
    TensorConversion,
    as_it_is,
    is_ml_dtype,
    ragged,
)
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief, shortened
from loaderpool.trainer.loader_core import LoaderCore

_SAME_BITS = {"float8": np.uint8, "bfloat": np.int16}  # by a name's beginning: NumPy hands these to no other library


def as_torch(core: LoaderCore, device: Any, ahead: Any) -> TorchBatches:
    try:
        place = None if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ArgumentError(
            f'device must be such as "cuda" or a torch.device, and be there, got {brief(device)}: '
            f"{shortened(str(error))}"
        ) from None
    far = None if place is None or place.type == "cpu" else place
    return TorchBatches(core, lambda: TorchConversion(device=far, keeps_text=True), ahead, far is not None)


class TorchBatches(BatchView, torch.utils.data.IterableDataset):  # type: ignore[misc]
    """A loader's batches as an `IterableDataset` of PyTorch."""


class TorchConversion(TensorConversion):
    """Makes tensors that share the arrays' memory, as `torch.from_numpy` does.

    Args:
        view: the method of a loader that gives such batches, as its errors name it.
        device: where tensors are copied; None: they stay where they are.
        keeps_text: whether text, of which PyTorch has no tensors, stays a NumPy array, or is refused.
    """

    def __init__(self, view: str = "as_torch", device: torch.device | None = None, keeps_text: bool = False) -> None:
        super().__init__(view, moves=device is not None)
        self._device, self._keeps_text = device, keeps_text

    def move(self, tensors: Sequence[Any]) -> Sequence[Any]:
        # `to` has read a slot when it returns: only from page-locked memory would a copy go on reading.
        return [each.to(self._device, non_blocking=True) if torch.is_tensor(each) else each for each in tensors]

    def check(self, path: str, component: ArraySpec) -> None:
        if component.text is not None:
            if self._keeps_text:
                return
            raise self.refuse(path, f"text ({component.text}), of which PyTorch has no tensors", TEXT_CURE)
        if _torch_dtype(component.dtype) is None:
            cure = "Let the function return another dtype, or iterate over the loader itself"
            raise self.refuse(path, f"{component.dtype}, which PyTorch {torch.__version__} does not have", cure)

    def convert_of(self, component: ArraySpec) -> Convert:
        if component.text is not None:
            return as_it_is
        convert: Convert = torch.from_numpy
        if is_ml_dtype(component.dtype):
            bits, dtype = _SAME_BITS[component.dtype.name[:6]], _torch_dtype(component.dtype)
            convert = lambda part: torch.from_numpy(part.view(bits)).view(dtype)  # noqa: E731
        if component.ragged:
            return ragged(convert, torch.nested.nested_tensor_from_jagged, torch.from_numpy)
        return convert

    def can_take_apart(self, component: ArraySpec) -> bool:
        return True

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        return convert(array).unbind(0)  # type: ignore[no-any-return]


def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    """The same dtype there, or None."""
    if is_ml_dtype(dtype):
        return getattr(torch, dtype.name, None) if dtype.name[:6] in _SAME_BITS else None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None
