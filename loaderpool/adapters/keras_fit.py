"""`Loader.for_keras`: input for `fit`, `evaluate` and `predict`, without tf.data."""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

try:
    import keras
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
except ImportError as missing:
    raise ImportError(
        "for_keras needs Keras 3.7 or later: pip install 'keras>=3.7', or use as_dataset()"
    ) from missing

from loaderpool.adapters.conversion import Convert, HostConversion, TensorConversion, check_epochs
from loaderpool.adapters.shards import check_distribution
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief, warn
from loaderpool.hints import no_attribute
from loaderpool.plan.places import Position
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import LoaderIterator
from loaderpool.trainer.pass_log import IterationLog, PassLog

# The number of first batches of a pass that are kept, to be delivered a second time. Keras reads
# one batch to build a model. On JAX it prefetches a second one (Keras 3.7, and later versions on a
# GPU).
_TAKEN_TO_BUILD = 2
# Upper bound of class labels: `_weight_table` has one entry for each label up to the largest.
_MOST_CLASSES = 1_000_000

_DROPPED = {
    "class_weight": "pass loader.for_keras(class_weight=...)",
    "sample_weight": "return (x, y, sample_weight) from the function",
    "y": "return (x, y) from the function",
}
# Methods of a model, with the name of their argument for the number of steps.
_METHODS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}
_ONE_CLASS = (
    "y must be one class for each sample, as a number (shape (n,) or (n, 1)) or one-hot "
    "(shape (n, classes))"
)
_WEIGH_PARTS = (
    "To weigh pixels or tokens, remove class_weight and return (x, y, weights[y]) from the "
    "function. The array weights has one weight for each class"
)


class LoaderAdapter(DataAdapter):  # type: ignore[misc]
    """Keras data adapter over a loader. Each iterator that Keras requests is a pass.

    A pass begins when its first batch is requested, because Keras creates one iterator more at the
    end of an epoch than it reads.

    To build a model, Keras reads the first batch of a pass and abandons that pass. The next
    iterator continues the abandoned pass and delivers that batch again. The calls of Keras show
    which case it is:

    - Reset after building a model: Keras reads `num_batches`, then calls `on_epoch_end`.
    - Normal end of an epoch: Keras calls only `on_epoch_end`.
    - `fit` after an interrupted epoch: Keras reads `num_batches` twice.
    """

    def __init__(
        self, core: LoaderCore, epochs: int | None, class_weight: Mapping[int, float] | None
    ) -> None:
        self._core = core
        core.check_usable()
        if core.config.batch_indices:
            raise ArgumentError(
                "for_keras() has no place for indices beside (x, y, sample_weight). Remove "
                "batch_indices=, or train on as_dataset() with a train_step(data) that unpacks "
                "indices, (x, y) = data"
            )
        self.epochs = check_epochs(core, epochs)
        check_distribution(core, self.epochs)
        self._weights = None if class_weight is None else _weight_table(class_weight)
        self._takes_apart = False  # True: a tf.distribute strategy makes the iterators
        # `_latest`: the latest pass that may have built a model, or the loader's position before an
        # epoch under a strategy. `_left`: the value of `_latest` when Keras last read
        # `num_batches`.
        self._latest: _Passes | Position | None = None
        self._left: _Passes | Position | None = None
        self._again: _Passes | None = None  # an abandoned pass that the next iterator continues
        self._had_rest = False  # True: Keras' latest epoch began within one of the loader
        # Texts of the warnings already given: Keras calls the checks several times.
        self._warnings = set[str]()

    def __len__(self) -> int:
        """Return the number of batches in one of Keras' epochs.

        Raises:
            TypeError: The number is unknown, or there is no end.
        """
        if self.epochs is None:
            raise TypeError("for_keras(epochs=None) has no end; pass steps_per_epoch to fit")
        return self._count(self.epochs, self._core.tracker.epoch)

    def _count(self, epochs: int, first: int) -> int:
        """Return the number of batches of consecutive epochs of the loader."""
        batches, draws = self._core.batches_per_epoch(), self._core.tracker.draws
        if draws is None:
            return epochs * batches
        return sum(draws.batches(first + number) for number in range(epochs))

    def __bool__(self) -> bool:
        # Without this, `bool()` would call `__len__`, which raises if the length is unknown.
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(no_attribute("what for_keras() returns", name, ()))

    def __repr__(self) -> str:
        return f"<batches for Keras' fit, evaluate and predict of {self._core.description}>"

    # ---- methods that Keras calls ----

    def get_numpy_iterator(self) -> _Iterator:
        """Return an iterator over NumPy arrays."""
        return _Iterator(self, HostConversion("for_keras", "NumPy"))

    def get_jax_iterator(self) -> _Iterator:
        """Return an iterator over NumPy arrays. Keras passes them to JAX.

        Keras 3.7 calls this once for each batch.
        """
        is_shared = check_distribution(self._core, self.epochs)
        return _Iterator(self, HostConversion("for_keras", "JAX", has_equal_shapes=is_shared))

    def get_torch_dataloader(self) -> _Batches:
        """Return an iterable of tensors that share the workers' memory."""
        from loaderpool.adapters.torch_tensors import TorchConversion

        return _Batches(lambda: _Iterator(self, TorchConversion("for_keras")))

    def get_tf_dataset(self) -> object:
        """Return an iterable of eager tensors that share the workers' memory.

        Under a distribution strategy, return a `tf.data.Dataset`.
        """
        import tensorflow as tf

        from loaderpool.adapters.eager_tensors import EagerConversion
        from loaderpool.adapters.tensorflow import as_dataset

        # Keras (3.15) calls this outside of the scope in which the model was made. The caller keeps
        # the model's strategy in a local variable.
        models = sys._getframe(1).f_locals.get("distribute_strategy")
        self._takes_apart = tf.distribute.has_strategy() or models not in (
            None,
            tf.distribute.get_strategy(),
        )
        if self._takes_apart:
            if self._weights is not None:
                raise ArgumentError(
                    "for_keras(class_weight=...) has no effect under a tf.distribute strategy. "
                    "Return (x, y, sample_weight) from the function."
                )
            return as_dataset(self._core, epochs=self.epochs, prefetch=2, device=None)
        # Make a new error each time: an error that was raised refers to its frames, and these hold
        # batches.
        end = functools.partial(tf.errors.OutOfRangeError, None, None, "no more batches")
        return _Batches(lambda: _Iterator(self, EagerConversion("for_keras"), end))

    @property
    def num_batches(self) -> int | None:
        """The number of batches in one of Keras' epochs. None: unknown, or no end."""
        self._check_call()
        self._left, self._latest = self._latest, None
        try:
            return len(self)
        except TypeError:
            return None

    def _check_call(self) -> None:
        """Check the arguments of `fit`, `evaluate` or `predict`.

        They are local variables of Keras' functions, read from the frames of the callers.

        Raises:
            ArgumentError: Keras would ignore an argument, or `fit` would run out of batches.
        """
        method, outermost = "", dict[str, Any]()
        for frame in _keras_frames(sys._getframe(2)):
            given = frame.f_locals
            for name, cure in _DROPPED.items():
                if given.get("x") is self and given.get(name) is not None:
                    raise ArgumentError(f"Keras ignores {name}= with loader.for_keras(); {cure}")
            # The last match is the outermost frame, the user's call.
            if frame.f_code.co_name in _METHODS:
                method, outermost = frame.f_code.co_name, given
        is_validation = outermost.get("validation_data") is self is not outermost.get("x")
        prefix = "validation_" * is_validation
        rows = outermost.get(f"{prefix}batch_size")
        if rows is not None and (is_validation or outermost.get("x") is self):
            raise ArgumentError(
                f"Keras ignores {prefix}batch_size= with loader.for_keras(); the loader has the "
                f"batch size: write Loader(..., batch_size={brief(rows)})"
            )
        if method == "fit" and outermost.get("x") is self:
            self._check_resume(outermost)
        if method:
            self._check_steps(
                method, "validation_steps" if is_validation else _METHODS[method], outermost
            )

    def _check_resume(self, given: Mapping[str, Any]) -> None:
        """Warn of arguments of `fit` that resume a training but do not set the loader's epoch."""
        callbacks, first, epoch = (
            given.get("callbacks") or (),
            given.get("initial_epoch"),
            self._core.tracker.epoch,
        )
        # Keras has wrapped the callbacks in a CallbackList.
        listed = getattr(callbacks, "callbacks", callbacks)
        listed = listed if isinstance(listed, (list, tuple)) else [listed]
        if any(type(each).__name__ == "BackupAndRestore" for each in listed):
            self._warn_once(
                "Keras' BackupAndRestore restores only the model, so after a restart for_keras() "
                "begins with the order of epoch 0. Use "
                "loaderpool.adapters.keras.BackupCallback(loader, path) instead"
            )
        elif first and not epoch:
            self._warn_once(
                f"fit(initial_epoch={first}) does not set the loader's epoch, so for_keras() "
                f"begins with the order of epoch 0. Set loader.epoch = {first} before fit"
            )

    def _check_steps(self, method: str, name: str, given: Mapping[str, Any]) -> None:
        """Check the number of steps (argument `name`) against the number of batches."""
        steps = given.get(name)
        if self.epochs is None and steps is None:
            self._warn_once(
                f"for_keras(epochs=None) has no end, and {method} has no {name}=, so it runs "
                f"until a callback stops it. Pass {name}=, or write loader.for_keras()"
            )
        if self.epochs is None or not isinstance(steps, numbers.Integral) or steps < 1:
            return
        try:
            batches = len(self)
        except TypeError:  # unknown length: `warn_of_end` warns at the end of the data
            return
        epochs = given.get("epochs", 1) - (given.get("initial_epoch") or 0)
        is_fit = name == "steps_per_epoch"
        # If no batch is left at the end of an epoch, Keras starts a new iterator.
        total = int(steps * epochs) if is_fit and batches % steps else int(steps)
        if total <= batches:
            return
        if is_fit:
            raise ArgumentError(
                f"fit(steps_per_epoch={steps}, epochs={epochs}) needs {total:,} batches in a row, "
                f"and for_keras(epochs={self.epochs}) has {batches:,}. Write "
                "loader.for_keras(epochs=None), which has no end, or remove steps_per_epoch"
            )
        self._warn_once(
            f"{method}({name}={steps}) needs {total:,} batches, and "
            f"for_keras(epochs={self.epochs}) has {batches:,}. Remove {name}=, or write "
            "loader.for_keras(epochs=None), which has no end"
        )

    def warn_of_end(self) -> None:
        """Warn if the data ended before Keras had its steps, for loaders of unknown length.

        Called by `_Iterator` at its end. Keras prints its own warning at the same time.
        """
        steps = None
        for frame in _keras_frames(sys._getframe(2)):
            found = frame.f_locals.get("epoch_iterator", frame.f_locals.get("self"))
            steps = steps or getattr(found, "steps_per_epoch", None)
        if steps is not None and self.epochs is not None:
            self._warn_once(
                f"for_keras(epochs={self.epochs}) ended before Keras had its {steps} steps an "
                "epoch. Write loader.for_keras(epochs=None), which has no end. It takes the "
                "place of .repeat(), of which Keras warns"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            warn(text, through="keras")

    def on_epoch_begin(self) -> None:
        """Note the loader's position if a strategy makes the iterators. Called by Keras.

        Keras keeps the number of batches of its first epoch. Epochs of a drawn order may differ,
        and the rest of an epoch has fewer, so their number is set here.
        """
        iterator: Any = sys._getframe(1).f_locals.get("self")
        # With `steps_per_epoch`, an iterator may have begun in an earlier epoch of Keras.
        is_new = not (getattr(iterator, "steps_per_epoch", None) and iterator._steps_seen)
        if self.epochs is not None and is_new and hasattr(iterator, "_num_batches"):
            self._set_count(iterator)
        stream = self._core.stream
        if self._takes_apart and not (stream and stream.is_one_shot):
            self._latest, self._left = self._core.tracker.next.position, None

    def on_epoch_end(self) -> None:
        """Run the hooks of sequences whose epoch has ended; keep a pass that only built a model.

        Called by Keras, also for the reset after it has built a model. A pass that only built a
        model does not count as an epoch.
        """
        left, self._left, self._latest = self._left, None, None
        tracker = self._core.tracker
        tracker.hooks.settle_ends()
        if isinstance(left, _Passes):
            self._again = left if left.rewind() else None
        elif left is not None:
            tracker.resume_at(left)

    def _set_count(self, iterator: Any) -> None:
        """Set the number of batches of Keras' next epoch, which may begin with a rest.

        If the number is unknown, Keras counts the steps of its first epoch, and the later ones have
        as many. The count of a rest is removed, so that Keras counts again.
        """
        tracker, again = self._core.tracker, self._again
        log = None if again is None or again.placed != tracker.next.times_set else again.first_log
        position = tracker.next.position if log is None else log.place
        had_rest, self._had_rest = self._had_rest, position.is_rest
        try:
            count = self._count(1, position.epoch)
        except TypeError:
            if had_rest:
                iterator._num_batches = None
            return
        if position.is_rest:
            count = (log or tracker.next_log()).batches
        assert self.epochs is not None
        iterator._num_batches = count + self._count(self.epochs - 1, position.epoch + 1)

    # ---- passes ----

    def begin(self, convert: TensorConversion) -> _Passes:
        """Return the pass that built a model, or a new one.

        A call of `load_state_dict` since then also makes a new one.
        """
        again, self._again = self._again, None
        if again is None or again.placed != self._core.tracker.next.times_set:
            again = _Passes(self._core, convert)
        self._latest, self._left = again, None
        return again

    def weigh(self, batch: object, convert: Convert) -> object:
        """Return the batch with sample weights appended, if `class_weight` was given."""
        if self._weights is None:
            return batch
        if type(batch) is not tuple or len(batch) != 2 or isinstance(batch[1], (tuple, list, dict)):
            raise ArgumentError(
                "for_keras(class_weight=...): batches must be pairs (x, y), with one array of "
                "classes as y and no sample weights. Otherwise return sample weights from the "
                "function, and remove class_weight."
            )
        places = _classes_of(batch[1]) + 1
        return (*batch, convert(self._weights.take(places, mode="clip")))


def _keras_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and its callers, up to the first one outside of Keras."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("keras."):
        yield frame
        frame = frame.f_back


def _classes_of(y: object) -> npt.NDArray[np.int64]:
    """Return the class of each sample of a batch.

    Raises:
        ArgumentError: A sample has no class, or several.
    """
    try:
        labels = np.asarray(y)
        values = labels.astype(np.float64)
    except (TypeError, ValueError):  # the labels are text, or a ragged array
        got = f"{type(y).__name__} of {getattr(y, 'dtype', 'objects')}"
        raise ArgumentError(f"for_keras(class_weight=...): {_ONE_CLASS}, got {got}") from None
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 1:
        classes = np.round(values)
        # A probability counts as the nearest class, as in Keras.
        is_right = ((values == classes) | ((values > 0) & (values < 1))).all()
    elif values.ndim == 2 and values.size:
        classes = values.argmax(-1)
        # A row sum other than 1 shows that the row is neither one-hot nor probabilities, but tokens
        # or several labels.
        is_right = (values >= 0).all() and np.allclose(values.sum(-1), 1, atol=0.01)
    else:
        is_right = np.False_
    if not is_right:
        raise ArgumentError(
            f"for_keras(class_weight=...): {_ONE_CLASS}, got {labels.dtype}{list(labels.shape)}. "
            f"{_WEIGH_PARTS}"
        )
    found: npt.NDArray[np.int64] = classes.astype(np.int64)
    return found


def _weight_table(weights: Mapping[int, float]) -> npt.NDArray[Any]:
    """Return a table with the weight of class `c` at index `c + 1`.

    Classes without a given weight have weight 1. The first and the last entry are for labels out
    of range. They are 1 as well.
    """
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"class_weight must be a dict such as {{0: 1.0, 1: 5.0}}, got {brief(weights)}"
        )
    for label, weight in weights.items():
        if (
            not isinstance(label, numbers.Integral)
            or isinstance(label, bool)
            or not 0 <= label < _MOST_CLASSES
        ):
            raise ArgumentError(
                f"class_weight: classes must be non-negative integers, got {brief(label)}"
            )
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise ArgumentError(
                f"class_weight[{label}] must be a finite number, got {brief(weight)}"
            )
    table = np.ones(max(weights, default=0) + 3, keras.config.floatx())
    for label, weight in weights.items():
        table[label + 1] = weight
    return table


class _Passes:
    """One or more consecutive passes over a loader, read through one iterator of Keras."""

    def __init__(self, core: LoaderCore, convert: TensorConversion) -> None:
        self._core, self._convert = core, convert
        self._of_weights = convert.convert_of("", ArraySpec((None,), keras.config.floatx()))
        # The tracker's `next.times_set` when these passes began; `resume_at` increments it.
        self.placed = core.tracker.next.times_set
        self._iteration = IterationLog()
        self._pass = LoaderIterator(core, convert, self._iteration)
        self._passes = 1
        # The first batches, kept for `rewind`; empty once more have been delivered.
        self._first: list[Any] = []
        self._given = 0

    def take(self, adapter: LoaderAdapter) -> object:
        """Return the next batch, across as many passes as the adapter has epochs.

        Called by `_Iterator`. Raises StopIteration after the last pass.
        """
        given = self._given
        batch = self._first[given] if given < len(self._first) else self._next(adapter)
        self._given = given + 1
        if given == _TAKEN_TO_BUILD:
            self._first.clear()
            adapter._latest = None  # a pass that got this far was not begun to build a model
        elif given == len(self._first):
            self._first.append(batch)
        return batch

    @property
    def first_log(self) -> PassLog | None:
        """Log of the first pass; None: it has not begun."""
        return next(iter(self._iteration.passes), None)

    def rewind(self) -> bool:
        """Go back to the first batch. Return False if it is no longer kept."""
        given, self._given = self._given, 0
        return len(self._first) == given

    def _next(self, adapter: LoaderAdapter) -> object:
        while True:
            try:
                return adapter.weigh(next(self._pass), self._of_weights)
            except StopIteration:
                passes = self._iteration.passes
                if self._passes == adapter.epochs or not (passes and passes[-1].delivered):
                    raise  # a loader without batches and without end would loop here forever
                self._passes += 1
                self._pass = LoaderIterator(self._core, self._convert, self._iteration)


class _Iterator:
    """Iterator over the batches of one of Keras' epochs.

    `make_end` makes the error that ends the iteration; None: StopIteration.
    """

    def __init__(
        self,
        adapter: LoaderAdapter,
        convert: TensorConversion,
        make_end: Callable[[], BaseException] | None = None,
    ) -> None:
        self._adapter, self._convert, self._make_end = adapter, convert, make_end
        self._begun: _Passes | None = None
        self._given_in_step = 0

    def __iter__(self) -> _Iterator:
        # On TensorFlow, Keras calls this at the start of every `steps_per_execution` steps.
        self._given_in_step = 0
        return self

    def __next__(self) -> object:
        if self._begun is None:
            self._begun = self._adapter.begin(self._convert)
        try:
            batch = self._begun.take(self._adapter)
        except StopIteration:
            self._adapter.warn_of_end()
            # If the first execution of a step gets StopIteration, Keras has no loss and raises
            # UnboundLocalError.
            if self._make_end is not None and not self._given_in_step:
                raise self._make_end() from None
            raise
        self._given_in_step += 1
        return batch


class _Batches:
    """Iterable from which Keras makes an iterator for each of its epochs."""

    def __init__(self, make_iterator: Callable[[], _Iterator]) -> None:
        self._make_iterator = make_iterator

    def __iter__(self) -> _Iterator:
        return self._make_iterator()
