"""`Packed`: packed rows have static shapes and the same bits in all views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read

ITEMS = 60
LENGTH = 24
LENGTHS = (1 + np.random.default_rng(2).integers(0, 20, ITEMS)).tolist()


def tokens(item: int) -> dict[str, Any]:
    size = LENGTHS[item]
    return {"tokens": np.full(size, item, np.int32), "noise": np.ones((size, 2), np.float32)}


def packed(fn: Any = tokens, **settings: Any) -> lp.Loader:
    order = lp.Packed(LENGTHS, LENGTH, window=25)
    return lp.Loader(
        range(ITEMS), fn, **{"batch_size": 3, "workers": 0, "order": order, **settings}
    )


def test_a_dataset_of_tensorflow_has_static_shapes(tf: Any) -> None:
    with packed(drop_remainder=True, workers=2) as loader, packed(drop_remainder=True) as here:
        dataset = loader.as_dataset()
        assert dataset.element_spec["segment_ids"] == tf.TensorSpec((3, LENGTH), tf.int32)
        assert dataset.element_spec["noise"] == tf.TensorSpec((3, LENGTH, 2), tf.float32)
        got = [{key: part.numpy() for key, part in batch.items()} for batch in dataset]
        assert_same(got, read(here))
        assert sum(1 for _ in loader.tensors()) == len(got)


def test_a_model_of_keras_trains_on_packed_rows(tf: Any) -> None:
    import keras

    def pair(item: int) -> Any:
        size = LENGTHS[item]
        return {"tokens": np.full(size, item % 5)}, np.ones((size, 1), np.float32)

    inputs = {
        name: keras.Input((LENGTH,), dtype="int32", name=name)
        for name in ("tokens", "segment_ids", "positions")
    }
    embedded = keras.layers.Embedding(ITEMS, 4)(sum(inputs.values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(embedded))
    model.compile("sgd", "mse")
    with packed(fn=pair, workers=2) as loader:
        history = model.fit(loader.for_keras(), epochs=2, verbose=0)
        assert len(history.history["loss"]) == 2


def test_tensors_of_pytorch_have_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    with packed(workers=2) as loader, packed() as here:
        got = list(loader.as_torch())
        assert got[0]["segment_ids"].dtype == torch.int32
        arrays = [{key: part.numpy() for key, part in batch.items()} for batch in got]
        assert_same(read(arrays), read(here))


def test_arrays_of_jax_have_the_same_bits() -> None:
    pytest.importorskip("jax")
    with packed(workers=2) as loader, packed() as here:
        got = [{key: np.asarray(part) for key, part in batch.items()} for batch in loader.as_jax()]
        assert_same(read(got), read(here))


def test_all_views_leave_out_batches_without_samples(tf: Any) -> None:
    def make(item: int) -> Any:
        if item % 3000 // 300 == 4 or item % 7 == 3:
            raise ValueError
        return np.full(2, item)

    order = lp.Packed([2] * 6000, 4, shuffle=False)
    settings: dict[str, Any] = {"batch_size": 2, "order": order, "on_error": "skip"}
    with (
        lp.Loader(range(6000), make, workers=0, **settings) as here,
        lp.Loader(range(6000), make, workers=1, **settings) as there,
    ):
        expected = read(here)
        assert_same(read(there), expected)
        torch = [{key: part.numpy() for key, part in batch.items()} for batch in there.as_torch()]
        assert_same(torch, expected)
        assert_same([*there.as_dataset().as_numpy_iterator()], expected)
        assert len(expected) == 1350
        assert there.statistics().samples == 3 * here.statistics().samples == 3 * 2 * 1350
        assert there.statistics().padding_share == here.statistics().padding_share


def test_a_token_budget_leaves_rows_and_lengths_open(tf: Any) -> None:
    order = lp.TokenBudget(LENGTHS, 60)
    with lp.Loader(range(ITEMS), tokens, order=order, pad=True, workers=2) as loader:
        dataset = loader.as_dataset()
        assert dataset.element_spec["tokens"] == tf.TensorSpec((None, None), tf.int32)
        assert sum(len(batch["tokens"]) for batch in dataset) == ITEMS
