"""Streams through tf.data, and tf.data as a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_streams import BATCH
from tests.support.batches import Place, assert_same, read
from tests.support.child import run_child
from tests.support.streams import Numbers, make


def test_through_tf_data(on: Place, tf: Any) -> None:
    with lp.Loader(Numbers(), make, batch_size=BATCH, workers=0) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(Numbers(), make, batch_size=BATCH, **on(2)) as loader:
        dataset = loader.as_dataset(epochs=2)
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
        got = [tuple(np.array(part) for part in batch) for batch in dataset]
        assert_same(got, expected)
        state = loader.state_dict(batches_taken=5)
    with lp.Loader(Numbers(), make, batch_size=BATCH, **on(2)) as loader:
        loader.load_state_dict(state)
        got = [tuple(np.array(part) for part in batch) for batch in loader.as_dataset(epochs=2)]
        assert_same(got, expected[5:])


def test_a_dataset_as_a_source(on: Place, tf: Any) -> None:
    numbers = tf.data.Dataset.range(50).map(lambda n: {"n": n, "text": tf.strings.as_string(n)})

    def upper(item: Any) -> Any:
        return item["n"], item["text"] + b"!"

    with lp.Loader(numbers.as_numpy_iterator(), upper, batch_size=BATCH, **on(2)) as loader:
        got = read(loader)
    assert np.concatenate([batch[0] for batch in got]).tolist() == list(range(50))
    assert got[0][1][3] == b"3!"
    with pytest.raises(lp.SourceError, match="as_numpy_iterator"):
        lp.Loader(numbers, workers=0)


def test_the_trainer_ends_while_tensorflow_gives_items(tf: Any) -> None:
    script = """
        import numpy as np, tensorflow as tf
        import loaderpool as lp
        endless = tf.data.Dataset.range(10**12).map(lambda n: tf.random.normal([100]) + tf.cast(n, tf.float32))
        loader = lp.Loader(endless.as_numpy_iterator(), batch_size=8, workers=1)
        for _, batch in zip(range(5), loader.as_dataset()):
            assert batch.shape == (8, 100)
        batches = iter(loader)
        print("read")
        1 / 0
    """
    result = run_child(script)
    assert result.stdout == "read\n"
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr, result.stderr
