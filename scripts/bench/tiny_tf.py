"""How much faster than `from_generator` do tiny batches come out of `tf.data`?

Work: that of tiny.py, read by `for batch in loader.as_dataset()`.
Baseline: a `from_generator` that computes nothing: it yields one ready-made batch again and again, 64-byte aligned, so
that TensorFlow does not even copy it; once with `prefetch` and once without, and the faster one counts. It is a process
of its own in each round, as it has two speeds. Beside it the ceiling: TensorFlow alone, repeating one tensor in C++.
Bar: at least 3 times its batches a second.
Verified: all numbers of the first 300 batches, and those of every 256th batch that was timed.
Command: scripts/bench/run tiny_tf

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    tiny_tf     from_generator   4,811 batches/s [4,811 .. 5,041]
    tiny_tf     ceiling         11,416 batches/s [11,406 .. 11,495]
    tiny_tf     as_dataset      11,886 batches/s [11,343 .. 12,267]  2.47 x from_generator (best 2.43; bar ≥ 3) MISSED
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require
from tiny import BATCH_SIZE, ITEMS, WIDTH, WORKERS, expected_batch, tiny

PREFETCH = 2  # that of `as_dataset` by default, for both sides
ALIGNMENT_BYTES = 64  # of an array that TensorFlow takes without a copy
LOOK_EVERY = 256


def from_generator(window: Window) -> Measured:
    import tensorflow as tf

    ready = aligned((BATCH_SIZE, WIDTH))
    ready[:] = expected_batch(0)

    def generate() -> Iterator[npt.NDArray[np.float32]]:
        while True:
            yield ready

    signature = tf.TensorSpec((BATCH_SIZE, WIDTH), tf.float32)
    plain = tf.data.Dataset.from_generator(generate, output_signature=signature)
    rates = []
    for dataset in (plain, plain.prefetch(PREFETCH)):
        rate, seen = deliveries(dataset, dataclasses.replace(window, seconds=window.seconds / 2), look_now_and_then())
        for batch in seen:
            require(batch is None or np.array_equal(batch, ready), "a wrong batch")
        rates.append(rate)
    return Measured({"from_generator": max(rates)}, {"from_generator_prefetch": rates[1]})


def ceiling(window: Window) -> Measured:
    import tensorflow as tf

    ready = expected_batch(0)
    rate, seen = deliveries(tf.data.Dataset.from_tensors(ready).repeat(), window, look_now_and_then())
    for batch in seen:
        require(batch is None or np.array_equal(batch, ready), "a wrong batch")
    return Measured({"ceiling": rate})


def as_dataset(window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(ITEMS), tiny, batch_size=BATCH_SIZE, workers=WORKERS) as loader:
        dataset = loader.as_dataset(prefetch=PREFETCH)
        for position, batch in enumerate(dataset.take(300)):
            require(np.array_equal(batch.numpy(), expected_batch(position)), f"batch {position} is wrong")
        rate, seen = deliveries(dataset, window, look_now_and_then())
        statistics = loader.statistics()
    for position, batch in enumerate(seen):
        require(batch is None or np.array_equal(batch, expected_batch(position)), f"batch {position} is wrong")
    return Measured({"as_dataset": rate}, {"slots": statistics.slots, "copied": statistics.batches_copied})


def aligned(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """An uninitialised float32 array that TensorFlow takes without a copy."""
    nbytes = int(np.prod(shape)) * 4
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[offset : offset + nbytes].view(np.float32).reshape(shape)


def look_now_and_then() -> Callable[[Any], npt.NDArray[Any] | None]:
    """A look that copies every LOOK_EVERY-th batch, from the first on: reading a tensor costs more than making it."""
    numbers = itertools.count()

    def look(batch: Any) -> npt.NDArray[Any] | None:
        return None if next(numbers) % LOOK_EVERY else np.array(batch)

    return look


QUESTION = Question(
    name="tiny_tf",
    figures=(
        Figure("from_generator", "batches/s", "from_generator of one ready-made batch"),
        Figure("ceiling", "batches/s", "TensorFlow's own iteration of one tensor"),
        Figure("as_dataset", "batches/s", "32 samples of 16 float32 through tf.data, 2 workers"),
    ),
    contestants={"from_generator": from_generator, "ceiling": ceiling, "as_dataset": as_dataset},
    bars=(Bar("as_dataset", "from_generator", at_least=3.0),),
    rounds=3,
    seconds=2.0,
)

if __name__ == "__main__":
    main(QUESTION)
