"""The user's part: ordinary Pillow and NumPy code that knows nothing of TensorFlow, processes or loaderpool."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["CLASSES", "SIZE_PX", "Item", "Sample", "load", "load_and_augment"]

SIZE_PX = 96  # side of the square that the network sees
CLASSES = 10

Item: TypeAlias = tuple[str, int]  # path of a JPEG file, its label
Sample: TypeAlias = tuple[npt.NDArray[np.float32], int]  # float32[96, 96, 3] in 0..1, label

_RESIZED_PX = 104  # the random crop moves by the 8 pixels that are left over


def load(item: Item) -> Sample:
    """The middle of the image, unchanged: for the test set."""
    path, label = item
    pixels = _read(path)
    margin = (_RESIZED_PX - SIZE_PX) // 2
    return pixels[margin : margin + SIZE_PX, margin : margin + SIZE_PX], label


def load_and_augment(item: Item, rng: np.random.Generator) -> Sample:
    """A random crop in random light, with a little noise: for training."""
    path, label = item
    pixels = _read(path)
    top, left = rng.integers(0, _RESIZED_PX - SIZE_PX, size=2, endpoint=True)
    pixels = pixels[top : top + SIZE_PX, left : left + SIZE_PX]
    # No mirroring, which most image folders would want: a mirrored 2 is no 2.
    contrast = np.float32(rng.uniform(0.8, 1.2))
    brightness = rng.uniform(-0.1, 0.1, size=3).astype(np.float32)  # for each colour, as lamps have tints
    noise = rng.standard_normal(pixels.shape, dtype=np.float32) * np.float32(0.02)
    mean = pixels.mean()
    lit: npt.NDArray[np.float32] = (pixels - mean) * contrast + mean + brightness + noise
    np.clip(lit, 0.0, 1.0, out=lit)
    return lit, label


def _read(path: str) -> npt.NDArray[np.float32]:
    """float32[104, 104, 3] in 0..1."""
    with Image.open(path) as file:
        image = file.convert("RGB").resize((_RESIZED_PX, _RESIZED_PX), Image.Resampling.LANCZOS)
    pixels: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32) / np.float32(255.0)
    return pixels
