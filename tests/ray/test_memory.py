"""Memory, disk space and descriptors that a pool on a cluster takes, and returns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.processes import command_of, count_fds, descendants
from tests.support.ray_cluster import STORE_BYTES, RayCluster, Stores

BATCH_BYTES = 2 << 20
_COMMAND = {"dispatcher": "loaderpool-dispatcher", "node": "ray::NodeActor"}


def processes(cluster: RayCluster, of: str) -> list[int]:
    """Return the processes of the dispatcher, or of the nodes' actors."""
    root = os.getpid() if of == "dispatcher" else cluster.pid
    return [pid for pid in descendants(root) if _COMMAND[of] in command_of(pid)]


def large(item: int) -> Any:
    return np.full((BATCH_BYTES // 8,), item, np.int64)


def own_bytes(pid: int) -> int:
    """Return the memory of a process, without the arena and stores."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def arena_bytes(actor: int) -> int:
    """Return the bytes of a node's arena."""
    for file in Path(f"/proc/{actor}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "loaderpool-arena" in os.readlink(file):
                return file.stat().st_blocks * 512
    raise AssertionError("it has no arena")


def settled(look: Callable[[], Any]) -> Any:
    """Return a value when it does not change any more."""
    before = None
    for _ in range(20):
        time.sleep(0.5)
        now = look()
        if now == before:
            break
        before = now
    return now


def test_who_keeps_all_batches_keeps_them_here_and_not_on_a_disk(cluster: RayCluster) -> None:
    batches = 2 * STORE_BYTES // BATCH_BYTES
    before = cluster.stores()
    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(range(batches), large, batch_size=None, workers=pool) as loader,
    ):
        kept = list(loader)
        assert [int(batch[0]) for batch in kept] == list(range(batches))
        assert all((batch == batch[0]).all() for batch in kept)
        assert cluster.stores().on_disk == before.on_disk
        del kept


def test_a_large_captured_array_lies_once_on_each_node(cluster: RayCluster) -> None:
    """A node's store may also keep data until it needs the memory. The array is larger than
    that.
    """
    table = np.arange(256 << 17)  # 256 MiB

    def looked_up(item: int) -> Any:
        return table[item * 1000 : item * 1000 + 4]

    with (
        lp.RayPool(cluster.address, workers_per_node=1) as pool,
        lp.Loader(range(600), looked_up, batch_size=4, workers=pool) as loader,
    ):
        got = np.concatenate(list(loader))
        assert (got == np.arange(600)[:, None] * 1000 + np.arange(4)).all()
        for actor in processes(cluster, "node"):
            assert table.nbytes <= arena_bytes(actor) < 1.3 * table.nbytes
            assert sum(map(own_bytes, [actor, *descendants(actor)])) < table.nbytes / 2


@pytest.mark.parametrize("passes", [20, pytest.param(500, marks=pytest.mark.long)])
def test_abandoned_passes_leave_nothing_on_any_node(cluster: RayCluster, passes: int) -> None:
    def held() -> tuple[Stores, dict[int, tuple[int, int, int]]]:
        found = [*processes(cluster, "dispatcher"), *processes(cluster, "node")]
        return cluster.stores(), {
            pid: (count_fds(pid), len(os.listdir(f"/proc/{pid}/task")), len(descendants(pid)))
            for pid in found
        }

    def abandon(count: int) -> None:
        for number in range(count):
            batches = iter(loader)
            for _ in range(1 + number % 3):
                next(batches)
            del batches

    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(range(20_000), large_enough, batch_size=10, workers=pool) as loader,
    ):
        abandon(20)
        before, was = settled(held)
        memory = {pid: own_bytes(pid) for pid in was}
        abandon(passes)
        after, now = settled(held)
        assert after.objects <= before.objects and after.on_disk == before.on_disk
        assert now.keys() == was.keys()
        for pid in now:
            assert all(one <= other + 2 for one, other in zip(now[pid], was[pid], strict=True)), (
                was[pid],
                now[pid],
            )
            assert own_bytes(pid) <= memory[pid] + (16 << 20)


def large_enough(item: int) -> Any:
    return np.full((2000,), item)
