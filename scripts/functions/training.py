"""The loader whose functions are recorded. `scripts/functions` runs it in a process of its own."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np
from sitecustomize import FOLDER, OFF, PHASE_FILE

import loaderpool as lp

WARM_BATCHES = 20  # the size of the tickets is settled after these
STEADY_BATCHES = 40
UNTIL_FIRST = 1  # phase from the call of `Loader` to its first batch
STEADY = 2  # phase of the first recorded batch in steady state; each batch is a phase


def load(item: int) -> Any:
    time.sleep(0.01)
    return np.full(4, item, np.float32)


def main() -> None:
    with open(os.path.join(os.environ[FOLDER], PHASE_FILE), "r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    phase[0] = UNTIL_FIRST
    with lp.Loader(range(400), load, batch_size=4, workers=2, shuffle=True) as loader:
        batches = iter(loader)
        next(batches)
        phase[0] = OFF
        for _ in range(WARM_BATCHES):
            next(batches)
        for number in range(STEADY, STEADY + STEADY_BATCHES):
            phase[0] = number
            next(batches)
        phase[0] = OFF


if __name__ == "__main__":
    main()
