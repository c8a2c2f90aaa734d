"""`headspace()` and pause tests: the same batches, and steps that workers do not slow down."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import loaderpool as lp


def computed(item: int, rng: np.random.Generator) -> np.ndarray:
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return np.full((8, 8), item + rng.random())


def trained(pauses: bool, step_s: float = 0.01, **settings: Any) -> tuple[list[float], lp.Loader]:
    taken = []
    with lp.Loader(range(10_000), computed, batch_size=4, shuffle=True, workers=2, **settings) as loader:
        for number, batch in enumerate(itertools.islice(loader, 120)):
            if pauses and number in (20, 60):
                loader.pause_test(8)
            taken.append(float(batch.sum()))
            time.sleep(step_s)
    return taken, loader


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_pause_test_changes_no_batch_and_ends_by_itself(deterministic: bool) -> None:
    with_pauses, loader = trained(pauses=True, deterministic=deterministic)
    without, _ = trained(pauses=False, deterministic=deterministic)
    if deterministic:
        assert with_pauses == without
    found = loader.headspace()
    assert found.quiet_steps >= 8
    assert found.quiet_step_s is not None and found.quiet_step_s >= 0.0099
    assert found.speedup is not None
    assert "workers at rest" in str(found)


def test_workers_do_nothing_meanwhile() -> None:
    with lp.Loader(range(100_000), computed, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        loader.pause_test(6)
        next(batches)  # waits until all slots are filled
        made = [sum(worker.samples for worker in loader.statistics().workers)]
        for _ in range(5):
            next(batches)
            time.sleep(0.02)
            made.append(sum(worker.samples for worker in loader.statistics().workers))
        assert made[1:] == made[:1] * 5
        for _ in itertools.islice(batches, 60):
            pass
        assert sum(worker.samples for worker in loader.statistics().workers) > made[0]


def test_time_that_the_test_takes_is_in_no_step() -> None:
    def slow(item: int) -> np.ndarray:
        time.sleep(0.02)
        return np.full(4, item)

    with lp.Loader(range(1000), slow, batch_size=4, workers=1) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        before = loader.statistics()
        loader.pause_test(4)
        begun_s = time.monotonic()
        next(batches)
        filling_s = time.monotonic() - begun_s
        next(batches)
        passed_s, told = time.monotonic() - begun_s, loader.statistics()
        assert filling_s > 0.2
        assert told.steps.count == before.steps.count + 2
        # Half of the filling is room for what passed since the hand-over before it.
        assert told.steps.seconds - before.steps.seconds < passed_s - filling_s / 2
        assert told.consumer_wait_s - before.consumer_wait_s < filling_s / 2


def test_a_rate_is_of_all_the_time_in_which_samples_were_made() -> None:
    """One that leaves out how long a pause test filled the slots would be several times as large."""

    def slow(item: int) -> np.ndarray:
        time.sleep(0.005)
        return np.full(4, item)

    with lp.Loader(range(10_000), slow, batch_size=4, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        begun, begun_s = loader._core.observer.now(), time.monotonic()
        loader.pause_test(4)
        for _ in range(30):
            next(batches)
        observed, passed_s = loader._core.observer.since(begun), time.monotonic() - begun_s
    assert observed.left_out_s > 0.1
    assert observed.samples_per_s == pytest.approx(120 / passed_s, rel=0.2)


def test_two_loaders_in_turns_wait_for_no_slot_that_is_held() -> None:
    with (
        lp.Pool(2) as pool,
        lp.Loader(range(2000), computed, batch_size=4, workers=pool) as first,
        lp.Loader(range(2000), computed, batch_size=4, workers=pool) as second,
    ):
        taken = 0
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            if number == 5:
                first.pause_test(50)
            taken += len(one) + len(other)
            if number == 200:
                break
        assert taken == 2 * 4 * 201


def test_a_loop_that_is_broken_off_in_a_pause_holds_up_none_behind_it() -> None:
    with lp.Loader(range(400), computed, batch_size=4, workers=2) as loader:
        for number, _ in enumerate(loader):
            if number == 5:
                loader.pause_test(1000)
            if number == 9:
                break
        assert len(list(loader)) == 100


def test_another_test_ends_the_one_before() -> None:
    with lp.Loader(range(2000), computed, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        loader.pause_test(1000)
        for _ in range(3):
            next(batches)
        lender = loader._core.engine.layout.ring.lender
        assert lender.is_held
        loader.pause_test(4)
        assert not lender.is_held
        assert len(list(batches)) == 496
        assert 4 <= loader.headspace().quiet_steps < 100


def test_a_supervisor_that_dies_in_a_pause_loses_nothing() -> None:
    with lp.Loader(range(400), computed, batch_size=4, shuffle=True, workers=2) as loader:
        taken = []
        for number, batch in enumerate(loader):
            if number == 5:
                loader.pause_test(1000)
            if number == 8:
                os.kill(loader._core.pool.session._supervisor.pid, signal.SIGKILL)
            taken.append(batch)
        loader.epoch = 0
        for batch, again in zip(taken, loader, strict=True):
            np.testing.assert_array_equal(batch, again)


def test_what_has_no_workers_has_none_that_pause() -> None:
    with (
        lp.Loader(range(40), computed, batch_size=4, workers=0) as loader,
        pytest.raises(lp.ArgumentError, match="batches are made in this process"),
    ):
        loader.pause_test()


def test_steps_are_a_number_from_one_on() -> None:
    with lp.Loader(range(40), computed, batch_size=4, workers=1) as loader:
        with pytest.raises(lp.ArgumentError, match="steps must be at least 1, got 0"):
            loader.pause_test(0)
        with pytest.raises(lp.ArgumentTypeError, match="steps must be a whole number"):
            loader.pause_test(1.5)  # type: ignore[arg-type]


def test_before_there_is_a_step_nothing_is_known() -> None:
    with lp.Loader(range(40), computed, batch_size=4, workers=1) as loader:
        assert str(loader.headspace()) == "HEADSPACE: no step has been taken yet"
        assert loader.headspace().speedup is None


def test_tf_data_takes_batches_in_a_pause(tf: Any) -> None:
    with lp.Loader(range(2000), computed, batch_size=4, workers=2) as loader:
        taken = 0
        for number, _ in enumerate(loader.as_dataset()):
            if number == 20:
                loader.pause_test(8)
            time.sleep(0.01)
            taken += 1
        assert taken == 500
        quiet_step_s = loader.headspace().quiet_step_s
        assert quiet_step_s is not None and quiet_step_s > 0.006  # it fetches ahead
