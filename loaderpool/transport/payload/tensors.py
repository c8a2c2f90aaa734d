"""How tensors of torch and JAX travel: their bytes go beside the pickle, as those of NumPy arrays do.

In their own way they would be copied into the pickle, torch's once for each tensor that looks at the same memory. Here
both arrive as views of what all workers share: torch's always, JAX's where its CPU backend takes an array as it is.
Runs in: the trainer (`reduce_tensor`), and where a payload is loaded (the others).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = frozenset({"ArrayImpl", "TypedStorage", "UntypedStorage"})
"""Names of the types that are reduced here."""


def reduce_tensor(value: Any) -> Any:
    """Return how a value of a type that is so named is pickled; NotImplemented: in its own way.

    Raises:
        TypeError: it lies in the memory of a device of torch's, where no worker has one.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and type(value) is torch.storage.TypedStorage:
        return typed_storage, (value._untyped_storage, value.dtype)
    if torch is not None and type(value) is torch.UntypedStorage:
        if value.device.type != "cpu":
            raise TypeError(f"a torch tensor on {value.device}, where workers have no device but the CPU; use .cpu()")
        return untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(value).numpy(),)
    if jax is not None and isinstance(value, jax.Array) and value.is_fully_addressable and not value.weak_type:
        array = np.asarray(value)
        # Of dtypes that are not its own NumPy pickles the bytes with the rest.
        return jax_array, (array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}"), array.dtype)
    return NotImplemented


def typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a storage as tensors are rebuilt of it."""
    import torch

    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def untyped_storage(memory: npt.NDArray[np.uint8]) -> Any:
    """Return a storage over this very memory, which it keeps."""
    import torch

    return torch.from_numpy(memory).untyped_storage()


def jax_array(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> Any:
    """Return a JAX array on its default device; JAX begins its threads here, if they do not run yet."""
    import jax

    return jax.device_put(array.view(dtype))
