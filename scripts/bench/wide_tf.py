"""How near to the speed of memory do large batches come through `tf.data`?

Work: that of wide.py, read by `for batch in loader.as_dataset()`.
Baseline: the two bare processes of wide.py.
Bar: at least 0.7 of them, with `out`.
Verified: all numbers of the first batches, and the first and last number of every batch that was timed.
Command: scripts/bench/run wide_tf

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    wide_tf     bare               421 batches/s [412 .. 423]
    wide_tf     out                342 batches/s [338 .. 343]       0.81 x bare (best 0.81; bar ≥ 0.7)
    wide_tf     return             291 batches/s [289 .. 297]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import wide
from common import Bar, Figure, Measured, Question, Window, deliveries, main


def measure_dataset(fn: Callable[..., Any], figure: str, window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(wide.ITEMS), fn, batch_size=wide.BATCH_SIZE, workers=wide.WORKERS) as loader:
        dataset = loader.as_dataset(prefetch=2)
        for position, batch in enumerate(dataset.take(5)):
            wide.verify_batch(batch.numpy(), position)

        def look(batch: Any) -> tuple[float, float]:
            values = np.asarray(memoryview(batch))  # a view of the tensor; batch.numpy() would copy all of it
            return values.item(0), values.item(-1)

        rate, seen = deliveries(dataset, window, look, turn=wide.WORKERS)
        statistics = loader.statistics()
    wide.verify_ends(seen)
    return Measured({figure: rate}, {"slots": statistics.slots, f"{figure}_copied": statistics.batches_copied})


def dataset_out(window: Window) -> Measured:
    return measure_dataset(wide.scale_into, "out", window)


def dataset_return(window: Window) -> Measured:
    return measure_dataset(wide.scale, "return", window)


QUESTION = Question(
    name="wide_tf",
    figures=(
        Figure("bare", "batches/s", "two bare processes into reused buffers"),
        Figure("out", "batches/s", "38.5 MB batches through tf.data, fn writes into out, 2 workers"),
        Figure("return", "batches/s", "38.5 MB batches through tf.data, fn returns an array, 2 workers"),
    ),
    contestants={"out": dataset_out, "bare": wide.bare, "return": dataset_return},
    bars=(Bar("out", "bare", at_least=0.7),),
    rounds=3,
    seconds=1.5,
)

if __name__ == "__main__":
    main(QUESTION)
