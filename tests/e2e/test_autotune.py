"""`workers="auto"` in true trainings, with looks and windows a tenth as long as they are for users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.autotune import windows
from loaderpool.trainer.epochs import step_times


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_MARK_NS", 200_000_000)
    monkeypatch.setattr(windows, "_LEAST_S", 0.6)


def slow(item: int, rng: np.random.Generator) -> np.ndarray:
    """Waits for 10 ms, as for a server."""
    time.sleep(0.01)
    return np.full(8, item + rng.random(), np.float64)


def train(batches: Iterator[np.ndarray], step_s: float, until: float, is_enough: object = None) -> list[np.ndarray]:
    """Take batches as a training would, for some seconds; `is_enough()` ends it before."""
    taken, begun_s = [], time.monotonic()
    for batch in batches:
        taken.append(batch.copy())
        time.sleep(step_s)
        if time.monotonic() - begun_s > until or (callable(is_enough) and is_enough()):
            break
    return taken


def test_it_has_more_workers_where_training_waits_and_batches_are_the_same() -> None:
    settings = {"batch_size": 8, "shuffle": True, "seed": 3}
    with lp.Loader(range(100_000), slow, workers=lp.Auto(max=8, start=1), **settings) as loader:
        assert loader.workers == 1
        batches = train(iter(loader), 0.02, 40.0, lambda: loader.workers >= 4)  # 80 ms of work, and steps of 20 ms
        assert loader.workers >= 4
        decisions = loader.statistics().decisions
        assert decisions[0].workers_before == 1
        assert decisions[-1].workers == loader.workers
        assert "training waited" in decisions[0].reason
        assert "SOURCE WAITS" not in str(loader.explain(1.0)) or "by itself" in str(loader.explain(1.0))
    with lp.Loader(range(100_000), slow, workers=0, **settings) as here:
        for batch, expected in zip(batches[:20], here, strict=False):
            np.testing.assert_array_equal(batch, expected)


def test_it_takes_back_workers_that_a_training_does_not_need() -> None:
    def fast(item: int) -> np.ndarray:
        time.sleep(0.001)
        return np.full(8, item)

    with lp.Loader(range(100_000), fast, batch_size=8, workers=lp.Auto(max=8, start=8)) as loader:
        train(iter(loader), 0.03, 40.0, lambda: loader.workers <= 2)
        assert loader.workers <= 2
        assert loader.statistics().decisions


def test_a_resize_by_hand_ends_it() -> None:
    with lp.Loader(range(100_000), slow, batch_size=8, workers=lp.Auto(max=8, start=1)) as loader:
        loader.resize(2)
        train(iter(loader), 0.005, 3.0)
        assert loader.workers == 2
        assert loader.statistics().decisions == ()


def test_a_number_of_workers_stays() -> None:
    with lp.Loader(range(100_000), slow, batch_size=8, workers=1) as loader:
        train(iter(loader), 0.005, 3.0)
        assert loader.workers == 1
        assert loader.statistics().decisions == ()


def test_loaders_of_a_pool_have_one_number() -> None:
    with (
        lp.Pool(lp.Auto(max=8, start=1)) as pool,
        lp.Loader(range(100_000), slow, batch_size=8, workers=pool) as training,
        lp.Loader(range(64), slow, batch_size=8, workers=pool) as validation,
    ):
        batches = iter(training)
        until_s = time.monotonic() + 40
        while pool.workers < 3 and time.monotonic() < until_s:
            train(batches, 0.02, 2.0)
            assert len(list(validation)) == 8
        assert pool.workers >= 3
        assert training.statistics().decisions == validation.statistics().decisions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min": 0}, "Auto.min must be at least 1, got 0"),
        ({"min": 3, "max": 2}, "Auto.max must be at least 3, got 2"),
        ({"max": 4, "start": 5}, "Auto.start must be at most 4, got 5"),
        ({"max": 2000}, "Auto.max must be at most 1024, got 2000"),
    ],
)
def test_bounds_are_checked(given: dict[str, int], said: str) -> None:
    with pytest.raises(lp.ArgumentError, match=said):
        lp.Auto(**given)


def test_bounds_are_whole_numbers() -> None:
    with pytest.raises(lp.ArgumentTypeError, match=r"Auto.min must be a whole number, got 1.5"):
        lp.Auto(1.5)  # type: ignore[arg-type]
    with pytest.raises(lp.ArgumentTypeError, match="most"):
        lp.Auto(most=3)  # type: ignore[call-arg]


def test_bench_measures_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loaderpool.tools.cli import main

    made = []

    def keep(*arguments: object, **settings: object) -> lp.Loader:
        made.append(lp.Loader(*arguments, **settings))  # type: ignore[arg-type]
        return made[-1]

    (tmp_path / "waits.py").write_text(
        "import loaderpool as lp\nfrom tests.e2e import test_autotune as t\n"
        "def make(): return t.KEEP[0](range(10**6), t.slow, batch_size=8, workers=lp.Auto(max=8, start=1))\n"
    )
    monkeypatch.setitem(KEEP, 0, keep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["bench", "waits:make", "--seconds", "3"]) == 0
    assert "1 worker" in capsys.readouterr().out
    assert made[0]._core.pool._autotuned.decisions == ()


KEEP: dict[int, object] = {}
