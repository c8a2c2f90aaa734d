"""The memory rows: those of scripts/bench/memory.py, which has the question and what is counted."""

from __future__ import annotations

import dataclasses

import memory
from common import Measured, Window

__all__ = ["measure_footprint"]

CONTESTANTS = {
    ("array", "loaderpool"): (memory.array_pool, "array_pool"),
    ("array", "forked"): (memory.array_forked, "array_forked"),
    ("dicts", "loaderpool"): (memory.items_pool, "items_pool"),
    ("dicts", "forked"): (memory.items_forked, "items_forked"),
}


def measure_footprint(row: str, contestant: str, window: Window) -> Measured:
    """Megabytes beyond a serial run's. "forked" are plain workers, forked from the process that has the data."""
    measure, figure = CONTESTANTS[row, contestant]
    # A window below a second would mean the short form there.
    measured = measure(dataclasses.replace(window, seconds=max(window.seconds, memory.SECONDS)))
    return Measured({"mb": measured.figures[figure]}, dict(measured.figures))
