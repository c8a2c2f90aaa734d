"""What does the engine cost by itself? Samples so small that making them is nothing, read as NumPy batches.

Work: one call of about 1 us a sample of 16 float32, in batches of 32, with two workers.
Baseline: two bare processes that only run the same function; they neither stack the samples nor hand them over.
Bar: at least 0.4 of them.
Verified: the first and the last number of every batch, and all numbers of the first 300 batches.
Command: scripts/bench/run tiny

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    tiny        bare            51,630 batches/s [51,607 .. 52,162]
    tiny        loader          34,897 batches/s [34,137 .. 35,173]  0.68 x bare (best 0.67; bar ≥ 0.4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from bare import bare_rate
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require

WORKERS = 2
BATCH_SIZE = 32
WIDTH = 16
# Every index below 2**24 is exact in float32, so that a batch tells which items it is made of.
ITEMS = 2**24


def tiny(item: int) -> npt.NDArray[np.float32]:
    """A sample that is as good as free: float32[16], all of them the item."""
    return np.full(WIDTH, item, np.float32)


def expected_batch(position: int) -> npt.NDArray[np.float32]:
    """float32[32, 16]: the batch at this position of an epoch, made in another way."""
    start = position * BATCH_SIZE
    return np.repeat(np.arange(start, start + BATCH_SIZE, dtype=np.float32), WIDTH).reshape(BATCH_SIZE, WIDTH)


def verify_ends(seen: list[tuple[float, float]]) -> None:
    """Check the first and last numbers of a pass's batches: right, in order, none missing, none twice."""
    starts = np.arange(len(seen), dtype=np.float64) * BATCH_SIZE
    expected = np.stack([starts, starts + BATCH_SIZE - 1], axis=1)
    wrong = np.flatnonzero((np.asarray(seen) != expected).any(axis=1))
    require(not wrong.size, f"{wrong.size} of {len(seen)} batches are wrong, the first is number {wrong[:1]}")


def bare(window: Window) -> Measured:
    def work(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        start, sample = number * ITEMS // WORKERS, tiny(0)

        def one_batch() -> None:
            nonlocal start, sample
            for item in range(start, start + BATCH_SIZE):
                sample = tiny(item)
            start += BATCH_SIZE

        def check() -> None:
            require((sample == start - 1).all(), "a wrong sample")

        return one_batch, check

    return Measured({"bare": bare_rate(work, WORKERS, window)})


def loader(window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(ITEMS), tiny, batch_size=BATCH_SIZE, workers=WORKERS) as batches:
        for position, batch in zip(range(300), batches):  # noqa: B905 - only the first ones
            require(np.array_equal(batch, expected_batch(position)), f"batch {position} is wrong")

        def look(batch: Any) -> tuple[float, float]:
            return batch.item(0), batch.item(-1)

        rate, seen = deliveries(batches, window, look)
        statistics = batches.statistics()
    verify_ends(seen)
    return Measured({"loader": rate}, {"slots": statistics.slots, "copied": statistics.batches_copied})


QUESTION = Question(
    name="tiny",
    figures=(
        Figure("bare", "batches/s", "two bare processes"),
        Figure("loader", "batches/s", "32 samples of 16 float32, 1 us a sample, 2 workers"),
    ),
    contestants={"loader": loader, "bare": bare},
    bars=(Bar("loader", "bare", at_least=0.4),),
    rounds=5,
    seconds=2.0,
)

if __name__ == "__main__":
    main(QUESTION)
