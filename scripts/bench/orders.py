"""Time for a batch in each kind of `order=`, and in a uniform shuffle, in turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.rows import Row
from bench.windows import Window

Figures = dict[str, float]

BATCH, BATCHES = 64, 1600
# Batches of each epoch that are not timed. Many of them were made while the other loader was read.
SKIPPED = 600
ITEMS = BATCH * BATCHES
_ZEROS = np.zeros(256, np.float32)


def sample(index: int) -> Any:
    """Return a sample of 256 numbers, all equal to the index, which is exact in float32."""
    return _ZEROS + index


def _lists() -> Any:
    """Return shuffled batches of 32 to 96 items."""
    random = np.random.default_rng(1)
    items, stops = random.permutation(ITEMS), random.integers(32, 97, 2 * BATCHES).cumsum()
    parts = np.split(items, stops[stops < ITEMS])
    return [part.tolist() for part in parts if len(part)]


def _orders() -> dict[str, Callable[[], dict[str, Any]]]:
    import loaderpool as lp

    random = np.random.default_rng(0)
    return {
        "shuffle": lambda: {"shuffle": True},
        "array": lambda: {"order": random.permutation(ITEMS)},
        "weights": lambda: {"order": lp.Weighted(random.random(ITEMS))},
        "blocks": lambda: {"order": lp.Blocks(rows=256, window=16)},
        "lists": lambda: {"order": _lists()},
    }


def beside_shuffle(row: Row, contestant: str, window: Window) -> Figures:
    """Return the microseconds for 64 rows, in the order of `row` and in a shuffle."""
    import loaderpool as lp

    kind, workers = row.view.split("/")
    loaders, times = {}, dict[str, list[float]](loaderpool=[], shuffle=[])
    for side, name in zip(times, (kind, "shuffle"), strict=True):
        settings = _orders()[name]()
        rows = {} if name == "lists" else {"batch_size": BATCH}
        loaders[side] = lp.Loader(range(ITEMS), sample, workers=int(workers), **rows, **settings)
    ends = time.perf_counter() + window.warm_s + window.seconds
    while time.perf_counter() < ends or len(times["shuffle"]) < 4:
        for side in sorted(times, reverse=len(times["shuffle"]) % 2 > 0):
            times[side].append(_turn_us(loaders[side]))
    for loader in loaders.values():
        loader.close()
    return {side: statistics.median(each[1:]) for side, each in times.items()}


def _turn_us(loader: Any) -> float:
    """Read an epoch, verify its batches, and return the time for 64 rows."""
    epoch, items = loader.epoch, []
    started, before = 0.0, 0
    for number, batch in enumerate(loader):
        if number == SKIPPED:
            before, started = sum(map(len, items)), time.perf_counter()
        items.append(batch[:, 0].copy())
    took, rows = time.perf_counter() - started, sum(map(len, items)) - before
    for number in (0, SKIPPED, len(items) - 1):
        if items[number].tolist() != loader.indices(epoch, number).tolist():
            raise ValueError(f"wrong batch {number}")
    if sum(map(len, items)) != ITEMS:
        raise ValueError("an epoch has another number of rows")
    return 1e6 * took / rows * BATCH
