"""The kinds of work, by name. Functions stand at module level, so that workers that are spawned can import them."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import blocking_io
import cpu_bound
import numpy as np
import tiny
import wide
from PIL import Image

from .work import Array, Work, make_batch

__all__ = ["IMAGES_VARIABLE", "STEP_WIDTH", "WORKS", "batch_at", "render_images"]

# Where `render_images` has put the files; in the environment, as spawned workers must know, too.
IMAGES_VARIABLE = "LOADERPOOL_BENCH_IMAGES"
IMAGE_FILES = 64
IMAGE_SIZE = (224, 224)
STRAGGLER_EVERY, STRAGGLER_COST = 64, 50
STRAGGLER_STEPS = 4_000  # of the others: about half a millisecond
# What a training step takes: a row for each sample.
STEP_WIDTH = 1024
NAP_S = 0.002
FRET_STEPS, PONDER_STEPS = 1_000, 6_000


def compute(item: int) -> Array:
    """int64[2]: the item and what about 5 ms of pure Python make of it."""
    return np.array([item, cpu_bound.slow(item)])


def straggle(item: int) -> Array:
    """int64[2]: every 64th item takes 50 times as long as the others."""
    steps = STRAGGLER_STEPS * (STRAGGLER_COST if item % STRAGGLER_EVERY == STRAGGLER_EVERY // 2 else 1)
    return np.array([item, cpu_bound.slow(item, steps)])


def wait_for_it(item: int) -> Array:
    """int64[1]: the item, after 20 ms of waiting."""
    return np.array([blocking_io.wait_for_it(item)])


def scale_into(item: int, out: Array) -> None:
    """float32[224, 224, 3]: an image as numbers in 0..1, its first one the item."""
    np.multiply(wide.IMAGES[item % len(wide.IMAGES)], wide.SCALE, out=out, dtype=np.float32)
    out[0, 0, 0] = item


def scale(item: int) -> Array:
    sample = np.empty(wide.SHAPE, np.float32)
    scale_into(item, sample)
    return sample


def decode(item: int) -> Array:
    """uint8[224, 224, 3]: a JPEG file decoded, resized, every other one flipped; its first pixel is the item."""
    with Image.open(_image_files()[item % IMAGE_FILES]) as file:
        image = file.convert("RGB").resize(IMAGE_SIZE, Image.Resampling.BILINEAR)
    if item % 2:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.array(image)
    pixels[0, 0] = item & 255, item >> 8 & 255, item >> 16
    return pixels


def decoded_items(batch: Array) -> Array:
    return batch[:, 0, 0].astype(np.int64) @ np.array([1, 1 << 8, 1 << 16])


def first_byte(item: int) -> int:
    return item & 255


def nap(item: int) -> Array:
    """float32[1024], after 2 ms of waiting: 16 workers make 250 batches of 32 a second, and use hardly any CPU."""
    time.sleep(NAP_S)
    return np.full(STEP_WIDTH, item, np.float32)


def fret(item: int) -> Array:
    """float32[1024], after about a tenth of a millisecond of Python."""
    cpu_bound.slow(item, FRET_STEPS)
    return np.full(STEP_WIDTH, item, np.float32)


def ponder(item: int) -> Array:
    """float32[1024], after more than half a millisecond of Python: a batch of 32 takes half of the step beside it."""
    cpu_bound.slow(item, PONDER_STEPS)
    return np.full(STEP_WIDTH, item, np.float32)


def render_images(folder: Path) -> None:
    """Write the JPEG files: 500 x 375, with the detail of a photograph, about 60 KB each."""
    generator = np.random.default_rng(0)
    for number in range(IMAGE_FILES):
        coarse = generator.integers(0, 256, (24, 32, 3), np.uint8)
        pixels = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(pixels + generator.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.jpg", quality=85)
    os.environ[IMAGES_VARIABLE] = str(folder)


@functools.cache
def _image_files() -> list[str]:
    return [f"{os.environ[IMAGES_VARIABLE]}/{number}.jpg" for number in range(IMAGE_FILES)]


def _waiting(workers: int) -> Work:
    return Work(
        f"io{workers}", f"20 ms of waiting a sample, {workers} workers", wait_for_it, (1,), np.int64,
        blocking_io.BATCH_SIZE, 10**5, workers=workers, ideal=workers / blocking_io.SLEEP_S,
        suits_threads=True,
    )  # fmt: skip


def _tiny(batch_size: int) -> Work:
    return Work(
        f"tiny{batch_size}", f"16 floats a sample, batch {batch_size}", tiny.tiny, (tiny.WIDTH,), np.float32,
        batch_size, min(tiny.ITEMS // batch_size, 2 * 10**6), is_tiny=True,
    )  # fmt: skip


WORKS = {
    work.name: work
    for work in (
        Work("cpu", "5 ms of Python a sample, batch 32", compute, (2,), np.int64, 32, 10**4),
        Work(
            "jpeg", "JPEG decode, resize, flip, batch 32", decode, (*IMAGE_SIZE, 3), np.uint8, 32, 10**4,
            token=first_byte, items_of=decoded_items,
        ),
        _tiny(32),
        _tiny(1),
        Work(
            "wide", "38.5 MB batches of float32", scale, wide.SHAPE, np.float32, wide.BATCH_SIZE, 10**4,
            write=scale_into, suits_threads=True,
        ),
        _waiting(16),
        _waiting(32),
        _waiting(256),
        Work(
            "threads", "20 ms of waiting a sample, 2 workers x 16 threads", wait_for_it, (1,), np.int64,
            blocking_io.BATCH_SIZE, 10**5, ideal=32 / blocking_io.SLEEP_S, suits_threads=True,
        ),
        Work(
            "straggler", "1 sample in 64 costs 50 times more, batch 8", straggle, (2,), np.int64, 8, 10**5,
            period=STRAGGLER_EVERY // 8,
        ),
        Work(
            "step", "samples that compute, beside a training step", ponder, (STEP_WIDTH,), np.float32, 32, 2**12,
            workers=1,
        ),
        Work(
            "shortstep", "samples that wait, beside a short training step", nap, (STEP_WIDTH,), np.float32, 32, 2**15,
            workers=16, ideal=16 / NAP_S, suits_threads=True,
        ),
        Work("busystep", "samples that compute, beside a training step", fret, (STEP_WIDTH,), np.float32, 32, 2**15),
    )
}  # fmt: skip


def batch_at(name: str, position: int) -> Array:
    """A whole batch of a work, for those who map a function over batches: what travels is a name and a number."""
    return make_batch(WORKS[name], position)
