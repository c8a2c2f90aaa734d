"""A Ray cluster for all tests of this directory. They need Ray: `pip install 'loaderpool[ray]'`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import POLL_S, command_of, descendants
from tests.support.ray_cluster import RayCluster


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this directory. pytest calls each conftest with all tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("ray")
            item.add_marker("slow")
            if importlib.util.find_spec("ray") is None:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """A head, and three nodes with one CPU each. A test that removes a node adds another one."""
    with RayCluster(nodes=3) as running:
        yield running


@pytest.fixture(autouse=True)
def _actors_of_earlier_tests_are_gone(request: pytest.FixtureRequest) -> None:
    """Wait until the actors of earlier tests have ended, so that a test finds only its own."""
    if "cluster" in request.fixturenames:
        pid, until_s = request.getfixturevalue("cluster").pid, time.monotonic() + 20
        while left := [each for each in descendants(pid) if "ray::NodeActor" in command_of(each)]:
            assert time.monotonic() < until_s, left
            time.sleep(POLL_S)
