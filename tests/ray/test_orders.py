"""Drawn orders on a Ray cluster: the same bits as on one machine, even if nodes die."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read, read_while
from tests.support.processes import command_of, descendants, strike
from tests.support.ray_cluster import RayCluster, impatient_pool
from tests.support.samples import noisy_image

ITEMS = 300


def permuted(epoch: int) -> Any:
    return np.random.permutation(ITEMS)[: 250 + 10 * epoch]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "function": lambda: {"order": permuted, "batch_size": 6},
    "weights": lambda: {"order": lp.Weighted(np.arange(ITEMS)), "batch_size": 6},
    "batches": lambda: {"order": [[*range(n, n + 1 + n % 9)] for n in range(0, 270, 5)]},
}


def loader_of(kind: str, workers: int | lp.Pool, **settings: Any) -> lp.Loader:
    return lp.Loader(range(ITEMS), noisy_image, workers=workers, **KINDS[kind](), **settings)


@pytest.mark.parametrize(
    ("kind", "what"), [("function", "node"), ("weights", "dispatcher"), ("batches", "node")]
)
def test_a_death_changes_no_bit(cluster: RayCluster, kind: str, what: str) -> None:
    with loader_of(kind, 0) as here:
        expected = read(here, passes=3)

    def kill() -> None:
        strike(cluster.actors if what == "node" else lambda: processes("dispatcher"))

    with impatient_pool(cluster.address, 5) as pool, loader_of(kind, pool) as there:
        got = read_while(there, {10: kill})
        iterator = iter(there)
        got += read(itertools.islice(iterator, 7))
        state = there.state_dict()
        rest = read(iterator)
        assert_same(got + rest + read(there), expected)
        there.load_state_dict(state)
        assert_same(read(there), rest)
    with loader_of(kind, 1) as here:
        here.load_state_dict(state)
        assert_same(read(here), rest)


def processes(name: str) -> list[int]:
    command = f"loaderpool-{name}"
    return [pid for pid in descendants(os.getpid()) if command in command_of(pid)]


def arena_bytes(actor: int) -> int:
    files = [file for file in Path(f"/proc/{actor}/fd").iterdir() if file.exists()]
    (size,) = {
        file.stat().st_blocks * 512 for file in files if "loaderpool-arena" in os.readlink(file)
    }
    return size


def test_orders_leave_the_nodes_when_their_passes_are_over(cluster: RayCluster) -> None:
    items = 1 << 17  # an order of 1 MiB

    def order(epoch: int) -> Any:
        return np.random.permutation(items)

    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(range(items), batch_size=64, order=order, workers=pool) as loader,
    ):
        held = []
        for _ in range(3):
            for _ in range(12):
                next(iter(loader))
            held.append(max(map(arena_bytes, cluster.actors())))
        assert held[2] <= held[0] + (4 << 20), held


LENGTHS = [1 + item * item % 17 for item in range(ITEMS)]


def tokens(item: int, rng: np.random.Generator) -> Any:
    return {"item": np.full(LENGTHS[item], item), "noise": rng.normal(size=(LENGTHS[item], 2))}


def patches(item: int, rng: np.random.Generator) -> Any:
    return [(4 * item + patch, rng.normal(size=3)) for patch in range(4)]


OF_OTHER_ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "packed": lambda: {"fn": tokens, "order": lp.Packed(LENGTHS, 40), "batch_size": 3},
    "token budget": lambda: {"fn": tokens, "order": lp.TokenBudget(LENGTHS, 60), "pad": True},
    "samples": lambda: {"fn": patches, "samples_per_item": 4, "shuffle": True, "batch_size": 6},
}


@pytest.mark.parametrize("kind", OF_OTHER_ROWS)
def test_rows_that_are_not_items_have_the_same_bits(cluster: RayCluster, kind: str) -> None:
    settings = OF_OTHER_ROWS[kind]
    with lp.Loader(range(ITEMS), workers=0, **settings()) as here:
        expected, size = read(here, passes=2), len(here)

    def kill() -> None:
        strike(cluster.actors)

    with (
        impatient_pool(cluster.address, 5) as pool,
        lp.Loader(range(ITEMS), workers=pool, **settings()) as there,
    ):
        got = read_while(there, {5: kill})
        first = len(got)
        iterator = iter(there)
        got += read(itertools.islice(iterator, 4))
        state = there.state_dict()
        iterator.close()
        assert_same(got, expected[: first + 4])
        there.load_state_dict(state)
        there.skip_batches(3)
        assert_same(read(there), expected[first + 7 :])
    assert first == size
    with lp.Loader(range(ITEMS), workers=1, **settings()) as here:
        here.load_state_dict(state)
        assert_same(read(here), expected[first + 4 :])


def test_left_out_batches_and_indices(cluster: RayCluster) -> None:
    settings = {"batch_indices": True, "pad": True}
    with loader_of("weights", 0, **settings) as here:
        expected = read(here)
    with lp.RayPool(cluster.address) as pool, loader_of("weights", pool, **settings) as there:
        there.skip_batches(range(3, 9))
        assert_same(read(there), expected[:3] + expected[9:])
