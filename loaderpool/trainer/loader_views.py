"""`LoaderViews`: a loader's batches for other frameworks; each method forwards to its adapter when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.settings.checks import known_names_only
from loaderpool.trainer.loader_core import LoaderCore

if TYPE_CHECKING:
    import tensorflow as tf


class View(Protocol):
    """Batches of a loader as tensors. Each iteration is one epoch; its iterators work like `LoaderIterator`."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...


class LoaderViews:
    """Methods that return a loader's batches in the form that a framework expects."""

    _core: LoaderCore

    @known_names_only
    def as_dataset(
        self,
        epochs: int | None = 1,
        prefetch: int = 2,
        device: str | None = None,
    ) -> tf.data.Dataset:
        """Return a `tf.data.Dataset` of the batches, without a copy except for strings and very small batches.

        Args:
            epochs: Epochs in one iteration over the dataset; `None`: endless, for `steps_per_epoch`. Default: 1.
            prefetch: Number of batches that `tf.data` prefetches, or `tf.data.AUTOTUNE`. Default: 2.
            device: Device to prefetch to, such as `"/GPU:0"`. Default: `None`, no device.
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
        """Return a dataset for a `tf.distribute` strategy. Several processes need `shard="auto"`.

        Args:
            strategy: Strategy such as `MirroredStrategy`. The loader's `batch_size` is then per replica.
            epochs: As in `as_dataset`.
            prefetch: As in `as_dataset`.
        """
        from loaderpool.adapters.tensorflow import as_distributed_dataset

        return as_distributed_dataset(self._core, strategy, epochs=epochs, prefetch=prefetch)

    @known_names_only
    def for_keras(self, epochs: int | None = 1, class_weight: Mapping[int, float] | None = None) -> Any:
        """Return what `fit`, `evaluate` and `predict` of Keras 3.7 or later accept, on TensorFlow, JAX or PyTorch.

        Args:
            epochs: Epochs of the loader in each epoch of Keras; `None`: endless, for `steps_per_epoch`. Default: 1.
            class_weight: Weight of each class, for batches `(x, y)`; use it instead of `fit(class_weight=...)`.
        """
        from loaderpool.adapters.keras_fit import LoaderAdapter

        return LoaderAdapter(self._core, epochs, class_weight)

    @known_names_only
    def tensors(self, device: str | None = None, prefetch: int = 2) -> View:
        """Return the batches as eager TensorFlow tensors, without `tf.data`, and without a copy except for strings.

        Args:
            device: Device to copy batches to, such as `"/GPU:0"`. Default: `None`, no copy.
            prefetch: Number of batches to copy to the device before you ask for them. Default: 2.
        """
        from loaderpool.adapters.eager_tensors import tensors

        return tensors(self._core, device, prefetch)

    @known_names_only
    def as_torch(self, device: Any = None, prefetch: int = 2) -> View:
        """Return the batches as an `IterableDataset` of PyTorch tensors, without a copy. Strings stay NumPy arrays.

        Args:
            device: Device to copy batches to, such as `"cuda"`. Default: `None`, no copy.
            prefetch: As in `tensors`.
        """
        from loaderpool.adapters.torch_tensors import as_torch

        return as_torch(self._core, device, prefetch)

    @known_names_only
    def as_jax(self, sharding: Any = None, prefetch: int = 2) -> View:
        """Return the batches as `jax.Array` objects, on the CPU without a copy.

        Args:
            sharding: A `jax.sharding.Sharding` or a device. If it spans several processes, each adds its own rows.
            prefetch: As in `tensors`.
        """
        from loaderpool.adapters.jax_arrays import as_jax

        return as_jax(self._core, sharding, prefetch)
