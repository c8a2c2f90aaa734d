"""Cases of `fit` with `Loader.for_keras()`, on the backend of this process.

`main` prints one line of JSON for each case: its name, and None or a traceback. The last cases
repeat Keras' own tests of data adapters (`data_adapters/*_test.py` and `trainer_test.py` in
`keras/src/trainers`) with a loader, and name these tests.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from scipy import sparse

import loaderpool as lp
from loaderpool.adapters.keras import BackupCallback

BACKEND = keras.backend.backend()
CASES: dict[str, Callable[[], None]] = {}
_MIX = 31


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Recorder(keras.layers.Layer):  # type: ignore[misc]
    """Returns its input, and computes a number from batches of whole numbers that depends on their
    order.
    """

    def build(self, _shape: Any) -> None:
        make = {"shape": (), "dtype": "int32", "trainable": False}
        self.mixed = self.add_weight(initializer="zeros", name="mixed", **make)
        self.batches = self.add_weight(initializer="zeros", name="batches", **make)

    def call(self, x: Any) -> Any:
        numbers = keras.ops.cast(x, "int32")
        self.mixed.assign(self.mixed * _MIX + keras.ops.sum(numbers))
        self.batches.assign(self.batches + 1)
        return keras.ops.cast(x, "float32") + 0.0


def mixed(batches: Any) -> int:
    """Return the number that the recorder computes from these batches."""
    total = 0
    for x in batches:
        total = (total * _MIX + int(np.asarray(x).astype(np.int64).sum())) % 2**32
    return total - 2**32 if total >= 2**31 else total


class Unbuilt(keras.Model):  # type: ignore[misc]
    """Has no weights before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder, self.dense = Recorder(), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(self.recorder(x))


def model(is_built: bool = True, **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    made = (
        keras.Sequential([keras.Input((4,)), Recorder(), keras.layers.Dense(1)])
        if is_built
        else Unbuilt()
    )
    made.compile(**{"optimizer": keras.optimizers.SGD(1e-6), "loss": "mse", **settings})
    return made


def recorder(of: Any) -> Any:
    return next(layer for layer in of.layers if isinstance(layer, Recorder))


def seen(of: Any) -> tuple[int, int]:
    found = recorder(of)
    return int(np.asarray(found.batches)), int(np.asarray(found.mixed))


def sample(index: int, rng: np.random.Generator) -> Any:
    return rng.integers(0, 1000, 4).astype(np.float32), np.float32(index)


def loader(items: int = 70, workers: int = 1, **settings: Any) -> lp.Loader:
    return lp.Loader(
        range(items), sample, **{"batch_size": 8, "workers": workers, "shuffle": True, **settings}
    )


def inputs(of: lp.Loader, epochs: int) -> list[Any]:
    """Return the batches of the loader's first epochs, and go back to the first epoch."""
    of.epoch = 0
    found = [x.copy() for _ in range(epochs) for x, *_ in of]
    of.epoch = 0
    return found


VIEWS = ("for_keras", "as_dataset") if BACKEND == "tensorflow" else ("for_keras",)


@case
def the_same_batches_whether_the_model_is_built_or_not() -> None:
    for workers, is_built, view in (
        (0, True, VIEWS[-1]),
        (1, False, VIEWS[0]),
        (3, True, VIEWS[0]),
    ):
        with loader(workers=workers) as made, warnings.catch_warnings():
            warnings.filterwarnings("error", ".*ran out of data")
            expected = inputs(made, 3)
            trained = model(is_built)
            history = trained.fit(getattr(made, view)(), epochs=3, verbose=0)
            assert seen(trained) == (27, mixed(expected)), (workers, is_built)
            assert len(history.history["loss"]) == 3
            assert made.epoch == 3


@case
def validation_takes_a_pass_each_time() -> None:
    for view in VIEWS:
        with loader() as made, loader(20, seed=5) as other:
            validation, training = inputs(other, 3), inputs(made, 3)
            trained = model(is_built=view == "as_dataset")
            data, held_out = getattr(made, view)(), getattr(other, view)()
            history = trained.fit(data, epochs=3, validation_data=held_out, verbose=0)
            assert "val_loss" in history.history
            woven = [
                x
                for epoch in range(3)
                for x in (*training[9 * epoch :][:9], *validation[3 * epoch :][:3])
            ]
            assert seen(trained) == (36, mixed(woven))
            assert (made.epoch, other.epoch) == (3, 3)


@case
def evaluate_and_predict_go_through_one_pass_in_order() -> None:
    with lp.Loader(range(50), lambda i: np.full(4, i, np.float32), batch_size=8, workers=2) as made:
        predicting = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x[:, :1])])
        for view in VIEWS:
            found = predicting.predict(getattr(made, view)(), verbose=0)
            assert found[:, 0].tolist() == list(range(50))
            assert predicting.predict(getattr(made, view)(), steps=2, verbose=0).shape == (16, 1)
    with loader() as made:
        tested = model(is_built=False)
        expected = inputs(made, 2)
        tested.evaluate(made.for_keras(), verbose=0)
        assert seen(tested) == (9, mixed(expected[:9]))
        tested.evaluate(made.for_keras(), verbose=0)
        assert seen(tested) == (18, mixed(expected))


@case
def several_steps_at_once() -> None:
    if BACKEND == "torch":
        return  # Keras does not support this
    for executions, settings in (
        (3, {}),
        (101, {}),
        (3, {"on_error": "skip"}),
        (9, {"on_error": "skip"}),
    ):
        epochs = 1 if settings else 2  # Keras learns an unknown number in the first epoch
        with loader(**settings) as made, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*ran out of data")
            expected = inputs(made, epochs)
            trained = model(steps_per_execution=executions)
            trained.fit(made.for_keras(), epochs=epochs, verbose=0)
            assert seen(trained) == (9 * epochs, mixed(expected)), executions
            assert settings or int(np.asarray(trained.optimizer.iterations)) == 18


@case
def steps_of_a_stream_without_end() -> None:
    with loader() as made:
        expected = inputs(made, 3)
        trained = model(is_built=False)
        trained.fit(made.for_keras(epochs=None), epochs=4, steps_per_epoch=5, verbose=0)
        assert seen(trained) == (20, mixed(expected[:20]))
        if BACKEND == "tensorflow":
            made.epoch = 0
            trained = model()
            trained.fit(made.as_dataset(epochs=None), epochs=4, steps_per_epoch=5, verbose=0)
            assert seen(trained) == (20, mixed(expected[:20]))
        made.epoch = 0
        trained = model()
        trained.fit(made.for_keras(epochs=2), epochs=1, verbose=0)
        assert seen(trained) == (18, mixed(expected[:18]))


@case
def generators_of_stated_lengths_show_progress() -> None:
    shards = [range(100 * shard, 100 * shard + 9 + shard % 4) for shard in range(7)]
    settings: dict[str, Any] = {"batch_size": 4, "cycle_length": 3, "shuffle": 5, "seed": 2}
    for executions, view in ((1, VIEWS[0]), (4, VIEWS[0]), (1, VIEWS[-1])):
        stated = {"shards": shards, "shard_lengths": [*map(len, shards)], "workers": 2}
        with (
            lp.Loader.from_generator(iter, **stated, **settings, fn=sample) as made,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", ".*ran out of data")
            expected, steps = inputs(made, 3), len(made)
            assert len(expected) == 3 * steps
            trained = model(steps_per_execution=1 if BACKEND == "torch" else executions)
            told: list[Any] = []
            begun = keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: told.append(begun.params["steps"])  # noqa: B023
            )
            trained.fit(getattr(made, view)(), epochs=3, verbose=0, callbacks=[begun])
            assert told == [steps]
            assert seen(trained) == (3 * steps, mixed(expected))
            assert made.epoch == 3


@case
def epochs_of_an_order_may_have_other_numbers_of_steps() -> None:
    def order(epoch: int) -> Any:
        return np.random.permutation(70)[: 16 * (epoch + 1)]

    for workers, is_built in ((0, True), (1, False)):
        with (
            loader(workers=workers, shuffle=False, order=order) as made,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", ".*ran out of data")
            expected = inputs(made, 3)
            trained = model(is_built)
            trained.fit(made.for_keras(), epochs=3, verbose=0)
            assert seen(trained) == (2 + 4 + 6, mixed(expected))
            assert made.epoch == 3


@case
def an_epoch_without_left_out_batches_has_fewer_steps() -> None:
    executions = 1 if BACKEND == "torch" else 3
    settings: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"workers": 0}),
        (1, {"shuffle": False, "order": lambda epoch: np.random.permutation(70)}),
        (1, {"batch_size": 4, "buckets": lp.Buckets([*range(70)], [30], [4, 2])}),
    ]
    for number, (epochs, given) in enumerate(settings):
        with loader(**given) as made, warnings.catch_warnings():
            warnings.filterwarnings("error", ".*ran out of data")
            first, size = inputs(made, 4), len(made)
            made.skip_batches(3)
            made.skip_batches(range(5, 7))
            trained = model(number % 2 == 0, steps_per_execution=executions)
            trained.fit(made.for_keras(epochs), epochs=4 // epochs, verbose=0)
            assert seen(trained) == (4 * size - 5, mixed(first[3:5] + first[7:])), given
            assert made.epoch == 4
            made.skip_batches(size - 2)
            held_out = made.for_keras()
            assert len(trained.predict(held_out, verbose=0)) <= 2 * 8
            assert made.epoch == 5


@case
def steps_of_unknown_number_do_not_become_those_of_a_rest() -> None:
    for order in (None, lambda epoch: np.random.permutation(70)):
        with (
            loader(on_error="skip", shuffle=order is None, order=order) as made,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", ".*ran out of data")
            expected = inputs(made, 3)
            made.skip_batches(4)
            trained = model()
            trained.fit(made.for_keras(), epochs=3, verbose=0)
            assert seen(trained) == (27 - 4, mixed(expected[4:]))


@case
def hooks_are_called_once_an_epoch_and_never_late() -> None:
    calls: list[str] = []

    class Hooked(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return np.full((2, 4), 100 * self.epoch + index, np.float32), np.zeros(
                (2, 1), np.float32
            )

        def on_epoch_begin(self) -> None:
            calls.append("begin")

        def on_epoch_end(self) -> None:
            calls.append("end")
            self.epoch += 1

    for is_built in (True, False):
        calls.clear()
        with lp.Loader.from_sequence(Hooked(), workers=2) as made:
            trained = model(is_built)
            trained.fit(made.for_keras(), epochs=3, verbose=0)
            expected = [
                np.full((2, 4), 100 * epoch + index) for epoch in range(3) for index in range(4)
            ]
            assert seen(trained) == (12, mixed(expected))
        assert calls == ["begin", "end"] * 3, calls


@case
def shapes_may_vary_from_batch_to_batch() -> None:
    class Varied(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows, columns = ((16, 4), (16, 5), (2, 6))[index]
            return np.full((rows, columns, 2), index, np.float32), np.full(
                (rows, 1), index, np.float32
            )

    varied = keras.Sequential(
        [keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )
    varied.compile("sgd", "mse")
    with lp.Loader.from_sequence(Varied(), workers=1) as made:
        varied.fit(made.for_keras(), epochs=2, verbose=0)
        assert varied.predict(made.for_keras(), verbose=0).shape == (34, 1)


class Weights(keras.losses.Loss):  # type: ignore[misc]
    """A loss of 1 for each row, so that the mean of the weighted loss is that of the weights."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(0.0 * y_pred, -1) + 1.0


def weighed(made: lp.Loader, **arguments: Any) -> float:
    trained = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    trained.compile(keras.optimizers.SGD(0.0), Weights(reduction="sum"))
    return float(trained.evaluate(made.for_keras(**arguments), verbose=0))


@case
def classes_have_weights() -> None:
    def labelled(form: str) -> Callable[[int], Any]:
        def fn(index: int) -> Any:
            x = np.zeros(4, np.float32)
            label = {
                "plain": np.int64(index % 3),
                "column": np.float32([index % 3]),
                "one-hot": np.eye(3)[index % 3],
            }
            return x, label[form]

        return fn

    for form, batch_size, weights, mean in (
        ("plain", 6, {0: 1.0, 1: 2.0, 2: 3.0}, 2.0),
        ("plain", 1, {7: 3.0}, 1.0),
        ("column", 1, {1: 4.0}, 2.0),
        ("one-hot", 6, {1: 4.0}, 2.0),
        ("one-hot", 1, {}, 1.0),
    ):
        with lp.Loader(range(6), labelled(form), batch_size=batch_size, workers=1) as made:
            found = weighed(made, class_weight=weights) / batch_size
            assert abs(found - mean) < 1e-5, (form, batch_size, weights, found)
    if BACKEND == "tensorflow":  # like Keras' own argument, through tf.data
        with lp.Loader(range(6), labelled("plain"), batch_size=6, workers=1) as made:
            trained = model(optimizer=keras.optimizers.SGD(0.0), loss=Weights())
            (loss,) = trained.fit(
                made.as_dataset(), class_weight={0: 2.0, 1: 2.0, 2: 2.0}, verbose=0
            ).history["loss"]
            assert abs(loss - 2) < 1e-5


@case
def weights_of_labels_that_are_no_classes_are_refused() -> None:
    samples: dict[str, Callable[[int], Any]] = {
        "masks": lambda i: np.full((5, 5), i % 3, np.int32),
        "masks with a channel": lambda i: np.full((5, 5, 1), i % 3, np.uint8),
        "one-hot masks": lambda i: np.eye(3, dtype=np.float32)[np.full((5, 5), i % 3)],
        "tokens": lambda i: np.arange(i, i + 5),
        "several labels": lambda i: np.float32([1, 0, 1]),
        "a number": lambda i: np.float32(i + 0.4),
        "no number": lambda i: np.float32("nan"),
        "text": lambda i: f"class {i}",
    }
    if BACKEND != "tensorflow":  # the other backends accept no text
        del samples["text"]
    for name, make in samples.items():

        def fn(index: int, make: Callable[[int], Any] = make) -> Any:
            return np.zeros(4, np.float32), make(index)

        for batch_size in (1, 4):
            with lp.Loader(range(8), fn, batch_size=batch_size, workers=0) as made:
                with pytest.raises(lp.ArgumentError, match="one class for each sample") as caught:
                    model().fit(made.for_keras(class_weight={0: 0.3, 1: 1.0}), verbose=0)
                assert "class_weight" in str(caught.value), name
                assert name == "text" or "(x, y, weights[y])" in str(caught.value)
    # The message's advice works.
    weights = np.float32([0.3, 1.0, 2.0])

    def weighted(index: int) -> Any:
        y = np.full((5, 5), index % 3, np.int32)
        return np.zeros((5, 5, 2), np.float32), y, weights[y]

    segmenting = keras.Sequential(
        [keras.Input((5, 5, 2)), keras.layers.Dense(3, activation="softmax")]
    )
    segmenting.compile("sgd", "sparse_categorical_crossentropy")
    with lp.Loader(range(8), weighted, batch_size=4, workers=0) as made:
        # Not `fit`: with Keras 3.15, torch has no gradient for such labels, even for plain arrays.
        assert np.isfinite(segmenting.evaluate(made.for_keras(), verbose=0))


@case
def rows_have_weights() -> None:
    def weighted(index: int) -> Any:
        return np.zeros(4, np.float32), np.float32(0), np.float32(index)

    with lp.Loader(range(6), weighted, batch_size=6, workers=1) as made:
        assert abs(weighed(made) - 15) < 1e-4
        with pytest.raises(lp.ArgumentError, match=re.escape("no sample weights")):
            weighed(made, class_weight={0: 1.0})


@case
def what_fit_would_drop_in_silence_is_refused() -> None:
    with loader() as made:
        for argument, cure in (
            ({"class_weight": {0: 1.0}}, "for_keras(class_weight="),
            ({"sample_weight": np.ones(70)}, "(x, y, sample_weight)"),
            ({"y": np.ones(70)}, "(x, y)"),
        ):
            with pytest.raises((lp.ArgumentError, ValueError), match=re.escape(cure)):
                model().fit(made.for_keras(), verbose=0, **argument)
        for wrong, cure in (
            ({"class_weight": [1.0, 2.0]}, "must be a dict"),
            ({"class_weight": {"0": 1.0}}, "must be non-negative integers"),
            ({"class_weight": {0: float("nan")}}, "finite"),
            ({"epochs": 0}, "epochs must be"),
            ({"workers": 2}, "workers"),
        ):
            with pytest.raises((ValueError, TypeError), match=re.escape(cure)):
                made.for_keras(**wrong)


@case
def the_batch_size_is_the_loaders() -> None:
    arrays = np.ones((6, 4), np.float32), np.ones(6, np.float32)
    with loader(20) as made:
        for call in (
            lambda: model().fit(made.for_keras(), batch_size=8, verbose=0),
            lambda: model().evaluate(made.for_keras(), batch_size=8, verbose=0),
            lambda: model().predict(made.for_keras(), batch_size=8, verbose=0),
            lambda: model().fit(
                *arrays, validation_data=made.for_keras(), validation_batch_size=8, verbose=0
            ),
        ):
            with pytest.raises(
                lp.ArgumentError, match=r"batch_size= .* Loader\(\.\.\., batch_size=8\)"
            ):
                call()
        # Warnings about the arrays beside it.
        model().fit(*arrays, batch_size=3, validation_data=made.for_keras(), verbose=0)
        model().fit(made.for_keras(), validation_data=arrays, validation_batch_size=3, verbose=0)


def only_warning(call: Callable[[], Any]) -> str:
    """Return the text of loaderpool's warning in a call. There must be one, in a line of this
    file.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    (ours,) = (each for each in told if each.category is lp.LoaderpoolWarning)
    assert ours.filename == __file__
    return str(ours.message)


@case
def steps_that_have_no_batches_are_told_of_epochs_none() -> None:
    with loader(32) as made:  # 4 batches
        for steps, epochs in ((5, 1), (3, 2), (5, 3)):
            with pytest.raises(
                lp.ArgumentError, match=r"4\. Write loader\.for_keras\(epochs=None\)"
            ):
                model().fit(made.for_keras(), steps_per_epoch=steps, epochs=epochs, verbose=0)
        assert made.epoch == 0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(ran out of data|epochs=None)")
            for steps, epochs in ((4, 3), (2, 3), (3, 1)):  # it starts again, or has as many
                model().fit(made.for_keras(), steps_per_epoch=steps, epochs=epochs, verbose=0)
            model().fit(made.for_keras(epochs=None), steps_per_epoch=5, epochs=2, verbose=0)
            model().fit(
                made.for_keras(), validation_data=made.for_keras(), validation_steps=2, verbose=0
            )
        for call in (
            lambda: model().evaluate(made.for_keras(), steps=6, verbose=0),
            lambda: model().predict(made.for_keras(), steps=6, verbose=0),
            lambda: model().fit(
                made.for_keras(), validation_data=made.for_keras(), validation_steps=6, verbose=0
            ),
        ):
            assert "steps=6) needs 6 batches" in only_warning(call)
    # The number of a stream is unknown before its end.
    with lp.Loader(
        (sample(i, np.random.default_rng(i)) for i in range(32)), batch_size=8, workers=0
    ) as made:
        told = only_warning(lambda: model().fit(made.for_keras(), steps_per_epoch=5, verbose=0))
        assert "loader.for_keras(epochs=None)" in told
    with loader(on_error="skip") as made, warnings.catch_warnings():
        warnings.simplefilter("error", lp.LoaderpoolWarning)
        model().fit(made.for_keras(), epochs=2, verbose=0)
        with pytest.raises(AttributeError, match=r"loader\.for_keras\(epochs=None\)"):
            made.for_keras().repeat()


def looks_ahead() -> bool:
    """Return True if Keras itself takes a batch ahead of the one in training: on JAX, up to
    3.10.
    """
    if BACKEND != "jax":
        return False
    from keras.src.backend.jax.trainer import JAXEpochIterator

    return hasattr(JAXEpochIterator, "_prefetch_numpy_iterator")


@case
def endless_batches_without_steps_are_warned_of() -> None:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 6
            if batch == 6:
                raise StopIteration

    def train() -> None:
        with contextlib.suppress(StopIteration):
            model().fit(made.for_keras(epochs=None), callbacks=[Stop()], verbose=0)

    with loader(32) as made:
        assert "fit has no steps_per_epoch=" in only_warning(train)


@case
def errors_come_as_they_are_behind_the_batches_before_them() -> None:
    def bad(index: int) -> Any:
        if index == 21:
            raise KeyError("twenty-one")
        return np.full(4, index, np.float32), np.float32(0)

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            trained.append(batch)

    trained: list[int] = []
    with lp.Loader(range(64), bad, batch_size=8, workers=2) as made:
        with pytest.raises(lp.SampleError, match=re.escape("twenty-one")):
            model(is_built=False).fit(made.for_keras(), verbose=0, callbacks=[Noting()])
        # Not by the weights of the model, because Keras 3.7 keeps none after an error on JAX.
        assert trained == ([0] if looks_ahead() else [0, 1])
    with pytest.raises(lp.ClosedError, match=re.escape("closed")):
        model().fit(made.for_keras(), verbose=0)


@case
def one_adapter_serves_two_fits_and_side_by_side() -> None:
    with loader() as made:
        expected = inputs(made, 4)
        adapter = made.for_keras()
        trained = model(is_built=False)
        trained.fit(adapter, epochs=1, verbose=0)
        trained.fit(adapter, epochs=1, verbose=0)
        assert seen(trained) == (18, mixed(expected[:18]))
        made.epoch = 0
        trained = model(is_built=False)
        trained.fit(adapter, epochs=2, validation_data=adapter, verbose=0)
        assert seen(trained) == (36, mixed(expected))


@case
def a_training_that_was_stopped_begins_another_pass() -> None:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == self.at

    for at in (0, 3):
        with loader() as made:
            expected = inputs(made, 3)
            adapter, trained, stop = made.for_keras(), model(is_built=False), Stop()
            stop.at = at
            trained.fit(adapter, epochs=1, verbose=0, callbacks=[stop])
            trained.evaluate(adapter, steps=2, verbose=0)
            trained.fit(adapter, epochs=1, verbose=0)
            assert seen(trained) == (
                at + 12,
                mixed(expected[: at + 1] + expected[9:11] + expected[18:]),
            ), at


@case
def a_backup_ends_with_the_same_weights() -> None:
    class Crash(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == 13:
                raise InterruptedError("in the middle of the second epoch")

    def made_model() -> Any:
        keras.utils.set_random_seed(1)
        made = keras.Sequential(
            [
                keras.Input((4,)),
                Recorder(),
                keras.layers.Dropout(0.3, seed=3),
                keras.layers.Dense(1),
            ]
        )
        made.compile("adam", "mse")
        return made

    def of_shards() -> lp.Loader:
        stated: dict[str, Any] = {
            "shards": [range(30), range(40)],
            "shard_lengths": [30, 40],
            "batch_size": 8,
        }
        return lp.Loader.from_generator(iter, workers=1, **stated, fn=sample, shuffle=True)

    for make, save_freq in ((loader, 4), (loader, "epoch"), (of_shards, 4), (of_shards, "epoch")):
        with make() as source:
            whole = made_model()
            whole.fit(source.for_keras(), epochs=3, verbose=0)
        with tempfile.TemporaryDirectory() as path:
            for callbacks in ([Crash()], []):
                with make() as source:
                    again = made_model()
                    backup = BackupCallback(source, path, save_freq=save_freq)
                    try:
                        again.fit(
                            source.for_keras(), epochs=3, verbose=0, callbacks=[backup, *callbacks]
                        )
                    except InterruptedError:
                        continue
        for ours, theirs in zip(again.get_weights(), whole.get_weights(), strict=True):
            assert np.array_equal(ours, theirs), save_freq


@case
def fit_warns_of_what_continues_the_model_alone() -> None:
    def told(train: lp.Loader, epoch: int = 0, **settings: Any) -> list[str]:
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
        train.epoch = epoch
        with warnings.catch_warnings(record=True) as found, loader(8, workers=0) as validation:
            warnings.simplefilter("always")
            made.fit(
                train.for_keras(), verbose=0, validation_data=validation.for_keras(), **settings
            )
        assert train.epoch == epoch + settings["epochs"] - settings.get("initial_epoch", 0)
        ours = [each for each in found if "for_keras" in str(each.message)]
        assert all(each.filename == __file__ for each in ours), ours
        return [str(each.message) for each in ours]

    with loader(8, workers=0) as made:
        (text,) = told(made, epochs=4, initial_epoch=2)
        assert "initial_epoch=2" in text and "loader.epoch = 2" in text, text
        with tempfile.TemporaryDirectory() as folder:
            (text,) = told(
                made, epochs=1, callbacks=[keras.callbacks.BackupAndRestore(f"{folder}/backup")]
            )
        assert "BackupAndRestore" in text and "loaderpool.adapters.keras.BackupCallback" in text, (
            text
        )
        assert told(made, epochs=4, epoch=2, initial_epoch=2) == []
        assert told(made, epochs=1, callbacks=[keras.callbacks.History()]) == []


@case
def an_iterator_may_be_asked_for_its_iterator() -> None:
    """Keras 3.7 does this on JAX, for each batch."""
    with loader() as made:
        expected = inputs(made, 1)
        for batches in (made.for_keras().get_jax_iterator(), made.for_keras().get_numpy_iterator()):
            made.epoch = 0
            assert mixed(next(iter(batches))[0] for _ in range(9)) == mixed(expected)


@case
def text_and_ragged_rows_are_given_or_refused_by_name() -> None:
    def text(index: int) -> Any:
        return f"w{index}", np.float32(0)

    with lp.Loader(range(8), text, batch_size=4, workers=1) as made:
        if BACKEND == "tensorflow":
            import tensorflow as tf

            batches = [x for x, _ in made.for_keras().get_tf_dataset()]
            assert batches[1].dtype == tf.string and batches[1].numpy().tolist() == [
                b"w4",
                b"w5",
                b"w6",
                b"w7",
            ]
        else:
            with pytest.raises(
                lp.SpecMismatchError, match=re.escape("for_keras: component [0] is text")
            ):
                model().fit(made.for_keras(), verbose=0)


# ---- of Keras' own tests ----


def batches_of(adapter: Any) -> Iterator[Any]:
    """Return the object over which Keras iterates on this backend."""
    get = {
        "tensorflow": "get_tf_dataset",
        "jax": "get_jax_iterator",
        "torch": "get_torch_dataloader",
    }[BACKEND]
    return iter(getattr(adapter, get)())


def class_of_batches() -> type:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.Tensor
    if BACKEND == "torch":
        import torch

        return torch.Tensor
    return np.ndarray


@case
def structures_are_kept() -> None:
    """test_nested_data, test_dict_inputs, test_multi_inputs_and_outputs, and single-tensor batches of a DataLoader."""
    structures: dict[str, Callable[[Any, Any], Any]] = {
        "single": lambda x, y: x,
        "list": lambda x, y: (x, y),
        "dict": lambda x, y: {"x": x, "y": y},
        "nested list": lambda x, y: (x, (x, y)),
        "nested dict": lambda x, y: {"data": {"x": x, "y": y}},
        "several": lambda x, y: ({"a": x, "b": (x, y)}, {"c": y, "d": x}, y),
    }
    for name, build in structures.items():

        def fn(index: int, build: Any = build) -> Any:
            return build(np.full(4, index, np.float32), np.float32(index))

        with lp.Loader(range(8), fn, batch_size=4, workers=0) as made:
            batches = list(batches_of(made.for_keras()))
            expected = build(np.zeros((4, 4)), np.zeros(4))
            shapes = keras.tree.map_structure(
                lambda part: np.shape(keras.ops.convert_to_numpy(part)), batches[1]
            )
            assert str(shapes) == str(keras.tree.map_structure(np.shape, expected)), name
            for part in keras.tree.flatten(batches[1]):
                assert isinstance(part, class_of_batches())
                assert keras.ops.convert_to_numpy(part).reshape(4, -1)[:, 0].tolist() == [
                    4,
                    5,
                    6,
                    7,
                ]


@case
def sparse_results_are_refused_by_name_in_the_first_batch() -> None:
    """test_sparse_tensors, test_fit_sparse, test_evaluate_sparse, test_predict_sparse: they are not
    silently made dense.
    """
    makers: list[Callable[[], Any]] = [
        lambda: sparse.random(2, 4, density=0.25, dtype="float32"),
        lambda: sparse.csr_array(np.eye(4, dtype=np.float32)),
    ]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        makers.append(lambda: tf.SparseTensor([[0, 0], [1, 2]], [1.0, 2.0], (2, 4)))
    if BACKEND == "jax":
        from jax.experimental import sparse as jax_sparse

        makers += [
            lambda: jax_sparse.BCOO.fromdense(np.eye(4)),
            lambda: jax_sparse.BCSR.fromdense(np.eye(4)),
        ]
    for make in makers:
        for method in ("fit", "evaluate", "predict"):
            made = lp.Loader(range(4), lambda i: (make(), np.zeros(2)), batch_size=None, workers=0)  # noqa: B023
            with made, pytest.raises(lp.SpecMismatchError, match=re.escape("component [0]")):
                getattr(model(), method)(made.for_keras(), verbose=0)


@case
def ragged_rows_are_given_where_the_backend_has_them() -> None:
    """test_ragged_tensors, test_trainer_with_raggeds."""

    def rows(index: int) -> Any:
        return np.arange(2.0 * (1 + index % 2), dtype=np.float32).reshape(-1, 2), np.float32(index)

    with lp.Loader(range(8), rows, batch_size=2, ragged=True, workers=1) as made:
        if BACKEND == "jax":
            with pytest.raises(lp.SpecMismatchError, match=re.escape("component [0] is ragged")):
                next(batches_of(made.for_keras()))
            return
        batches = list(batches_of(made.for_keras()))
        assert len(batches) == 4
        if BACKEND == "tensorflow":
            import tensorflow as tf

            assert all(isinstance(x, tf.RaggedTensor) for x, _ in batches)
            assert batches[0][0].to_list() == [[[0.0, 1.0]], [[0.0, 1.0], [2.0, 3.0]]]

            class Mean(keras.Model):  # type: ignore[misc]
                def call(self, x: Any) -> Any:
                    return tf.reduce_mean(x, axis=1)

            trained = Mean()
            trained.compile("sgd", lambda y, found: 0.0)
            trained.fit(made.for_keras(), verbose=0)
            assert trained.predict(made.for_keras(), verbose=0).shape == (8, 2)


@case
def a_model_that_predict_builds_predicts_of_the_same_pass() -> None:
    """test_stop_loop, with an unbuilt model: on JAX, `predict` takes a batch to build it."""
    with lp.Loader(
        range(20), lambda i: np.full(4, i, np.float32), batch_size=8, workers=1, shuffle=True
    ) as made:
        expected = [x for batch in made for x in batch[:, 0].tolist()]
        for steps, rows in ((None, 20), (2, 16)):
            made.epoch = 0
            predicting = Unbuilt()
            predicting.dense = keras.layers.Dense(
                1, kernel_initializer=keras.initializers.Constant(0.25)
            )
            found = predicting.predict(made.for_keras(), steps=steps, verbose=0)
            assert found[:, 0].tolist() == expected[:rows]
            assert made.epoch == 1


def main(names: list[str]) -> None:
    for name in names:
        try:
            CASES[name]()
            trace = None
        except BaseException:
            trace = traceback.format_exc()
        print(json.dumps([name, trace]), flush=True)
