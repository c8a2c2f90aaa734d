"""Limits for every loader: processes that deliver nothing, and TensorFlow alone.

- bare: as many processes as workers, which only call the function (the limit of the CPUs).
- rows: the same, with rows written into as many reused buffers as the loader has slots (the limit
  of memory).
- new_rows: as rows, for some batches, with a few new buffers for each process.
- ideal: the computed limit of work that waits.
- from_generator: yields one ready batch, aligned to 64 bytes, so that TensorFlow does not copy it.
  It runs with and without `prefetch`, and the faster one counts.
- from_tensors: `from_tensors(batch).repeat()`, TensorFlow's own iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.samples import Array
from bench.windows import Delivery, Window, tensor_as_array, verified
from bench.works import Work, check_batch, make_batch

DEFAULT_SLOTS = 8  # number of buffers if loaderpool has not run before and reported its slots
ALIGNMENT_BYTES = 64  # alignment of an array that TensorFlow takes without a copy
BUFFER_BYTES = 2**29  # maximum size of all buffers together, as for slots
NEW_BUFFERS = 2  # buffers of each process: one is written while the other one would be read
# batches between two readings of the clock, because a tiny batch takes no longer than a reading
TINY_TURN = 8
# position of the ready batch: at 0, its first number would equal that of empty memory
READY_POSITION = 1

# Called with the number of a process. Returns a function that makes some batches, and one that
# verifies the last of them.
Contender = Callable[[int], tuple[Callable[[], None], Callable[[], None]]]


def _bare(work: Work, window: Window) -> Delivery:
    turn = max(work.period, TINY_TURN if work.is_tiny else 1)

    def contender(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        item, sample = number * (work.items // work.workers), None

        def some_batches() -> None:
            nonlocal item, sample
            first = item + 1
            for item in range(first, first + turn * work.batch_size):
                sample = work.fn(item)

        def check() -> None:
            if not np.array_equal(sample, work.fn(item)):
                raise ValueError("a wrong sample")

        return some_batches, check

    return _delivery(contender, work.workers, turn, window)


def _rows(work: Work, window: Window) -> Delivery:
    slots = int(window.before.get("slots", DEFAULT_SLOTS))
    count = max(1, min(slots, BUFFER_BYTES // work.batch_bytes) // work.workers)
    turn = max(work.period, TINY_TURN if work.is_tiny else 1)

    def contender(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        # One mapping for all buffers, as for slots. Small batches in pages of their own would be
        # slower.
        memory = mmap.mmap(-1, count * work.batch_bytes)
        buffers: Array = np.ndarray((count, *work.batch_shape), work.dtype, buffer=memory)
        buffers.fill(0)  # allocates the pages before the clock starts
        first = number * (work.batches // work.workers)
        done = 0

        def some_batches() -> None:
            nonlocal done
            for _ in range(turn):
                make_batch(work, first + done, buffers[done % count])
                done += 1

        def check() -> None:
            check_batch(work, first + done - 1, buffers[(done - 1) % count])

        return some_batches, check

    return _delivery(contender, work.workers, turn, window)


def new_rows(work: Work, batches: int) -> float:
    """Return the batches per second of processes that write this number of batches, each into a few
    new buffers of shared memory.
    """
    context = multiprocessing.get_context("fork")
    all_ready, ends = context.Barrier(work.workers + 1), context.SimpleQueue()
    count = batches // work.workers

    def run(number: int) -> None:
        try:
            memory = mmap.mmap(-1, NEW_BUFFERS * work.batch_bytes)
            buffers: Array = np.ndarray((NEW_BUFFERS, *work.batch_shape), work.dtype, buffer=memory)
            first = number * count
            all_ready.wait()
            for done in range(count):
                make_batch(work, first + done, buffers[done % NEW_BUFFERS])
            ends.put(time.perf_counter())
            check_batch(work, first + count - 1, buffers[(count - 1) % NEW_BUFFERS])
        except BaseException:
            all_ready.abort()
            raise

    children = [context.Process(target=run, args=(number,)) for number in range(work.workers)]
    for child in children:
        child.start()
    all_ready.wait()
    started = time.perf_counter()
    ended = max(ends.get() for _ in children)
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise ValueError("a bare process failed; see above")
    return count * work.workers / (ended - started)


def _ideal(work: Work, window: Window) -> Delivery:
    assert work.ideal is not None
    return Delivery(work.ideal / work.batch_size, 0)


def _delivery(contender: Contender, processes: int, turn: int, window: Window) -> Delivery:
    """Return the rate of all processes together. Each is forked here and times itself, in turns of
    `turn` batches.
    """
    context = multiprocessing.get_context("fork")
    all_warm, rates = context.Barrier(processes), context.SimpleQueue()

    def run(number: int) -> None:
        try:
            some_batches, check = contender(number)
            warm_until = time.perf_counter() + window.warm_s
            some_batches()
            while time.perf_counter() < warm_until:
                some_batches()
            check()
            all_warm.wait()
        except BaseException:
            all_warm.abort()
            raise
        turns, now, started = 0, 0.0, time.perf_counter()
        while now < started + window.seconds:
            some_batches()
            turns += 1
            now = time.perf_counter()
        check()
        rates.put(turns / (now - started))

    children = [context.Process(target=run, args=(number,)) for number in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise ValueError("a bare process failed; see above")
    return Delivery(turn * sum(rates.get() for _ in children), 0)


def ready_batch(work: Work) -> Array:
    """Return a batch that TensorFlow takes without a copy."""
    memory = np.empty(work.batch_bytes + ALIGNMENT_BYTES, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT_BYTES
    batch: Array = (
        memory[offset : offset + work.batch_bytes].view(work.dtype).reshape(work.batch_shape)
    )
    return make_batch(work, READY_POSITION, batch)


def _from_generator(work: Work, window: Window) -> Delivery:
    import tensorflow as tf

    ready = ready_batch(work)
    signature = tf.TensorSpec(work.batch_shape, tf.as_dtype(work.dtype))
    made = tf.data.Dataset.from_generator(
        lambda: itertools.repeat(ready), output_signature=signature
    )
    half = Window(window.seconds / 2, window.warm_s / 2)
    found = [_measure_ready(dataset, work, half) for dataset in (made, made.prefetch(2))]
    return max(found, key=lambda delivery: delivery.rate)


def _from_tensors(work: Work, window: Window) -> Delivery:
    import tensorflow as tf

    return _measure_ready(tf.data.Dataset.from_tensors(ready_batch(work)).repeat(), work, window)


def _measure_ready(dataset: Any, work: Work, window: Window) -> Delivery:
    """Measure a dataset as a peer is measured. All its batches are the same one."""
    first = READY_POSITION * work.batch_size

    def fn(item: int) -> Array:
        return work.fn(first + item % work.batch_size)

    same = dataclasses.replace(
        work, fn=fn, write=None, token=lambda item: work.token(first + item % work.batch_size)
    )
    return verified(dataset, same, window, tensor_as_array, 256 if work.is_tiny else 1)


LIMITS: dict[str, Callable[[Work, Window], Delivery]] = {
    "bare": _bare, "rows": _rows, "ideal": _ideal, "from_generator": _from_generator,
    "from_tensors": _from_tensors,
}  # fmt: skip
