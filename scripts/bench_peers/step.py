"""How long does a training step take beside a loader that works?

The step is some matrix products. The time from step to step counts, waiting for the batch included.

- "step": tens of milliseconds on one core, and one worker that makes a batch in half of that: two cores suffice.
- "shortstep": some milliseconds on one core, and 16 workers, whose samples wait: nobody computes, but 16 processes wake
  some thousand times a second.
- "busystep": some milliseconds on all cores, and samples compute, too: the cores do not suffice, and the step itself is
  slower, which is the fact `step_ms`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchlib.limits import ready_batch
from benchlib.model import Measured, Window, require
from benchlib.peer import load_peer
from benchlib.rates import only_tensor
from benchlib.samples import STEP_WIDTH
from benchlib.work import Work
from benchlib.works import WORKS

__all__ = ["measure_step"]

LAYERS = 6  # of 4 MB each, which stay in the last-level cache
LONG = 8  # times as many products
WARM_STEPS = 20


def measure_step(contestant: str, view: str, name: str, window: Window) -> Measured:
    """Median milliseconds from step to step, and of the step by itself."""
    import tensorflow as tf

    work = WORKS[name]
    if name != "busystep":
        tf.config.threading.set_intra_op_parallelism_threads(1)
    weights = [
        tf.random.stateless_normal((STEP_WIDTH, STEP_WIDTH), (0, layer), stddev=STEP_WIDTH**-0.5)
        for layer in range(LAYERS)
    ]

    @tf.function
    def step(batch: Any) -> Any:
        values = batch
        for weight in weights * (LONG if name == "step" else 1):
            values = tf.nn.relu(values @ weight)
        return tf.reduce_sum(values), batch[0, 0]

    with _batches(contestant, view, work) as batches:
        between_ms, alone_ms, firsts = _walk(batches, step, view, window)
    if contestant != "ready":
        expected = [work.token(position * work.batch_size) for position in range(len(firsts))]
        require(firsts == expected, "batches are wrong, missing or out of order")
    return Measured({"ms": statistics.median(between_ms)}, {"step_ms": statistics.median(alone_ms)})


def _walk(batches: Any, step: Any, view: str, window: Window) -> tuple[list[float], list[float], list[float]]:
    clock = time.perf_counter
    between_ms: list[float] = []
    alone_ms: list[float] = []
    firsts: list[float] = []
    ended = deadline = 0.0
    for number, element in enumerate(batches):
        began = clock()
        total, first = step(only_tensor(element))
        float(total)  # waits for the result
        now = clock()
        firsts.append(float(first))
        if number == WARM_STEPS:
            deadline = now + window.seconds
        elif number > WARM_STEPS:
            between_ms.append((now - ended) * 1e3)
            alone_ms.append((now - began) * 1e3)
            if now > deadline:
                break
        ended = now
    return between_ms, alone_ms, firsts


@contextmanager
def _batches(contestant: str, view: str, work: Work) -> Iterator[Any]:
    """The contestant's batches, as what the step takes."""
    import tensorflow as tf

    if contestant == "ready":
        tensor = tf.constant(ready_batch(work))
        yield (tensor for _ in range(work.batches))
        return
    peer = load_peer(contestant)
    if view == "tf":
        with peer.tf(work, work.workers) as dataset:
            yield dataset
        return
    assert peer.own is not None
    own: AbstractContextManager[Any] = peer.own(work, work.workers)
    with own as batches:
        yield (tf.convert_to_tensor(peer.as_array(batch)) for batch in batches)
