"""Memory of four workers, compared with a serial run over the same data, and its growth.

The serial run iterates the data in one process. Memory is the proportional set size of all
processes after each of three shuffled epochs, minus that of the process after its serial run. So
the interpreters of supervisor and workers count, and shared pages count once. The sum of labels, or
of the array, is verified for each epoch.

- "forked": plain workers, forked from the process that has the data. Each iterates a share of the
  data. Reference counts copy their pages. Arrays have none, so there the difference is the cost of
  a supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil

from bench.measures import tree
from bench.rows import Row
from bench.windows import Window

WORKERS = 4
EPOCHS = 3


def over_serial(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Return the megabytes that three epochs take in addition to one serial run, and their
    growth.
    """
    is_quick = window.seconds < row.seconds
    if row.work == "dicts":
        count = 100_000 if is_quick else 2_000_000
        data: Any = [
            {"path": f"data/train/{i % 1000:03d}/{i:08d}.jpg", "label": i % 1000, "weight": i / 7}
            for i in range(count)
        ]
        value: Callable[[int], int] = lambda index: data[index]["label"]  # noqa: E731
        batch_size = 1000
    else:
        count = 64 if is_quick else 2000
        data = np.empty((count, 1_000_000), np.uint8)
        data[:] = (np.arange(count) % 251)[:, None]
        value = lambda index: int(data[index].sum(dtype=np.int64))  # noqa: E731
        batch_size = 4
    expected = sum(map(value, range(count)))
    gc.collect()
    before_mb = _tree_mb()
    found_mb = []
    for total in _EPOCHS[contestant](data, value, batch_size):
        if total != expected:
            raise ValueError(f"an epoch's sum is {total}, not {expected}")
        found_mb.append(_tree_mb() - before_mb)
    return {
        contestant: max(found_mb),
        f"{contestant} growth": max(found_mb[-1] - found_mb[0], 0.001),
    }


def _tree_mb() -> float:
    total = 0
    for pid in tree(os.getpid()):
        with contextlib.suppress(psutil.Error):  # the process has ended
            total += psutil.Process(pid).memory_full_info().pss
    return total / 1e6


def _of_loaderpool(data: Any, value: Callable[[int], int], batch_size: int) -> Iterator[int]:
    import loaderpool as lp

    if isinstance(data, list):
        source, fn = data, lambda item: item["label"]
    else:
        source, fn = range(len(data)), lambda index: data[index].sum(dtype=np.int64)
    with lp.Loader(source, fn, batch_size=batch_size, shuffle=True, workers=WORKERS) as loader:
        for _ in range(EPOCHS):
            yield sum(int(batch.sum()) for batch in loader)


_inherited: Any = None  # data for forked processes, and the function of an index


def _sum_of_share(epoch: int, worker: int) -> int:
    data, value = _inherited
    order = np.random.default_rng(epoch).permutation(len(data))[worker::WORKERS]
    return sum(value(int(index)) for index in order)


def _of_forked(data: Any, value: Callable[[int], int], batch_size: int) -> Iterator[int]:
    global _inherited
    _inherited = data, value
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        for epoch in range(EPOCHS):
            yield sum(
                pool.starmap(
                    _sum_of_share, [(epoch, worker) for worker in range(WORKERS)], chunksize=1
                )
            )


def _of_torch(data: Any, value: Callable[[int], int], batch_size: int) -> Iterator[int]:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Values(Dataset[Any]):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> int:
            return value(index)

    torch.set_num_threads(1)
    loader = DataLoader(
        Values(), batch_size=batch_size, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    for _ in range(EPOCHS):
        yield sum(int(batch.sum()) for batch in loader)


_EPOCHS = {"loaderpool": _of_loaderpool, "forked": _of_forked, "torch": _of_torch}
