"""`Loader.as_jax`: `jax.Array`s, which on the CPU share the workers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import jax
except ImportError as missing:
    raise ImportError("as_jax needs JAX: pip install jax") from missing

from loaderpool.adapters.conversion import (
    Convert,
    ConvertedBatches,
    HostConversion,
    dtype_refusal,
    is_ml_dtype,
)
from loaderpool.adapters.shards import check_rows
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief
from loaderpool.trainer.loader_core import LoaderCore


def as_jax(
    core: LoaderCore, sharding: jax.sharding.Sharding | jax.Device | None, prefetch: int
) -> ConvertedBatches:
    is_host, shards = _is_host(sharding), core.config.shard.num_shards
    # True: an array consists of rows of several processes.
    is_global = not getattr(sharding, "is_fully_addressable", True)
    if shards > 1 and is_global:
        check_rows(core, shards, "processes", of_process=1)

    def put(arrays: Sequence[Any]) -> Sequence[Any]:
        if is_global:  # each process passes its own rows of the batch
            return [jax.make_array_from_process_local_data(sharding, each) for each in arrays]
        # On the CPU, JAX shares aligned memory instead of copying it, and holds it until the array
        # is freed.
        return jax.device_put(list(arrays), sharding)  # type: ignore[no-any-return]

    return ConvertedBatches(
        core, lambda: JaxConversion("as_jax", "JAX", put), prefetch, not is_host
    )


class JaxConversion(HostConversion):
    """Does not change arrays, and refuses dtypes that JAX lacks."""

    def convert_of(self, path: str, component: ArraySpec) -> Convert:
        convert = super().convert_of(path, component)
        if is_ml_dtype(component.dtype):
            try:
                jax.device_put(np.zeros(1, component.dtype))
            except (TypeError, RuntimeError):
                raise dtype_refusal(self._view, path, component.dtype, "JAX") from None
        return convert


def _is_host(sharding: jax.sharding.Sharding | jax.Device | None) -> bool:
    """Return True if arrays stay in host memory, so that prefetching to a device is pointless."""
    if sharding is None:
        return bool(jax.default_backend() == "cpu")
    if not isinstance(sharding, (jax.Device, jax.sharding.Sharding)):
        raise ArgumentError(
            f"sharding must be a jax.sharding.Sharding or a jax.Device, got {brief(sharding)}"
        )
    return all(device.platform == "cpu" for device in getattr(sharding, "device_set", [sharding]))
