"""How long until the first batch: of a loader, of a second one on a running pool, of the next epoch?

Work: that of `tiny` with two workers, in fresh processes. "First batch" runs from `Loader(...)`, imports done, to the
batch; "second loader" the same on a `Pool` whose workers have served another loader; "gap" from the last batch of an
epoch to the first of the next, by the clock of the loop that reads them.
Baselines: a bare interpreter that imports NumPy and cloudpickle, `python -c "import numpy, cloudpickle"`, from start to
end; for the gap, three tiny batches at the rate at which the same epochs deliver them.
Bars: at most 4 bare interpreters; at most half of one; at most those three batches.
Verified: every first batch, and the number of batches of every epoch.
Command: scripts/bench/run latency

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    latency     interpreter       79.7 ms        [74.8 .. 96]
    latency     first_batch        139 ms        [134 .. 146]       1.75 x interpreter (best 1.79; bar ≤ 4)
    latency     second_loader     16.5 ms        [15.5 .. 19.5]     0.21 x interpreter (best 0.21; bar ≤ 0.5)
    latency     three_batches     52.1 us        [50.5 .. 59.6]
    latency     gap                 64 us        [56.1 .. 75.6]     1.23 x three_batches (best 1.11; bar ≤ 1) MISSED
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import numpy as np

from benchlib.model import Bar, Figure, Measured, Question, Window, require
from benchlib.samples import tiny
from benchlib.work import make_batch
from benchlib.works import TINY_ITEMS, WORKS

WORK = WORKS["tiny32"]
BATCH_SIZE, WORKERS = WORK.batch_size, WORK.workers
REPETITIONS = 5  # within a process, where a process can give several
EPOCHS = 40
EPOCH_BATCHES = 1000


def interpreter(window: Window) -> Measured:
    times_ms = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import numpy, cloudpickle"], check=True)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return Measured({"interpreter": statistics.median(times_ms)})


def first_batch(window: Window) -> Measured:
    from loaderpool import Loader  # imported when named, and that is not in the time

    started = time.perf_counter()
    loader = Loader(range(TINY_ITEMS), tiny, batch_size=BATCH_SIZE, workers=WORKERS)
    batch = next(iter(loader))
    elapsed_ms = (time.perf_counter() - started) * 1e3
    require(np.array_equal(batch, make_batch(WORK, 0)), "a wrong first batch")
    loader.close()
    return Measured({"first_batch": elapsed_ms})


def second_loader(window: Window) -> Measured:
    import loaderpool as lp

    times_ms = []
    with (
        lp.Pool(workers=WORKERS) as pool,
        lp.Loader(range(TINY_ITEMS), tiny, batch_size=BATCH_SIZE, workers=pool) as first,
    ):
        require(np.array_equal(next(iter(first)), make_batch(WORK, 0)), "a wrong first batch")
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            second = lp.Loader(range(TINY_ITEMS), tiny, batch_size=BATCH_SIZE, workers=pool)
            batch = next(iter(second))
            times_ms.append((time.perf_counter() - started) * 1e3)
            require(np.array_equal(batch, make_batch(WORK, 0)), "a wrong first batch")
            second.close()
    return Measured({"second_loader": statistics.median(times_ms)})


def epoch_gap(window: Window) -> Measured:
    import loaderpool as lp

    clock = time.perf_counter
    gaps_us, batches_us = [], []
    with lp.Loader(range(EPOCH_BATCHES * BATCH_SIZE), tiny, batch_size=BATCH_SIZE, workers=WORKERS) as loader:
        ended = 0.0
        for epoch in range(EPOCHS):
            began, count = 0.0, 0
            for batch in loader:
                now = clock()  # before anything else is done with the batch
                if not count:
                    began = now
                    require(batch.item(0) == 0 and batch.item(-1) == BATCH_SIZE - 1, "a wrong first batch")
                count += 1
            require(count == EPOCH_BATCHES, f"an epoch of {count} batches")
            # The first epochs start the pool and find out how long the function takes.
            if epoch >= EPOCHS // 4:
                gaps_us.append((began - ended) * 1e6)
                batches_us.append((now - began) * 1e6 / (EPOCH_BATCHES - 1))
            ended = now
    return Measured({"gap": statistics.median(gaps_us), "three_batches": 3 * statistics.median(batches_us)})


QUESTION = Question(
    name="latency",
    figures=(
        Figure("interpreter", "ms", "a bare interpreter with NumPy and cloudpickle"),
        Figure("first_batch", "ms", "from Loader(...) to its first batch"),
        Figure("second_loader", "ms", "the same on a running pool"),
        Figure("three_batches", "us", "three tiny batches"),
        Figure("gap", "us", "from an epoch's last batch to the next one's first"),
    ),
    contestants={
        "interpreter": interpreter,
        "first_batch": first_batch,
        "second_loader": second_loader,
        "epoch_gap": epoch_gap,
    },
    bars=(
        Bar("first_batch", "interpreter", at_most=4.0),
        Bar("second_loader", "interpreter", at_most=0.5),
        Bar("gap", "three_batches", at_most=1.0),
    ),
    rounds=5,
)
