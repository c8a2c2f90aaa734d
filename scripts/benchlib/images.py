"""Images as samples: large arrays of floats, and JPEG files that are decoded. Apart, as they cost time to import."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IMAGES_VARIABLE", "JPEG_SIZE", "SHAPE", "decode", "decoded_items", "first_byte", "render_images", "scale"]

Array = npt.NDArray[Any]

SHAPE = (224, 224, 3)
SCALE = np.float32(1 / 255)
# Images are used in turn. A number that is no divisor of the batch makes neighbouring batches differ; as a whole they
# (7.4 MB) are larger than a core's own cache, as real images would be.
IMAGES = np.random.default_rng(0).integers(0, 256, size=(49, *SHAPE), dtype=np.uint8)
# Where `render_images` has put the files; in the environment, as spawned workers must know, too.
IMAGES_VARIABLE = "LOADERPOOL_BENCH_IMAGES"
JPEG_FILES = 64
JPEG_SIZE = (224, 224)


def write(item: int, out: Array) -> None:
    """float32[224, 224, 3]: an image as numbers in 0..1, its first one the item, into memory that is there."""
    np.multiply(IMAGES[item % len(IMAGES)], SCALE, out=out, dtype=np.float32)
    out[0, 0, 0] = item


def scale(item: int) -> Array:
    """The same in an array of its own."""
    sample = np.empty(SHAPE, np.float32)
    write(item, sample)
    return sample


def scale_into(item: int, out: Array | None) -> Array | None:
    """The same where it belongs; at the first call, which finds the form, there is no such place."""
    if out is None:
        return scale(item)
    write(item, out)
    return None


def decode(item: int) -> Array:
    """uint8[224, 224, 3]: a JPEG file decoded, resized, every other one flipped; its first pixel is the item."""
    from PIL import Image

    with Image.open(_jpeg_files()[item % JPEG_FILES]) as file:
        image = file.convert("RGB").resize(JPEG_SIZE, Image.Resampling.BILINEAR)
    if item % 2:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.array(image)
    pixels[0, 0] = item & 255, item >> 8 & 255, item >> 16
    return pixels


def decoded_items(batch: Array) -> Array:
    return batch[:, 0, 0].astype(np.int64) @ np.array([1, 1 << 8, 1 << 16])


def first_byte(item: int) -> int:
    return item & 255


def render_images(folder: Path) -> None:
    """Write the JPEG files: 500 x 375, with the detail of a photograph, about 60 KB each."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(JPEG_FILES):
        coarse = generator.integers(0, 256, (24, 32, 3), np.uint8)
        pixels = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(pixels + generator.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.jpg", quality=85)
    os.environ[IMAGES_VARIABLE] = str(folder)


@functools.cache
def _jpeg_files() -> list[str]:
    return [f"{os.environ[IMAGES_VARIABLE]}/{number}.jpg" for number in range(JPEG_FILES)]
