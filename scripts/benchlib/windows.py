"""Batches taken through a warm-up and a window, by the clock of the loop that reads them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from benchlib.model import Window, require

__all__ = ["Delivery", "delivered"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Delivery(Generic[_T]):
    """What a consumer saw of the batches that it took."""

    rate: float  # batches per second after the warm-up
    seen: list[_T]  # of every batch from the first one on
    cpu_s: float  # CPU time of this process for each counted batch, all its threads together


def delivered(batches: Iterable[Any], window: Window, look: Callable[[Any], _T], turn: int = 1) -> Delivery[_T]:
    """Take batches through the warm-up and the window.

    Args:
        batches: must not end before the window does.
        window: its warm-up begins at the first delivery; the clock starts at the first one after it, and stops at one.
        look: cheap against the making of a batch; its results are for the caller to verify.
        turn: the counted batches are a multiple of this. Where n workers each make a whole batch at a time, batches
            come n at a time, and a window that cuts a bunch would measure its own edge.
    """
    seen: list[_T] = []
    iterator: Iterator[Any] = iter(batches)
    clock = time.perf_counter
    warm_until = 0.0
    for batch in iterator:
        # From the first delivery on: what starts slowly is warm no sooner than others.
        warm_until = warm_until or clock() + window.warm_s
        seen.append(look(batch))
        if clock() >= warm_until:
            break
    cpu_s = time.process_time()
    started = clock()
    deadline, count, is_whole = started + window.seconds, 0, False
    for batch in iterator:
        seen.append(look(batch))
        count += 1
        if clock() >= deadline and count % turn == 0:
            is_whole = True
            break
    elapsed_s = clock() - started
    cpu_s = time.process_time() - cpu_s
    require(is_whole, "the pass ended before the window did: give the loader more items")
    return Delivery(count / elapsed_s, seen, cpu_s / count)
