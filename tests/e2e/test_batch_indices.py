"""`batch_indices=True`: each batch comes with the source indices of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.element.spec import RaggedArray
from tests.support.batches import assert_same, read
from tests.support.frameworks import FRAMEWORKS, Framework

ITEMS = 90
LENGTHS = [1 + item % 4 for item in range(ITEMS)]


def sample(item: int) -> Any:
    return {"item": item, "square": np.float32(item**2)}


def varying(item: int) -> Any:
    return item, np.full(LENGTHS[item], item)


def failing(item: int) -> int:
    if item % 5 == 2 or 40 <= item < 56:
        raise ValueError(item)
    return item


def whole(items: list[int]) -> Any:
    return np.array(items), np.zeros((len(items), 3))


def weights(epoch: int) -> Any:
    return np.arange(ITEMS) ** epoch


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"fn": sample, "batch_size": 7},
    "tiny": lambda: {"fn": sample, "batch_size": 1, "shuffle": True},
    "shuffle": lambda: {"fn": sample, "batch_size": 8, "shuffle": True},
    "shard": lambda: {"fn": sample, "batch_size": 4, "shuffle": True, "shard": lp.Shard(3, 1)},
    "weights": lambda: {"fn": sample, "batch_size": 8, "order": lp.Weighted(weights)},
    "batches": lambda: {"fn": sample, "order": [[3, 1], [4], [1, 5, 9]]},
    "buckets": lambda: {"fn": sample, "shuffle": True, "buckets": lp.Buckets(LENGTHS, [2], [6, 4])},
    "padded": lambda: {"fn": varying, "batch_size": 8, "pad": True, "shuffle": True},
    "ragged": lambda: {"fn": varying, "batch_size": 8, "ragged": True},
    "batch_fn": lambda: {"batch_fn": whole, "batch_size": 8, "shuffle": True},
    "element": lambda: {"fn": sample, "batch_size": None, "shuffle": True},
    "no function": lambda: {"batch_size": 8, "shuffle": True},
}


def loader(kind: str, **more: Any) -> lp.Loader:
    return lp.Loader(range(ITEMS), **{"batch_indices": True, "workers": 0, **KINDS[kind](), **more})


@pytest.mark.parametrize("kind", ["in order", "tiny", "batches", "buckets"])
@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_include_the_indices(kind: str, workers: int) -> None:
    with loader(kind, workers=workers) as pairs:
        got = read(pairs)
        expected = sum(part.nbytes for indices, batch in got for part in (indices, *batch.values()))
        assert pairs.statistics().bytes == expected


def items_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        batch = batch["item"]
    if isinstance(batch, tuple):
        batch = batch[0]
    return np.atleast_1d(batch.values if isinstance(batch, RaggedArray) else batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_are_those_of_the_rows(kind: str, workers: int) -> None:
    with loader(kind, workers=workers) as each, loader(kind, batch_indices=False) as plain:
        for epoch in range(2):
            got = read(each)
            assert_same([batch for _, batch in got], read(plain))
            for number, (indices, batch) in enumerate(got):
                assert indices.dtype == np.int64
                assert indices.tolist() == items_of(batch).tolist()
                assert indices.tolist() == each.indices(epoch, number).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_epoch_has_its_indices(kind: str) -> None:
    with loader(kind) as each, loader(kind) as other:
        iterator = iter(each)
        next(iterator)
        other.load_state_dict(each.state_dict())
        assert_same(read(other), read(iterator))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("action", ["skip", "replace"])
def test_rows_that_fail_have_no_indices(workers: int, action: str) -> None:
    settings: dict[str, Any] = {"batch_size": 18, "on_error": action, "workers": workers}
    for shuffle in (False, True):
        with lp.Loader(
            range(ITEMS), failing, shuffle=shuffle, batch_indices=True, **settings
        ) as each:
            got = read(each)
            assert got
            for indices, items in got:
                assert indices.tolist() == items.tolist()


def test_unordered_batches_have_their_own_indices() -> None:
    with loader("tiny", workers=3, deterministic=False) as each:
        got = read(each)
        assert sorted(int(indices[0]) for indices, _ in got) == [*range(ITEMS)]
        for indices, batch in got:
            assert indices.tolist() == items_of(batch).tolist()


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    found = FRAMEWORKS[request.param]
    pytest.importorskip(found.name)
    found.load()
    return found


def test_views_have_tensors_of_indices(framework: Framework) -> None:
    for kind in ("in order", "tiny", "padded", "element"):
        with loader(kind, workers=1) as each:
            count = 0
            for pair in framework.view(each):
                indices, batch = framework.arrays(pair)
                assert indices.tolist() == items_of(batch).tolist()
                assert indices.ndim == 1
                count += 1
            assert count == len(each)


@pytest.mark.parametrize("kind", ["in order", "tiny", "padded", "batch_fn", "element"])
def test_datasets_have_the_spec_of_pairs(tf: Any, kind: str) -> None:
    with loader(kind, workers=1) as each:
        spec = each.element_spec
        assert isinstance(spec, tuple)
        assert (spec[0].dtype, len(spec[0].shape)) == (np.int64, 1)
        dataset = each.as_dataset()
        assert dataset.element_spec[0].dtype == tf.int64
        got = list(dataset.as_numpy_iterator())
        assert len(got) == len(each)
        for indices, batch in got:
            assert indices.tolist() == items_of(batch).tolist()


def test_keras_refuses_indices_by_name(tf: Any) -> None:
    with loader("in order") as each, pytest.raises(lp.ArgumentError, match="train on as_dataset"):
        each.for_keras()


def test_streams_and_generators_refuse_indices_by_name() -> None:
    with pytest.raises(lp.ArgumentError, match="batch_indices=True needs a source with __len__"):
        lp.Loader(itertools.count(), batch_indices=True, workers=0)
    with pytest.raises(lp.ArgumentError, match="batch_indices=True needs a source with __len__"):
        lp.Loader.from_generator(lambda: iter([1]), batch_indices=True, workers=0)


def test_weights_may_follow_from_the_losses_of_the_epoch() -> None:
    """Hard items come more often in the next epoch."""
    hard = {3, 50, 71}
    factors = np.ones(ITEMS)
    order = lp.Weighted(factors, num_samples=900)
    with lp.Loader(
        range(ITEMS), sample, batch_size=30, order=order, batch_indices=True, workers=2
    ) as each:
        for indices, batch in each:
            losses = np.isin(batch["item"], [*hard]) * 10 + 0.01
            factors[indices] = losses
        drawn = np.concatenate([indices for indices, _ in read(each)])
    assert np.isin(drawn, [*hard]).mean() > 0.8
