"""A folder of JPEG files, one folder per class, that is either complete or not there.

Handwritten digits (8 x 8 pixels, they come with scikit-learn) are drawn at random size, place, angle and colour over
gradients, clouds, stripes and checks, so that decoding and resizing cost what they cost for photographs.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import multiprocessing
import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from .loading import CLASSES, Item

__all__ = ["NotOurFolderError", "ensure_folder", "list_items"]

WIDTH_PX, HEIGHT_PX = 400, 300
_RECIPE = 1  # to be raised with each change of the drawing, so that older folders are made again
_MARKER = "made-by-quickstart.json"
_JPEG_QUALITY = 90
_TEST_EVERY = 5  # each fifth digit is for the test
_CHUNK = 25  # images per task of the pool: smaller costs messages, larger leaves a process idle at the end


class NotOurFolderError(RuntimeError):
    """The folder was not made by this script, so it is not replaced; name another one."""


def ensure_folder(folder: Path, images: int) -> bool:
    """`folder` holds exactly `images` JPEG files of today's recipe; returns whether they had to be made.

    They are drawn into a folder beside it that gets its name when all are there. An older or incomplete one is
    replaced.

    Raises:
        NotOurFolderError: `folder` holds something else.
    """
    if folder.exists():
        if _is_complete(folder, images):
            return False
        if not (folder / _MARKER).is_file() and any(folder.iterdir()):
            raise NotOurFolderError(f"{folder} holds files that are not from the quickstart; name another folder by --data")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that the rename stays in one file system; what an interrupted run left is not ours to reuse.
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _draw_all(draft, images)
        (draft / _MARKER).write_text(json.dumps(_marker(images)))
        draft.chmod(0o755)  # mkdtemp's are private
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def list_items(folder: Path) -> tuple[list[Item], list[Item]]:
    """The (path, label) of all files, for training and for the test, no digit in both; sorted by class and name."""
    train: list[Item] = []
    test: list[Item] = []
    for label in range(CLASSES):
        for path in sorted((folder / str(label)).glob("*.jpg")):
            digit = int(path.stem.partition("-")[0])
            (train if digit % _TEST_EVERY else test).append((str(path), label))
    return train, test


def _marker(images: int) -> dict[str, int]:
    return {"recipe": _RECIPE, "images": images}


def _is_complete(folder: Path, images: int) -> bool:
    try:
        if json.loads((folder / _MARKER).read_text()) != _marker(images):
            return False
    except (OSError, ValueError):
        return False
    return sum(len(part) for part in list_items(folder)) == images


def _draw_all(folder: Path, images: int) -> None:
    for label in range(CLASSES):
        (folder / str(label)).mkdir()
    chunks = [range(start, min(start + _CHUNK, images)) for start in range(0, images, _CHUNK)]
    # spawn, as the caller may have threads, which fork would break.
    context = multiprocessing.get_context("spawn")
    processes = min(len(chunks), _usable_cpus())
    with ProcessPoolExecutor(processes, mp_context=context) as executor:
        collections.deque(executor.map(functools.partial(_draw_chunk, folder), chunks), maxlen=0)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _draw_chunk(folder: Path, numbers: range) -> None:
    glyphs, labels = _digits()
    for number in numbers:
        digit, copy = number % len(glyphs), number // len(glyphs)
        image = _draw(glyphs[digit], np.random.default_rng([_RECIPE, number]))
        path = folder / str(labels[digit]) / f"{digit:04d}-{copy}.jpg"
        Image.fromarray(image).save(path, quality=_JPEG_QUALITY)


@functools.cache
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """uint8[1797, 8, 8] and int64[1797]."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return (digits.images * (255.0 / 16.0)).astype(np.uint8), digits.target


def _draw(glyph: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """uint8[300, 400, 3] with the digit in the middle half, where no crop cuts it off."""
    ground = _background(rng)
    side_px = int(rng.integers(150, 230))
    mask = Image.fromarray(glyph).resize((side_px, side_px), Image.Resampling.BICUBIC)
    mask = mask.rotate(rng.uniform(-15.0, 15.0), Image.Resampling.BICUBIC, expand=True)
    stroke = np.asarray(mask, dtype=np.float32) / 255.0
    opacity = np.clip((stroke - 0.3) / 0.25, 0.0, 1.0)[..., None]  # blurred strokes become firm ones
    height, width = opacity.shape[:2]
    top = int(rng.integers(0, max(1, HEIGHT_PX - height)))
    left = int(rng.integers(85, max(86, WIDTH_PX - 85 - width)))
    patch = ground[top : top + height, left : left + width]
    opacity = opacity[: patch.shape[0], : patch.shape[1]]
    colour = _contrasting(patch.mean(axis=(0, 1)), rng)
    patch += opacity * (colour - patch)
    ground += rng.normal(0.0, rng.uniform(2.0, 10.0), size=(HEIGHT_PX, WIDTH_PX, 1))  # a sensor's grain
    return np.clip(ground, 0.0, 255.0).astype(np.uint8)


def _background(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """float32[300, 400, 3] in 0..255: two colours, mixed by a pattern."""
    y, x = np.mgrid[0:HEIGHT_PX, 0:WIDTH_PX].astype(np.float32)
    angle = rng.uniform(0.0, 2.0 * math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    wave_px = rng.uniform(15.0, 60.0)
    kind = rng.integers(4)
    if kind == 0:  # gradient
        mix = (along - along.min()) / (along.max() - along.min())
    elif kind == 1:  # stripes
        mix = 0.5 + 0.5 * np.sin(along * (2.0 * math.pi / wave_px))
    elif kind == 2:  # checks
        mix = ((along // wave_px + across // wave_px) % 2.0).astype(np.float32)
    else:  # clouds
        coarse = rng.integers(0, 256, size=(rng.integers(4, 12), rng.integers(5, 16)), dtype=np.uint8)
        clouds = Image.fromarray(coarse).resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BICUBIC)
        mix = np.asarray(clouds, dtype=np.float32) / 255.0
    first = rng.uniform(20.0, 235.0, size=3)
    second = np.clip(first + rng.uniform(-70.0, 70.0, size=3), 0.0, 255.0)
    return (first + mix[..., None] * (second - first)).astype(np.float32)


def _contrasting(ground: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A colour clearly darker or lighter than `ground`."""
    colour = rng.uniform(0.0, 70.0, size=3) if ground.mean() > 127.0 else rng.uniform(185.0, 255.0, size=3)
    return colour.astype(np.float32)
