"""How near to the speed of memory do large batches come, read as NumPy arrays?

Work: batches of 64 images of 224 x 224 x 3 float32 (38.5 MB), each image made by one scale of uint8, with two workers;
once by a function that writes into `out`, once by one that returns a new array (written once more, into the batch).
Baseline: two bare processes that write the same rows into as many reused buffers of shared memory as the loader has
slots, and hand them to nobody.
Bar: at least 0.7 of them, with `out`.
Verified: the first and the last number of every batch, and all numbers of the first batches.
Command: scripts/bench/run wide

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    wide        bare               410 batches/s [407 .. 411]
    wide        out                357 batches/s [347 .. 373]       0.87 x bare (best 0.91; bar ≥ 0.7)
    wide        return             300 batches/s [299 .. 314]
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from bare import bare_rate
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require

WORKERS = 2
BATCH_SIZE = 64
SHAPE = (224, 224, 3)
BATCH_BYTES = BATCH_SIZE * 4 * 224 * 224 * 3
SCALE = np.float32(1 / 255)
ITEMS = 10**6
# Images are used in turn. A number that is no divisor of the batch makes neighbouring batches differ; as a whole they
# (7.4 MB) are larger than a core's own cache, as real images would be.
IMAGES = np.random.default_rng(0).integers(0, 256, size=(49, *SHAPE), dtype=np.uint8)


def scale_into(item: int, out: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
    """The image as float32 in 0..1, written where it belongs."""
    scaled: npt.NDArray[np.float32] = np.multiply(IMAGES[item % len(IMAGES)], SCALE, out=out, dtype=np.float32)
    return scaled


def scale(item: int) -> npt.NDArray[np.float32]:
    """The image as float32 in 0..1, in an array of its own."""
    scaled: npt.NDArray[np.float32] = np.multiply(IMAGES[item % len(IMAGES)], SCALE, dtype=np.float32)
    return scaled


def verify_batch(batch: npt.NDArray[Any], position: int) -> None:
    """Check all numbers of a batch, against another way to make them."""
    items = np.arange(position * BATCH_SIZE, (position + 1) * BATCH_SIZE) % len(IMAGES)
    require(batch.shape == (BATCH_SIZE, *SHAPE) and batch.dtype == np.float32, f"batch {position}: {batch.shape}")
    for row, item in zip(batch, items, strict=True):
        require(np.array_equal(row, IMAGES[item] * SCALE), f"batch {position} is wrong")


def verify_ends(seen: list[tuple[float, float]]) -> None:
    """Check the first and last numbers of a pass's batches: right, in order, none missing, none twice."""
    for position, ends in enumerate(seen):
        first, last = position * BATCH_SIZE, (position + 1) * BATCH_SIZE - 1
        expected = IMAGES[first % len(IMAGES)].item(0) * SCALE, IMAGES[last % len(IMAGES)].item(-1) * SCALE
        require(ends == expected, f"batch {position} is wrong: {ends}, not {expected}")


def bare(window: Window) -> Measured:
    buffers = max(1, int(window.facts["slots"]) // WORKERS)

    def work(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        own = [np.ndarray((BATCH_SIZE, *SHAPE), np.float32, buffer=mmap.mmap(-1, BATCH_BYTES)) for _ in range(buffers)]
        for buffer in own:
            buffer.fill(0)  # the pages are there before the clock starts
        done = 0

        def one_batch() -> None:
            nonlocal done
            batch, start = own[done % buffers], done * BATCH_SIZE
            for row in range(BATCH_SIZE):
                scale_into(start + row, batch[row])
            done += 1

        def check() -> None:
            verify_batch(own[(done - 1) % buffers], done - 1)

        return one_batch, check

    return Measured({"bare": bare_rate(work, WORKERS, window)})


def measure_loader(fn: Callable[..., Any], figure: str, window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(ITEMS), fn, batch_size=BATCH_SIZE, workers=WORKERS) as batches:
        for position, batch in zip(range(5), batches):  # noqa: B905 - only the first ones
            verify_batch(batch, position)

        def look(batch: Any) -> tuple[float, float]:
            return batch.item(0), batch.item(-1)

        rate, seen = deliveries(batches, window, look, turn=WORKERS)
        statistics = batches.statistics()
    verify_ends(seen)
    return Measured({figure: rate}, {"slots": statistics.slots, f"{figure}_copied": statistics.batches_copied})


def loader_out(window: Window) -> Measured:
    return measure_loader(scale_into, "out", window)


def loader_return(window: Window) -> Measured:
    return measure_loader(scale, "return", window)


QUESTION = Question(
    name="wide",
    figures=(
        Figure("bare", "batches/s", "two bare processes into reused buffers"),
        Figure("out", "batches/s", "38.5 MB batches, fn writes into out, 2 workers"),
        Figure("return", "batches/s", "38.5 MB batches, fn returns an array, 2 workers"),
    ),
    contestants={"out": loader_out, "bare": bare, "return": loader_return},
    bars=(Bar("out", "bare", at_least=0.7),),
    rounds=4,
    seconds=1.5,
)

if __name__ == "__main__":
    main(QUESTION)
