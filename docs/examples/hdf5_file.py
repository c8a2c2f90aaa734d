"""Read rows of several HDF5 files in random order, with the files open in every worker.

`lp.HDF5` takes paths and dataset names, because an open `h5py.File` cannot be sent to the workers.
Install, in a clone: pip install ".[files]"
"""

import tempfile
from pathlib import Path

import h5py
import numpy as np

import loaderpool as lp

ROWS = 200  # of each file


def write_files(folder):
    rng = np.random.default_rng(0)
    paths = []
    for part in range(3):
        ids = np.arange(part * ROWS, (part + 1) * ROWS)
        images = (ids % 10 * 25)[:, None, None] + rng.integers(0, 25, (ROWS, 16, 16))
        path = Path(folder, f"part-{part}.h5")
        with h5py.File(path, "w") as file:
            # One row for each chunk, so that a row can be read without its neighbors.
            file.create_dataset("images", data=images.astype(np.uint8), chunks=(1, 16, 16))
            file.create_dataset("train/ids", data=ids)
        paths.append(path)
    return paths


def load(row):
    return row["image"].astype(np.float32) / 255, row["id"]


seen, files_of_a_batch = [], []
with tempfile.TemporaryDirectory() as folder:
    rows = lp.HDF5(write_files(folder), {"image": "images", "id": "train/ids"})
    with lp.Loader(rows, load, batch_size=64, shuffle=True, seed=1, workers=2) as loader:
        for images, ids in loader:
            digits = np.rint(images * 255) // 25
            assert (digits == (ids % 10)[:, None, None]).all()  # each image comes with its own id
            files_of_a_batch.append(len(set((ids // ROWS).tolist())))
            seen += ids.tolist()

print(
    f"{len(seen)} rows of 3 files, each row once; the first batch has rows of {files_of_a_batch[0]} files"
)
assert sorted(seen) == list(range(3 * ROWS))
assert files_of_a_batch[0] == 3
