"""What a batch costs trainer and supervisor as workers, items and components become more. loaderpool alone.

Samples wait, in proportion to the number of workers, so that all sizes deliver the same number of batches a second:
what differs is the engine's. Items are shuffled. The trainer's part and the supervisor's are told apart as facts.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchlib.model import Measured, Window, require
from benchlib.processes import cpu_ms, parent
from benchlib.windows import delivered

__all__ = ["measure_growth"]

BATCH_SIZE = 4
SAMPLES_PER_S = 4000.0
DEFAULT_WORKERS, DEFAULT_ITEMS, DEFAULT_COMPONENTS = 16, 10**6, 1


class Nap:
    """Gives the item in as many components as asked for, after some waiting."""

    def __init__(self, seconds: float, components: int) -> None:
        self.seconds = seconds
        self.components = components

    def __call__(self, item: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {f"component {number}": np.full(16, item) for number in range(self.components)}


def measure_growth(what: str, window: Window) -> Measured:
    """Microseconds of CPU time a batch, of trainer and supervisor together.

    Args:
        what: such as "workers=64", "items=10^9", "components=10".
        window: how long.
    """
    import loaderpool as lp

    name, _, size = what.partition("=")
    sizes = {"workers": DEFAULT_WORKERS, "items": DEFAULT_ITEMS, "components": DEFAULT_COMPONENTS}
    sizes[name] = 10 ** int(size[3:]) if size.startswith("10^") else int(size)
    workers = sizes["workers"]
    fn = Nap(workers / SAMPLES_PER_S, sizes["components"])
    with lp.Loader(
        range(sizes["items"]),
        fn,
        batch_size=BATCH_SIZE,
        workers=workers,
        shuffle=True,
        limits=lp.Limits(restarts=None),
    ) as loader:

        def epochs() -> Any:
            while True:
                yield from loader

        batches = epochs()
        warm = delivered(batches, Window(0.2, max(window.warm_s, workers / 64), {}), _look)
        supervisor = parent(loader.statistics().workers[0].pid)
        require(parent(supervisor) == os.getpid(), "the workers' parent is no child of the trainer")
        before = cpu_ms(supervisor)
        found = delivered(batches, Window(window.seconds, 0.0, {}), _look)
        supervisor_us = (cpu_ms(supervisor) - before) * 1e3 / (len(found.seen) or 1)
    seen = [item for ends in (*warm.seen, *found.seen) for item in ends]
    require(len(set(seen[: sizes["items"]])) == len(seen[: sizes["items"]]), "samples came twice")
    trainer_us = found.cpu_s * 1e6
    facts = {"trainer_us": trainer_us, "supervisor_us": supervisor_us, "batches_per_s": found.rate}
    return Measured({"cpu_us": trainer_us + supervisor_us}, facts)


def _look(batch: dict[str, Any]) -> list[int]:
    column: list[int] = batch["component 0"][:, 0].tolist()
    return column
