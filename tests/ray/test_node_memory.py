"""A node that runs out of memory, as Ray's memory monitor sees it: an error has the reason. `pytest
-m long tests/ray`.
"""

from __future__ import annotations

import functools

import pytest

import loaderpool as lp
from tests.support.ray_cluster import RayCluster
from tests.support.samples import slow_number

pytestmark = pytest.mark.long


def test_a_node_that_is_ended_for_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor is set to a limit that the machine always exceeds, so it ends any process that it
    may end.
    """
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "200")
    with RayCluster(nodes=1) as cluster:
        pool = lp.RayPool(cluster.address, restarts=(1, 60))
        loader = lp.Loader(
            range(4000), functools.partial(slow_number, wait_s=0.05), batch_size=4, workers=pool
        )
        with (
            pool,
            loader,
            pytest.raises(lp.WorkerLostError, match=r"Nodes were lost 2 times .*memory") as e,
        ):
            for _ in loader:
                pass
        assert all("memory" in why.lower() for _, why in e.value.nodes)
