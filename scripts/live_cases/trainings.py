"""Trainings of some seconds, each in a process of its own, which prints what came of it.

A consumer of 20 ms a step takes batches of 16 rows; what is wrong is in its name. Each batch is compared with what it
should be.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import loaderpool as lp
from benchlib.fresh import print_result

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


def slow_one(item: int) -> Any:
    return sleep(1.0 if item % 1000 == 10 else 0.001, item)


_LARGE = np.zeros(1 << 18, np.float32)


def large(item: int) -> Any:
    _LARGE[0] = item
    return _LARGE


def dearer(after: int, item: int) -> Any:
    return sleep(0.002 if item < after else 0.01, item)


class SlowDisk:
    def __len__(self) -> int:
        return len(ITEMS)

    def __getitem__(self, item: int) -> int:
        time.sleep(0.01)
        return item


class SlowStream:
    def __iter__(self) -> Iterator[int]:
        for item in ITEMS:
            time.sleep(0.005)
            yield item


def slow_part(part: int) -> Iterator[Any]:
    while True:
        yield waits(part)


class SlowImport:
    """A function whose module takes long to import."""

    def __init__(self) -> None:
        self.is_there = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(4)
        self.__dict__.update(state)

    def __call__(self, item: int) -> Any:
        return sleep(0.0005, item)


class Limited:
    """A server that serves so many calls at a time, over all workers: each takes a token, and gives it back."""

    def __init__(self, calls: int, seconds: float) -> None:
        self.calls, self.seconds = calls, seconds
        self.path = ""
        self.turns = -1

    def __getstate__(self) -> dict[str, Any]:
        if not self.path:
            folder = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, folder)
            self.path = f"{folder}/turns"
            os.mkfifo(self.path)
            self._open()
            os.write(self.turns, bytes(self.calls))
        return {**vars(self), "turns": -1}

    def _open(self) -> None:
        self.turns = os.open(self.path, os.O_RDWR)

    def __call__(self, item: int) -> Any:
        if self.turns < 0:
            self._open()
        token = os.read(self.turns, 1)
        try:
            return sleep(self.seconds, item)
        finally:
            os.write(self.turns, token)


def pause() -> None:
    time.sleep(STEP_S)


def no_step() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and what is to be said of it."""

    verdict: str
    fn: Callable[[int], Any] = waits  # of an item, or of a part, for `parts`
    source: Any = ITEMS
    parts: int = 0  # generators, in place of the source
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"workers": 2})
    step: Callable[[], None] = pause
    change: str = ""  # in what is told to change; empty: nothing must be, or anything that the verdict tells
    may_change: bool = True  # False: a change would be a wrong one
    steps: int = 10**9
    seconds: float = 12.0
    kept: int = 0  # batches that the consumer keeps
    neighbours: int = 0  # processes that use a CPU each


CASES = {
    "sleep": Case("SOURCE_WAITS", change="threads="),
    "burn": Case("TOO_FEW_WORKERS", functools.partial(burn, 0.002), settings={"workers": 1}, change="workers=2"),
    "slow item": Case("STRAGGLERS", slow_one, settings={"workers": 4}, change="deterministic=False"),
    "tiny memory": Case(
        "MEMORY_LIMIT", settings={"workers": 10, "limits": lp.Limits(memory=3 * 4096)}, change="Limits(memory="
    ),
    "slow disk": Case("SOURCE_WAITS", row, SlowDisk(), change="threads="),
    "tiny batches": Case("HAND_OVER", np.float32, step=no_step),
    "hoarding": Case(
        "CONSUMER_HOARDS",
        large,
        settings={"workers": 1, "limits": lp.Limits(memory="256MiB")},
        step=functools.partial(time.sleep, 0.003),
        kept=40,
        may_change=False,
    ),
    "slow stream": Case("STREAM_READER", row, SlowStream()),
    "busy neighbour": Case(
        "NOISY_NEIGHBOUR",
        functools.partial(sleep, 0.0005),
        settings={"workers": 1},
        step=functools.partial(compute, STEP_S),
        neighbours=4,
        may_change=False,
    ),
    "slow import": Case("START_UP", SlowImport(), settings={"workers": 1}, steps=60, may_change=False),
    "nothing": Case("COMPUTE_BOUND", functools.partial(sleep, 0.0005), settings={"workers": 1}, may_change=False),
    "too short": Case("WARM_UP", steps=15, may_change=False),
}


# Trainings whose number of workers is to be found.
FOR_AUTO = {
    "blocking": Case(""),  # 160 ms of waiting a batch: eight workers
    "computing": Case("", functools.partial(burn, 0.0015)),  # 24 ms of a CPU a batch: two workers
    "blocking generators": Case("", slow_part, parts=48),  # the same, where there are no threads
    "light": Case("", functools.partial(burn, 0.0008)),  # 13 ms of a CPU a batch: one worker
    "limited source": Case("", Limited(4, 0.01)),  # 40 ms a batch with four workers and with any more
    "dearer": Case("", functools.partial(dearer, 15_000)),  # five times as dear from item 15,000 on
    "computing step": Case("", functools.partial(burn, 0.0008), step=functools.partial(compute, STEP_S)),
}


def run(case: Case) -> dict[str, Any]:
    """What is said of it, with the steps of its second half."""
    spawn = multiprocessing.get_context("spawn")
    neighbours = [spawn.Process(target=compute, args=(3600.0,), daemon=True) for _ in range(case.neighbours)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        with make_loader(case) as loader:
            steps = train(loader, case)
            said = loader.explain()
            decisions = loader.statistics().decisions
            workers = loader.workers
    finally:
        for neighbour in neighbours:
            neighbour.terminate()
    return {
        "verdict": said.verdict.name,
        "change": said.change,
        "expected_step_s": said.expected_step_s,
        "said": str(said),
        "steps": steps,
        "workers": workers,
        "decisions": [dataclasses.asdict(each) for each in decisions],
    }


def make_loader(case: Case) -> lp.Loader:
    if case.parts:
        return lp.Loader.from_generator(case.fn, shards=range(case.parts), batch_size=ROWS, **case.settings)
    return lp.Loader(case.source, case.fn, batch_size=ROWS, **case.settings)


def train(loader: lp.Loader, case: Case) -> list[tuple[float, float]]:
    """When each step ended, and how long it took; both in seconds, the first one from the first batch on."""
    kept, begun_s = [], time.monotonic()
    first_s = last_s = 0.0
    steps = []
    is_ordered = case.settings.get("deterministic", True) and not case.parts
    for number, batch in enumerate(itertools.islice(loader, case.steps)):
        first = np.asarray(batch).reshape(ROWS, -1)[0, 0]
        if is_ordered and first != np.float32(number * ROWS):
            raise AssertionError(f"batch {number} begins with {first}")
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


def main() -> None:
    """Run the case that the command line names, with what it says in place of its own settings."""
    options = argparse.ArgumentParser()
    options.add_argument("case", choices=[*CASES, *FOR_AUTO])
    options.add_argument("--seconds", type=float)
    options.add_argument("--workers", type=int)
    options.add_argument("--threads", type=int)
    options.add_argument("--auto-from", type=int, help="how many workers there are at first")
    given = options.parse_args()
    case = {**CASES, **FOR_AUTO}[given.case]
    settings = dict(case.settings)
    if given.workers is not None:
        settings["workers"] = given.workers
    if given.auto_from is not None:
        settings["workers"] = lp.Auto(start=given.auto_from)
    if given.threads is not None:
        settings["worker_options"] = lp.WorkerOptions(threads=given.threads)
    print_result(run(dataclasses.replace(case, settings=settings, seconds=given.seconds or case.seconds)))


if __name__ == "__main__":
    main()
