"""The memory rows: those of scripts/bench/memory.py, which says what is counted, and PyTorch's workers beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench import memory
from benchlib.model import Measured, Window

__all__ = ["measure_footprint"]


def measure_footprint(row: str, contestant: str, window: Window) -> Measured:
    """Megabytes beyond a serial run's. "forked" are plain workers, forked from the process that has the data."""
    # A window below a second would mean the short form there.
    window = dataclasses.replace(window, seconds=max(window.seconds, memory.SECONDS))
    measure, figure = _CONTESTANTS[row, contestant]
    figures = measure(window).figures
    return Measured({"mb": figures[figure]}, dict(figures))


def items_torch(window: Window) -> Measured:
    items = memory.make_items(memory.sizes(window)[0])
    epochs = _torch_epochs(len(items), 1000, lambda index: items[index]["label"])
    return memory.over_serial("items", "torch", lambda: sum(item["label"] for item in items), epochs)


def array_torch(window: Window) -> Measured:
    array = memory.make_array(memory.sizes(window)[1])
    epochs = _torch_epochs(len(array), 4, lambda index: int(array[index].sum(dtype=np.int64)))
    return memory.over_serial("array", "torch", lambda: sum(int(row.sum(dtype=np.int64)) for row in array), epochs)


def _torch_epochs(size: int, batch_size: int, value: Callable[[int], int]) -> Iterator[int]:
    """The sums of epochs that PyTorch's workers read, shuffled; set up as in peers/torch.py."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Values(Dataset[Any]):
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: int) -> int:
            return value(index)

    torch.set_num_threads(1)
    loader = DataLoader(
        Values(), batch_size=batch_size, shuffle=True, num_workers=memory.WORKERS, persistent_workers=True
    )
    for _ in range(memory.EPOCHS):
        yield sum(int(batch.sum()) for batch in loader)


_CONTESTANTS = {
    ("array", "loaderpool"): (memory.array_pool, "array_pool"),
    ("array", "forked"): (memory.array_forked, "array_forked"),
    ("array", "torch"): (array_torch, "array_torch"),
    ("dicts", "loaderpool"): (memory.items_pool, "items_pool"),
    ("dicts", "forked"): (memory.items_forked, "items_forked"),
    ("dicts", "torch"): (items_torch, "items_torch"),
}
