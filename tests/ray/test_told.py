"""Information about nodes: statistics, trace, report, and the reason why training waits."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import loaderpool as lp
from loaderpool.trainer.explain.verdicts import Verdict
from tests.support.batches import read, read_while, told_when
from tests.support.processes import strike
from tests.support.ray_cluster import RayCluster, impatient_pool
from tests.support.samples import noisy_image


def loader_of(workers: int | lp.Pool, items: int = 600) -> lp.Loader:
    return lp.Loader(
        range(items), functools.partial(noisy_image, wait_s=0.002), batch_size=6, workers=workers
    )


def test_statistics_say_what_each_node_has_done(cluster: RayCluster) -> None:
    with lp.RayPool(cluster.address, nodes=2) as pool, loader_of(pool) as loader:
        told_when(loader, lambda told: [node.state for node in told.nodes] == ["running"] * 2)
        read(loader, passes=2)
        told = told_when(loader, lambda told: sum(node.batches for node in told.nodes) >= 200)
        assert (
            told.batches == 200 and sum(worker.samples for worker in told.workers) >= 1200
        )  # some samples are made ahead
        assert [(node.workers, node.state) for node in told.nodes] == [(1, "running")] * 2
        assert all(node.busy_s > 0.05 for node in told.nodes)
        assert told_when(loader, lambda told: sum(worker.wait_s for worker in told.workers) > 0)
        assert (told.nodes_lost, told.restarts, told.notes) == (0, 0, ())


def test_a_node_that_leaves_is_none_that_was_lost(cluster: RayCluster) -> None:
    with lp.RayPool(cluster.address) as pool, loader_of(pool) as loader:
        told_when(loader, lambda told: [node.state for node in told.nodes] == ["running"] * 3)
        pool.resize(1)
        told = told_when(loader, lambda told: len(told.nodes) == 1)
        assert told.nodes_lost == 0
        read(loader)


def test_trace_and_report_and_why_it_waits(cluster: RayCluster, tmp_path: Path) -> None:
    with impatient_pool(cluster.address, 5) as pool, loader_of(pool, items=3000) as loader:
        read_while(loader, {40: lambda: strike(cluster.actors)})
        told_when(loader, lambda told: told.nodes_lost == 1)
        told_when(loader, lambda told: [node.state for node in told.nodes] == ["running"] * 3)
        read(loader)
        loader.trace(tmp_path / "trace.json")
        loader.report(tmp_path / "report.html")
        found = loader.explain()
    trace: Any = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]
    report = (tmp_path / "report.html").read_text()
    assert cluster.address.partition(":")[0] in report
    expected = (
        Verdict.INCOMPLETE,
        Verdict.BATCH_OVERHEAD,
        Verdict.NOISY_NEIGHBOUR,
    )  # the last: other tests
    assert found.verdict in expected and not found.change
