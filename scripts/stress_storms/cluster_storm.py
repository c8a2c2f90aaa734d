"""Rounds of a storm over a cluster: a pool on it and a loader each, kills all the while, and the twin beside it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import loaderpool as lp
from tests.support.processes import describe

from .cluster import StormedCluster, running_cluster
from .cluster_killer import ClusterKiller, Strike, kinds_for
from .companion import Companion
from .consumer import Consumer
from .readings import LoopReading, Reading
from .rounds import Plan, Result, Round, plan_rounds
from .shapes import Faults
from .storm import take_passes
from .streams import Twin
from .succession import Succession
from .watchdog import watched

__all__ = ["NODES", "ClusterResult", "run_cluster_storm"]

NODES = 3
HOST_TIMEOUT_S = 3.0
# Each call that is lost takes a second, and some in twenty of those that are made again are lost, too.
_HOST_TIMEOUT_IF_LOST_S = 10.0
_ROUNDS_A_CLUSTER = 6
_LOSES_CALLS_EVERY = 3  # clusters; the second of three
# Few items: so many of them fault once, and a host makes no more than fifty deaths within a minute good.
_COMPANIONS = ("single batches", "varying, padded")


@dataclasses.dataclass
class ClusterResult(Result):
    """What came of a round over a cluster."""

    loses_calls: bool = False
    strikes: list[Strike] = dataclasses.field(default_factory=list)
    emptied_s: float = 0.0  # after the pool was closed: until nothing of ours was on any node


class _Succession(Succession):
    """Loaders on a cluster's pool, whose waits for batches are told."""

    # A ticket of a host's is eight times as much work, and so are the batches of a slot: with less, two iterators of
    # batches that outgrow their slots have no two slots between them, as the error says.
    _memory_limits = (None, "192MiB", "768MiB")

    def read(self, place: Any) -> Reading:
        """See `Succession.read`."""
        return _TimedReading(self.loader, place, self._faults.folder, self._killer.note_wait)

    def resize(self, workers: int) -> None:
        """Have another number of hosts."""
        assert isinstance(self._pool, lp.RayPool)
        self._pool.resize("auto" if workers > NODES else workers)


class _TimedReading(LoopReading):
    def __init__(self, loader: lp.Loader, place: Any, folder: str, tell: Callable[[float, float], None]) -> None:
        super().__init__(loader, place, folder)
        self._tell = tell

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            begun = time.monotonic()
            batch = next(batches, None)
            self._tell(begun, time.monotonic())
            if batch is None:
                return
            yield batch
            del batch


def run_cluster_storm(
    plan: Plan, kills: int, only: int | None, deadline_s: float, say: Callable[[str], None]
) -> list[ClusterResult]:
    """Storm until there were so many kills, or something differs.

    Args:
        plan: of the rounds; its kills are those of a round.
        kills: in all.
        only: the round of this number, and no other.
        deadline_s: of each pass.
        say: is told how far it is.
    """
    results: list[ClusterResult] = []
    rounds = plan_rounds(plan)
    while kills:
        era = list(itertools.islice(rounds, _ROUNDS_A_CLUSTER))
        number = era[0].number // _ROUNDS_A_CLUSTER
        if only is not None:
            era = [this for this in era if this.number == only]
            if not era:
                continue
        loses_calls = number % _LOSES_CALLS_EVERY == 1
        with running_cluster(NODES, loses_calls) as cluster:
            timeout_s = _HOST_TIMEOUT_IF_LOST_S if loses_calls else HOST_TIMEOUT_S
            say(f"a cluster at {cluster.address}{', which loses calls' if loses_calls else ''}")
            for this in era:
                result = _run_round(this, plan.kills, cluster, timeout_s, deadline_s)
                result.loses_calls = loses_calls
                results.append(result)
                done = sum(len(each.strikes) for each in results)
                say(
                    f"round {this.number} ({this.shape.name}, {'ordered' if this.is_ordered else 'unordered'}): "
                    f"{result.passes} passes, {result.batches} batches, {len(result.strikes)} kills, longest gap "
                    f"{max((each.gap_s for each in result.strikes), default=0):.1f} s, {len(result.mismatches)} "
                    f"mismatches, {result.seconds:.1f} s; {done} kills in all"
                )
                for line in result.mismatches:
                    say(f"  {line}")
                if result.mismatches or done >= kills or only is not None:
                    return results
    return results


def _run_round(
    this: Round, kills: int, cluster: StormedCluster, host_timeout_s: float, deadline_s: float
) -> ClusterResult:
    result = ClusterResult(this)
    started = time.monotonic()
    draw = random.Random(this.draws)
    what = f"round {this.number} ({this.shape.name}, {'' if this.is_ordered else 'un'}ordered) at {cluster.address}"
    kinds = kinds_for(100, draw)[:kills]
    killer = ClusterKiller(cluster, kinds, host_timeout_s, random.Random(draw.random()))
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        faults = Faults(folder, os.getpid(), this.shape.faults_one_in)
        seed = draw.randrange(2**31)
        pool = lp.RayPool(cluster.address, host_timeout_s=host_timeout_s, restarts=None)
        loaders = _Succession(this, faults, seed, pool, killer, random.Random(draw.random()), result)
        companion = Companion(pool, faults, seed, _COMPANIONS) if this.has_companion else None
        twin = Twin(this.shape, faults, seed)
        consumer = Consumer(loaders, twin, this, killer, random.Random(draw.random()), result, companion)
        killer.start()
        try:
            take_passes(consumer, killer, result, what, deadline_s)
        except Exception:
            result.mismatches.append(f"pass {result.passes} raised\n{traceback.format_exc()}")
        finally:
            killer.stop()
        with watched(deadline_s, f"{what}, its end"):
            consumer.end()
            loaders.close()
            pool.close()
            consumer.check_held("after close()")
            result.emptied_s, left = cluster.wait_empty()
            result.mismatches += [f"left behind: {describe(pid)}" for pid in left]
        result.strikes, result.faults = killer.strikes, faults.met
    del consumer, loaders, companion, pool
    gc.collect()
    result.seconds = time.monotonic() - started
    return result
