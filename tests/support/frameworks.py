"""One interface to TensorFlow, PyTorch and JAX for tests of a loader's views."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.element.spec import RaggedArray
from tests.support import tensorflow_runtime


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework, which is imported at its first use."""

    name: str
    load: Callable[[], Any]
    method: str  # method of a loader
    to_numpy: Callable[[Any], Any]
    address: Callable[[Any], int]
    types: Callable[[], type]

    def view(self, loader: lp.Loader, **arguments: Any) -> Any:
        """Return the loader's batches as tensors."""
        self.load()
        return getattr(loader, self.method)(**arguments)

    def arrays(self, batch: Any) -> Any:
        """Return the batch with a NumPy array in place of each tensor."""
        if isinstance(batch, dict):
            return {key: self.arrays(part) for key, part in batch.items()}
        if isinstance(batch, tuple):
            parts = [self.arrays(part) for part in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
        assert isinstance(batch, self.types()), type(batch)
        return self.to_numpy(batch)


def _torch() -> Any:
    import torch

    return torch


def _jax() -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    return jax


def _of_tensorflow(tensor: Any) -> Any:
    tf = tensorflow_runtime.load()
    if isinstance(tensor, tf.RaggedTensor):
        return RaggedArray(tensor.values.numpy(), tensor.row_splits.numpy())
    return np.asarray(tensor)


def _of_torch(tensor: Any) -> Any:
    if tensor.is_nested:
        return RaggedArray(tensor.values().numpy(), tensor.offsets().numpy())
    if tensor.dtype == _torch().bfloat16:
        import ml_dtypes

        return tensor.view(_torch().int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


FRAMEWORKS = {
    each.name: each
    for each in (
        Framework(
            "tensorflow", tensorflow_runtime.load, "tensors", _of_tensorflow, tensorflow_runtime.address_of,
            lambda: tensorflow_runtime.load().__internal__.types.Tensor | tensorflow_runtime.load().RaggedTensor,
        ),
        Framework("torch", _torch, "as_torch", _of_torch, lambda tensor: tensor.data_ptr(), lambda: _torch().Tensor),
        Framework(
            "jax", _jax, "as_jax", np.asarray, lambda array: array.unsafe_buffer_pointer(), lambda: _jax().Array
        ),
    )
}  # fmt: skip
