"""`RayPool` before there is a cluster: its arguments, what it refuses, and where it looks for one."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.ray import cluster
from loaderpool.ray.pool import RayPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": "ray://head:10001"}, r'"auto" or "host:port" of the cluster \(GCS\), got .ray:'),
        ({"address": "head"}, r'"auto" or "host:port" .*, got .head'),
        ({"address": 6379}, r'"auto" or "host:port" .*, got 6379'),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"nodes": "all"}, "nodes must be an integer, got 'all'"),
        ({"workers_per_node": -1}, "workers_per_node must be at least 1, got -1"),
        ({"workers_per_node": 1.5}, "workers_per_node must be an integer, got 1.5"),
        ({"actor_options": [1]}, r"a dict of options of Ray's \.options\(\), got \[1\]"),
        ({"restarts": -1}, "restarts"),
    ],
)
def test_a_mistake_in_an_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lp.ArgumentError, match=words):
        RayPool(**arguments)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(lp.ClusterError, match=r"pip install 'loaderpool\[ray\]'"):
        RayPool()


def numbers() -> Iterator[int]:
    yield from range(100)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda pool: lp.Loader(numbers(), batch_size=4, workers=pool), "needs a source that is read by index"),
        (
            lambda pool: lp.Loader.from_generator(numbers, batch_size=4, workers=pool),
            "needs a source that is read by index",
        ),
        (
            lambda pool: lp.Loader(range(8), abs, batch_size=4, workers=pool, cache="memory"),
            "cannot be combined with cache=",
        ),
    ],
    ids=["stream", "generator", "cache"],
)
def test_what_cannot_be_made_on_other_machines_is_refused(make: Any, words: str) -> None:
    """In the line that makes the loader, and before any cluster is looked for."""
    with RayPool(address="127.0.0.1:1") as pool, pytest.raises(lp.ArgumentError, match=words):
        make(pool)


class TestFindCluster:
    def test_where_one_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            assert cluster.find_cluster(address) == address

    def test_where_one_was(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Ray leaves its note behind when it is killed, and looks for that cluster for minutes."""
        note = tmp_path / "ray_current_cluster"
        note.write_text("127.0.0.1:1\n")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "_CURRENT_CLUSTER", note)
        with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: "):
            cluster.find_cluster("auto")

    def test_where_none_ever_was(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "_CURRENT_CLUSTER", tmp_path / "none")
        with pytest.raises(ConnectionError, match=r"found no Ray cluster on this machine\. Start one"):
            cluster.find_cluster("auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_loader_on_no_cluster_says_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is named, and where it was: RAY_ADDRESS is of one that has gone."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    pool = RayPool(address=address)
    told = pytest.raises(lp.ClusterError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: ")
    with pool, lp.Loader(range(8), abs, batch_size=4, workers=pool) as loader, told:
        next(iter(loader))
