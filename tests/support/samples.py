"""Sample functions, sources, classes and errors that several test files use.

Helpers of a single test file stay in that file. To slow a function down, bind its `wait_s` with
`functools.partial`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import numpy as np


def slow_number(item: int, wait_s: float = 0.004) -> int:
    """Return the item itself, after a wait."""
    time.sleep(wait_s)
    return item


def slow_vector(item: int, wait_s: float = 0.004) -> np.ndarray:
    """Return float32[4], filled with the item, after a wait."""
    time.sleep(wait_s)
    return np.full(4, item, np.float32)


def noisy_vector(item: int, rng: np.random.Generator) -> np.ndarray:
    """Return float64[8], the item plus noise, after a wait of 10 ms."""
    time.sleep(0.01)
    return np.full(8, item + rng.random())


def noisy_image(item: int, rng: np.random.Generator, wait_s: float = 0.0005) -> dict[str, Any]:
    """Return an image filled with the item, and five random numbers, after a wait."""
    time.sleep(wait_s)
    return {"item": np.full((30, 40), item, np.float32), "noise": rng.random(5)}


def batch_of_noise(items: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the items, and a random number for each. A `batch_fn`."""
    return np.array(items), rng.random(len(items))


def fail_at(bad: Container[int]) -> Callable[[int], int]:
    """Return a function that raises ValueError for items in `bad`, and returns all others."""

    def fail(item: int) -> int:
        if item in bad:
            raise ValueError(f"item {item} is bad")
        return item

    return fail


def start_thread() -> None:
    """Start a thread that never ends."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


class StartsThread:
    """Object that starts a thread when it is unpickled. The supervisor then cannot fork workers."""

    def __reduce__(self) -> Any:
        return start_thread, ()


class Stream:
    """A stream of 61 numbers, a prime, so the last batch is shorter."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(61))


class Point(NamedTuple):
    """A named tuple. Batches have the same class."""

    x: Any
    y: Any


class Pair(tuple):  # type: ignore[type-arg]
    """A subclass of tuple without names."""

    __slots__ = ()


class Unspeakable(ValueError):
    """An error whose `str()` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no words")
