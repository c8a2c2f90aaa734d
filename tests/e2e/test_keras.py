"""`fit`, `evaluate` and `predict` on datasets of loaders: every batch once, in order, without a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

pytestmark = pytest.mark.corner

ITEMS, BATCH = 40, 4


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Keras warns where a dataset runs out of data or a generator ends early: that is an error here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(warning.message) for warning in caught if "`shuffle=True` was passed" not in str(warning.message)]
    assert not [text for text in said if "data" in text or "loaderpool" in text]


def sample(index: int) -> Any:
    x = np.array([index, 1], np.float32)
    return x, np.float32(2 * index)


def recording_model(keras: Any) -> tuple[Any, list[list[int]]]:
    """A model that notes the first column of every batch it sees."""
    import tensorflow as tf

    seen: list[list[int]] = []

    class Recording(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Recording()
    # Eager, so that `call` sees each batch. The weights stay at nought: what is tested is the data.
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", run_eagerly=True)
    model(tf.zeros((1, 2)))

    call = model.dense.call

    def noting(x: Any, *arguments: Any, **settings: Any) -> Any:
        seen.append([int(value) for value in x[:, 0]])
        return call(x, *arguments, **settings)

    model.dense.call = noting
    return model, seen


EPOCH = [list(range(start, start + BATCH)) for start in range(0, ITEMS, BATCH)]


def test_fit_takes_each_epoch_once(tf: Any, pool: lp.Pool) -> None:
    import keras

    model, seen = recording_model(keras)
    with lp.Loader(range(ITEMS), sample, batch_size=BATCH, workers=pool) as loader:
        history = model.fit(loader.as_dataset(), epochs=3, verbose=0)
        assert loader.epoch == 3
    assert seen == 3 * EPOCH
    assert len(history.history["loss"]) == 3


def test_a_loader_given_to_fit_as_it_is_is_told_what_to_pass(tf: Any, pool: lp.Pool) -> None:
    import keras

    loader = lp.Loader(range(ITEMS), sample, batch_size=BATCH, workers=pool)
    model, _ = recording_model(keras)
    with pytest.raises(ValueError, match=r"Unrecognized data type: .*model\.fit\(loader\.for_keras\(\)\)"):
        model.fit(loader, verbose=0)


def test_steps_per_epoch_goes_on_where_the_last_epoch_stopped(tf: Any, pool: lp.Pool) -> None:
    import keras

    model, seen = recording_model(keras)
    with lp.Loader(range(ITEMS), sample, batch_size=BATCH, workers=pool) as loader:
        history = model.fit(loader.as_dataset(epochs=None), steps_per_epoch=7, epochs=4, verbose=0)
    assert len(history.history["loss"]) == 4
    assert seen == (3 * EPOCH)[:28]


def test_validation_data_evaluate_and_predict_see_everything_once(tf: Any, pool: lp.Pool) -> None:
    import keras

    model, seen = recording_model(keras)
    with (
        lp.Loader(range(ITEMS), sample, batch_size=BATCH, workers=pool) as training,
        lp.Loader(range(100, 110), sample, batch_size=BATCH, workers=pool) as validation,
    ):
        data, held_out = training.as_dataset(), validation.as_dataset()
        tail = [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
        model.fit(data, validation_data=held_out, epochs=2, verbose=0)
        assert seen == [*EPOCH, *tail, *EPOCH, *tail]
        seen.clear()
        model.evaluate(held_out, verbose=0)
        assert seen == tail
        seen.clear()
        assert model.predict(held_out, verbose=0).shape == (10, 1)
        assert seen == tail
        seen.clear()
        model.evaluate(data, steps=3, verbose=0)
        assert model.predict(data, steps=2, verbose=0).shape == (8, 1)
        assert seen == EPOCH[:3] + EPOCH[:2]


def test_stop_training_leaves_the_loader_whole(tf: Any, pool: lp.Pool) -> None:
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.stop_training = True
                raise KeyboardInterrupt

    model, seen = recording_model(keras)
    with lp.Loader(range(ITEMS), sample, batch_size=BATCH, workers=pool) as loader:
        dataset = loader.as_dataset()
        with pytest.raises(KeyboardInterrupt):
            model.fit(dataset, epochs=2, verbose=0, callbacks=[Stop()])
        assert seen == EPOCH[:3]
        seen.clear()
        model.fit(dataset, epochs=1, verbose=0)
        assert seen == EPOCH


class Weighted:
    """Batches of three: the last one says how much each row counts."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        x = np.full((4, 2), index, np.float32)
        y = np.full((4, 1), index % 2, np.float32)
        return x, y, np.full(4, float(index == 3), np.float32)


def test_sample_weights_of_a_sequence_count_in_fit(tf: Any, pool: lp.Pool) -> None:
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=keras.losses.MeanSquaredError(reduction="sum"))
    with lp.Loader.from_sequence(Weighted(), workers=pool) as loader:
        loss = model.evaluate(loader.as_dataset(), verbose=0)
    # Only batch 3 counts: each of its 4 rows is predicted as 3 + 3 where 1 is right. Keras shows the mean of batches.
    assert loss == pytest.approx(4 * 25 / 24, rel=1e-5) or loss == pytest.approx(4 * 25 / 6, rel=1e-5)


def test_class_weight_works_with_a_sequence(tf: Any, pool: lp.Pool) -> None:
    import keras

    class Labelled(Weighted):
        def __getitem__(self, index: int) -> Any:
            x, y, _ = super().__getitem__(index)
            return x, y

    def trained(class_weight: dict[int, float] | None) -> float:
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        with lp.Loader.from_sequence(Labelled(), workers=pool) as loader:
            return float(model.fit(loader.as_dataset(), verbose=0, class_weight=class_weight).history["loss"][0])

    assert trained({0: 2.0, 1: 2.0}) == pytest.approx(2 * trained(None), rel=1e-5)
