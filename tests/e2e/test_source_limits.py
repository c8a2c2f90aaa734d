"""Sources with and without a limit, as `explain()` finds them with a fixed number of workers.

Takes minutes on two free CPUs: `scripts/test -m long tests/e2e/test_source_limits.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.explain import trials
from loaderpool.trainer.explain.verdicts import Verdict

SECONDS = 20.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@contextlib.contextmanager
def holding(path: Path, flags: int = fcntl.LOCK_EX) -> Iterator[Any]:
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, flags)
        yield file


def rate(path: Path) -> None:
    """Call a server that answers 120 calls a second, each after 4 ms."""
    with holding(path) as file:
        begun_s = max(
            time.monotonic(), *struct.unpack("d", os.pread(file.fileno(), 8, 0) or bytes(8))
        )
        file.truncate(0)
        file.write(struct.pack("d", begun_s + 1 / 120))
    time.sleep(max(0.0, begun_s - time.monotonic()) + 0.004)


def lock(path: Path) -> None:
    with holding(path):
        time.sleep(0.008)


def connections(path: Path) -> None:
    """Use one of two connections. Each call takes 16 ms."""
    while True:
        for number in range(2):
            with (
                contextlib.suppress(BlockingIOError),
                holding(path.with_suffix(f".{number}"), fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                time.sleep(0.016)
                return
        time.sleep(0.001)


def disk(path: Path) -> None:
    """Read from a disk, one reader at a time, and decompress the data, which needs no shared
    resource.
    """
    with holding(path):
        time.sleep(0.005)
    time.sleep(0.003)


def computing(seconds: float, then: Callable[[Path], None] | None, path: Path) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    if then is not None:
        then(path)


def sleeping(_: Path) -> None:
    time.sleep(0.02)


def multiplying(_: Path) -> None:
    matrix = np.ones((120, 120))
    for _ in range(12):
        matrix = matrix @ matrix / 120


def straggling(path: Path) -> None:
    time.sleep(0.4 if np.random.default_rng(time.monotonic_ns()).random() < 0.02 else 0.008)


def varying(_: Path) -> None:
    time.sleep(np.random.default_rng(time.monotonic_ns()).exponential(0.02))


def told(
    work: Callable[[Path], None], workers: int, path: Path, step_s: float = 0.0, **settings: Any
) -> Any:
    """Return the first explanation that names a limit, or the last one."""

    def sample(item: int) -> np.ndarray:
        work(path)
        return np.full(4, item, np.float32)

    trials._logs.clear()
    with lp.Loader(range(10**6), sample, batch_size=8, workers=workers, **settings) as loader:
        begun_s = time.monotonic()
        for number, batch in enumerate(loader):
            assert batch[0, 0] == number * 8
            time.sleep(step_s)
            is_over = time.monotonic() - begun_s > SECONDS
            if is_over or (number % 10 == 0 and loader.explain().verdict is Verdict.SOURCE_LIMIT):
                return loader.explain()
    raise AssertionError("the epoch is over")


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize(
    "work",
    [
        rate,
        lock,
        connections,
        disk,
        functools.partial(computing, 0.001, rate),
        functools.partial(computing, 0.001, lock),
    ],
    ids=["rate", "lock", "connections", "disk", "rate beside compute", "lock beside compute"],
)
def test_a_limit_is_told_within_twenty_seconds(
    work: Callable[[Path], None], workers: int, tmp_path: Path
) -> None:
    found = told(work, workers, tmp_path / "file")
    assert found.verdict is Verdict.SOURCE_LIMIT, found


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(
    ("work", "settings"),
    [
        (sleeping, {}),
        (varying, {}),
        (straggling, {}),
        (multiplying, {}),
        (functools.partial(computing, 0.001, sleeping), {}),
        (functools.partial(computing, 0.004, None), {"threads": 4}),
        (sleeping, {"step_s": 0.2}),
    ],
    ids=["sleep", "varying", "stragglers", "numpy", "compute and sleep", "GIL", "slow consumer"],
)
def test_no_limit_is_told_where_there_is_none(
    work: Callable[[Path], None], settings: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    found = told(work, workers, tmp_path / "file", **settings)
    assert found.verdict is not Verdict.SOURCE_LIMIT, found
