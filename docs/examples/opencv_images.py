"""Read and resize images with OpenCV, with one OpenCV thread in each worker.

`setup` turns off OpenCV's own threads, which would compete with the other workers for the CPUs.
Install, in a clone: pip install . opencv-python-headless
"""

import tempfile
from pathlib import Path

import cv2
import numpy as np

import loaderpool as lp


def setup():
    cv2.setNumThreads(0)


def load(item):
    path, label = item
    image = cv2.imread(str(path))
    if image is None:  # OpenCV raises no error for a file that it cannot read
        raise ValueError(f"{path} is not an image")
    image = cv2.resize(image, (64, 48), interpolation=cv2.INTER_AREA)  # width, then height
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB), label, cv2.getNumThreads()


def write_images(folder):
    rng = np.random.default_rng(0)
    items = []
    for number in range(120):
        label = number % 2
        height, width = rng.integers(60, 200, 2)
        image = rng.integers(0, 120, (height, width, 3), np.uint8)
        image[:, :, 2 if label else 0] += (
            100  # label 1 is red, label 0 is blue: OpenCV's order is BGR
        )
        path = Path(folder, f"{number:03d}.jpg")
        cv2.imwrite(str(path), image)
        items.append((path, label))
    return items


right = total = 0
with (
    tempfile.TemporaryDirectory() as folder,
    lp.Loader(
        write_images(folder), load, batch_size=32, shuffle=True, setup=setup, workers=2
    ) as loader,
):
    for images, labels, threads in loader:
        assert images.shape[1:] == (48, 64, 3) and images.dtype == np.uint8
        assert (threads == 1).all()
        is_red = images[..., 0].mean(axis=(1, 2)) > images[..., 2].mean(axis=(1, 2))
        right += int((is_red == labels).sum())
        total += len(labels)

print(f"{right} of {total} images have the color of their label")
assert right == total == 120
