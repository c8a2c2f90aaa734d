"""How many batches a second a contestant delivers, in each of the three views, verified before the number is given."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchlib.model import Measured, Window, require
from benchlib.peer import Peer
from benchlib.windows import delivered
from benchlib.work import Array, Work, check_batches, check_items, check_tokens, items_of

__all__ = ["VIEWS", "measure_rate", "only_tensor", "tensor_as_array"]

# own: the loader's batches. tf: tensors out of `for batch in dataset`. function: out of the same in a tf.function.
VIEWS = ("own", "tf", "function")
LOOK_EVERY = 256  # batches of tiny work in tf.data: reading a tensor costs more than making it
CALL_STEPS = 256  # that a tf.function takes at a time, as fit(steps_per_execution=256) would
KEPT = 3  # first batches that are held until they are verified number by number


def measure_rate(peer: Peer, work: Work, view: str, window: Window) -> Measured:
    """Batches per second, and the trainer's CPU time for each."""
    if view == "own":
        require(peer.own is not None, f"{peer.name} has no batches of its own")
        with peer.own(work, work.workers) as batches:  # type: ignore[misc]
            figures = _iterate(batches, peer, work, window, 1, peer.as_array)
    else:
        with peer.tf(work, work.workers) as dataset:
            if view == "function":
                figures = _call(dataset, peer, work, window)
            else:
                every = LOOK_EVERY if work.is_tiny else 1
                figures = _iterate(dataset, peer, work, window, every, tensor_as_array)
    return Measured(figures, dict(peer.facts))


def tensor_as_array(element: Any) -> Array:
    """A view of an element's one eager tensor; `tensor.numpy()` would copy it."""
    return np.asarray(memoryview(only_tensor(element)))


def only_tensor(element: Any) -> Any:
    """The tensor itself, or the only one of a tuple or dict."""
    if isinstance(element, dict):
        return next(iter(element.values()))
    return element[0] if isinstance(element, tuple) else element


def _iterate(
    batches: Any, peer: Peer, work: Work, window: Window, every: int, as_array: Callable[[Any], Array]
) -> dict[str, float]:
    first: list[Array] = []
    look = _ends(work, first, every, as_array) if peer.is_ordered else _all_items(work, first, every, as_array)
    delivery = delivered(batches, window, look, turn=max(work.workers, work.period * 2))
    check_batches(work, first)
    if peer.is_ordered:
        check_tokens(work, [ends for ends in delivery.seen if ends is not None])
    else:
        check_items(work, [items for items in delivery.seen if items is not None], is_whole=False)
    return {"rate": delivery.rate, "cpu_us": delivery.cpu_s * 1e6}


def _ends(work: Work, first: list[Array], every: int, as_array: Callable[[Any], Array]) -> Callable[[Any], Any]:
    """Looks at the first and last row of every n-th batch, and keeps copies of the first few."""
    positions = itertools.count()
    last_row = (work.batch_size - 1) * int(np.prod(work.shape))

    def look(batch: Any) -> tuple[int, float, float] | None:
        position = next(positions)
        if position >= KEPT and position % every:
            return None
        array = as_array(batch)
        if position < KEPT:
            first.append(array.copy())
        return position, array.item(0), array.item(last_row)

    return look


def _all_items(work: Work, first: list[Array], every: int, as_array: Callable[[Any], Array]) -> Callable[[Any], Any]:
    """Looks at all rows of all batches, as which items are in which batch is not known."""

    def look(batch: Any) -> Array:
        array = as_array(batch)
        if len(first) < KEPT:
            first.append(array.copy())
        return items_of(work, array)

    return look


def _call(dataset: Any, peer: Peer, work: Work, window: Window) -> dict[str, float]:
    """A tf.function that takes many batches at a call and adds up their first numbers."""
    import tensorflow as tf

    @tf.function
    def take(iterator: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for _ in tf.range(CALL_STEPS):
            total += tf.cast(tf.reshape(only_tensor(next(iterator)), [-1])[0], tf.int64)
        return total

    iterator = iter(dataset)
    clock = time.perf_counter
    total, calls = int(take(iterator)), 1
    warm_until = clock() + window.warm_s
    while clock() < warm_until:
        total, calls = total + int(take(iterator)), calls + 1
    warm_calls, cpu_s, started = calls, time.process_time(), clock()
    deadline = started + window.seconds
    while clock() < deadline:
        total, calls = total + int(take(iterator)), calls + 1
    elapsed_s, cpu_s = clock() - started, time.process_time() - cpu_s
    count = calls * CALL_STEPS
    if peer.is_ordered:
        expected = sum(work.token(position * work.batch_size) for position in range(count))
        require(total == expected, f"the first numbers of {count} batches add up to {total}, not {expected}")
    timed = (calls - warm_calls) * CALL_STEPS
    return {"rate": timed / elapsed_s, "cpu_us": cpu_s / timed * 1e6}
