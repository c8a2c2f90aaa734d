"""Random kills in a cluster: workers, supervisors and actors of nodes, whole nodes, dispatchers.
The bits stay the same.

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
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read
from tests.support.processes import command_of, descendants, parents
from tests.support.ray_cluster import RayCluster, impatient_pool

MOST_S = 240.0  # limit for 15 kills
KINDS = ("worker",) * 5 + ("supervisor",) * 3 + ("actor",) * 3 + ("node",) * 2 + ("dispatcher",) * 2


def sample(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.001 * (1 + 20 * (item % 50 == 0)))
    return {
        "item": np.full((30, 40), item, np.float32),
        "noise": rng.random(5),
        "text": "é" * (item % 4),
    }


def loader_of(workers: int | lp.Pool) -> lp.Loader:
    limits = lp.Limits(restarts_per_item=1000)  # random kills may hit the same batch often
    return lp.Loader(
        range(400), sample, batch_size=6, shuffle=True, seed=3, limits=limits, workers=workers
    )


class Storm(threading.Thread):
    """Makes this number of kills, with short pauses."""

    def __init__(self, cluster: RayCluster, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._kills, self._random, self._nodes = (
            cluster,
            kills,
            random.Random(seed),
            [1, 2, 3],
        )
        self.killed: Counter[str] = Counter()

    def run(self) -> None:
        for number in range(self._kills):
            kind = KINDS[number % 15] if self._kills <= 15 else self._random.choice(KINDS)
            time.sleep(self._random.uniform(0.2, 3.0))
            while not self._kill(kind):  # the replacement has not started yet
                time.sleep(0.1)
            self.killed[kind] += 1

    def _kill(self, kind: str) -> bool:
        if kind == "node":
            self._cluster.remove(self._nodes.pop(self._random.randrange(3)))
            self._nodes.append(self._cluster.add())
            return True
        try:
            os.kill(self._random.choice(self._pids(kind)), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def _pids(self, kind: str) -> list[int]:
        if kind == "dispatcher":
            return [
                pid
                for pid in descendants(os.getpid())
                if "loaderpool-dispatcher" in command_of(pid)
            ]
        actors, born_of = self._cluster.actors(), parents()
        supervisors = [
            pid
            for pid, parent in born_of.items()
            if parent in actors and "-supervisor" in command_of(pid)
        ]
        workers = [pid for pid, parent in born_of.items() if parent in supervisors]
        return {"actor": actors, "supervisor": supervisors, "worker": workers}[kind]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_storm_changes_no_bit() -> None:
    kills, seed = (
        int(os.environ.get("LOADERPOOL_RAY_KILLS", "15")),
        int(os.environ.get("LOADERPOOL_RAY_SEED", "1")),
    )
    began_s = time.monotonic()
    with (
        RayCluster(nodes=3) as cluster,
        loader_of(0) as here,
        impatient_pool(cluster.address, 5, restarts=None) as pool,
        loader_of(pool) as loader,
    ):
        storm = Storm(cluster, kills, seed)
        for epoch in itertools.count():
            expected, got = read(here), []
            for batch in loader:
                got += read([batch])
                if not epoch and len(got) == 5:
                    storm.start()
                assert time.monotonic() < began_s + MOST_S * max(1, kills / 15), (
                    epoch,
                    len(got),
                    storm.killed,
                )
            assert_same(got, expected, f"epoch {epoch}, seed {seed}")
            if not storm.is_alive():
                break
        told = loader.statistics()
    print(
        f"{dict(storm.killed)}, {epoch + 1} epochs, {time.monotonic() - began_s:.0f} s, {told.nodes_lost} nodes lost"
    )
    assert sum(storm.killed.values()) == kills and storm.killed.keys() == set(KINDS)
