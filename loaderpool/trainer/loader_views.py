"""`LoaderViews`: a loader's batches for other frameworks; each method forwards to its adapter when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.settings.checks import known_names_only
from loaderpool.trainer.loader_core import LoaderCore

if TYPE_CHECKING:
    import tensorflow as tf


class View(Protocol):
    """Gives a loader's batches in another form, an epoch each time it is iterated.

    Its iterators are passes over the loader, and have `state_dict()`, `position`, `epoch` and `close()` as the loader's
    own have. Its length is the loader's.
    """

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...


class LoaderViews:
    """What a loader's batches can be looked at as, beside NumPy arrays."""

    _core: LoaderCore

    @known_names_only
    def as_dataset(
        self,
        epochs: int | None = 1,
        prefetch: int = 2,
        device: str | None = None,
    ) -> tf.data.Dataset:
        """A `tf.data.Dataset` of the batches, without a copy.

        Args:
            epochs: in one pass over the dataset; None: it never ends (for `fit(steps_per_epoch=...)`).
            prefetch: batches that tf.data keeps ready, or `tf.data.AUTOTUNE`.
            device: such as "/GPU:0": prefetch there.
        """
        from loaderpool.adapters.tensorflow import as_dataset

        return as_dataset(self._core, epochs=epochs, prefetch=prefetch, device=device)

    @known_names_only
    def as_distributed_dataset(
        self,
        strategy: tf.distribute.Strategy,
        epochs: int | None = 1,
        prefetch: int = 2,
    ) -> tf.distribute.DistributedDataset:
        """A dataset for a strategy; `batch_size` is that of one replica. Several processes need `shard="auto"`.

        Args:
            strategy: such as `MirroredStrategy` or `MultiWorkerMirroredStrategy`.
            epochs: as in `as_dataset`.
            prefetch: as in `as_dataset`.
        """
        from loaderpool.adapters.tensorflow import as_distributed_dataset

        return as_distributed_dataset(self._core, strategy, epochs=epochs, prefetch=prefetch)

    @known_names_only
    def for_keras(self, epochs: int | None = 1, class_weight: Mapping[int, float] | None = None) -> Any:
        """What `fit`, `evaluate` and `predict` of Keras 3 take, on TensorFlow, JAX and torch, without a copy.

        Args:
            epochs: passes over the loader in each of Keras' epochs; None: it never ends (for `steps_per_epoch`).
            class_weight: in place of `fit`'s, for batches `(x, y)`.
        """
        from loaderpool.adapters.keras_fit import LoaderAdapter

        return LoaderAdapter(self._core, epochs, class_weight)

    @known_names_only
    def tensors(self, device: str | None = None, ahead: int = 2) -> View:
        """The batches as eager TensorFlow tensors, without tf.data and without a copy.

        Args:
            device: such as "/GPU:0": copy them there.
            ahead: batches on their way to the device before they are asked for.
        """
        from loaderpool.adapters.eager_tensors import tensors

        return tensors(self._core, device, ahead)

    @known_names_only
    def as_torch(self, device: Any = None, ahead: int = 2) -> View:
        """The batches as PyTorch tensors, without a copy: an `IterableDataset`. Text stays a NumPy array.

        Args:
            device: such as "cuda": copy them there.
            ahead: as in `tensors`.
        """
        from loaderpool.adapters.torch_tensors import as_torch

        return as_torch(self._core, device, ahead)

    @known_names_only
    def as_jax(self, sharding: Any = None, ahead: int = 2) -> View:
        """The batches as `jax.Array`s, on the CPU without a copy.

        Args:
            sharding: a `jax.sharding.Sharding` (of several processes each gives its own rows) or a device; None: the
                default one.
            ahead: as in `tensors`.
        """
        from loaderpool.adapters.jax_arrays import as_jax

        return as_jax(self._core, sharding, ahead)
