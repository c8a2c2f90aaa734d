"""Functions that make samples. They are at module level, so that workers can import them
quickly.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TINY_WIDTH = 16
# A linear congruential generator: pure Python that cannot be shortened. STEPS take about 5 ms.
STEPS, FACTOR, ADDEND, MODULUS = 40_000, 1_103_515_245, 12_345, 2**31
SLEEP_S = 0.02
REQUEST_S = 0.05
STRAGGLER_EVERY, STRAGGLER_COST = 64, 50
STEP_WIDTH = 1024  # width of a sample that a training step takes


def tiny(item: int) -> Array:
    """float32[16], all equal to the item. Making it takes almost no time."""
    return np.full(TINY_WIDTH, item, np.float32)


def slow(item: int, steps: int = STEPS) -> int:
    """Return the generator's state after this number of steps from `item`."""
    state = item
    for _ in range(steps):
        state = (state * FACTOR + ADDEND) % MODULUS
    return state


def compute(item: int) -> Array:
    """int64[2]: the item, and a number computed from it by about 5 ms of pure Python."""
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
    """int64[1]: the item, after a wait of 20 ms without CPU, as for a remote read."""
    time.sleep(SLEEP_S)
    return np.array([item])


def request(item: int) -> Array:
    """int64[1]: the item, after a request to a slow server."""
    time.sleep(REQUEST_S)
    return np.array([item])


async def request_async(item: int) -> Array:
    """As `request`, but as a coroutine."""
    await asyncio.sleep(REQUEST_S)
    return np.array([item])


def ponder(item: int) -> Array:
    """float32[1024], after more than half a millisecond of Python. A batch of 32 takes half as long
    as the step.
    """
    slow(item, 6_000)
    return np.full(STEP_WIDTH, item, np.float32)
