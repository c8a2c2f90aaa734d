"""Padded and ragged batches through tf.data and in Keras: static shapes, tf.data's own pad values, ragged text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.element.spec import RaggedArray
from tests.support.batches import Place, read

SIZE = 60


def sequence(index: int) -> Any:
    """A sequence of varied length, and ten classes."""
    return np.full((5 + index % 7, 4), index, np.float32), np.eye(10, dtype=np.float32)[index % 10]


def labelled(index: int) -> Any:
    length = 1 + index % 4
    words = np.array(["a", "bé", "", "d"][:length])
    return {"x": np.full(length, index + 1, np.float32), "y": np.full(length, index, np.int32), "words": words}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_component_is_padded_with_its_own_value(tf: Any, on: Place, workers: int) -> None:
    """Batch by batch what tf.data's `padded_batch` makes, text included."""
    pad = {"x": np.nan, "y": -1, "words": None}
    types = {"x": tf.float32, "y": tf.int32, "words": tf.string}
    dataset = tf.data.Dataset.from_generator(
        lambda: map(labelled, range(18)), output_signature={name: tf.TensorSpec([None], types[name]) for name in types}
    )
    values = {"x": np.float32(np.nan), "y": np.int32(-1), "words": None}
    expected = list(dataset.padded_batch(5, padding_values=values))
    with lp.Loader(range(18), labelled, batch_size=5, pad=pad, **on(workers)) as loader:
        batches = read(loader)
        for name in types:
            for got, batch, want in zip(loader.as_dataset(), batches, expected, strict=True):
                assert np.array_equal(got[name].numpy(), want[name].numpy(), equal_nan=name == "x")
                if name != "words":
                    assert np.array_equal(batch[name], want[name].numpy(), equal_nan=name == "x")
    assert batches[0]["words"].tolist()[1] == ["a", "bé", "", ""]
    assert batches[0]["words"].tolist()[0] == ["a", "", "", ""]


def test_ragged_text_is_a_ragged_tensor(tf: Any, on: Place) -> None:
    def fn(index: int) -> Any:
        return {"words": np.array(["a", "bé", "c\0d"][: index % 4], "U3"), "n": index, "two": np.array([b"x", b"y"])}

    for workers in (0, 2):
        with lp.Loader(range(12), fn, batch_size=5, ragged=True, **on(workers)) as loader:
            spec = loader.element_spec
            assert (spec["words"].ragged, spec["two"].ragged, spec["two"].shape) == (True, False, (None, 2))
            batches = list(loader)
            assert all(isinstance(batch["words"], RaggedArray) for batch in batches)
            rows = [row.tolist() for batch in batches for row in batch["words"]]
            assert rows == [fn(index)["words"].tolist() for index in range(12)]
            dataset = loader.as_dataset(epochs=1)
            assert dataset.element_spec["words"] == tf.RaggedTensorSpec((None, None), tf.string, 1, tf.int64)
            got = [row for element in dataset for row in element["words"].to_list()]
            assert got == [[word.encode() for word in row] for row in rows]


def test_a_gru_trains_on_padded_sequences_without_an_element_spec(tf: Any, on: Place) -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.GRU(4), keras.layers.Dense(10, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy")
    with lp.Loader(range(SIZE), sequence, batch_size=8, pad=True, shuffle=True, **on(2)) as loader:
        history = model.fit(loader.as_dataset(epochs=2), epochs=2, steps_per_epoch=len(loader), verbose=0)
    assert model.input_shape == (None, None, 4) and model.output_shape == (None, 10)
    assert np.isfinite(history.history["loss"]).all() and len(history.history["loss"]) == 2


def test_padded_to_a_fixed_length_a_model_is_compiled_by_xla(tf: Any, on: Place) -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")])
    model.compile("sgd", "mse", jit_compile=True)
    spec = (lp.ArraySpec((8, 12, 4), np.float32), lp.ArraySpec((8, 10), np.float32))
    how: dict[str, Any] = {"batch_size": 8, "pad": True, "element_spec": spec, "drop_remainder": True}
    with lp.Loader(range(SIZE), lambda index: (sequence(index)[0] / 60, sequence(index)[1]), **how, **on(2)) as loader:
        dataset = loader.as_dataset(epochs=2)
        assert [each.shape.as_list() for each in dataset.element_spec] == [[8, 12, 4], [8, 10]]
        history = model.fit(dataset, epochs=2, steps_per_epoch=len(loader), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
