"""Train PyTorch on a zarr store, by shuffled rows or by whole chunks, and resume in the middle of an epoch.

The arrays of a store are columns of the source. With `shuffle=True`, a row decompresses its whole chunk. A generator of
chunks is faster.
Install, in a clone: pip install . "zarr>=3" xarray torch
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import xarray
import zarr
from torch import nn

import loaderpool as lp

ROWS, CHUNK = 800, 20


def write_store(path):
    rng = np.random.default_rng(0)
    labels = np.arange(ROWS) * 2 // ROWS  # sorted, as data often is
    images = rng.normal(280 + 5 * labels[:, None, None], 5, (ROWS, 8, 8)).astype(np.float32)
    dataset = xarray.Dataset({"image": (("sample", "y", "x"), images), "label": ("sample", labels)})
    dataset.to_zarr(
        path, zarr_format=3, consolidated=False, encoding={"image": {"chunks": (CHUNK, 8, 8)}}
    )
    return images


def prepare(row):
    return (row["image"] - np.float32(280)) / np.float32(5), row["label"]


def read_chunk(start):
    part = slice(start, start + CHUNK)
    for image, label in zip(store["image"][part], labels[part], strict=True):
        yield {"image": image, "label": label}


def by_rows(workers, columns):
    return lp.Loader(columns, prepare, batch_size=32, shuffle=True, seed=1, workers=workers)


def by_chunks(workers):
    """Read chunks in random order, and shuffle rows within a window of 10 chunks."""
    return lp.Loader.from_generator(
        read_chunk,
        shards=range(0, ROWS, CHUNK),
        shard_lengths=CHUNK,  # gives the loader a length
        fn=prepare,
        cycle_length=2,
        shuffle=10 * CHUNK,
        seed=1,
        batch_size=32,
        workers=workers,
    )


def batches_of(loader, state=None):
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        return [(images.copy(), labels.copy()) for images, labels in loader]


def same(first, second):
    return len(first) == len(second) and all(map(np.array_equal, sum(first, ()), sum(second, ())))


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "images.zarr")
    images = write_store(path)
    store, dataset = (
        zarr.open_group(path, mode="r"),
        xarray.open_zarr(path, chunks=None, consolidated=False),
    )
    labels = store["label"][:]
    of_zarr = {"image": store["image"], "label": labels}
    of_xarray = {"image": dataset["image"], "label": labels}

    rows = batches_of(by_rows(2, of_zarr))
    assert same(rows, batches_of(by_rows(0, of_zarr))) and same(
        rows, batches_of(by_rows(2, of_xarray))
    )
    chunks = batches_of(by_chunks(2))
    assert same(chunks, batches_of(by_chunks(1)))
    for batches in (rows, chunks):  # every row once
        found = np.concatenate([batch for batch, _ in batches])
        assert np.array_equal(
            np.sort(found.mean((1, 2))), np.sort(((images - 280) / 5).mean((1, 2)))
        )

    with by_chunks(2) as loader:
        for _ in range(4):
            for inputs, targets in loader.as_torch():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        state = batches.state_dict()
        rest = [(inputs.copy(), targets.copy()) for inputs, targets in batches]
    assert same(batches_of(by_chunks(1), state), rest)
    scores = model(torch.from_numpy((images - 280) / 5)).argmax(1).numpy()

accuracy = float((scores == labels).mean())
print(
    f"{ROWS} rows, accuracy {accuracy:.1%}; a batch of chunks has {np.mean(chunks[5][1]):.0%} of label 1"
)
assert accuracy > 0.95
assert 0.1 < np.mean(chunks[5][1]) < 0.9
