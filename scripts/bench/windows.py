"""Batches taken through a warm-up and a window, by the clock of the loop that reads them; rates that come of it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from bench.samples import Array
from bench.works import Work, check_batch, check_ends

LOOK_EVERY = 256  # batches of tiny work in tf.data: reading a tensor costs more than making it
KEPT = 3  # first batches that are held until they are verified number by number


@dataclasses.dataclass(frozen=True)
class Window:
    """How long a contestant measures."""

    seconds: float  # of measurement, after the warm-up
    warm_s: float  # before it, not counted
    before: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # what others of the row have found already


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What a consumer saw of the batches that it took."""

    rate: float  # batches per second after the warm-up
    count: int


def delivered(
    batches: Iterable[Any], window: Window, look: Callable[[Any], object], turn: int = 1
) -> Delivery:
    """Take batches through the warm-up and the window; `look` is given each, and is cheap against the making of one.

    The clock starts at the first delivery after the warm-up, and stops at one. The counted batches are a multiple of
    `turn`: of n workers batches come n at a time, and a window that cuts a bunch would measure its own edge.
    """
    iterator: Iterator[Any] = iter(batches)
    clock = time.perf_counter
    warm_until = 0.0
    for batch in iterator:
        # From the first delivery on: what starts slowly is warm no sooner than others.
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
    """The same, with all numbers of the first batches compared, and the ends of every n-th one."""
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
    """A view of an element's one eager tensor; `tensor.numpy()` would copy it."""
    return np.asarray(memoryview(only_tensor(element)))


def only_tensor(element: Any) -> Any:
    """The tensor itself, or the only one of a tuple or dict."""
    if isinstance(element, dict):
        return next(iter(element.values()))
    return element[0] if isinstance(element, tuple) else element
