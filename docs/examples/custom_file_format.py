"""Read a file format that loaderpool does not know: IDX, the format of the MNIST files.

A subclass of `lp.FileSource` finds the records of a file and reads one of them.
Install, in a clone: pip install .
"""

import math
import struct
import tempfile
from pathlib import Path

import numpy as np

import loaderpool as lp


class Idx(lp.FileSource):
    """Items of uncompressed IDX files of bytes: a header with the shape, then all values."""

    kind, unit = "IDX", "item"  # names in error messages

    def index(self, path):
        """The offset of each item, and the end of the last one."""
        with open(path, "rb") as file:
            _, _, kind, axes = file.read(4)
            if kind != 8:
                raise ValueError(f"values of type {kind}, not uint8 (8)")
            count, *self.item_shape = struct.unpack(f">{axes}I", file.read(4 * axes))
        start, size = 4 + 4 * axes, math.prod(self.item_shape)
        return start + size * np.arange(count + 1)

    def read(self, handle, record):
        """One item, from its bytes."""
        return np.frombuffer(handle.read(record), np.uint8).reshape(self.item_shape)


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def prepare(item):
    image, label = item
    return image.astype(np.float32) / 255, int(label)


counts = np.zeros(10, int)
with tempfile.TemporaryDirectory() as folder:
    images_path, labels_path = Path(folder, "images-idx3-ubyte"), Path(folder, "labels-idx1-ubyte")
    labels = np.arange(500) % 10
    write_idx(
        images_path,
        (25 * labels)[:, None, None] + np.random.default_rng(0).integers(0, 25, (500, 28, 28)),
    )
    write_idx(labels_path, labels)

    source = lp.zip_sources(Idx(images_path), Idx(labels_path))
    with lp.Loader(source, prepare, batch_size=64, shuffle=True, workers=2) as loader:
        for images, labels in loader:
            assert (
                np.rint(images * 255) // 25 == labels[:, None, None]
            ).all()  # each image has its own label
            counts += np.bincount(labels, minlength=10)

print(f"{counts.sum()} images, of each digit: {counts.tolist()}")
assert (counts == 50).all()
