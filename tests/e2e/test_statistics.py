"""`Loader.statistics()` of steps and calls: times that a test lengthens are counted where they
belong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.samples import slow_number


def sample(item: int) -> Any:
    time.sleep(0.3 if item == 37 else 0.004)
    return np.full(4, item, np.float32)


def computing(item: int) -> Any:
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return np.full(4, item, np.float32)


def train(loader: lp.Loader, steps: int, step_s: float) -> lp.Statistics:
    with loader:
        for step, _ in enumerate(loader):
            if step == steps:
                break
            time.sleep(step_s)
        return loader.statistics()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_steps_are_told_with_what_was_waited_for(workers: int) -> None:
    told = train(lp.Loader(range(10**6), sample, batch_size=8, workers=workers), 40, 0.005).steps
    assert told.count == 40
    assert (
        told.mean_s is not None and told.wait_share is not None and told.first_batch_s is not None
    )
    assert told.mean_s > 0.012  # 8 samples of 4 ms, by two workers at best
    assert 0.3 < told.wait_share < 1
    assert told.first_batch_s > 0.004
    assert told.seconds == pytest.approx(40 * told.mean_s)
    assert told.wait_s == pytest.approx(told.wait_share * told.seconds)


def test_steps_that_find_data_ready_are_told_apart() -> None:
    told = train(
        lp.Loader(range(10**6), lambda item: np.float32(item), batch_size=8, workers=1), 40, 0.02
    ).steps
    assert told.ready_share is not None and told.ready_share > 0.6
    assert told.ready_mean_s is not None and told.ready_mean_s >= 0.02
    assert told.wait_share is not None and told.wait_share < 0.5


def test_calls_are_told_with_the_slowest_item() -> None:
    told = train(lp.Loader(range(10**6), sample, batch_size=8, workers=2), 60, 0.0).calls
    assert told is not None
    assert (told.of, told.slowest[0].index, told.slowest[0].epoch) == ("sample", 37, 0)
    assert 0.3 <= told.slowest[0].seconds < 2
    assert len(told.slowest) == 16
    assert told.timed >= 8
    assert 0.002 <= told.p50_s <= told.p90_s <= told.p99_s  # each within a factor of two
    assert told.p50_s < 0.15  # one of hundreds takes 0.3 s
    assert 0.004 <= told.mean_s < 0.3


def test_calls_of_workers_that_are_gone_count() -> None:
    with lp.Loader(range(10**6), sample, batch_size=8, workers=3) as loader:
        batches = iter(loader)
        for _ in range(40):
            next(batches)
        before = loader.statistics().calls
        loader.resize(1)
        while len(loader.statistics().workers) > 1:
            next(batches)
        told = loader.statistics().calls
    assert before is not None and told is not None
    assert told.timed >= before.timed and told.slowest[0].index == 37


def test_cpu_time_of_a_sample_is_that_of_its_call() -> None:
    told = train(lp.Loader(range(10**6), computing, batch_size=8, workers=1), 110, 0.0)
    assert told.cpu_s_per_sample is not None
    assert 0.004 < told.cpu_s_per_sample < 0.009


def test_before_the_first_batch_nothing_is_known() -> None:
    with lp.Loader(range(64), sample, batch_size=8, workers=1) as loader:
        told = loader.statistics()
    assert dataclasses.astuple(told.steps) == (0, 0.0, 0.0, None, None, None, None, None)
    assert (told.calls, told.cpu_s_per_sample) == (None, None)


def test_in_this_process_calls_are_not_timed() -> None:
    told = train(lp.Loader(range(10**6), sample, batch_size=8, workers=0), 10, 0.0)
    assert (told.calls, told.cpu_s_per_sample) == (None, None)


def test_behind_a_close_they_are_as_they_were() -> None:
    # The source is an iterator. Otherwise workers would make calls for the next epoch meanwhile.
    with lp.Loader(iter(range(800)), sample, batch_size=8, workers=2) as loader:
        list(loader)
        before = loader.statistics()
    told = loader.statistics()
    assert told.steps == before.steps
    assert told.calls is not None and before.calls is not None
    assert told.calls.slowest == before.calls.slowest
    assert json.loads(json.dumps(dataclasses.asdict(told)))["calls"]["of"] == "sample"


def test_calls_of_generators_are_their_items() -> None:
    def part(number: int) -> Iterator[int]:
        for item in range(120):
            time.sleep(0.2 if (number, item) == (1, 7) else 0.001)
            yield item

    with lp.Loader.from_generator(part, shards=range(3), batch_size=4, workers=2) as loader:
        assert len(list(loader)) == 90
        told = loader.statistics().calls
        assert told is not None and 0.001 < told.mean_s < 0.05
        slowest = told.slowest[0]
        assert (slowest.generator, slowest.index, slowest.name) == (1, 7, "7 of generator 1")
        assert 0.2 < slowest.seconds < 2
        assert "Slowest items: 7 of generator 1 (" in str(loader.explain())


def test_calls_of_a_function_for_what_generators_yield_are_its_own() -> None:
    def part(number: int) -> Iterator[int]:
        for item in range(40):
            time.sleep(0.001)
            yield item

    with lp.Loader.from_generator(
        part,
        shards=range(2),
        fn=functools.partial(slow_number, wait_s=0.02),
        batch_size=4,
        workers=2,
    ) as loader:
        assert len(list(loader)) == 20
        told = loader.statistics().calls
    assert told is not None and told.p50_s > 0.015
    assert min(item.seconds for item in told.slowest) > 0.015
