"""A node's processes end when it is replaced or the pool is closed, also while Ray cannot end them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import loaderpool as lp
from tests.support.processes import command_of, descendants, end_all, strike, wait_gone
from tests.support.ray_cluster import RayCluster, impatient_pool
from tests.support.samples import noisy_image

# Long enough for any one end. Ray alone needs 15 s or more in each of these cases, or never ends
# the processes.
END_S = 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster that can lose its head, and get it back."""
    with RayCluster(nodes=2, can_lose_head=True) as running:
        yield running


@pytest.fixture
def without_head(cluster: RayCluster) -> Iterator[Callable[[], None]]:
    """Function that ends the head. It is started again after the test."""
    with contextlib.ExitStack() as undo:

        def end() -> None:
            cluster.end_head()
            undo.callback(cluster.start_head)

        yield end


@contextlib.contextmanager
def in_mid_epoch(
    cluster: RayCluster, node_timeout_s: float = 15
) -> Iterator[tuple[Any, list[int], lp.RayPool]]:
    """An iterator after batches of both nodes, the processes of each node, and the pool."""
    pool = impatient_pool(cluster.address, node_timeout_s)
    with (
        pool,
        lp.Loader(
            range(1200), functools.partial(noisy_image, wait_s=0.002), batch_size=6, workers=pool
        ) as loader,
    ):
        batches = iter(loader)
        deadline_s = time.monotonic() + 60
        while (
            len(actors := cluster.actors()) < 2
            or sum(node.batches > 0 for node in loader.statistics().nodes) < 2
        ):
            next(batches, None)
            assert time.monotonic() < deadline_s, "a node has made no batch"
            time.sleep(0.02)
        mine = [each for actor in actors for each in [actor, *descendants(actor)]]
        try:
            yield batches, mine, pool
        finally:
            end_all(mine)  # processes that a failed test has left


def of_node(actor: int) -> list[int]:
    """Return a node's processes."""
    return [actor, *descendants(actor)]


def test_stopped_actor_ends_without_the_head(
    cluster: RayCluster, without_head: Callable[[], None]
) -> None:
    with in_mid_epoch(cluster) as (batches, _, _):
        node = of_node(cluster.actors()[0])
        without_head()
        os.kill(node[0], signal.SIGSTOP)
        assert not wait_gone(node, END_S)
        assert sum(1 for _ in batches) > 0


def test_stopped_node_ends_with_its_workers(cluster: RayCluster) -> None:
    """All its processes are stopped, so none of them can end the others."""
    with in_mid_epoch(cluster, node_timeout_s=2) as (batches, _, _):
        node = of_node(cluster.actors()[0])
        for pid in node:
            os.kill(pid, signal.SIGSTOP)
        assert sum(1 for _ in batches) > 0
        assert not wait_gone(node, END_S)


def test_close_ends_nodes_without_the_head(
    cluster: RayCluster, without_head: Callable[[], None]
) -> None:
    with in_mid_epoch(cluster) as (_, mine, pool):
        without_head()
        pool.close()
        assert not wait_gone(mine, END_S)


def test_close_ends_the_node_of_a_stopped_raylet(cluster: RayCluster) -> None:
    (raylet,) = cluster.pids(1)["raylet"]
    with in_mid_epoch(cluster) as (_, mine, pool):
        os.kill(raylet, signal.SIGSTOP)
        try:
            pool.close()
            assert not wait_gone(mine, END_S)
        finally:
            os.kill(raylet, signal.SIGCONT)


def test_nodes_end_after_their_dispatcher(
    cluster: RayCluster, without_head: Callable[[], None]
) -> None:
    """The dispatcher is killed while the head is away, so nothing notifies the nodes."""
    with in_mid_epoch(cluster, node_timeout_s=2) as (_, mine, pool):
        without_head()
        strike(
            lambda: [
                pid
                for pid in descendants(os.getpid())
                if "loaderpool-dispatcher" in command_of(pid)
            ]
        )
        pool.close()
        assert not wait_gone(mine, END_S)
