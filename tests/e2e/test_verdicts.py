"""Trainings in which one thing is wrong, or nothing: whether `explain()` says so, whether what it tells to change helps
as much as it says, and whether workers="auto" finds the number by itself. Minutes, on two free CPUs:

    scripts/test -m long tests/e2e/test_verdicts.py

A consumer of 20 ms a step takes batches of 16 rows; what is wrong is in the name. Each batch is compared with what it
should be.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

STEP_S = 0.02
ROWS = 16
ITEMS = range(10**6)


def row(item: int) -> Any:
    return np.full(4, item, np.float32)


def sleep(seconds: float, item: int) -> Any:
    time.sleep(seconds)
    return row(item)


def waits(item: int) -> Any:
    return sleep(0.01, item)


def burn(seconds: float, item: int) -> Any:
    compute(seconds)
    return row(item)


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


_LARGE = np.zeros(1 << 18, np.float32)


def large(item: int) -> Any:
    _LARGE[0] = item
    return _LARGE


def dearer(after: int, item: int) -> Any:
    return sleep(0.002 if item < after else 0.01, item)


def pause() -> None:
    time.sleep(STEP_S)


def no_step() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and what is to be said of it."""

    verdict: str
    fn: Callable[[int], Any] = waits
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"workers": 2})
    step: Callable[[], None] = pause
    change: str = ""  # in what is told to change; empty: nothing must be, or anything that the verdict tells
    may_change: bool = True  # False: a change would be a wrong one
    seconds: float = 12.0
    kept: int = 0  # batches that the consumer keeps
    neighbours: int = 0  # processes that use a CPU each


# Those beside which no other test may compute; test_explain.py has the others.
CASES = {
    "sleep": Case("SOURCE_WAITS", change="threads="),
    "burn": Case("TOO_FEW_WORKERS", functools.partial(burn, 0.002), settings={"workers": 1}, change="workers=2"),
    "tiny batches": Case("BATCH_OVERHEAD", np.float32, step=no_step),
    "batches that are kept": Case(
        "BATCHES_KEPT",
        large,
        settings={"workers": 1, "limits": lp.Limits(memory="256MiB")},
        step=functools.partial(time.sleep, 0.003),
        kept=40,
        may_change=False,
    ),
    "busy neighbour": Case(
        "NOISY_NEIGHBOUR",
        functools.partial(sleep, 0.0005),
        settings={"workers": 1},
        step=functools.partial(compute, STEP_S),
        neighbours=4,
        may_change=False,
    ),
    "nothing": Case("COMPUTE_BOUND", functools.partial(sleep, 0.0005), settings={"workers": 1}, may_change=False),
}


# Trainings whose number of workers is to be found.
FOR_AUTO = {
    "blocking": Case(""),  # 160 ms of waiting a batch: eight workers
    "computing": Case("", functools.partial(burn, 0.0015)),  # 24 ms of a CPU a batch: two workers
    "light": Case("", functools.partial(burn, 0.0008)),  # 13 ms of a CPU a batch: one worker
    "dearer": Case("", functools.partial(dearer, 15_000)),  # five times as dear from item 15,000 on
}


@dataclasses.dataclass
class Outcome:
    said: Any  # of explain()
    steps: list[tuple[float, float]]  # when each ended, from the first batch on, and how long it took, in seconds
    workers: int
    decisions: tuple[Any, ...]

    def step_ms(self, from_s: float | None = None) -> float:
        """The mean of the steps from then on, or of the second half."""
        took = [took for end, took in self.steps if from_s is None or end >= from_s]
        return 1e3 * statistics.fmean(took[len(took) // 2 if from_s is None else 0 :])


def run(case: Case, seconds: float | None = None, **settings: Any) -> Outcome:
    case = dataclasses.replace(case, settings={**case.settings, **settings}, seconds=seconds or case.seconds)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(case.neighbours)]
    try:
        with make_loader(case) as loader:
            steps = train(loader, case)
            return Outcome(loader.explain(), steps, loader.workers, loader.statistics().decisions)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def make_loader(case: Case) -> lp.Loader:
    return lp.Loader(ITEMS, case.fn, batch_size=ROWS, **case.settings)


def train(loader: lp.Loader, case: Case) -> list[tuple[float, float]]:
    kept: list[Any] = []
    begun_s, first_s, last_s, steps = time.monotonic(), 0.0, 0.0, []
    for number, batch in enumerate(loader):
        assert np.asarray(batch).reshape(ROWS, -1)[0, 0] == np.float32(number * ROWS)
        if case.kept:
            kept = [*kept[1 - case.kept :], batch]
        case.step()
        now_s = time.monotonic()
        if number:
            steps.append((now_s - first_s, now_s - last_s))
        else:
            first_s = now_s
        last_s = now_s
        if now_s - begun_s > case.seconds:
            break
    return steps


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_right_and_no_change_is_wrong(name: str) -> None:
    case = CASES[name]
    said = run(case).said
    assert said.verdict.name == case.verdict, said
    assert not said.change or (case.may_change and case.change in said.change), said


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "workers", "least"), [("sleep", 1, None), ("burn", 1, 2)])
def test_a_change_brings_what_is_said(name: str, workers: int, least: int | None) -> None:
    case = {**CASES, **FOR_AUTO}[name]
    before = run(case, workers=workers).said
    change = re.search(r"(workers|threads)=(\d+)", before.change)
    assert change is not None, before
    settings = {"workers": workers, change[1]: int(change[2])}
    came_ms = statistics.median(run(case, **settings).step_ms() for _ in range(3))
    assert came_ms == pytest.approx(1e3 * before.expected_step_s, rel=0.10)
    assert least is None or abs(int(change[2]) - least) <= 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", [1, 4], ids=["from one", "from four times the least"])
@pytest.mark.parametrize(
    ("name", "least"),
    [("blocking", 8), ("computing", 2), ("light", 1), ("dearer", 8)],
)
def test_auto_finds_the_number(name: str, least: int, start: int) -> None:
    case, found_s = FOR_AUTO[name], 20.0 if start == 1 and name != "dearer" else 60.0  # which it becomes after 20 s
    best_ms = 20.3 if name == "dearer" else run(case, 8.0, workers=least).step_ms()
    found = run(case, 80.0, workers=(1 if start == 1 else 4 * least, 1024))
    assert found.step_ms(found_s) <= 1.05 * best_ms, found.decisions
    if name in ("blocking", "computing", "light"):  # more workers than that bring nothing
        assert abs(found.workers - least) <= 1, found.decisions
