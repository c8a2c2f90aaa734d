"""Cases of Keras' own tests of its data adapters that a loader keeps in a form of its own, on this process' backend.

Each names the tests of Keras that it stands for (`data_adapters/*_test.py` and `trainer_test.py` of
`keras/src/trainers`); tests/support/keras_cases.py has what is beyond them.
"""

from __future__ import annotations

import re
import warnings
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


def of_backend(array: Any) -> Any:
    return keras.ops.convert_to_tensor(array)


@case
def items_of_the_backend_and_of_numpy_come_as_its_tensors() -> None:
    """test_basic_flow of generators and sequences, with sample weights and without."""
    x, weights = np.random.default_rng(0).random((34, 4)).astype(np.float32), np.arange(34, dtype=np.float32)
    y = np.repeat(np.arange(34, dtype=np.float32)[:, None], 2, 1)

    for convert in (np.asarray, of_backend):
        for columns in ((x, y), (x, y, weights)):

            def parts(columns: Any = columns, convert: Any = convert) -> Iterator[Any]:
                for start in range(0, 34, 16):
                    yield tuple(convert(column[start : start + 16]) for column in columns)

            with lp.Loader.from_generator(parts, batch_size=None, workers=0) as made:
                rows = []
                for batch in batches_of(made.for_keras()):
                    assert len(batch) == len(columns)
                    assert all(isinstance(part, class_of_batches()) for part in batch)
                    found = [keras.ops.convert_to_numpy(part) for part in batch]
                    assert all(part.dtype == np.float32 for part in found)
                    at = found[1][:, 0].astype(int)
                    assert all((part == column[at]).all() for part, column in zip(found, columns, strict=True))
                    rows.append(at)
                assert [len(part) for part in rows] == [16, 16, 2] and np.concatenate(rows).tolist() == list(range(34))


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
def several_iterators_of_one_adapter_are_passes_side_by_side() -> None:
    """test_multiple_calling_on_iterators."""
    with lp.Loader(range(20), lambda i: np.float32(i), batch_size=8, workers=1) as made:
        adapter = made.for_keras()
        first, second = batches_of(adapter), adapter.get_numpy_iterator()
        taken = [(keras.ops.convert_to_numpy(a).tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
        assert all(a == b for a, b in taken) and [len(a) for a, _ in taken] == [8, 8, 4]
        assert len(list(batches_of(adapter))) == 3


@case
def numbers_of_batches_are_known_infinite_or_unknown() -> None:
    """test_num_batches, test_iterate_*, and test_basic_flow."""

    def numbers() -> Iterator[int]:
        yield from range(9)

    class Endless(keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = None

        def __getitem__(self, index: int) -> Any:
            return np.full(2, index % 4, np.float32)

    with loader() as made, loader(on_error="skip") as skipping:
        known = made.for_keras()
        assert known.num_batches == 9
        assert made.for_keras(epochs=3).num_batches == 27
        assert made.for_keras(epochs=None).num_batches is None
        assert skipping.for_keras().num_batches is None
    with (
        lp.Loader.from_generator(numbers, batch_size=2, workers=0) as stream,
        lp.Loader.from_sequence(Endless(), workers=1) as endless,
    ):
        assert stream.for_keras().num_batches is endless.for_keras().num_batches is None
        batches = batches_of(endless.for_keras())
        found = [float(keras.ops.convert_to_numpy(next(batches))[0]) for _ in range(11)]
        assert found == [index % 4 for index in range(11)]


@case
def an_empty_generator_is_a_clear_error() -> None:
    """test_empty_generator_raises_clear_error."""

    def nothing() -> Iterator[Any]:
        return iter(())

    for method in ("fit", "evaluate", "predict"):
        with (
            lp.Loader.from_generator(nothing, batch_size=None, workers=0) as made,
            pytest.raises(lp.SourceError, match=re.escape("source is empty: no generator yielded anything")),
        ):
            getattr(model(), method)(made.for_keras(), verbose=0)


@case
def an_exception_comes_behind_two_good_batches_with_its_text() -> None:
    """test_exception_reported; through tf.data Keras has InvalidArgumentError for the user's own."""

    class Failing(keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = 4

        def __getitem__(self, index: int) -> Any:
            if index < 2:
                return np.zeros((8, 4), np.float32), np.zeros((8, 2), np.float32)
            raise ValueError("Expected exception")

    for workers in (2, 0):
        with lp.Loader.from_sequence(Failing(), workers=workers) as made:
            batches = batches_of(made.for_keras())
            assert [next(batches)[0].shape == (8, 4) for _ in range(2)] == [True, True]
            with pytest.raises(ValueError, match="Expected exception"):
                next(batches)
            with pytest.raises(ValueError, match="Expected exception"):
                model().fit(made.for_keras(), verbose=0)


@case
def an_unexpected_shape_is_named_beside_the_one_expected() -> None:
    """test_with_unexpected_shapes: of rows, and of whole batches where the shapes are given."""

    def wider(index: int) -> Any:
        return np.ones(4, np.float32), np.ones(3 if index == 9 else 2, np.float32)

    def elements(index: int) -> Any:
        return np.ones((16, 4 + index), np.float32), np.ones((16, 2 + index // 2), np.float32)

    spec = (lp.ArraySpec((None, None), "float32"), lp.ArraySpec((None, 2), "float32"))
    for made, good in (
        (lp.Loader(range(16), wider, batch_size=4, workers=0), 2),
        (lp.Loader(range(3), elements, batch_size=None, workers=0, element_spec=spec), 2),
    ):
        with made:
            batches = batches_of(made.for_keras())
            for _ in range(good):
                next(batches)
            with pytest.raises(lp.SpecMismatchError, match=r"component \[1\].*3.*2") as raised:
                next(batches)
            assert "component [0]" not in str(raised.value)


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
def parts_of_a_sparse_matrix_make_it_again() -> None:
    """The same tests, by what the refusal says to return."""
    matrices = [sparse.random(3, 5, density=0.4, dtype="float32", random_state=seed) for seed in range(3)]

    def parts(index: int) -> Any:
        c = matrices[index].tocoo()
        return c.row, c.col, c.data, c.shape

    with lp.Loader(range(3), parts, batch_size=None, workers=1) as made:
        for matrix, batch in zip(matrices, batches_of(made.for_keras()), strict=True):
            row, column, data, shape = keras.tree.map_structure(keras.ops.convert_to_numpy, batch)
            again = sparse.coo_matrix((data, (row, column)), tuple(map(int, shape)))
            assert (again.toarray() == matrix.toarray()).all()


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
def weights_of_classes_stand_beside_their_rows() -> None:
    """test_class_weight, test_class_weights_*, test_class_weight_to_sample_weights, and what is refused with them."""
    labels = np.array([0, 1, 2, 1, 3, 0])
    forms: dict[str, Any] = {
        "plain": lambda y: np.int64(y),
        "column": lambda y: np.int32([y]),
        "one-hot": lambda y: np.eye(4)[y],
    }
    for form in forms.values():

        def fn(index: int, form: Any = form) -> Any:
            return np.full(5, index), form(labels[index])

        with lp.Loader(range(6), fn, batch_size=4, workers=0) as made:
            for weights in ({0: 2.0, 1: 1.0, 2: 3.0}, {}):
                rows = [
                    (int(x[0]), float(weight))
                    for batch in batches_of(made.for_keras(class_weight=weights))
                    for x, weight in zip(*(keras.ops.convert_to_numpy(batch[part]) for part in (0, 2)), strict=True)
                ]
                assert rows == [(i, weights.get(int(labels[i]), 1.0)) for i in range(6)]
    for refused in (
        lambda i: (np.zeros(4), {"a": i, "b": i}),
        lambda i: (np.zeros(4), (i, i)),
        lambda i: (np.zeros(4), i, 1.0),
        lambda i: np.zeros(4),
    ):
        with (
            lp.Loader(range(4), refused, batch_size=2, workers=0) as made,
            pytest.raises(lp.ArgumentError, match=re.escape("pairs (x, y), with one array of classes")),
        ):
            next(batches_of(made.for_keras(class_weight={0: 2.0})))


@case
def predictions_keep_their_order_whatever_the_batches() -> None:
    """test_predict_preserve_order, test_predict_generator, test_nested_input_predict, test_predict_flow_struct."""

    def uneven() -> Iterator[Any]:
        start = 0
        for size in (2, 3, 4) * 3:
            yield np.arange(start, start + size, dtype=np.int32)
            start += size

    numbers = keras.Input(())
    for executions in (1, 5) if BACKEND != "torch" else (1,):
        predicting = keras.Model(numbers, {"same": keras.layers.Identity()(numbers), "twice": numbers * 2})
        predicting.compile("sgd", "mse", steps_per_execution=executions)
        with lp.Loader.from_generator(uneven, batch_size=None, workers=1) as made, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*ran out of data")
            found = predicting.predict(made.for_keras(), verbose=0)
        assert found["same"].tolist() == list(range(27)) and (found["twice"] == 2 * found["same"]).all()


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
