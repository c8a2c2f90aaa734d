"""`workers="auto"` in real trainings, with ten times shorter intervals than for users."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.config import Auto
from loaderpool.trainer import autotune, counters
from tests.support.samples import noisy_vector


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_MARK_NS", 200_000_000)
    monkeypatch.setattr(autotune, "_WHOLE_S", 0.6)


def train(
    batches: Iterator[np.ndarray], step_s: float, until: float, is_enough: object = None
) -> list[np.ndarray]:
    """Take batches like a training, for some seconds, or until `is_enough()` returns True."""
    taken, begun_s = [], time.monotonic()
    for batch in batches:
        taken.append(batch.copy())
        time.sleep(step_s)
        if time.monotonic() - begun_s > until or (callable(is_enough) and is_enough()):
            break
    return taken


def begins_with(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the first number of workers, whatever the number of CPUs."""
    monkeypatch.setattr(Auto, "first", lambda bounds, *_: workers)


def test_it_has_more_workers_where_training_waits_and_batches_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins_with(1, monkeypatch)
    settings = {"batch_size": 8, "shuffle": True, "seed": 3}
    with lp.Loader(range(100_000), noisy_vector, workers=(1, 8), **settings) as loader:
        assert loader.workers == 1
        batches = train(
            iter(loader), 0.02, 40.0, lambda: loader.workers >= 4
        )  # 80 ms of work, and steps of 20 ms
        assert loader.workers >= 4
        decisions = loader.statistics().decisions
        assert decisions[0].workers_before == 1
        assert decisions[-1].workers == loader.workers
        assert "training waited" in decisions[0].reason
        assert "SOURCE WAITS" not in str(loader.explain(1.0)) or "by itself" in str(
            loader.explain(1.0)
        )
    with lp.Loader(range(100_000), noisy_vector, workers=0, **settings) as here:
        for batch, expected in zip(batches[:20], here, strict=False):
            np.testing.assert_array_equal(batch, expected)


def test_it_takes_back_workers_that_a_training_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins_with(8, monkeypatch)

    def fast(item: int) -> np.ndarray:
        time.sleep(0.001)
        return np.full(8, item)

    with lp.Loader(range(100_000), fast, batch_size=8, workers=(1, 8)) as loader:
        train(iter(loader), 0.03, 40.0, lambda: loader.workers <= 2)
        assert loader.workers <= 2
        assert loader.statistics().decisions


def test_a_number_of_workers_stays_also_one_that_is_set_by_hand() -> None:
    with lp.Loader(range(100_000), noisy_vector, batch_size=8, workers=(1, 8)) as loader:
        loader.resize(2)
        train(iter(loader), 0.005, 2.0)
        assert (loader.workers, loader.statistics().decisions) == (2, ())
    with lp.Loader(range(100_000), noisy_vector, batch_size=8, workers=1) as loader:
        train(iter(loader), 0.005, 2.0)
        assert (loader.workers, loader.statistics().decisions) == (1, ())
