"""Work of all contestants: items 0 … n-1 and a function, and the expected batches.

The first number of a sample identifies its item (`token`), so a batch shows its items.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench import samples
from bench.samples import Array

TINY_ITEMS = 2**24  # all smaller indices are exact in float32
IMAGE_SHAPE = (224, 224, 3)
# Images are used in turn. Their number does not divide the batch size, so neighboring batches
# differ. Together (7.4 MB) they are larger than a core's own cache, as real images would be.
IMAGES = np.random.default_rng(0).integers(0, 256, size=(49, *IMAGE_SHAPE), dtype=np.uint8)
SCALE = np.float32(1 / 255)
# path of the JPEG files, which spawned workers need, too
IMAGES_VARIABLE = "LOADERPOOL_BENCH_IMAGES"
JPEG_FILES = 64


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work."""

    name: str
    what: str  # description for the tables
    fn: Callable[[int], Array]  # item -> sample; pickled by name
    shape: tuple[int, ...]  # shape of a sample
    dtype: type[np.generic]
    batch_size: int
    batches: int  # batches of an epoch, more than a window takes
    workers: int = 2
    threads: int = 1  # concurrent calls of a worker, if a loader has threads in workers
    write: Callable[[int, Array], None] | None = (
        None  # writes fn's result into existing memory; None: fn and a copy
    )
    token: Callable[[int], int] = int  # returns the first number of an item's sample
    period: int = 1  # batches after which the cost repeats
    async_fn: Callable[[int], Any] | None = None  # `fn` for loaders that run coroutines
    suits_threads: bool = False  # True if the function waits, or if NumPy releases the GIL in it
    ideal: float | None = None  # samples per second that no loader can exceed
    is_tiny: bool = False  # True if making a batch takes less time than checking one

    @property
    def items(self) -> int:
        return self.batches * self.batch_size

    @property
    def batch_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize * self.batch_size

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (self.batch_size, *self.shape)


def make_batch(work: Work, position: int, out: Array | None = None) -> Array:
    """Return the batch at this position of an epoch, made here, in `out` or new memory. Do not copy
    if `fn` can write into it.
    """
    batch = np.empty(work.batch_shape, work.dtype) if out is None else out
    first = position * work.batch_size
    for row in range(work.batch_size):
        if work.write is not None:
            work.write(first + row, batch[row])
        else:
            batch[row] = work.fn(first + row)
    return batch


def batch_at(name: str, position: int) -> Array:
    """Return a whole batch of a work, for peers that map a function over batches. They send only a
    name and a number.
    """
    return make_batch(WORKS[name], position)


def check_batch(work: Work, position: int, batch: Array) -> None:
    """Check all numbers of a batch. Raise a ValueError if they are wrong."""
    expected = make_batch(work, position)
    if batch.dtype != expected.dtype or not np.array_equal(batch, expected):
        raise ValueError(
            f"batch {position} is wrong: {batch.dtype}{batch.shape}, {batch.reshape(-1)[:4]}"
        )


def check_ends(work: Work, seen: Iterable[tuple[int, float, float]]) -> None:
    """Check the position, and the first number of the first and last row, of batches in order.
    Raise a ValueError if one is wrong, missing or repeated.
    """
    for position, first, last in seen:
        item = position * work.batch_size
        expected = work.token(item), work.token(item + work.batch_size - 1)
        if (first, last) != expected:
            raise ValueError(f"batch {position} begins and ends with {first, last}, not {expected}")


def _write_scaled(item: int, out: Array) -> None:
    """float32[224, 224, 3]: an image as numbers in 0..1, written into existing memory. Its first
    number is the item.
    """
    np.multiply(IMAGES[item % len(IMAGES)], SCALE, out=out, dtype=np.float32)
    out[0, 0, 0] = item


def _scale(item: int) -> Array:
    sample = np.empty(IMAGE_SHAPE, np.float32)
    _write_scaled(item, sample)
    return sample


def scale_into(item: int, out: Array | None) -> Array | None:
    """The same, written into `out`. In the first call, which determines the form, `out` is None."""
    if out is None:
        return _scale(item)
    _write_scaled(item, out)
    return None


def _decode(item: int) -> Array:
    """uint8[224, 224, 3]: a JPEG file, decoded, resized, and every other one flipped. Its first
    number identifies the item.
    """
    from PIL import Image

    with Image.open(f"{os.environ[IMAGES_VARIABLE]}/{item % JPEG_FILES}.jpg") as file:
        image = file.convert("RGB").resize(IMAGE_SHAPE[:2], Image.Resampling.BILINEAR)
    if item % 2:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.array(image)
    pixels[0, 0] = item & 255, item >> 8 & 255, item >> 16
    return pixels


def render_images(folder: Path) -> None:
    """Write the JPEG files: 500 x 375 pixels, with the detail of a photograph, about 60 KB each."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(JPEG_FILES):
        coarse = generator.integers(0, 256, (24, 32, 3), np.uint8)
        pixels = np.asarray(
            Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), np.int16
        )
        noisy = np.clip(pixels + generator.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.jpg", quality=85)
    os.environ[IMAGES_VARIABLE] = str(folder)


def _waiting(name: str, workers: int, batch_size: int, threads: int = 1) -> Work:
    who = f"{workers} workers" + (
        f" x {threads} threads, batch {batch_size}" if threads > 1 else ""
    )
    return Work(
        name, f"20 ms of waiting a sample, {who}", samples.wait_for_it, (1,), np.int64, batch_size, 10**5, workers,
        threads, ideal=workers * threads / samples.SLEEP_S, suits_threads=True,
    )  # fmt: skip


def _tiny(batch_size: int) -> Work:
    return Work(
        f"tiny{batch_size}", f"16 floats a sample, batch {batch_size}", samples.tiny, (samples.TINY_WIDTH,),
        np.float32, batch_size, min(TINY_ITEMS // batch_size, 6 * 10**6), is_tiny=True,
    )  # fmt: skip


_STEP = (samples.STEP_WIDTH,)
WORKS = {
    work.name: work
    for work in (
        Work("cpu", "5 ms of Python a sample, batch 32", samples.compute, (2,), np.int64, 32, 10**4),
        Work("burn", "2 ms of Python a sample, batch 32", samples.burn, (8,), np.int64, 32, 10**5),
        Work(
            "jpeg", "JPEG decode, resize, flip, batch 32", _decode, IMAGE_SHAPE, np.uint8, 32, 10**4,
            token=(255).__and__,  # not a lambda, because the workers of some peers are spawned
        ),
        _tiny(32),
        _tiny(1),
        Work(
            "wide", "38.5 MB batches of float32", _scale, IMAGE_SHAPE, np.float32, 64, 10**4, write=_write_scaled,
            suits_threads=True,
        ),
        _waiting("io32", 32, 16),
        _waiting("io256", 256, 16),
        _waiting("threads16", 2, 16, 16),
        Work(
            "async200", "50 ms of waiting a sample, 1 worker x 200 coroutines, batch 32", samples.request, (1,),
            np.int64, 32, 10**5, 1, 200, async_fn=samples.request_async, ideal=200 / samples.REQUEST_S,
            suits_threads=True,
        ),
        Work(
            "straggler", "1 sample in 64 costs 50 times more, batch 8", samples.straggle, (2,), np.int64, 8, 10**5,
            period=samples.STRAGGLER_EVERY // 8,
        ),
        Work(
            "straggler4", "1 sample in 64 costs 50 times more, batch 8, 4 workers", samples.straggle, (2,), np.int64, 8,
            10**5, workers=4, period=samples.STRAGGLER_EVERY // 8,
        ),
        Work("step", "a training step, cores suffice", samples.ponder, _STEP, np.float32, 32, 2**12, workers=1),
    )
}  # fmt: skip
