"""Cases of Keras' own tests of its data adapters that a loader keeps in a form of its own, on this process' backend.

Each names the tests of Keras that it stands for (`data_adapters/*_test.py` and `trainer_test.py` of
`keras/src/trainers`); tests/support/keras_cases.py has what is beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from scipy import sparse

import loaderpool as lp
from tests.support.keras_cases import BACKEND, Unbuilt, case, loader, model


def batches_of(adapter: Any) -> Iterator[Any]:
    """What Keras iterates over on this backend."""
    get = {"tensorflow": "get_tf_dataset", "jax": "get_jax_iterator", "torch": "get_torch_dataloader"}[BACKEND]
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
            shapes = keras.tree.map_structure(lambda part: np.shape(keras.ops.convert_to_numpy(part)), batches[1])
            assert str(shapes) == str(keras.tree.map_structure(np.shape, expected)), name
            for part in keras.tree.flatten(batches[1]):
                assert isinstance(part, class_of_batches())
                assert keras.ops.convert_to_numpy(part).reshape(4, -1)[:, 0].tolist() == [4, 5, 6, 7]


@case
def sparse_results_are_refused_by_name_in_the_first_batch() -> None:
    """test_sparse_tensors, test_fit_sparse, test_evaluate_sparse, test_predict_sparse: never made dense in silence."""
    makers: list[tuple[Callable[[], Any], str]] = [
        (lambda: sparse.random(2, 4, density=0.25, dtype="float32"), "value.toarray()"),
        (lambda: sparse.csr_array(np.eye(4, dtype=np.float32)), "value.toarray()"),
    ]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        makers.append((lambda: tf.SparseTensor([[0, 0], [1, 2]], [1.0, 2.0], (2, 4)), "tf.sparse.to_dense(value)"))
    if BACKEND == "jax":
        from jax.experimental import sparse as jax_sparse

        makers += [
            (lambda: jax_sparse.BCOO.fromdense(np.eye(4)), "value.todense()"),
            (lambda: jax_sparse.BCSR.fromdense(np.eye(4)), "value.todense()"),
        ]
    for make, cure in makers:
        for method in ("fit", "evaluate", "predict"):
            with lp.Loader(range(4), lambda i: (make(), np.zeros(2)), batch_size=None, workers=0) as made:  # noqa: B023
                with pytest.raises(lp.SpecMismatchError, match=re.escape(cure)) as raised:
                    getattr(model(), method)(made.for_keras(), verbose=0)
                assert "component [0]" in str(raised.value) and "indices, values and shape" in str(raised.value)
        with pytest.raises(lp.SourceError, match=re.escape(f"is a sparse {type(make()).__name__}")):
            lp.Loader(make(), batch_size=2, workers=0)


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
    """test_stop_loop, with a model that is not built: on JAX `predict` takes a batch to build it."""
    with lp.Loader(range(20), lambda i: np.full(4, i, np.float32), batch_size=8, workers=1, shuffle=True) as made:
        expected = [x for batch in made for x in batch[:, 0].tolist()]
        for steps, rows in ((None, 20), (2, 16)):
            made.epoch = 0
            predicting = Unbuilt()
            predicting.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.25))
            found = predicting.predict(made.for_keras(), steps=steps, verbose=0)
            assert found[:, 0].tolist() == expected[:rows]
            assert made.epoch == 1


@case
def validation_without_end_stops_at_its_steps() -> None:
    """test_validation_data_infinite_generator, test_for_eval_epoch_iterator."""

    class Counter(keras.callbacks.Callback):  # type: ignore[misc]
        trained = tested = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.trained += 1

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.tested += 1

    counter = Counter()
    with loader() as made, loader(20, seed=5) as other:
        model().fit(
            made.for_keras(epochs=None), validation_data=other.for_keras(epochs=None), steps_per_epoch=3,
            validation_steps=4, epochs=2, callbacks=[counter], verbose=0,
        )  # fmt: skip
    assert (counter.trained, counter.tested) == (6, 8)
