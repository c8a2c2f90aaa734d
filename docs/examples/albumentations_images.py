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
        return [np.concatenate([images for images, labels in loader]) for _ in range(2)]


with tempfile.TemporaryDirectory() as folder:
    items = write_images(folder)
    first, second = two_epochs(items, workers=1)
    with_three_workers = two_epochs(items, workers=3)

print(f"2 epochs of {len(first)} images of shape {first.shape[1:]}: the same with 1 and with 3 workers")
assert np.array_equal(first, with_three_workers[0]) and np.array_equal(second, with_three_workers[1])
assert not np.array_equal(first, second)  # each epoch has its own order and augmentations
