"""Do many workers that mostly wait (a slow disk, a web server) all wait at the same time?

Work: `time.sleep` of 20 ms a sample, in batches of 16, with 32 workers on however few cores there are.
Baseline: the ideal, 32 / 0.02 s = 1,600 samples a second; 32 bare processes show what the machine's clock leaves of it.
Bar: at least 0.95 of the ideal, once running.
Verified: every number of every batch.
Command: scripts/bench/run blocking_io

Last result; others kept up to 2.0 CPUs busy meanwhile, run again on a quiet machine
(2026-11-21, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    blocking_io ideal            1,600 samples/s [1,600 .. 1,600]
    blocking_io bare             1,584 samples/s [1,577 .. 1,587]
    blocking_io loader           1,571 samples/s [1,565 .. 1,575]   0.98 x ideal (medians 0.98; bar ≥ 0.95)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bare import bare_rate
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require

WORKERS = 32
BATCH_SIZE = 16
SLEEP_S = 0.02


def wait_for_it(item: int) -> int:
    """What a read from afar is to the CPU: nothing, for 20 ms."""
    time.sleep(SLEEP_S)
    return item


def ideal(window: Window) -> Measured:
    return Measured({"ideal": WORKERS / SLEEP_S})


def bare(window: Window) -> Measured:
    def work(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        results: list[int] = []

        def one_batch() -> None:
            results[:] = [wait_for_it(item) for item in range(number, number + BATCH_SIZE)]

        def check() -> None:
            require(results == list(range(number, number + BATCH_SIZE)), "a wrong result")

        return one_batch, check

    return Measured({"bare": bare_rate(work, WORKERS, window) * BATCH_SIZE})


def loader(window: Window) -> Measured:
    import loaderpool as lp

    def look(batch: Any) -> list[int]:
        return batch.tolist()  # type: ignore[no-any-return]

    with lp.Loader(range(10**6), wait_for_it, batch_size=BATCH_SIZE, workers=WORKERS) as batches:
        rate, seen = deliveries(batches, window, look, turn=WORKERS)
    numbers = [number for batch in seen for number in batch]
    require(numbers == list(range(len(seen) * BATCH_SIZE)), "batches are wrong, missing or out of order")
    return Measured({"loader": rate * BATCH_SIZE})


QUESTION = Question(
    name="blocking_io",
    figures=(
        Figure("ideal", "samples/s", "the ideal"),
        Figure("bare", "samples/s", "32 bare processes"),
        Figure("loader", "samples/s", "20 ms of waiting a sample, 32 workers"),
    ),
    contestants={"ideal": ideal, "bare": bare, "loader": loader},
    bars=(Bar("loader", "ideal", at_least=0.95),),
    rounds=3,
    seconds=3.2,
    warm_s=1.5,
)

if __name__ == "__main__":
    main(QUESTION)
