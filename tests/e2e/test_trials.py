"""Trials with fewer workers in real trainings, and events during a trial. Snapshots are more
frequent than for users.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.board import Board
from loaderpool.trainer import counters
from loaderpool.trainer.explain import trials
from loaderpool.trainer.explain.verdicts import Verdict
from tests.support.batches import kill_supervisor
from tests.support.samples import noisy_vector

SETTINGS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3}
LONG_S = 60.0  # long enough if other tests run


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_MARK_NS", 200_000_000)
    monkeypatch.setattr(trials, "_logs", {})


def locked(path: Path) -> Callable[..., np.ndarray]:
    """Each call holds a lock of all workers for 8 ms."""

    def sample(item: int, rng: np.random.Generator) -> np.ndarray:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.008)
        return np.full(8, item + rng.random())

    return sample


def board_of(loader: lp.Loader) -> Board:
    board: Board = loader._core.engine.pool.arena.board  # type: ignore[union-attr]
    return board


def begin_trial(loader: lp.Loader, milliseconds: int = 2000) -> None:
    board = board_of(loader)
    board.trial_ms = milliseconds
    board.trials += 1


def is_over(loader: lp.Loader) -> bool:
    board = board_of(loader)
    return board.trials == board.trials_over


def take(
    batches: Iterator[Any], until: Callable[[], bool], seconds: float = LONG_S
) -> list[np.ndarray]:
    """Take batches until a condition is true."""
    taken, begun_s = [], time.monotonic()
    for batch in batches:
        taken.append(batch.copy())
        if until():
            return taken
        assert time.monotonic() - begun_s < seconds
    raise AssertionError("the epoch is over")


def assert_same(batches: list[np.ndarray]) -> None:
    """Compare the batches with those of a training without workers."""
    quick = lp.Loader(
        range(100_000), lambda item, rng: np.full(8, item + rng.random()), workers=0, **SETTINGS
    )
    with quick:
        for batch, expected in zip(batches, quick, strict=False):
            np.testing.assert_array_equal(batch, expected)


def test_a_lock_that_workers_share_is_told_with_the_number_that_suffices(tmp_path: Path) -> None:
    with lp.Loader(range(100_000), locked(tmp_path / "lock"), workers=4, **SETTINGS) as loader:
        batches = take(iter(loader), lambda: loader.explain().verdict is Verdict.SOURCE_LIMIT)
        told = loader.explain()
        assert "as fast as 4. Something that workers share is the limit" in told.why
        assert told.change.startswith('lp.Loader(..., cache="memory")')
    assert_same(batches)


def test_a_function_that_waits_is_not_told_to_have_a_limit() -> None:
    with lp.Loader(range(100_000), noisy_vector, workers=4, **SETTINGS) as loader:
        batches = take(iter(loader), lambda: board_of(loader).trials_over >= 1)
        told = loader.explain()
        assert told.verdict is not Verdict.SOURCE_LIMIT
        assert board_of(loader).trial_result().enough == 4
    assert_same(batches)


def test_no_trial_is_made_of_workers_that_loaderpool_chooses_nor_of_one() -> None:
    for workers in ((2, 4), 1):
        with lp.Loader(range(100_000), noisy_vector, workers=workers, **SETTINGS) as loader:
            begun_s = time.monotonic()
            take(iter(loader), lambda s=begun_s: time.monotonic() - s > 3.0)  # type: ignore[misc]
            assert board_of(loader).trials == 0


def kills_a_worker(loader: lp.Loader) -> None:
    pid = loader.statistics().workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kills_a_paused_worker(loader: lp.Loader) -> None:
    pid = loader.statistics().workers[-1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kills_the_supervisor(loader: lp.Loader) -> None:
    kill_supervisor(loader)


def resizes_up(loader: lp.Loader) -> None:
    loader.resize(6)


def resizes_down(loader: lp.Loader) -> None:
    loader.resize(1)


def nothing(loader: lp.Loader) -> None:
    pass


EVENTS = [
    nothing,
    kills_a_worker,
    kills_a_paused_worker,
    kills_the_supervisor,
    resizes_up,
    resizes_down,
]


@pytest.mark.parametrize("event", EVENTS)
def test_batches_are_the_same_whatever_happens_in_a_trial(
    event: Callable[[lp.Loader], None],
) -> None:
    with lp.Loader(range(100_000), noisy_vector, workers=4, **SETTINGS) as loader:
        loader._core.observer.tries_fewer = False
        batches, stream = [], iter(loader)
        batches += take(stream, lambda: len(board_of(loader).workers()) == 4)
        for pause in (
            0.7,
            1.3,
        ):  # the trial begins within a second, and pauses workers half a second later
            begin_trial(loader)
            begun_s = time.monotonic()
            batches += take(stream, lambda s=begun_s, p=pause: time.monotonic() - s > p)  # type: ignore[misc]
            event(loader)
            batches += take(stream, lambda: is_over(loader))
        batches += [next(stream).copy() for _ in range(20)]
        workers = loader.workers
        before = {worker.index: worker.samples for worker in loader.statistics().workers}
        batches += take(
            stream,
            lambda: (
                sum(
                    each.samples > before.get(each.index, 0) for each in loader.statistics().workers
                )
                == workers
            ),
        )  # all workers have work again
    assert_same(batches)


def test_a_trial_ends_with_its_iteration_and_the_next_one_has_all_workers() -> None:
    with lp.Loader(range(100_000), noisy_vector, workers=4, **SETTINGS) as loader:
        loader._core.observer.tries_fewer = False
        for _ in range(2):
            begin_trial(loader)
            begun_s = time.monotonic()
            take(iter(loader), lambda s=begun_s: time.monotonic() - s > 1.3)  # type: ignore[misc]
        begun_s = time.monotonic()
        while not is_over(loader):  # although no batch is taken
            assert time.monotonic() - begun_s < LONG_S
            time.sleep(0.05)


def test_spawned_workers_have_trials_too() -> None:
    with (
        lp.Pool(workers=4, start="spawn") as pool,
        lp.Loader(range(100_000), noisy_vector, workers=pool, **SETTINGS) as loader,
    ):
        stream = iter(loader)
        batches = take(stream, lambda: board_of(loader).trials_over >= 1)
        assert board_of(loader).trial_result().workers == 4
    assert_same(batches)
