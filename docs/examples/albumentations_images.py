"""Augment images with albumentations and get the same images with any number of workers.

The loader seeds the random generators inside the transform for each sample.
Install, in a clone: pip install . "albumentations>=2.0"
"""

import tempfile
from pathlib import Path

import albumentations as A
import cv2
import numpy as np

import loaderpool as lp

transform = A.Compose(
    [
        A.RandomCrop(height=48, width=48),
        A.HorizontalFlip(p=0.5),
        A.RandomBrightnessContrast(p=0.5),
    ],
    seed=1,
)


def load(item):
    path, label = item
    image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    return transform(image=image)["image"], label


def write_images(folder):
    rng = np.random.default_rng(0)
    items = []
    for number in range(96):
        path = Path(folder, f"{number:03d}.jpg")
        cv2.imwrite(str(path), rng.integers(0, 256, (60, 80, 3), np.uint8))
        items.append((path, number % 2))
    return items


def two_epochs(items, workers):
    with lp.Loader(items, load, batch_size=16, shuffle=True, seed=1, workers=workers) as loader:
        return np.concatenate([images for _ in range(2) for images, labels in loader])


with tempfile.TemporaryDirectory() as folder:
    items = write_images(folder)
    without_workers, with_one, with_three = (two_epochs(items, workers) for workers in (0, 1, 3))

distinct = len(np.unique(with_three.reshape(len(with_three), -1), axis=0))
print(
    f"{len(with_three)} images of shape {with_three.shape[1:]}, {distinct} distinct: the same with 0, 1 and 3 workers"
)
assert distinct == len(with_three) == 192  # each epoch has its own order and augmentations
assert np.array_equal(without_workers, with_one) and np.array_equal(with_one, with_three)
