"""A loader whose order and numbers are drawn at random, and whose samples take a moment: others may die meanwhile."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import loaderpool as lp

__all__ = ["loader_of", "sample"]


def sample(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.0005)
    return {"item": np.full((30, 40), item, np.float32), "noise": rng.random(5)}


def loader_of(workers: int | lp.Pool | lp.RayPool, items: int = 600, **settings: Any) -> lp.Loader:
    return lp.Loader(range(items), sample, batch_size=6, shuffle=True, seed=3, workers=workers, **settings)
