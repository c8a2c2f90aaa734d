"""Streams, buckets and samples of varied shape through tf.data: its batches, and the place at which
a consumer continues.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_resume import SHAPES, over_json, plain, take
from tests.e2e.test_streams import BATCH
from tests.support.batches import Place, assert_same, read
from tests.support.child import run_child

# loaded before the pools, so that its threads and files do not count as leaks
pytestmark = pytest.mark.usefixtures("tf")


# ---- saved places: they count what the consumer has taken, not what tf.data has fetched ----


@pytest.mark.parametrize("name", ["samples", "tiny", "skip"])
def test_the_consumer_counts(on: Place, name: str) -> None:
    make = SHAPES[name]
    with make(workers=0) as reference:
        expected = [plain(batch) for _ in range(3) for batch in reference]
    with make(**on(2)) as loader:
        stream = loader.as_dataset(epochs=3).as_numpy_iterator()
        taken = len(expected) // 2 + 1
        got = take(stream, taken)
        with pytest.raises(lp.StateError, match="batches_taken"):
            loader.state_dict()
        state = over_json(loader.state_dict(batches_taken=taken))
        assert got == expected[:taken]
        del stream
    with make(**on(1)) as again:
        again.load_state_dict(state)
        dataset = again.as_dataset(epochs=2)
        if name != "skip":
            assert len(dataset) == len(expected) - taken
        assert take(dataset.as_numpy_iterator(), 10**6) == expected[taken:]


def test_a_dataset_has_one_length(on: Place, tf: Any) -> None:
    with SHAPES["in order"](**on(1)) as loader:
        early = loader.as_dataset()
        batches = iter(loader)
        take(batches, 3)
        loader.load_state_dict(batches.state_dict())  # type: ignore[attr-defined]
        rest = loader.as_dataset()
        assert len(rest) == len(loader) - 3
        with pytest.raises(tf.errors.OpError, match="made before load_state_dict"):
            list(early)
        assert len(list(rest)) == len(loader) - 3
        with pytest.raises(tf.errors.OpError, match="length of another epoch"):
            list(rest)
        assert len(list(early)) == len(loader)


# ---- streams ----


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


@pytest.mark.slow
def test_the_trainer_ends_while_tensorflow_gives_items() -> None:
    result = run_child("""
        import numpy as np, tensorflow as tf
        import loaderpool as lp
        endless = tf.data.Dataset.range(10**12).map(lambda n: tf.random.normal([100]) + tf.cast(n, tf.float32))
        loader = lp.Loader(endless.as_numpy_iterator(), batch_size=8, workers=1)
        for _, batch in zip(range(5), loader.as_dataset()):
            assert batch.shape == (8, 100)
        batches = iter(loader)
        print("read")
        1 / 0
    """)
    assert result.stdout == "read\n"
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr, result.stderr


# ---- buckets and varied shapes ----


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(
    ("boundaries", "sizes"), [([5, 12, 20], [4, 3, 2, 5]), ([3, 4, 40], [2, 3, 4, 5])]
)
def test_buckets_without_shuffle_are_what_tf_data_makes(
    tf: Any, on: Place, boundaries: list[int], sizes: list[int], drop_remainder: bool
) -> None:
    """The same buckets and batches in the same order, with the remainders."""
    items = [np.arange(1, 1 + n) for n in np.random.default_rng(3).integers(0, 30, 200)]
    dataset = tf.data.Dataset.from_generator(lambda: iter(items), tf.int64, [None])
    dataset = dataset.bucket_by_sequence_length(
        tf.size, boundaries, sizes, padding_values=np.int64(-1), drop_remainder=drop_remainder
    )
    expected = [batch.numpy() for batch in dataset]
    how: dict[str, Any] = {
        "buckets": lp.Buckets([len(item) for item in items], boundaries, sizes),
        "drop_remainder": drop_remainder,
    }
    with lp.Loader(items, None, pad=-1, **how, **on(2)) as loader:
        assert_same(read(loader), expected)
        ours = loader.as_dataset()
        assert ours.cardinality().numpy() == len(loader) == len(expected)
        assert_same([batch.numpy() for batch in ours], expected)


def labelled(index: int) -> Any:
    length = 1 + index % 4
    words = np.array(["a", "bé", "", "d"][:length])
    return {
        "x": np.full(length, index + 1, np.float32),
        "y": np.full(length, index, np.int32),
        "words": words,
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_each_component_is_padded_with_its_own_value(tf: Any, on: Place, workers: int) -> None:
    """The same batches as tf.data's `padded_batch`, also with text."""
    pad = {"x": np.nan, "y": -1, "words": None}
    types = {"x": tf.float32, "y": tf.int32, "words": tf.string}
    dataset = tf.data.Dataset.from_generator(
        lambda: map(labelled, range(18)),
        output_signature={name: tf.TensorSpec([None], types[name]) for name in types},
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


def test_ragged_text_is_a_ragged_tensor(tf: Any, on: Place) -> None:
    def fn(index: int) -> Any:
        return {
            "words": np.array(["a", "bé", "c\0d"][: index % 4], "U3"),
            "n": index,
            "two": np.array([b"x", b"y"]),
        }

    with lp.Loader(range(12), fn, batch_size=5, ragged=True, **on(2)) as loader:
        spec = loader.element_spec
        assert (spec["words"].ragged, spec["two"].ragged, spec["two"].shape) == (
            True,
            False,
            (None, 2),
        )
        batches = list(loader)
        assert all(isinstance(batch["words"], lp.RaggedArray) for batch in batches)
        rows = [row.tolist() for batch in batches for row in batch["words"]]
        assert rows == [fn(index)["words"].tolist() for index in range(12)]
        dataset = loader.as_dataset(epochs=1)
        assert dataset.element_spec["words"] == tf.RaggedTensorSpec(
            (None, None), tf.string, 1, tf.int64
        )
        got = [row for element in dataset for row in element["words"].to_list()]
        assert got == [[word.encode() for word in row] for row in rows]
