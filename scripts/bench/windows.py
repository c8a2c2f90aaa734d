"""Batches taken during a warm-up and a window, by the clock of the loop that reads them, and their
rates.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from bench.samples import Array
from bench.works import Work, check_batch, check_ends

# tiny batches in tf.data from one check to the next, because reading a tensor costs more than
# making it
LOOK_EVERY = 256
KEPT = 3  # number of first batches that are kept, and whose numbers are all verified


@dataclasses.dataclass(frozen=True)
class Window:
    """Duration of a measurement."""

    seconds: float  # seconds of the measurement, after the warm-up
    warm_s: float  # seconds of the warm-up
    before: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # results of earlier contestants of the row


@dataclasses.dataclass(frozen=True)
class Delivery:
    """Batches that a consumer has received."""

    rate: float  # batches per second after the warm-up
    count: int


def delivered(
    batches: Iterable[Any], window: Window, look: Callable[[Any], object], turn: int = 1
) -> Delivery:
    """Take batches during the warm-up and the window. `look` is called with each, and must be much
    cheaper than making one.

    The clock starts at the first delivery after the warm-up, and stops at a delivery. The number of
    counted batches is a multiple of `turn`: n workers deliver n batches at a time, and a part of
    these would distort the rate.
    """
    iterator: Iterator[Any] = iter(batches)
    clock = time.perf_counter
    warm_until = 0.0
    for batch in iterator:
        # The warm-up starts with the first delivery, so that a slow start does not shorten it.
        warm_until = warm_until or clock() + window.warm_s
        look(batch)
        if clock() >= warm_until:
            break
    started = clock()
    deadline = started + window.seconds
    for count, batch in enumerate(iterator, start=1):
        look(batch)
        if clock() >= deadline and count % turn == 0:
            return Delivery(count / (clock() - started), count)
    raise ValueError("the pass ended before the window did: give the loader more items")


def verified(
    batches: Any, work: Work, window: Window, as_array: Callable[[Any], Array], every: int = 1
) -> Delivery:
    """As `delivered`, but compare all numbers of the first batches, and the ends of every n-th
    batch.
    """
    first: list[Array] = []
    ends: list[tuple[int, float, float]] = []
    positions = itertools.count()
    last_row = (work.batch_size - 1) * int(np.prod(work.shape))

    def look(batch: Any) -> None:
        position = next(positions)
        if position >= KEPT and position % every:
            return
        array = as_array(batch)
        if position < KEPT:
            first.append(array.copy())
        ends.append((position, array.item(0), array.item(last_row)))

    delivery = delivered(batches, window, look, turn=max(work.workers, work.period * 2))
    for position, batch in enumerate(first):
        check_batch(work, position, batch)
    check_ends(work, ends)
    return delivery


def tensor_as_array(element: Any) -> Array:
    """Return a view of an element's only eager tensor. `tensor.numpy()` would copy it."""
    return np.asarray(memoryview(only_tensor(element)))


def only_tensor(element: Any) -> Any:
    """Return the tensor itself, or the only one of a tuple or dict."""
    if isinstance(element, dict):
        return next(iter(element.values()))
    return element[0] if isinstance(element, tuple) else element
