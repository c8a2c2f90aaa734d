"""The `repr` of loaders, views, iterators and pools, as users or Keras print it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child


def pair(item: int) -> Any:
    return np.float32([item]), np.float32([item])


def test_an_iterator_has_a_length_and_a_repr() -> None:
    iterator = iter(lp.Loader(range(10), pair, batch_size=4, workers=0))
    assert len(iterator) == 3
    assert "10 items" in repr(iterator) and "for_keras()" in repr(iterator)


def test_an_iterator_of_a_stream_has_no_length() -> None:
    stream = iter(lp.Loader(iter(range(10)), batch_size=4, workers=0))
    assert "a stream" in repr(stream) and stream
    with pytest.raises(TypeError, match="the number of batches is unknown"):
        len(stream)


def test_the_repr_of_a_pool_has_its_workers() -> None:
    pool = lp.Pool(2)
    assert repr(pool) == "<loaderpool.Pool: 2 workers>"
    pool.close()
    assert repr(pool) == "<loaderpool.Pool: closed>"


@pytest.mark.usefixtures("tf")
def test_views_for_frameworks_have_a_repr_and_where_known_a_length() -> None:
    pytest.importorskip("keras")
    with lp.Loader(range(10), pair, batch_size=4, workers=0) as loader:
        assert len(loader.tensors()) == len(loader.for_keras()) == 3
        assert len(loader.for_keras(epochs=2)) == 6
        assert "10 items" in repr(loader.tensors()) and "for_keras()" in repr(loader.tensors())
        assert "10 items" in repr(loader.for_keras())
        with pytest.raises(TypeError, match="has no end"):
            len(loader.for_keras(epochs=None))
        assert loader.for_keras(epochs=None)


def test_what_fit_cannot_take_says_what_to_write() -> None:
    pytest.importorskip("tensorflow")

    def body() -> None:
        import keras
        import numpy as np

        import loaderpool as lp

        loader = lp.Loader(
            range(8), lambda item: (np.float32([item]), np.float32([item])), batch_size=4, workers=0
        )
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for given in (loader, iter(loader), loader.tensors(), iter(loader.tensors())):
            said = "taken"
            try:
                model.fit(given, verbose=0)
            except Exception as error:
                said = str(error)
            assert "model.fit(loader.for_keras())" in said, said
        assert model.fit(loader.for_keras(), verbose=0).params["steps"] == 2

    run_child(body, env={"KERAS_BACKEND": "tensorflow"}, imported="tensorflow").check()
