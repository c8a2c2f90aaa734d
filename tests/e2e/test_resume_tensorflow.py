"""Resume through tf.data, which fetches ahead: what counts is what the consumer has taken."""

from __future__ import annotations

from typing import Any

import pytest

import loaderpool as lp
from tests.e2e.test_resume import SHAPES, over_json, plain, take
from tests.support.batches import Place

pytestmark = [
    pytest.mark.usefixtures("tf"),  # loaded before the pools: what it leaves is not theirs
]


def test_through_tf_data_the_consumer_counts(on: Place, tf: Any) -> None:
    for name in ("samples", "tiny", "skip"):
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
