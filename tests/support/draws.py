"""Draws from the global generators of `random` and `numpy.random`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


def global_draws() -> tuple[float, ...]:
    """Draw numbers of each kind from the global generators, first a cached Gaussian if there is
    one.
    """
    return (
        float(np.random.normal()),
        random.gauss(0, 1),
        random.random(),
        float(np.random.rand()),
        random.getrandbits(64),
        int(np.random.randint(1 << 30)),
    )


@contextlib.contextmanager
def generators_left_alone() -> Iterator[None]:
    """Context that asserts that nothing draws from the global generators."""
    random.seed(5)
    np.random.seed(5)
    expected = global_draws()
    random.seed(5)
    np.random.seed(5)
    yield
    assert global_draws() == expected
