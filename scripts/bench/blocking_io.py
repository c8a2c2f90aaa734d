"""Do many workers that mostly wait (a slow disk, a web server) all wait at the same time?

Work: `time.sleep` of 20 ms a sample, in batches of 16, with 32 workers on however few cores there are; and in batches
of 32 and of 8 with 2 workers that have 16 threads each.
Baseline: the ideal, 32 / 0.02 s = 1,600 samples a second; 32 bare processes show what the machine's clock leaves of it.
Bar: at least 0.95 of the ideal, once running, with 32 workers, and with threads in batches of 32.
Verified: every number of every batch.
Command: scripts/bench/run blocking_io

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    blocking_io ideal            1,600 samples/s [1,600 .. 1,600]
    blocking_io bare             1,589 samples/s [1,588 .. 1,589]
    blocking_io loader           1,583 samples/s [1,583 .. 1,584]   0.99 x ideal (best 0.99; bar ≥ 0.95)
    blocking_io threads          1,592 samples/s [1,592 .. 1,594]   0.99 x ideal (best 1.00; bar ≥ 0.95)
    blocking_io threads_small    1,592 samples/s [1,592 .. 1,596]   1.00 x ideal (best 1.00; bar ≥ 0.9)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bare import bare_rate
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require

WORKERS = 32
FEW_WORKERS, THREADS = 2, 16
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


def made_by(window: Window, figure: str, *, workers: int, threads: int = 1, batch_size: int = BATCH_SIZE) -> Measured:
    import loaderpool as lp

    def look(batch: Any) -> list[int]:
        return batch.tolist()  # type: ignore[no-any-return]

    options = lp.WorkerOptions(threads=threads)
    with lp.Loader(
        range(10**6), wait_for_it, batch_size=batch_size, workers=workers, worker_options=options
    ) as batches:
        rate, seen = deliveries(batches, window, look, turn=workers)
    numbers = [number for batch in seen for number in batch]
    require(numbers == list(range(len(seen) * batch_size)), "batches are wrong, missing or out of order")
    return Measured({figure: rate * batch_size})


def loader(window: Window) -> Measured:
    return made_by(window, "loader", workers=WORKERS)


def threads(window: Window) -> Measured:
    return made_by(window, "threads", workers=FEW_WORKERS, threads=THREADS, batch_size=32)


def threads_small(window: Window) -> Measured:
    return made_by(window, "threads_small", workers=FEW_WORKERS, threads=THREADS, batch_size=8)


QUESTION = Question(
    name="blocking_io",
    figures=(
        Figure("ideal", "samples/s", "the ideal"),
        Figure("bare", "samples/s", "32 bare processes"),
        Figure("loader", "samples/s", "20 ms of waiting a sample, 32 workers"),
        Figure("threads", "samples/s", "the same, 2 workers with 16 threads each, batches of 32"),
        Figure("threads_small", "samples/s", "the same in batches of 8"),
    ),
    contestants={
        "ideal": ideal,
        "bare": bare,
        "loader": loader,
        "threads": threads,
        "threads_small": threads_small,
    },
    bars=(
        Bar("loader", "ideal", at_least=0.95),
        Bar("threads", "ideal", at_least=0.95),
        Bar("threads_small", "ideal", at_least=0.9),
    ),
    rounds=3,
    seconds=3.2,
    warm_s=1.5,
)

if __name__ == "__main__":
    main(QUESTION)
