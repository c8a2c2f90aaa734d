"""Functions that make samples: at module level, so that workers can import them, beside nothing that takes time to."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TINY_WIDTH = 16
# A linear congruential generator: pure Python that nothing can shorten. STEPS take about 5 ms.
STEPS, FACTOR, ADDEND, MODULUS = 40_000, 1_103_515_245, 12_345, 2**31
SLEEP_S = 0.02
REQUEST_S = 0.05
STRAGGLER_EVERY, STRAGGLER_COST = 64, 50
STEP_WIDTH = 1024  # of a sample that a training step takes


def tiny(item: int) -> Array:
    """float32[16], all of them the item: a sample that is as good as free."""
    return np.full(TINY_WIDTH, item, np.float32)


def slow(item: int, steps: int = STEPS) -> int:
    """The generator's state so many steps after `item`."""
    state = item
    for _ in range(steps):
        state = (state * FACTOR + ADDEND) % MODULUS
    return state


def compute(item: int) -> Array:
    """int64[2]: the item and what about 5 ms of pure Python make of it."""
    return np.array([item, slow(item)])


def burn(item: int) -> Array:
    """int64[8]: the item, after about 2 ms of Python."""
    slow(item, 16_000)
    return np.full(8, item)


def straggle(item: int) -> Array:
    """int64[2]: half a millisecond of Python; every 64th item takes 50 times as long."""
    is_slow = item % STRAGGLER_EVERY == STRAGGLER_EVERY // 2
    return np.array([item, slow(item, 4_000 * (STRAGGLER_COST if is_slow else 1))])


def wait_for_it(item: int) -> Array:
    """int64[1]: the item, after what a read from afar is to the CPU: nothing, for 20 ms."""
    time.sleep(SLEEP_S)
    return np.array([item])


def request(item: int) -> Array:
    """int64[1]: the item, after a request to a slow server."""
    time.sleep(REQUEST_S)
    return np.array([item])


async def request_async(item: int) -> Array:
    """The same as a coroutine."""
    await asyncio.sleep(REQUEST_S)
    return np.array([item])


def ponder(item: int) -> Array:
    """float32[1024], after more than half a millisecond of Python: a batch of 32 takes half of the step beside it."""
    slow(item, 6_000)
    return np.full(STEP_WIDTH, item, np.float32)
