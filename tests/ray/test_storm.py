"""Kills at random in a cluster: workers, supervisors and actors of nodes, whole nodes, dispatchers. The same bits come.

LOADERPOOL_RAY_KILLS=300 pytest -m long tests/ray/test_storm.py
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read
from tests.support.processes import command_of, descendants, is_alive, parents
from tests.support.ray_cluster import RayCluster, impatient_pool

MOST_S = 240.0  # for 15 kills
KINDS = {"worker": 5, "supervisor": 3, "actor": 3, "node": 2, "dispatcher": 2}  # how often of 15 times


def sample(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.001 * (1 + 20 * (item % 50 == 0)))
    return {"item": np.full((30, 40), item, np.float32), "noise": rng.random(5), "text": "é" * (item % 4)}


def loader_of(workers: int | lp.Pool) -> lp.Loader:
    limits = lp.Limits(restarts_per_item=1000)  # kills at random may meet the same batch often
    return lp.Loader(range(400), sample, batch_size=6, shuffle=True, seed=3, limits=limits, workers=workers)


class Storm:
    """Kills on a thread of its own, a moment after the one before.

    Args:
        cluster: whose nodes and processes may be killed.
        kills: how many.
        seed: of all that is random.
    """

    def __init__(self, cluster: RayCluster, kills: int, seed: int) -> None:
        self._cluster, self._left, self._random = cluster, kills, random.Random(seed)
        self._nodes = [1, 2, 3]
        self.killed: Counter[str] = Counter()
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._blow, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _blow(self) -> None:
        try:
            plan = [kind for kind, count in KINDS.items() for _ in range(count)]
            while self._left:
                self._random.shuffle(plan)
                for kind in plan[: self._left]:
                    time.sleep(self._random.uniform(0.2, 3.0))
                    while not self._kill(kind):  # its heir has not come yet
                        time.sleep(0.1)
                    self.killed[kind] += 1
                    self._left -= 1
        finally:
            self.is_over.set()

    def _kill(self, kind: str) -> bool:
        if kind == "node":
            self._cluster.remove(self._nodes.pop(self._random.randrange(3)))
            self._nodes.append(self._cluster.add())
            return True
        pids = self._pids(kind)
        try:
            os.kill(self._random.choice(pids), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def _pids(self, kind: str) -> list[int]:
        if kind == "dispatcher":
            return [pid for pid in descendants(os.getpid()) if "loaderpool-dispatcher" in command_of(pid)]
        actors = self._cluster.actors()
        if kind == "actor":
            return actors
        born_of = parents()
        supervisors = [pid for pid, parent in born_of.items() if parent in actors and "-supervisor" in command_of(pid)]
        if kind == "supervisor":
            return supervisors
        return [pid for pid, parent in born_of.items() if parent in supervisors and is_alive(pid)]


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[RayCluster]:
    with RayCluster(nodes=3) as cluster:
        yield cluster


@pytest.mark.timeout(3600)
def test_a_storm_changes_no_bit(own_cluster: RayCluster) -> None:
    kills = int(os.environ.get("LOADERPOOL_RAY_KILLS", "15"))
    seed = int(os.environ.get("LOADERPOOL_RAY_SEED", "1"))
    storm, took_s = Storm(own_cluster, kills, seed), time.monotonic()
    with loader_of(0) as here, impatient_pool(own_cluster.address, 5, restarts=None) as pool, loader_of(pool) as loader:
        for epoch in itertools.count():
            expected, got = read(here), []
            for batch in loader:
                got += read([batch])
                if not epoch and len(got) == 5:
                    storm.start()
                assert time.monotonic() < took_s + MOST_S * max(1, kills / 15), (epoch, len(got), storm.killed)
            assert_same(got, expected, f"epoch {epoch}, seed {seed}")
            if storm.is_over.is_set():
                break
        told = loader.statistics()
    print(f"{dict(storm.killed)}, {epoch + 1} epochs, {time.monotonic() - took_s:.0f} s, {told.nodes_lost} nodes lost")
    assert sum(storm.killed.values()) == kills and (kills < 15 or storm.killed.keys() == KINDS.keys())
