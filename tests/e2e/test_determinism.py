"""Bits depend on epoch and seed only; and the epoch of each pass."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, indices_in, read
from tests.support.draws import generators_left_alone
from tests.support.samples import batch_of_noise

pytestmark = pytest.mark.corner


def draw_python(index: int) -> Any:
    return index, random.random(), random.gauss(0, 1)


def draw_numpy(index: int) -> Any:
    return {"index": index, "normal": np.random.normal(size=3), "one": np.random.normal()}


def draw_own(index: int, rng: np.random.Generator) -> Any:
    return {
        "index": index,
        "noise": rng.standard_normal((2, 3), np.float32),
        "choice": rng.integers(1000),
    }


def draw_length(index: int, rng: np.random.Generator) -> Any:
    return rng.integers(0, 255, size=int(rng.integers(0, 9)), dtype=np.uint8)


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"fn": None, "shuffle": True},
    "random": {"fn": draw_python},
    "numpy.random": {"fn": draw_numpy, "shuffle": True},
    "rng": {"fn": draw_own, "shuffle": True},
    "ragged": {"fn": draw_length, "ragged": True, "shuffle": True},
    "batch_fn with rng": {"batch_fn": batch_of_noise, "shuffle": True},
}
SIZE = 95


def make(name: str, **place: Any) -> lp.Loader:
    return lp.Loader(range(SIZE), **{"batch_size": 6, "seed": 3, **LOADERS[name], **place})


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Return two epochs of each loader, made in this process."""
    return {name: read(make(name, workers=0), passes=2) for name in LOADERS}


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_differ_and_the_seed_repeats_them(expected: dict[str, list[Any]], name: str) -> None:
    epochs = expected[name]
    first, second = epochs[: len(epochs) // 2], epochs[len(epochs) // 2 :]
    with pytest.raises(AssertionError):
        assert_same(first, second)
    assert_same(read(make(name, workers=0), passes=2), epochs)
    with pytest.raises(AssertionError):
        assert_same(read(make(name, workers=0, seed=4)), first)


def test_samples_of_one_epoch_draw_different_numbers(expected: dict[str, list[Any]]) -> None:
    noise = np.concatenate([batch["noise"].reshape(-1, 6) for batch in expected["rng"]])
    assert len(np.unique(noise, axis=0)) == 2 * SIZE
    drawn = np.concatenate([batch[1] for batch in expected["random"]])
    assert len(np.unique(drawn)) == 2 * SIZE


def test_the_callers_own_generators_are_left_alone() -> None:
    with generators_left_alone():
        read(make("random", workers=0, seed_globals=True))
        read(make("random", workers=0))


# ---- epochs ----


PLAN: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 9}


@pytest.fixture(scope="module")
def starts() -> list[list[int]]:
    """Indices of the first batch of each of eight epochs."""
    reference = lp.Loader(range(40), **PLAN, workers=0)
    return [indices_in([next(iter(reference))]) for _ in range(8)]


any_workers = pytest.mark.parametrize("workers", [0, 1, 2])


@any_workers
def test_an_iterator_without_a_delivery_uses_no_epoch(
    on: Place, workers: int, starts: list[list[int]]
) -> None:
    loader = lp.Loader(range(40), **PLAN, **on(workers))
    unread = iter(loader)
    assert (loader.epoch, unread.epoch) == (0, -1)
    assert indices_in([next(iter(loader))]) == starts[0]


@any_workers
def test_an_unfinished_pass_counts_as_an_epoch(
    on: Place, workers: int, starts: list[list[int]]
) -> None:
    loader = lp.Loader(range(40), **PLAN, **on(workers))
    for batch in loader:
        assert indices_in([batch]) == starts[0]
        break
    assert loader.epoch == 1
    assert indices_in(read(loader)[:1]) == starts[1]
    assert loader.epoch == 2


@any_workers
def test_concurrent_iterators_have_different_epochs(
    on: Place, workers: int, starts: list[list[int]]
) -> None:
    loader = lp.Loader(range(40), **PLAN, **on(workers))
    one, other = iter(loader), iter(loader)
    assert [indices_in([next(each)]) for each in (one, other)] == starts[:2]
    assert (one.epoch, other.epoch) == (0, 1)


@any_workers
def test_setting_the_epoch_decides_the_next_pass(
    on: Place, workers: int, starts: list[list[int]]
) -> None:
    loader = lp.Loader(range(40), **PLAN, **on(workers))
    for epoch in (1, 7, 3):  # 7 and 3 are set while another epoch is prefetched
        loader.epoch = epoch
        assert indices_in(read(loader)[:1]) == starts[epoch]
        assert loader.epoch == epoch + 1
