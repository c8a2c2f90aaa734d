"""`Loader.explain()` on running loaders: verdicts of trainings that each have one fault.

Faults of the CPUs are not among them, because other tests keep the CPUs busy.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.system import capacity
from loaderpool.trainer.explain.verdicts import Verdict

STEP_S = 0.02


def sleeping(seconds: float) -> Callable[[int], Any]:
    def sample(item: int) -> Any:
        time.sleep(seconds)
        return np.full(4, item, np.float32)

    return sample


def slow_now_and_then(item: int) -> Any:
    time.sleep(1.0 if item % 1000 == 10 else 0.001)
    return np.full(4, item, np.float32)


class SlowStream:
    """A stream that takes 10 ms to read each item."""

    def __iter__(self) -> Iterator[int]:
        for item in range(10**6):
            time.sleep(0.005)
            yield item


def train(loader: lp.Loader, steps: int = 60, step_s: float = STEP_S) -> Any:
    """Take batches, with a pause after each. Return the explanation, which must be the same after
    `close`.
    """
    with loader:
        for step, _ in enumerate(loader, 1):
            if step == steps:
                break
            time.sleep(step_s)
        found = loader.explain()
    assert loader.explain().verdict is found.verdict
    return found


def test_a_function_that_waits_is_named_with_the_threads_that_would_do() -> None:
    found = train(lp.Loader(range(10**6), sleeping(0.01), batch_size=16, workers=2))
    assert found.verdict is Verdict.SOURCE_WAITS
    assert 0.5 < found.wait_share < 0.95
    # 4 for each of 2 workers, or fewer if other programs use the CPUs.
    assert re.fullmatch(r"lp\.Loader\(\.\.\., threads=[2-5]\)", found.change)
    assert found.expected_step_s < 0.8 * found.step_s
    assert "2 workers" in found.why and found.expect.startswith(
        "if the source can serve more calls at once, "
    )
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == found.verdict.name


def test_where_nothing_is_wrong_nothing_is_said_to_be() -> None:
    found = train(lp.Loader(range(10**6), sleeping(0.001), batch_size=4, workers=1), step_s=0.05)
    assert found.verdict in (
        Verdict.COMPUTE_BOUND,
        Verdict.START_UP,
    )  # a start takes long if other tests run
    assert not found.change


@pytest.mark.slow
def test_slow_items_are_named() -> None:
    found = train(
        lp.Loader(range(10**6), slow_now_and_then, batch_size=20, workers=4), steps=220, step_s=0.01
    )
    assert found.verdict is Verdict.STRAGGLERS
    assert {item.index for item in found.slowest[:5]} == {10, 1010, 2010, 3010, 4010}
    assert all(1 <= item.seconds < 2 for item in found.slowest[:5])


def test_a_slow_stream_is_named() -> None:
    found = train(lp.Loader(SlowStream(), sleeping(0), batch_size=16, workers=2), step_s=0.01)
    assert found.verdict is Verdict.STREAM_READER


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_measurement_is_a_warning_and_later_ones_go_on(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> float:
        raise OSError("Too many open files")

    with lp.Loader(range(100), batch_size=1, workers=workers) as loader:
        batches = iter(loader)
        with monkeypatch.context() as patch:
            patch.setattr(capacity, "machine_cpu_s", fails)
            with pytest.warns(lp.LoaderpoolWarning, match="OSError: Too many open files") as told:
                list(itertools.islice(batches, 2))
        assert len(told) == 1
        for _ in range(50):
            next(batches)
        assert "steps so far" not in loader.explain().why


@pytest.mark.parametrize("workers", [0, 2])
def test_a_short_training_is_said_to_be_short(workers: int) -> None:
    found = train(lp.Loader(range(10**6), sleeping(0.01), batch_size=2, workers=workers), steps=10)
    assert found.verdict is Verdict.WARM_UP
    assert str(found).startswith("WARM-UP: ")


@pytest.mark.parametrize("seconds", ["60", 0, -1.0, float("nan"), True])
def test_seconds_are_a_number_above_0(seconds: Any) -> None:
    with (
        lp.Loader(range(10), sleeping(0), batch_size=2, workers=0) as loader,
        pytest.raises(lp.ArgumentError, match="seconds"),
    ):
        loader.explain(seconds=seconds)
