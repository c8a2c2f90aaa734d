"""A folder of JPEG files, one folder per class, that is either complete or not there.

Handwritten digits (8 x 8 pixels, they come with scikit-learn) are drawn at random size, place, angle and colour over
gradients, clouds, stripes and checks, so that decoding and resizing cost what they cost for photographs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

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
_SHIFT_PX = 25  # how far a digit lies from the middle at most
_CHUNK = 25  # images per task of the pool: smaller costs messages, larger leaves a process idle at the end

_FIRM = [min(255, max(0, (value - 90) * 4)) for value in range(256)]  # blurred strokes become firm ones

_Task: TypeAlias = tuple[int, npt.NDArray[np.uint8], Path]  # number of the image, uint8[8, 8], file to write


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
            raise NotOurFolderError(f"{folder} holds files that are not the quickstart's; name another by --data")
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
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits: Any = load_digits()
    glyphs, labels = (digits.images * (255.0 / 16.0)).astype(np.uint8), digits.target
    tasks: list[_Task] = []
    for number in range(images):
        digit, copy = number % len(glyphs), number // len(glyphs)
        path = folder / str(labels[digit]) / f"{digit:04d}-{copy}.jpg"
        tasks.append((number, glyphs[digit], path))
    # spawn, as the caller may have threads, which fork would break.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_usable_cpus(), len(tasks) // _CHUNK + 1), mp_context=context) as executor:
        for _ in executor.map(_draw_file, tasks, chunksize=_CHUNK):  # asked for each, as an error shows only then
            pass


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _draw_file(task: _Task) -> None:
    number, glyph, path = task
    _draw(glyph, np.random.default_rng([_RECIPE, number])).save(path, quality=_JPEG_QUALITY)


def _draw(glyph: npt.NDArray[np.uint8], rng: np.random.Generator) -> Image.Image:
    """A 400 x 300 image with the digit in its middle half, where no crop cuts it off."""
    first = rng.uniform(20.0, 235.0, size=3)
    second = np.clip(first + rng.uniform(-50.0, 50.0, size=3), 0.0, 255.0)
    image = Image.composite(_filled(first), _filled(second), _pattern(rng))

    # Padded, as the strokes reach the glyph's border and would end as if cut with a knife; turned while small: cheaper.
    stroke = Image.fromarray(np.pad(glyph, 1)).resize((100, 100), Image.Resampling.BICUBIC)
    stroke = stroke.rotate(rng.uniform(-10.0, 10.0), Image.Resampling.BICUBIC, expand=True)
    scale = rng.uniform(2.4, 3.0)
    stroke = stroke.resize((int(stroke.width * scale), int(stroke.height * scale)), Image.Resampling.BICUBIC)
    opacity = stroke.point(_FIRM)
    opacity = opacity.crop(opacity.getbbox())
    left = (WIDTH_PX - opacity.width) // 2 + int(rng.integers(-_SHIFT_PX, _SHIFT_PX, endpoint=True))
    top = (HEIGHT_PX - opacity.height) // 2 + int(rng.integers(-_SHIFT_PX, _SHIFT_PX, endpoint=True))
    is_bright = (first.mean() + second.mean()) / 2.0 > 127.0
    colour = rng.uniform(0.0, 70.0, size=3) if is_bright else rng.uniform(185.0, 255.0, size=3)
    image.paste(_rgb(colour), (left, top), opacity)

    strength = int(rng.integers(3, 16))
    grain = rng.integers(-strength, strength, size=(HEIGHT_PX, WIDTH_PX, 1), dtype=np.int8)
    grainy = np.asarray(image, dtype=np.int16) + grain
    return Image.fromarray(np.clip(grainy, 0, 255).astype(np.uint8))


def _pattern(rng: np.random.Generator) -> Image.Image:
    """How two colours are mixed: a gradient, stripes, checks or clouds."""
    kind = rng.integers(4)
    if kind == 0:
        coarse = rng.integers(0, 256, size=(rng.integers(4, 12), rng.integers(5, 16)), dtype=np.uint8)
        return Image.fromarray(coarse).resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BICUBIC)
    y, x = np.arange(HEIGHT_PX, dtype=np.float32)[:, None], np.arange(WIDTH_PX, dtype=np.float32)
    angle = rng.uniform(0.0, 2.0 * math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)  # pixels along the pattern; float32, as math's floats are weak
    wave_px = rng.uniform(15.0, 60.0)
    if kind == 1:
        mix = (along - along.min()) / (along.max() - along.min())
    elif kind == 2:
        mix = 0.5 + 0.5 * np.sin(along * (2.0 * math.pi / wave_px))
    else:
        across = y * math.cos(angle) - x * math.sin(angle)
        mix = np.sin(along * (math.pi / wave_px)) * np.sin(across * (math.pi / wave_px)) > 0.0
    return Image.fromarray((mix * 255.0).astype(np.uint8))


def _filled(colour: npt.NDArray[np.float64]) -> Image.Image:
    return Image.new("RGB", (WIDTH_PX, HEIGHT_PX), _rgb(colour))


def _rgb(colour: npt.NDArray[np.float64]) -> tuple[int, int, int]:
    red, green, blue = (int(part) for part in colour)
    return red, green, blue
