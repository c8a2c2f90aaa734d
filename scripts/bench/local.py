"""What does a loader in your own process (`workers=0`) cost beside a plain loop? Samples that are as good as free.

Work: one call of about 1 us a sample of 16 float32, shuffled, in batches of 32, 128, 8 and 1.
Baseline: `np.stack([fn(index) for index in indices])` over a list that has the very same order before the clock runs.
Bar: at most 2.5 times the loop's time for batches of 8 and more. Beside its samples a batch costs some 8 us, which is
much beside one sample of 1 us: the bar of batches of 1 is there to keep it so.
Verified: the sum over all numbers of each turn's batches, of both sides.
Loop and loader take turns of half a millisecond in one process, so that what else the machine does meets both alike.
Command: scripts/bench/run local

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    local       loop32            33.2 us        [33 .. 33.9]
    local       local32           45.8 us        [45.3 .. 46.3]     1.38 x loop32 (best 1.37; bar ≤ 2.5)
    local       loop128            129 us        [129 .. 131]
    local       local128           145 us        [142 .. 146]       1.12 x loop128 (best 1.11; bar ≤ 2.5)
    local       loop8             9.56 us        [9.53 .. 9.71]
    local       local8            20.3 us        [20.1 .. 20.4]     2.13 x loop8 (best 2.11; bar ≤ 2.5)
    local       loop1              2.7 us        [2.68 .. 2.74]
    local       local1            10.4 us        [10.4 .. 10.7]     3.85 x loop1 (best 3.87; bar ≤ 5)
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchlib.model import Bar, Figure, Measured, Question, Window, require
from benchlib.samples import tiny

ITEMS = 2**21  # more than a window needs; each index is exact in float32, each sum in float64
TURN_S = 0.0005  # shorter than the slices in which other processes get the CPU: few turns meet one
# Of the loop's time, by batch size.
BARS = {32: 2.5, 128: 2.5, 8: 2.5, 1: 5.0}

Batches = Iterator[npt.NDArray[np.float32]]


def loop(order: list[int], batch_size: int) -> Batches:
    """What the loader stands in for."""
    for start in range(0, len(order), batch_size):
        yield np.stack([tiny(index) for index in order[start : start + batch_size]])


def turn_us(batches: Batches, expected: list[int], batch_size: int) -> float:
    """Microseconds for each of the batches that these items make; they are verified when the clock has stopped."""
    count = len(expected) // batch_size
    started = time.perf_counter()
    taken = list(itertools.islice(batches, count))
    elapsed_s = time.perf_counter() - started
    total = sum(float(batch.sum(dtype=np.float64)) for batch in taken)
    require(total == tiny(0).size * sum(expected), f"wrong batches of {batch_size}: their sum is {total}")
    return 1e6 * elapsed_s / count


def contest(batch_size: int, window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(ITEMS), batch_size=4096, shuffle=True, workers=0) as indices:
        order = np.concatenate(list(indices)).tolist()
    require(sorted(order) == list(range(ITEMS)), "the order is no permutation")
    with lp.Loader(range(ITEMS), tiny, batch_size=batch_size, shuffle=True, workers=0) as loader:
        sides: tuple[Batches, Batches] = loop(order, batch_size), iter(loader)
        place = 0

        def round_us(batches: int, first: int) -> tuple[float, float]:
            """One turn of each over the same items, that one of the two first."""
            nonlocal place
            expected = order[place : place + batches * batch_size]
            place += len(expected)
            one, other = (turn_us(sides[side], expected, batch_size) for side in (first, 1 - first))
            return (other, one) if first else (one, other)

        warm = [round_us(max(1, 1024 // batch_size), number % 2) for number in range(40)]
        batches = max(1, round(1e6 * TURN_S / statistics.median(local for _, local in warm)))
        times: list[tuple[float, float]] = []
        ends = time.perf_counter() + window.seconds
        while time.perf_counter() < ends:
            times.append(round_us(batches, len(times) % 2))
    loop_us, local_us = (statistics.median(side) for side in zip(*times, strict=True))
    return Measured({f"loop{batch_size}": loop_us, f"local{batch_size}": local_us}, {"turns": len(times)})


QUESTION = Question(
    name="local",
    figures=tuple(
        figure
        for size in BARS
        for figure in (
            Figure(f"loop{size}", "us", "a plain loop and `np.stack`"),
            Figure(f"local{size}", "us", f"a batch of {size}, 16 float32 and 1 us a sample, `workers=0`"),
        )
    ),
    contestants={f"batches of {size}": functools.partial(contest, size) for size in BARS},
    bars=tuple(Bar(f"local{size}", f"loop{size}", at_most=most) for size, most in BARS.items()),
)
