"""How long a consumer waits for a batch after one part of a cluster has ended, while all else is well."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import loaderpool as lp

from .cluster import StormedCluster
from .cluster_killer import KINDS, ClusterKiller, Strike

__all__ = ["measure_gaps"]

_HOST_TIMEOUT_S = 3.0
_STEADY_S = 1.5  # that all is there, before anything is ended
_GIVE_UP_S = 60.0
_LEFT_OUT = ("head, SIGSTOP for 10 s",)


class _OneByOne(ClusterKiller):
    """Ends something when all is there again."""

    def run(self) -> None:
        """See `ClusterKiller`."""
        super().run()
        self._pause()

    def _pause(self) -> float:
        whole, began = len(self._cluster.nodes), time.monotonic()
        steady_since = began
        while time.monotonic() < min(steady_since + _STEADY_S, began + _GIVE_UP_S):
            self._repair()
            time.sleep(0.1)
            if self._later or len(self._cluster.workers()) < whole or not self._cluster.dispatchers():
                steady_since = time.monotonic()
        return 0.0


def measure_gaps(times: int, cluster: StormedCluster, seed: int, say: Callable[[str], None]) -> list[Strike]:
    """End each part of a cluster so many times, one after the other, and note what a consumer that never waits sees.

    Args:
        times: of each kind.
        cluster: on which nobody else works.
        seed: of what is drawn.
        say: is told how far it is.
    """
    kinds = [kind for kind in KINDS if kind not in _LEFT_OUT] * times
    killer = _OneByOne(cluster, kinds, _HOST_TIMEOUT_S, random.Random(f"{seed}/gaps"))
    with (
        lp.RayPool(cluster.address, host_timeout_s=_HOST_TIMEOUT_S, restarts=None) as pool,
        lp.Loader(range(1_000_000), _work, batch_size=4, shuffle=True, seed=seed, workers=pool) as loader,
    ):
        batches = iter(loader)
        next(batches)
        killer.start()
        told = 0
        while killer.is_alive():
            begun = time.monotonic()
            next(batches)
            killer.note_wait(begun, time.monotonic())
            while len(killer.strikes) > told + 1:
                say(f"{killer.strikes[told].kind}: a gap of {killer.strikes[told].gap_s:.2f} s")
                told += 1
        del batches
    return killer.strikes


def _work(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.01)
    return {"item": np.full((50, 50), item, np.float32), "noise": rng.random(5)}
