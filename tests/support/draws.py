"""Draws from the global generators of `random` and `numpy.random`."""

from __future__ import annotations

import random

import numpy as np


def global_draws() -> tuple[float, ...]:
    """What each kind of draw gives, a cached Gaussian first where there is one."""
    return (
        float(np.random.normal()),
        random.gauss(0, 1),
        random.random(),
        float(np.random.rand()),
        random.getrandbits(64),
        int(np.random.randint(1 << 30)),
    )
