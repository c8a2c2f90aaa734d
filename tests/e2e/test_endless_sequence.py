"""A sequence without a number of batches: `num_batches = None`, or no length at all. A pass over it
has no end.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

pytestmark = [
    # loaded before the pool, so that its threads and files do not count as leaks
    pytest.mark.usefixtures("tf"),
    pytest.mark.corner,
]


class Unsized:
    """A sequence without a length."""

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 3), index, np.float32), np.zeros((2, 1), np.float32)


class Endless(Unsized):
    """A sequence that is endless in Keras' way."""

    num_batches = None


class Random(Endless):
    def __getitem__(self, index: int) -> Any:
        return np.random.normal(size=(2, 3))


def numbers(batches: Any, count: int) -> list[int]:
    return [int(np.asarray(x)[0, 0]) for x, _ in itertools.islice(batches, count)]


@pytest.fixture(params=["workers", "this process"])
def where(request: pytest.FixtureRequest, pool: lp.Pool) -> dict[str, Any]:
    return {"workers": pool} if request.param == "workers" else {"workers": 0}


@pytest.mark.parametrize("make", [Unsized, Endless])
def test_batches_come_by_their_number_until_the_consumer_stops(
    make: type, where: dict[str, Any]
) -> None:
    with lp.Loader.from_sequence(make(), **where) as loader:
        batches = iter(loader)
        assert numbers(batches, 300) == list(range(300))
        assert numbers(batches, 300) == list(range(300, 600))
        # each pass starts at the beginning, as each fit does
        assert numbers(loader, 20) == list(range(20))
        with pytest.raises(
            TypeError, match=r"endless sequence has no length. Pass steps_per_epoch"
        ):
            len(loader)
        assert "endless sequence" in repr(loader)
        assert not loader.statistics().notes


def test_in_any_order_each_batch_comes_once(pool: lp.Pool) -> None:
    with lp.Loader.from_sequence(Endless(), deterministic=False, workers=pool) as loader:
        batches, seen = iter(loader), set[int]()
        while not seen >= set(
            range(300)
        ):  # one worker may be any number of batches behind the other
            [number] = numbers(batches, 1)
            assert number not in seen
            seen.add(number)


def test_it_goes_on_at_the_very_batch(where: dict[str, Any]) -> None:
    with lp.Loader.from_sequence(Random(), seed=3, **where) as loader:
        batches = iter(loader)
        first = [next(batches).copy() for _ in range(7)]
        state = batches.state_dict()
        rest = [next(batches).copy() for _ in range(30)]
    assert len({batch.tobytes() for batch in first + rest}) == 37
    for settings in ({"workers": 1}, {"workers": 0}):
        with lp.Loader.from_sequence(Random(), seed=3, **settings) as again:
            again.load_state_dict(state)
            batches = iter(again)
            assert all(np.array_equal(next(batches), batch) for batch in rest)
            assert (
                np.array_equal(next(iter(again)), next(iter(again))) is False
            )  # later passes draw other numbers


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_deal_the_batches(where: dict[str, Any], shards: int) -> None:
    for shard in range(shards):
        with lp.Loader.from_sequence(Endless(), shard=lp.Shard(shards, shard), **where) as loader:
            batches = iter(loader)
            assert numbers(batches, 5) == [shard + shards * step for step in range(5)]
            state = batches.state_dict()
            assert not loader.statistics().notes
        with lp.Loader.from_sequence(Endless(), **where) as alone:
            alone.load_state_dict(state)
            assert numbers(alone, 3) == [5 * shards + step for step in range(3)]


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (
            Endless,
            {"shuffle": True},
            "shuffle=True shuffles the batches of an epoch, but Endless .* is endless",
        ),
        (Unsized, {"shuffle": 8}, "shuffle=8 shuffles .* Unsized"),
        (Endless, {"on_error": ("skip", 0.1)}, "the fraction 0.1"),
        (Endless, {"batch_size": 4}, "batch_size"),
        (
            type("Hooked", (Endless,), {"on_epoch_end": lambda self: None}),
            {},
            "Hooked is endless.* on_epoch_end",
        ),
        (
            type("Begun", (Unsized,), {"on_epoch_begin": lambda self: None}),
            {},
            "Begun is endless.* on_epoch_begin",
        ),
    ],
)
def test_what_needs_an_end_is_refused_by_name(
    make: type, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(lp.ArgumentError, match=text):
        lp.Loader.from_sequence(make(), workers=1, **settings)


def test_a_length_that_cannot_be_said_is_still_an_error() -> None:
    class Abstract(Unsized):
        def __len__(self) -> int:
            raise NotImplementedError

    with pytest.raises(lp.SourceError, match="Abstract does not report its number of batches"):
        lp.Loader.from_sequence(Abstract(), workers=0)


def test_an_error_budget_of_a_number_holds(where: dict[str, Any]) -> None:
    class Failing(Endless):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError("three")
            return super().__getitem__(index)

    with lp.Loader.from_sequence(Failing(), on_error=("skip", 1), **where) as loader:
        assert numbers(loader, 6) == [0, 1, 2, 4, 5, 6]


# ---- TensorFlow and Keras ----


def seen_by_fit(data: Any, steps: int, epochs: int, **settings: Any) -> list[int]:
    """Return the numbers of the batches in a training's steps."""
    import keras

    seen: list[int] = []

    class Recording(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            seen.append(int(data[0][0, 0]))
            return {"loss": data[0][0, 0]}

    model = Recording()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(data, steps_per_epoch=steps, epochs=epochs, verbose=0, **settings)
    return seen


def test_fit_is_given_the_batches_that_keras_gives_it(tf: Any, where: dict[str, Any]) -> None:
    import keras

    class Keras(Unsized, keras.utils.PyDataset):  # type: ignore[misc]
        @property
        def num_batches(self) -> None:
            return None

    direct = seen_by_fit(Keras(), steps=4, epochs=3)
    assert direct == list(range(12))  # the next epoch continues
    with lp.Loader.from_sequence(Keras(), **where) as loader:
        assert seen_by_fit(loader.for_keras(), steps=4, epochs=3) == direct
        for settings in ({}, {"epochs": 2}, {"epochs": None}, {"prefetch": 0}):
            dataset = loader.as_dataset(**settings)
            assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
            assert seen_by_fit(dataset, steps=4, epochs=3) == direct
            # each fit starts at the beginning
            assert seen_by_fit(dataset, steps=4, epochs=1) == direct[:4]
