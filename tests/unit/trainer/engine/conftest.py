"""Fixtures for runs in a pool that is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hand_pool import HandPool, small_pool


@pytest.fixture
def small() -> Iterator[HandPool]:
    """Room for few batches, so that every further pass has the others begin anew."""
    with small_pool() as pool:
        yield pool
