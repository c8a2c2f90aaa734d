"""Loaders on a Ray cluster: the same bits as without it, whichever part of the cluster ends
meanwhile.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.docs.pages import ROOT
from tests.support.batches import assert_same, read, read_while, told_when
from tests.support.child import run_child
from tests.support.processes import command_of, descendants, is_alive, parents, strike, wait_gone
from tests.support.ray_cluster import RayCluster, impatient_pool
from tests.support.samples import noisy_image


def with_text(item: int, rng: np.random.Generator) -> Any:
    return {"tokens": rng.integers(0, 99, 1 + item % 7), "name": "é" * (item % 5) + str(item)}


def loader_of(workers: int | lp.Pool, **settings: Any) -> lp.Loader:
    return lp.Loader(
        range(600),
        functools.partial(noisy_image, wait_s=0.002),
        batch_size=6,
        shuffle=True,
        seed=3,
        workers=workers,
        **settings,
    )


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with loader_of(0) as loader:
        return read(loader, passes=2)


def test_the_three_lines_of_the_readme_run(cluster: RayCluster) -> None:
    (block,) = re.findall(
        r"^```python\n([^`]*RayPool[^`]*)```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert (
        run_child(block, env={"RAY_ADDRESS": cluster.address}).check().stdout.split()[-1]
        == "499500.0"
    )


def test_the_same_bits_and_a_saved_place_both_ways(
    cluster: RayCluster, expected: list[Any]
) -> None:
    with lp.RayPool(cluster.address) as pool, loader_of(pool) as loader:
        got = read(loader)
        batches = iter(loader)
        got += [part for _ in range(30) for part in read([next(batches)])]
        state = loader.state_dict()
        del batches
        assert pool.workers == 3
        told = loader.statistics()
        assert len({node.node for node in told.nodes}) == 3 and all(
            len(node.node) == 56 for node in told.nodes
        )
        assert {node.address for node in told.nodes} == {cluster.address.partition(":")[0]}
        assert all(node.workers == 1 and node.batches for node in told.nodes)
    with loader_of(2) as loader:
        loader.load_state_dict(state)
        assert_same(got + read(loader), expected)
    with lp.RayPool(cluster.address, nodes=2) as pool, loader_of(pool) as loader:
        loader.load_state_dict(state)
        assert_same(got + read(loader), expected)


def test_text_and_ragged(cluster: RayCluster) -> None:
    def made(workers: int | lp.Pool) -> lp.Loader:
        return lp.Loader(range(200), with_text, batch_size=8, ragged=True, seed=1, workers=workers)

    with lp.RayPool(cluster.address) as pool, made(pool) as there, made(0) as here:
        assert_same(read(there), read(here))


@pytest.mark.parametrize("what", ["a node", "a node's supervisor", "the dispatcher"])
def test_a_death_changes_no_bit(cluster: RayCluster, expected: list[Any], what: str) -> None:
    def victims() -> list[int]:
        actors = cluster.actors()
        if what == "a node":
            return actors
        of, command = (
            (actors, "supervisor")
            if what == "a node's supervisor"
            else ([os.getpid()], "dispatcher")
        )
        children = [pid for pid, parent in parents().items() if parent in of]
        return [pid for pid in children if f"loaderpool-{command}" in command_of(pid)]

    def kill() -> None:
        strike(victims)

    with impatient_pool(cluster.address, 5) as pool, loader_of(pool) as loader:
        assert_same(read_while(loader, {20: kill}) + read(loader), expected)
        lost = int(what != "the dispatcher"), int(what == "the dispatcher")
        told_when(loader, lambda told: (told.nodes_lost, told.supervisor_restarts) == lost)


def test_a_node_that_is_stopped_is_replaced(cluster: RayCluster, expected: list[Any]) -> None:
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(strike(cluster.actors, signal.SIGSTOP))

    with impatient_pool(cluster.address, 2) as pool, loader_of(pool) as loader:
        assert_same(read_while(loader, {20: stop}) + read(loader), expected)
        until = time.monotonic() + 15  # a node that works is not silent for longer
        while len(there := {*cluster.actors()} - {*stopped}) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(there) == 3
    assert not is_alive(stopped[0]) or not wait_gone(stopped, 10)


def test_nodes_leave_and_join(cluster: RayCluster, expected: list[Any]) -> None:
    with impatient_pool(cluster.address, 5) as pool, loader_of(pool) as loader:
        got = read_while(loader, {20: lambda: cluster.remove(1), 40: cluster.add})
        assert_same(got + read(loader), expected)


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "SIGINT", "exit"])
def test_nothing_is_left_when_the_trainer_ends(cluster: RayCluster, way: str) -> None:
    before = set(cluster.actors())
    script = (
        "import loaderpool as lp, sys, time\n"
        f"pool = lp.RayPool({cluster.address!r})\n"
        "loader = lp.Loader(range(10_000), lambda item: time.sleep(0.01) or item, batch_size=4, workers=pool)\n"
        "batches = iter(loader); next(batches); print('running', flush=True); sys.stdin.readline()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert "running\n" in iter(
            trainer.stdout.readline, ""
        )  # Ray may first print messages about nodes of other tests
        ours = set(cluster.actors()) - before
        mine = [
            *descendants(trainer.pid),
            *ours,
            *(pid for actor in ours for pid in descendants(actor)),
        ]
        assert len(mine) >= 4
        if way == "exit":
            trainer.stdin.close()  # it ends without closing anything
        else:
            trainer.send_signal(getattr(signal, way))
        trainer.wait(20)
        assert not wait_gone(mine, 2)
