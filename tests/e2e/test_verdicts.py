"""The advice of `explain()` helps as much as it says, and `workers="auto"` finds the number by
itself.

Takes minutes on two free CPUs: `scripts/test -m long tests/e2e/test_verdicts.py`. A consumer with
steps of 20 ms takes batches of 16 rows. Verdicts that do not depend on free CPUs are in
test_explain.py.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import loaderpool as lp
from tests.support.samples import slow_vector

STEP_S, ROWS = 0.02, 16
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
# 160 ms of waiting for each batch, so eight workers are needed
WAITS = functools.partial(slow_vector, wait_s=0.01)


def computes(seconds: float, item: int) -> Any:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return np.full(4, item, np.float32)


def becomes_dearer(item: int) -> Any:
    time.sleep(0.002 if item < 15_000 else 0.01)
    return np.full(4, item, np.float32)


def large(item: int) -> Any:
    return np.full(1 << 18, item, np.float32)


class Outcome(NamedTuple):
    said: Any  # result of explain()
    steps: list[
        tuple[float, float]
    ]  # end of each step, from the first batch on, and its duration, in seconds
    workers: int
    decisions: tuple[Any, ...]

    def step_ms(self, from_s: float | None = None) -> float:
        """Return the mean duration of the steps from this time on, or of the second half."""
        took = [took for end, took in self.steps if from_s is None or end >= from_s]
        return 1e3 * statistics.fmean(took[len(took) // 2 if from_s is None else 0 :])


def train(
    fn: Any,
    seconds: float = 12.0,
    step_s: float = STEP_S,
    kept: int = 0,
    first: int = 0,
    **settings: Any,
) -> Outcome:
    held: list[Any] = []
    steps: list[tuple[float, float]] = []
    with lp.Loader(range(10**6), fn, batch_size=ROWS, **settings) as loader:
        if first:
            loader._core.pool._set_workers(first)  # type: ignore[union-attr]  # which "auto" begins with
        first_s = last_s = 0.0
        for number, batch in enumerate(loader):
            assert np.asarray(batch).reshape(ROWS, -1)[0, 0] == np.float32(number * ROWS)
            if kept:
                held = [*held[1 - kept :], batch]
            time.sleep(step_s)
            now_s = time.monotonic()
            if number:
                steps.append((now_s - first_s, now_s - last_s))
            last_s, first_s = now_s, first_s or now_s
            if now_s - first_s > seconds:
                break
        return Outcome(loader.explain(), steps, loader.workers, loader.statistics().decisions)


@pytest.mark.parametrize(
    ("training", "verdict", "change"),
    [
        ({"fn": WAITS, "workers": 2}, "SOURCE_WAITS", "threads="),
        ({"fn": functools.partial(computes, 0.002), "workers": 1}, "TOO_FEW_WORKERS", "workers=2"),
        ({"fn": np.float32, "workers": 2, "step_s": 0.0}, "BATCH_OVERHEAD", ""),
        ({"fn": large, "workers": 1, "step_s": 0.003, "kept": 40}, "BATCHES_KEPT", None),
        ({"fn": functools.partial(computes, 0.0002), "workers": 1}, "COMPUTE_BOUND", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict_is_right_and_no_change_is_wrong(
    training: dict[str, Any], verdict: str, change: str | None
) -> None:
    limits = lp.Limits(memory="256MiB") if "kept" in training else lp.Limits()
    said = train(**training, limits=limits).said
    assert said.verdict.name == verdict, said
    assert not said.change or (change is not None and change in said.change), said


@pytest.mark.parametrize(
    ("fn", "least"),
    [(WAITS, None), (functools.partial(computes, 0.002), 2)],
    ids=["wait", "cpu"],
)
def test_a_change_brings_what_is_said(fn: Callable[[int], Any], least: int | None) -> None:
    before = train(fn, workers=1).said
    change = re.search(r"(workers|threads)=(\d+)", before.change)
    assert change is not None, before
    settings = {"workers": 1, change[1]: int(change[2])}
    came_ms = statistics.median(train(fn, **settings).step_ms() for _ in range(3))
    assert came_ms == pytest.approx(1e3 * before.expected_step_s, rel=0.10)
    assert least is None or abs(int(change[2]) - least) <= 1


@pytest.mark.parametrize("start", [1, 4], ids=["from one", "from four times the least"])
@pytest.mark.parametrize(
    ("fn", "least"),
    [
        (WAITS, 8),
        (functools.partial(computes, 0.0015), 2),
        (becomes_dearer, 8),
    ],
    ids=["waits", "computes", "becomes dearer"],
)
def test_auto_finds_the_number(fn: Callable[[int], Any], least: int, start: int) -> None:
    is_dearer = fn is becomes_dearer  # the change comes after 20 s
    best_ms = 20.3 if is_dearer else train(fn, 8.0, workers=least).step_ms()
    found = train(fn, 80.0, first=1 if start == 1 else 4 * least, workers=(1, 1024))
    assert found.step_ms(20.0 if start == 1 and not is_dearer else 60.0) <= 1.05 * best_ms, (
        found.decisions
    )
    # more workers gain nothing
    assert is_dearer or abs(found.workers - least) <= 1, found.decisions
