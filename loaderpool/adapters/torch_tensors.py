"""`Loader.as_torch`: PyTorch tensors that share the workers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError as missing:
    raise ImportError("as_torch needs PyTorch: pip install torch") from missing

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

# Dtypes to view arrays as, by the first six letters of the name. NumPy exports these arrays to no
# other library. Of the other small dtypes PyTorch has no numeric tensors.
_SAME_BITS = {"float8": np.uint8, "bfloat": np.int16}


def as_torch(core: LoaderCore, device: torch.device | str | None, prefetch: int) -> TorchBatches:
    try:
        place = None if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError, TypeError) as error:
        # PyTorch without CUDA, no GPU, or not a device's name.
        raise ArgumentError(
            f'device must be a device that PyTorch has here, such as "cpu", got {brief(device)}: '
            f"{shortened(str(error))}"
        ) from None
    is_far = place is not None and place.type != "cpu"

    def move(tensors: Sequence[Any]) -> Sequence[Any]:
        # `to` has read the slot when it returns. A copy would only continue later from page-locked
        # memory, which a slot is not.
        return [
            each.to(place, non_blocking=True) if torch.is_tensor(each) else each for each in tensors
        ]

    return TorchBatches(
        core, lambda: TorchConversion("as_torch", move if is_far else None, True), prefetch, is_far
    )


class TorchBatches(ConvertedBatches, torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Iterable over a loader's batches that is an `IterableDataset` of PyTorch."""

    @property
    def dataset(self) -> NoReturn:
        """Raise an error with the fix. Accelerate reads this attribute when it skips batches."""
        raise AttributeError(
            "as_torch() returns batches, which have no dataset from which to skip some. To resume "
            "a training, save loader.state_dict(), and call loader.load_state_dict(state). With "
            "transformers, also write TrainingArguments(ignore_data_skip=True)"
        )


class TorchConversion(TensorConversion):
    """Converts arrays to tensors that share their memory.

    PyTorch has no text tensors. With `keeps_text` text stays an array; otherwise it is refused.
    """

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
