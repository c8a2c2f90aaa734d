"""Batches by length through tf.data, against its own, and in Keras' fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read
from tests.support.sounds import BY_LENGTH, load_sound


def over_json(state: dict[str, Any]) -> Any:
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


def test_without_shuffle_it_is_what_tf_data_makes(tf: Any, on: Place) -> None:
    """Bucket by bucket, batch by batch, in the same order, the rests included."""
    rng = np.random.default_rng(3)
    items = [np.arange(1, 1 + n) for n in rng.integers(0, 30, 200)]
    for boundaries, sizes in (([5, 12, 20], [4, 3, 2, 5]), ([10], [7, 7]), ([3, 4, 40], [2, 3, 4, 5])):
        for drop_remainder in (False, True):
            dataset = tf.data.Dataset.from_generator(lambda: iter(items), tf.int64, [None])
            dataset = dataset.bucket_by_sequence_length(
                tf.size, boundaries, sizes, padding_values=np.int64(-1), drop_remainder=drop_remainder
            )
            expected = [batch.numpy() for batch in dataset]
            with lp.Loader(
                items, None, buckets=lp.Buckets(len, boundaries, sizes), pad=-1,
                drop_remainder=drop_remainder, **on(2),
            ) as loader:  # fmt: skip
                assert_same(read(loader), expected)
                ours = loader.as_dataset()
                assert ours.cardinality().numpy() == len(loader) == len(expected)
                assert_same([batch.numpy() for batch in ours], expected)


def test_a_dataset_goes_on(tf: Any, sounds: list[str], two_epochs: list[Any], on: Place) -> None:
    length = len(two_epochs) // 2
    with lp.Loader(sounds, load_sound, **on(2), **BY_LENGTH) as loader:
        dataset = loader.as_dataset(epochs=2)
        assert dataset.cardinality().numpy() == 2 * length
        for _ in zip(range(length + 4), dataset, strict=False):
            pass
        state = over_json(loader.state_dict(batches_taken=length + 4))
        loader.load_state_dict(state)
        rest = loader.as_dataset()
        assert rest.cardinality().numpy() == length - 4
        got = [{name: part.numpy() for name, part in element.items()} for element in rest]
        assert_same(got, two_epochs[length + 4 :])


def test_keras_fits(tf: Any, sounds: list[str], on: Place) -> None:
    keras = pytest.importorskip("keras")

    def sample(path: str) -> Any:
        sound = load_sound(path, np.random.default_rng(0))["sound"][:, None] / np.float32(3000)
        return sound, np.float32(len(sound) > 500)

    inputs = keras.Input((None, 1))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(keras.layers.Conv1D(4, 8)(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    with lp.Loader(sounds, sample, **on(2), **{**BY_LENGTH, "drop_remainder": True}) as loader:
        history = model.fit(loader.as_dataset(), epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2 and model.optimizer.iterations.numpy() == 2 * len(loader)
