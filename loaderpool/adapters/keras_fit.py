"""`Loader.for_keras`: what `fit`, `evaluate` and `predict` take on each backend, without tf.data."""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import keras
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
except ImportError as missing:
    raise ImportError("for_keras needs Keras 3.7 or later: pip install 'keras>=3.7', or use as_dataset()") from missing

from loaderpool.adapters.conversion import Convert, HostConversion, TensorConversion, check_epochs
from loaderpool.adapters.shards import check_distribution
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief
from loaderpool.plan.order import Position
from loaderpool.trainer.epoch_tracker import IterationLog
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import LoaderIterator

# As many batches of a pass can be given a second time: Keras takes one to build a model, and a second one ahead of it
# on JAX (Keras 3.7, and later ones on a GPU).
_TAKEN_TO_BUILD = 2
_MOST_CLASSES = 1_000_000  # each has its place in a table

_DROPPED = {
    "class_weight": "pass loader.for_keras(class_weight=...)",
    "sample_weight": "return (x, y, sample_weight) from the function",
    "y": "return (x, y) from the function",
}


class LoaderAdapter(DataAdapter):  # type: ignore[misc]
    """Hands a loader's batches to Keras, which uses it as it is: each iterator that Keras asks for is a pass.

    A pass begins with its first batch: Keras makes one more iterator at an epoch's end than it reads.

    To build a model Keras takes a batch of a pass that it then leaves; the next iterator goes on with that pass, that
    batch first. Keras leaves it by a reset: it asks for `num_batches`, then calls `on_epoch_end`. An epoch that is over
    calls `on_epoch_end` alone; and after one that was broken off the next `fit` asks for `num_batches` twice.
    """

    def __init__(self, core: LoaderCore, epochs: int | None, class_weight: Mapping[int, float] | None) -> None:
        self._core = core
        core.check_usable()
        self.epochs = check_epochs(core, epochs)
        check_distribution(core, self.epochs)
        self._weights = None if class_weight is None else _weight_table(class_weight)
        self._takes_apart = False  # a tf.distribute strategy makes the iterators
        # The latest pass, or where the loader stood before it; and the same once Keras has asked for `num_batches`.
        self._latest: _Passes | Position | None = None
        self._left: _Passes | Position | None = None
        self._again: _Passes | None = None  # goes on with the next iterator

    def __len__(self) -> int:
        """Batches of one of Keras' epochs. Raises TypeError where that is unknown, or there is no end."""
        if self.epochs is None:
            raise TypeError("for_keras(epochs=None) has no end; pass steps_per_epoch to fit")
        return self.epochs * self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # its length may be unknown

    def __repr__(self) -> str:
        return f"<batches for Keras' fit, evaluate and predict of {self._core.description}>"

    # ---- what Keras asks for ----

    def get_numpy_iterator(self) -> Any:
        """NumPy arrays."""
        return _Iterator(self, HostConversion("for_keras", "NumPy"))

    def get_jax_iterator(self) -> Any:
        """NumPy arrays, which JAX takes as they are; Keras 3.7 asks for an iterator of them for each batch."""
        is_shared = check_distribution(self._core, self.epochs)
        return _Iterator(self, HostConversion("for_keras", "JAX", has_equal_shapes=is_shared))

    def get_torch_dataloader(self) -> Any:
        """Tensors that look at the workers' memory."""
        from loaderpool.adapters.torch_tensors import TorchConversion

        return _Batches(lambda: _Iterator(self, TorchConversion("for_keras")))

    def get_tf_dataset(self) -> Any:
        """Eager tensors that look at the workers' memory; under a distribution strategy a `tf.data.Dataset`."""
        import tensorflow as tf

        from loaderpool.adapters.eager_tensors import EagerConversion
        from loaderpool.adapters.tensorflow import as_dataset

        # Keras asks outside of the scope in which the model was made (3.15), and has that strategy in a variable.
        models = sys._getframe(1).f_locals.get("distribute_strategy")
        self._takes_apart = tf.distribute.has_strategy() or models not in (None, tf.distribute.get_strategy())
        if self._takes_apart:
            if self._weights is not None:
                raise ArgumentError(
                    "for_keras(class_weight=...) has no effect under a tf.distribute strategy. Return "
                    "(x, y, sample_weight) from the function."
                )
            return as_dataset(self._core, epochs=self.epochs, prefetch=2, device=None)
        # A new error each time, for one that was raised holds the frames that it went through, and they the batches.
        end = functools.partial(tf.errors.OutOfRangeError, None, None, "no more batches")
        return _Batches(lambda: _Iterator(self, EagerConversion("for_keras"), end))

    @property
    def num_batches(self) -> int | None:
        """Batches of one of Keras' epochs; None: unknown, or no end."""
        self._refuse_dropped()
        self._left, self._latest = self._latest, None
        try:
            return len(self)
        except TypeError:
            return None

    def _refuse_dropped(self) -> None:
        """Refuse arguments of `fit` that Keras drops. They stand in variables of its functions, up to the caller."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("keras."):
            given = frame.f_locals
            for name, cure in _DROPPED.items():
                if given.get("x") is self and given.get(name) is not None:
                    raise ArgumentError(f"Keras ignores {name}= with loader.for_keras(); {cure}")
            frame = frame.f_back

    def on_epoch_begin(self) -> None:
        """Under a strategy its dataset begins a pass."""
        stream = self._core.stream
        if self._takes_apart and not (stream and stream.is_one_shot):
            self._latest, self._left = self._core.tracker.next_place, None

    def on_epoch_end(self) -> None:
        """Run the hooks of a sequence whose epoch was handed over whole; a pass that only built a model is none."""
        left, self._left, self._latest = self._left, None, None
        tracker = self._core.tracker
        tracker.settle_ends()
        if isinstance(left, _Passes):
            self._again = left if left.rewind() else None
        elif left is not None:
            tracker.resume_at(left)

    # ---- passes ----

    def begin(self, convert: TensorConversion) -> _Passes:
        """The pass that built a model, unless `load_state_dict` was called since; or a new one."""
        again, self._again = self._again, None
        if again is None or again.placed != self._core.tracker.times_placed:
            again = _Passes(self._core, convert)
        self._latest, self._left = again, None
        return again

    def weigh(self, batch: Any, convert: Convert) -> Any:
        """The batch with weights of its classes beside it, if that is wanted."""
        if self._weights is None:
            return batch
        if type(batch) is not tuple or len(batch) != 2 or isinstance(batch[1], (tuple, list, dict)):
            raise ArgumentError(
                "for_keras(class_weight=...): batches must be pairs (x, y), with one array of classes as y and no "
                "sample weights. Otherwise return sample weights from the function, and remove class_weight."
            )
        labels = np.asarray(batch[1])
        if labels.ndim > 1:
            labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
        places = np.round(labels).astype(np.int64) + 1
        return (*batch, convert(self._weights.take(places, mode="clip")))


def _weight_table(weights: Mapping[int, float]) -> npt.NDArray[Any]:
    """The weight of each class `c` at `c + 1`; classes that are not named weigh 1, so do the first and last place."""
    if not isinstance(weights, Mapping):
        raise ArgumentError(f"class_weight must be a dict such as {{0: 1.0, 1: 5.0}}, got {brief(weights)}")
    for label, weight in weights.items():
        if not isinstance(label, numbers.Integral) or isinstance(label, bool) or not 0 <= label < _MOST_CLASSES:
            raise ArgumentError(f"class_weight: classes must be non-negative integers, got {brief(label)}")
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise ArgumentError(f"class_weight[{label}] must be a finite number, got {brief(weight)}")
    table = np.ones(max(weights, default=0) + 3, keras.config.floatx())
    for label, weight in weights.items():
        table[label + 1] = weight
    return table


class _Passes:
    """Passes over a loader, one after another, that were begun."""

    def __init__(self, core: LoaderCore, convert: TensorConversion) -> None:
        self._core, self._convert = core, convert
        self._of_weights = convert.convert_of("", ArraySpec((None,), keras.config.floatx()))
        self.placed = core.tracker.times_placed  # how often the loader was given another place before
        self._iteration = IterationLog()
        self._pass = LoaderIterator(core, convert, self._iteration)
        self._passes = 1
        self._first: list[Any] = []  # its first batches; none once it has given more
        self._given = 0

    def take(self, adapter: LoaderAdapter) -> Any:
        """The next batch of as many passes as the adapter has; raises StopIteration after the last."""
        given = self._given
        batch = self._first[given] if given < len(self._first) else self._next(adapter)
        self._given = given + 1
        if given == _TAKEN_TO_BUILD:
            self._first.clear()
            adapter._latest = None  # it was not begun to build a model
        elif given == len(self._first):
            self._first.append(batch)
        return batch

    def rewind(self) -> bool:
        """Have it begin with its first batch again, if that is still here."""
        given, self._given = self._given, 0
        return len(self._first) == given

    def _next(self, adapter: LoaderAdapter) -> Any:
        while True:
            try:
                return adapter.weigh(next(self._pass), self._of_weights)
            except StopIteration:
                passes = self._iteration.passes
                if self._passes == adapter.epochs or not (passes and passes[-1].delivered):
                    raise  # a loader without batches, and without end, would never come back
                self._passes += 1
                self._pass = LoaderIterator(self._core, self._convert, self._iteration)


class _Iterator:
    """Gives the batches of one of Keras' epochs; `make_end` makes the error that ends it (None: StopIteration)."""

    def __init__(
        self, adapter: LoaderAdapter, convert: TensorConversion, make_end: Callable[[], BaseException] | None = None
    ) -> None:
        self._adapter, self._convert, self._make_end = adapter, convert, make_end
        self._begun: _Passes | None = None
        self._given_in_step = 0

    def __iter__(self) -> _Iterator:
        self._given_in_step = 0  # on TensorFlow Keras zips each step's executions with its iterator
        return self

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._adapter.begin(self._convert)
        try:
            batch = self._begun.take(self._adapter)
        except StopIteration:
            # Keras takes no loss of a step that had no batch, and says UnboundLocalError.
            if self._make_end is not None and not self._given_in_step:
                raise self._make_end() from None
            raise
        self._given_in_step += 1
        return batch


class _Batches:
    """What Keras makes an iterator of for each of its epochs."""

    def __init__(self, make_iterator: Callable[[], _Iterator]) -> None:
        self._make_iterator = make_iterator

    def __iter__(self) -> _Iterator:
        return self._make_iterator()
