"""`Loader.as_jax`: `jax.Array`s, which on the CPU look at the workers' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import jax
except ImportError as missing:
    raise ImportError("as_jax needs JAX, which is not installed: pip install jax") from missing

from loaderpool.adapters.conversion import BatchView, HostConversion
from loaderpool.adapters.shards import check_rows
from loaderpool.errors import ArgumentError, brief
from loaderpool.trainer.loader_core import LoaderCore


def as_jax(core: LoaderCore, sharding: Any, ahead: Any) -> BatchView:
    is_host, shards = _is_host(sharding), core.config.shard.num_shards
    if shards > 1 and _is_global(sharding):
        check_rows(core, shards, "processes", of_process=1)
    return BatchView(core, lambda: JaxConversion(sharding), ahead, not is_host)


class JaxConversion(HostConversion):
    """Makes arrays by `jax.device_put`, all components of a batch in one call.

    On the CPU JAX looks at aligned memory instead of copying it, and holds it until the array dies.
    """

    def __init__(self, sharding: Any = None) -> None:
        super().__init__("as_jax", "JAX", moves=True)
        self._sharding = sharding
        self._is_global = _is_global(sharding)

    def move(self, tensors: Sequence[Any]) -> Sequence[Any]:
        if self._is_global:  # each process has its own rows of the batch
            return [jax.make_array_from_process_local_data(self._sharding, each) for each in tensors]
        return jax.device_put(list(tensors), self._sharding)  # type: ignore[no-any-return]


def _is_global(sharding: Any) -> bool:
    """Whether an array has rows of several processes."""
    return not getattr(sharding, "is_fully_addressable", True)


def _is_host(sharding: Any) -> bool:
    """Whether arrays stay in this machine's memory, so that there is nothing to copy ahead."""
    if sharding is None:
        return bool(jax.default_backend() == "cpu")
    if isinstance(sharding, jax.Device):
        return bool(sharding.platform == "cpu")
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ArgumentError(
            f"sharding must be a jax.sharding.Sharding or a jax.Device, got {brief(sharding)} of type "
            f"{type(sharding).__name__}"
        )
    return all(device.platform == "cpu" for device in sharding.device_set)
