"""What no loader can exceed, or can hardly: processes that hand nothing over, and TensorFlow alone.

- bare: as many processes as there are workers, which only run the function (the limit of the CPUs).
- rows: the same, writing the rows into as many reused buffers as the loader has slots (the limit of memory).
- ideal: for work that waits, by arithmetic.
- from_generator: yields one ready-made batch, 64-byte aligned, so that TensorFlow does not even copy it.
- waiting: the same at loaderpool's rate: its threads sleep and wake between batches, as they do with a loader.
- from_tensors: `from_tensors(batch).repeat()`, which is TensorFlow's own iteration.
- interpreter: a bare one that imports NumPy and cloudpickle.
"""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchlib.bare import bare_rate
from benchlib.model import Measured, Window, require
from benchlib.peer import Peer
from benchlib.rates import measure_rate
from benchlib.work import Array, Work, check_batches, make_batch

__all__ = ["LIMITS", "READY_POSITION", "ready_batch"]

DEFAULT_SLOTS = 8  # where loaderpool has not run before and told how many it has
ALIGNMENT_BYTES = 64  # of an array that TensorFlow takes without a copy
# Large batches: all buffers together take this much at most, as a ring of slots would.
BUFFER_BYTES = 2**29
# Batches that a process makes between two looks at the clock: a tiny one takes no longer than a look.
TINY_TURN = 8


def bare(work: Work, view: str, window: Window) -> Measured:
    """Only the function is run; its results are dropped."""

    def contender(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        state = {"next": number * (work.items // work.workers), "sample": work.fn(0), "item": 0}
        batches = max(work.period, TINY_TURN if work.is_tiny else 1)

        def some_batches() -> None:
            start = state["next"]
            for item in range(start, start + batches * work.batch_size):
                sample = work.fn(item)
            state.update(next=item + 1, sample=sample, item=item)

        def check() -> None:
            require(np.array_equal(state["sample"], work.fn(state["item"])), "a wrong sample")

        return some_batches, check

    turns = bare_rate(contender, work.workers, window)
    return Measured({"rate": turns * max(work.period, TINY_TURN if work.is_tiny else 1)})


def rows(work: Work, view: str, window: Window) -> Measured:
    """The function's results are written into buffers that are used in turn."""
    slots = int(window.facts.get("slots", DEFAULT_SLOTS))
    count = max(1, min(slots, BUFFER_BYTES // work.batch_bytes) // work.workers)
    turn = max(work.period, TINY_TURN if work.is_tiny else 1)

    def contender(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        # Together in one mapping, as slots are: a small batch of its own page would be slower.
        memory = mmap.mmap(-1, count * work.batch_bytes)
        buffers: Array = np.ndarray((count, *work.batch_shape), work.dtype, buffer=memory)
        buffers.fill(0)  # the pages are there before the clock starts
        first = number * (work.batches // work.workers)
        done = 0

        def some_batches() -> None:
            nonlocal done
            for _ in range(turn):
                make_batch(work, first + done, buffers[done % count])
                done += 1

        def check() -> None:
            check_batches(work, [buffers[(done - 1) % count]])

        return some_batches, check

    return Measured({"rate": bare_rate(contender, work.workers, window) * turn}, {"buffers": count * work.workers})


def ideal(work: Work, view: str, window: Window) -> Measured:
    assert work.ideal is not None
    return Measured({"rate": work.ideal / work.batch_size})


# The position of the ready batch: its first number would be 0 otherwise, which is what memory holds by itself.
READY_POSITION = 1


def ready_batch(work: Work) -> Array:
    """A batch that TensorFlow takes without a copy."""
    memory = np.empty(work.batch_bytes + ALIGNMENT_BYTES, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT_BYTES
    batch: Array = memory[offset : offset + work.batch_bytes].view(work.dtype).reshape(work.batch_shape)
    return make_batch(work, READY_POSITION, batch)


def from_generator(work: Work, view: str, window: Window) -> Measured:
    """With `prefetch` and without; the faster one counts."""

    def always(ready: Array) -> Iterator[Array]:
        while True:
            yield ready

    half = Window(window.seconds / 2, window.warm_s / 2, window.facts)
    found = [_measure_ready(_generated(always, prefetch), work, view, half) for prefetch in (0, 2)]
    return max(found, key=lambda measured: measured.figures["rate"])


def waiting(work: Work, view: str, window: Window) -> Measured:
    """As `from_generator` with `prefetch`, at the rate at which loaderpool delivered: what waiting itself costs it."""
    pause_s = 1 / window.facts["rate"]

    def in_time(ready: Array) -> Iterator[Array]:
        due = time.perf_counter()
        while True:
            due += pause_s
            time.sleep(max(0.0, due - time.perf_counter()))
            yield ready

    return _measure_ready(_generated(in_time, 2), work, view, window)


def _generated(generate: Callable[[Array], Iterator[Array]], prefetch: int) -> Any:
    """The ready batch through `from_generator`, as a peer's `tf`."""
    import tensorflow as tf

    @contextmanager
    def dataset(work: Work, workers: int) -> Iterator[Any]:
        ready = ready_batch(work)
        signature = tf.TensorSpec(work.batch_shape, tf.as_dtype(work.dtype))
        made = tf.data.Dataset.from_generator(lambda: generate(ready), output_signature=signature)
        yield made.prefetch(prefetch) if prefetch else made

    return dataset


def from_tensors(work: Work, view: str, window: Window) -> Measured:
    import tensorflow as tf

    @contextmanager
    def dataset(work: Work, workers: int) -> Iterator[Any]:
        yield tf.data.Dataset.from_tensors(ready_batch(work)).repeat()

    return _measure_ready(dataset, work, view, window)


def _measure_ready(dataset: Any, work: Work, view: str, window: Window) -> Measured:
    """As any peer is measured, except that all batches are the same one."""

    def token(item: int) -> int:
        return work.token(READY_POSITION * work.batch_size + item % work.batch_size)

    peer = Peer("ready", None, dataset, lambda batch: batch, is_ordered=True)
    return measure_rate(peer, dataclasses.replace(work, token=token), view, window)


LIMITS: dict[str, Callable[[Work, str, Window], Measured]] = {
    limit.__name__: limit for limit in (bare, rows, ideal, from_generator, waiting, from_tensors)
}
