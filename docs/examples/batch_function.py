"""Build a whole batch in one call with `batch_fn`, because NumPy is faster on many rows at once.

The function gets the list of the batch's items and returns the batch. One call per row gives the same batches.
Install, in a clone: pip install .
"""

import tempfile
from pathlib import Path

import numpy as np

import loaderpool as lp


def write_arrays(folder):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 2000)
    times = np.arange(256) / 256
    signals = np.sin(2 * np.pi * 10 * (labels[:, None] + 1) * times) + rng.normal(
        0, 0.3, (2000, 256)
    )
    np.save(Path(folder, "signals.npy"), signals.astype(np.float32))
    np.save(Path(folder, "labels.npy"), labels)


def load_row(row):
    return np.abs(np.fft.rfft(signals[row])).astype(np.float32), labels[row]


def load_batch(rows):
    return np.abs(np.fft.rfft(signals[rows], axis=1)).astype(np.float32), labels[rows]


with tempfile.TemporaryDirectory() as folder:
    write_arrays(folder)
    signals = np.load(
        Path(folder, "signals.npy"), mmap_mode="r"
    )  # every worker opens the file by its path
    labels = np.load(Path(folder, "labels.npy"))
    settings = {"batch_size": 128, "shuffle": True, "seed": 1, "workers": 2}
    with lp.Loader(range(len(signals)), batch_fn=load_batch, **settings) as loader:
        by_batch = list(loader)
    with lp.Loader(range(len(signals)), load_row, **settings) as loader:
        by_row = list(loader)

right = sum(
    int((spectra.argmax(axis=1) == 10 * (digits + 1)).sum()) for spectra, digits in by_batch
)
print(
    f"{len(by_batch)} calls for {len(labels)} rows; {right} rows have their peak at the frequency of their label"
)
assert right == len(labels)
for (spectra, digits), (row_spectra, row_digits) in zip(by_batch, by_row, strict=True):
    assert np.allclose(spectra, row_spectra, atol=1e-3) and np.array_equal(digits, row_digits)
