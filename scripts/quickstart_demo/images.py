"""A folder of JPEG files, one folder for each class, which is complete or does not exist; and its
functions.

Handwritten digits (8 x 8 pixels, from scikit-learn) are drawn at random sizes, places, angles and
colors over clouds and stripes. So decoding and resizing take as long as for photographs. The
functions that read the files are ordinary Pillow and NumPy code, without TensorFlow, processes or
loaderpool.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE_PX = 96  # side of the network's square input
CLASSES = 10

Item: TypeAlias = tuple[str, int]  # path of a JPEG file, its label
Sample: TypeAlias = tuple[npt.NDArray[np.float32], int]  # float32[96, 96, 3] in 0..1, label
Pixels: TypeAlias = npt.NDArray[np.float32]
_RESIZED_PX = 104  # the random crop moves within the remaining 8 pixels


def load(item: Item) -> Sample:
    """Return the middle of an image, unchanged, for the test."""
    path, label = item
    pixels = _read(path)
    margin = (_RESIZED_PX - SIZE_PX) // 2
    return pixels[margin : margin + SIZE_PX, margin : margin + SIZE_PX], label


def load_and_augment(item: Item, rng: np.random.Generator) -> Sample:
    """Return a random crop in random light, with a little noise, for training."""
    path, label = item
    pixels = _read(path)
    top, left = rng.integers(0, _RESIZED_PX - SIZE_PX, size=2, endpoint=True)
    pixels = pixels[top : top + SIZE_PX, left : left + SIZE_PX]
    # No mirroring, which is usual for images: a mirrored 2 is not a 2.
    contrast = np.float32(rng.uniform(0.8, 1.2))
    brightness = rng.uniform(-0.1, 0.1, size=3).astype(
        np.float32
    )  # one factor for each color, because lamps have tints
    noise = rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(0.02)
    mean = pixels.mean()
    lit: npt.NDArray[np.float32] = (pixels - mean) * contrast + mean + brightness + noise
    np.clip(lit, 0.0, 1.0, out=lit)
    return lit, label


def _read(path: str) -> npt.NDArray[np.float32]:
    """Return the image in `float32[104, 104, 3]`, from 0 to 1."""
    with Image.open(path) as file:
        image = file.convert("RGB").resize((_RESIZED_PX, _RESIZED_PX), Image.Resampling.LANCZOS)
    pixels: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32) / np.float32(255.0)
    return pixels


# ---- the folder

WIDTH_PX, HEIGHT_PX = 400, 300
# increase it with each change of the drawing, so that older folders are replaced
_RECIPE = "recipe 2, {} images"
_MARKER = "made-by-quickstart.txt"
_JPEG_QUALITY = 90
_CHUNK = 25  # images in a task. Smaller: more messages. Larger: a process is idle at the end.
_TEST_EVERY = 5  # every fifth digit is for the test
_SHIFT_PX = 25  # largest distance of a digit from the middle

_FIRM = [min(255, max(0, (value - 90) * 4)) for value in range(256)]  # makes blurred strokes firm


class NotOurFolderError(RuntimeError):
    """The folder was not made by this script, so it is not replaced. Choose another folder."""


def ensure_folder(folder: Path, images: int) -> bool:
    """Make `folder` with exactly `images` JPEG files, unless it exists. Return True if it was made.

    The files are written to a neighboring folder, which is renamed when it is complete, and
    replaces an older one.
    """
    if folder.exists():
        if _is_complete(folder, images):
            return False
        if not (folder / _MARKER).is_file() and any(folder.iterdir()):
            raise NotOurFolderError(
                f"{folder} holds files that are not the quickstart's; name another by --data"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A neighboring folder, so that the rename stays in one file system. Files of an interrupted run
    # are not reused.
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _draw_all(draft, images)
        (draft / _MARKER).write_text(_RECIPE.format(images), encoding="utf-8")
        draft.chmod(0o755)  # folders of mkdtemp are private
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def list_items(folder: Path) -> tuple[list[Item], list[Item]]:
    """Return the (path, label) of all files, for training and for the test, sorted by class and
    name. No digit is in both.
    """
    train: list[Item] = []
    test: list[Item] = []
    for label in range(CLASSES):
        for path in sorted((folder / str(label)).glob("*.jpg")):
            digit = int(path.stem.partition("-")[0])
            (train if digit % _TEST_EVERY else test).append((str(path), label))
    return train, test


def _is_complete(folder: Path, images: int) -> bool:
    marker = folder / _MARKER
    is_ours = marker.is_file() and marker.read_text(encoding="utf-8") == _RECIPE.format(images)
    return is_ours and sum(len(part) for part in list_items(folder)) == images


def _draw_all(folder: Path, images: int) -> None:
    for label in range(CLASSES):
        (folder / str(label)).mkdir()
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits: Any = load_digits()
    glyphs, labels = (digits.images * (255.0 / 16.0)).astype(np.uint8), digits.target
    shown = [number % len(glyphs) for number in range(images)]
    paths = [
        folder / str(labels[digit]) / f"{digit:04d}-{number // len(glyphs)}.jpg"
        for number, digit in enumerate(shown)
    ]
    # spawn, because a fork is not safe if the caller has threads.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as executor:
        # Read all results, because this raises the errors.
        list(
            executor.map(
                _draw_file,
                range(images),
                (glyphs[digit] for digit in shown),
                paths,
                chunksize=_CHUNK,
            )
        )


def _draw_file(number: int, glyph: npt.NDArray[np.uint8], path: Path) -> None:
    _draw(glyph, np.random.default_rng(number)).save(path, quality=_JPEG_QUALITY)


def _draw(glyph: npt.NDArray[np.uint8], rng: np.random.Generator) -> Image.Image:
    """Return a 400 x 300 image with the digit in its middle half, where no crop cuts it off."""
    first = rng.uniform(20.0, 235.0, size=3)
    second = np.clip(first + rng.uniform(-50.0, 50.0, size=3), 0.0, 255.0)
    one, other = (Image.new("RGB", (WIDTH_PX, HEIGHT_PX), _rgb(color)) for color in (first, second))
    image = Image.composite(one, other, _pattern(rng))

    # Padded, because strokes reach the border of the glyph and would look cut off. Rotated while it
    # is small, which is faster.
    stroke = Image.fromarray(np.pad(glyph, 1)).resize((100, 100), Image.Resampling.BICUBIC)
    stroke = stroke.rotate(rng.uniform(-10.0, 10.0), Image.Resampling.BICUBIC, expand=True)
    scale = rng.uniform(2.4, 3.0)
    stroke = stroke.resize(
        (int(stroke.width * scale), int(stroke.height * scale)), Image.Resampling.BICUBIC
    )
    opacity = stroke.point(_FIRM)
    opacity = opacity.crop(opacity.getbbox())
    left = (WIDTH_PX - opacity.width) // 2 + int(rng.integers(-_SHIFT_PX, _SHIFT_PX, endpoint=True))
    top = (HEIGHT_PX - opacity.height) // 2 + int(
        rng.integers(-_SHIFT_PX, _SHIFT_PX, endpoint=True)
    )
    is_bright = (first.mean() + second.mean()) / 2.0 > 127.0
    color = rng.uniform(0.0, 70.0, size=3) if is_bright else rng.uniform(185.0, 255.0, size=3)
    image.paste(_rgb(color), (left, top), opacity)

    strength = int(rng.integers(3, 16))
    grain = rng.integers(-strength, strength, size=(HEIGHT_PX, WIDTH_PX, 1), dtype=np.int8)
    grainy = np.asarray(image, dtype=np.int16) + grain
    return Image.fromarray(np.clip(grainy, 0, 255).astype(np.uint8))


def _pattern(rng: np.random.Generator) -> Image.Image:
    """Return the weights with which two colors are mixed: clouds or stripes."""
    if rng.random() < 0.5:
        coarse = rng.integers(
            0, 256, size=(rng.integers(4, 12), rng.integers(5, 16)), dtype=np.uint8
        )
        return Image.fromarray(coarse).resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BICUBIC)
    y, x = np.arange(HEIGHT_PX, dtype=np.float32)[:, None], np.arange(WIDTH_PX, dtype=np.float32)
    angle, wave_px = rng.uniform(0.0, 2.0 * math.pi), rng.uniform(15.0, 60.0)
    mix = 0.5 + 0.5 * np.sin(
        (x * math.cos(angle) + y * math.sin(angle)) * (2.0 * math.pi / wave_px)
    )
    return Image.fromarray((mix * 255.0).astype(np.uint8))


def _rgb(color: npt.NDArray[np.float64]) -> tuple[int, int, int]:
    red, green, blue = (int(part) for part in color)
    return red, green, blue
