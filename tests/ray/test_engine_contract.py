"""An engine with workers on other nodes keeps the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import loaderpool as lp
from tests.support.engine_contract import PoolEngineContract
from tests.support.ray_cluster import RayCluster


@pytest.fixture(autouse=True)
def _actors_of_earlier_tests_are_gone() -> None:
    """Replaces the fixture of this name, because the tests of this file share a pool."""


@pytest.fixture(scope="module")
def workers(cluster: RayCluster) -> Iterator[lp.Pool]:
    with lp.RayPool(cluster.address) as pool:
        yield pool


class TestRayEngine(PoolEngineContract):
    """All of these tests use the module's pool."""
