"""Generators, streams and caches on a Ray cluster: the same bits as on one machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read, read_while
from tests.support.processes import command_of, descendants, parents, strike
from tests.support.ray_cluster import RayCluster, impatient_pool

Make = Callable[..., lp.Loader]


def prepare(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.002)
    return {"item": np.full((8,), item, np.float32), "noise": rng.random(3)}


def records(shard: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yield as many items as the shard states, with random parts of both kinds."""
    for number in range(40 + 3 * shard):
        time.sleep(0.001)
        yield np.array([shard, number, rng.integers(1 << 30), random.getrandbits(30)])


class Numbers:
    """A stream that can be read again."""

    def __iter__(self) -> Iterator[int]:
        yield from range(301)


class Arrays:
    """A stream of large items, which are sent beside the pickle, and of a class that the script
    defines.
    """

    def __iter__(self) -> Iterator[Any]:
        for number in range(40):
            yield np.full((50_000,), number, np.int32)


def of_shards(workers: int | lp.Pool, **settings: Any) -> lp.Loader:
    return lp.Loader.from_generator(
        records, shards=list(range(7)), batch_size=5, seed=3, workers=workers, cycle_length=5,
        **settings,
    )  # fmt: skip


def of_copies(workers: int | lp.Pool) -> lp.Loader:
    def copy(worker: lp.WorkerInfo, rng: np.random.Generator) -> Iterator[int]:
        for _ in range(30):
            yield worker.index * 1000 + int(rng.integers(1000))

    return lp.Loader.from_generator(
        copy, fn=prepare, copies=3, batch_size=4, seed=3, shuffle=8, workers=workers
    )


def of_stream(workers: int | lp.Pool) -> lp.Loader:
    return lp.Loader(Numbers(), prepare, batch_size=4, seed=3, shuffle=16, workers=workers)


def of_arrays(workers: int | lp.Pool) -> lp.Loader:
    def change(item: Any, rng: np.random.Generator) -> Any:
        item += rng.integers(1000, dtype=np.int32)  # the function may change its items
        return item

    return lp.Loader(Arrays(), change, batch_size=3, seed=3, workers=workers)


SOURCES = {"shards": of_shards, "copies": of_copies, "stream": of_stream, "arrays": of_arrays}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_sources_without_an_index_give_the_same_bits(cluster: RayCluster, make: Make) -> None:
    with make(0) as here, lp.RayPool(cluster.address) as pool, make(pool) as there:
        for _ in range(2):
            assert_same(read(there), read(here))


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_saved_place_is_one_on_the_cluster_too(cluster: RayCluster, make: Make) -> None:
    with make(0) as here:
        expected = read(here, passes=2)
    with lp.RayPool(cluster.address) as pool, make(pool) as there:
        batches = iter(there)
        got = [part for _ in range(6) for part in read([next(batches)])]
        state = there.state_dict()
        del batches
    with make(2) as local:
        local.load_state_dict(state)
        batches = iter(local)
        got += [part for _ in range(4) for part in read([next(batches)])]
        state = local.state_dict()
        del batches
    with lp.RayPool(cluster.address, nodes=2) as pool, make(pool) as there:
        there.load_state_dict(state)
        assert_same(got + read(there) + read(there), expected)


def test_an_iterator_is_read_once_and_here(cluster: RayCluster) -> None:
    pid = os.getpid()

    def items() -> Iterator[int]:
        for number in range(50):
            assert os.getpid() == pid
            yield number

    with (
        lp.Loader(items(), prepare, batch_size=4, seed=3) as here,
        lp.RayPool(cluster.address) as pool,
        lp.Loader(items(), prepare, batch_size=4, seed=3, workers=pool) as there,
    ):
        assert_same(read(there), read(here))
        with pytest.raises(lp.SourceError, match="only once"):
            next(iter(there))


def test_lanes_that_need_not_wait_for_each_other(cluster: RayCluster) -> None:
    with (
        of_shards(0) as here,
        lp.RayPool(cluster.address) as pool,
        of_shards(pool, deterministic=False) as there,
    ):
        expected, got = ({batch.tobytes() for batch in loader} for loader in (here, there))
        assert got == expected


def victims(cluster: RayCluster, what: str) -> list[int]:
    actors = cluster.actors()
    if what == "a node":
        return actors
    if what == "the dispatcher":
        mine = descendants(os.getpid())
        return [pid for pid in mine if "loaderpool-dispatcher" in command_of(pid)]
    if what == "the reader":
        return [pid for pid in descendants(os.getpid()) if "loaderpool-reader" in command_of(pid)]
    born_of = parents()
    supervisors = [
        pid for pid, of in born_of.items() if of in actors and "-supervisor" in command_of(pid)
    ]
    if what == "a supervisor":
        return supervisors
    return [pid for pid, parent in born_of.items() if parent in supervisors]


@pytest.mark.parametrize("what", ["a worker", "a supervisor", "a node", "the dispatcher"])
@pytest.mark.parametrize("make", [of_shards, of_stream], ids=["shards", "stream"])
def test_a_death_changes_no_bit(cluster: RayCluster, make: Make, what: str) -> None:
    with make(0) as here:
        expected = read(here, passes=2)

    def kill() -> None:
        strike(lambda: victims(cluster, what))

    with impatient_pool(cluster.address, 5) as pool, make(pool) as there:
        assert_same(read_while(there, {6: kill}) + read(there), expected)


def test_an_error_names_the_shard_and_the_item(cluster: RayCluster) -> None:
    def failing(shard: str) -> Iterator[int]:
        yield from range(7)
        raise OSError(f"no more of {shard}")

    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader.from_generator(failing, shards=["a", "b"], batch_size=3, workers=pool) as loader,
        pytest.raises(lp.SampleError, match=r"no more of a") as caught,
    ):
        list(loader)
    assert "OSError" in str(caught.value)


def test_abandoned_passes_close_their_generators(cluster: RayCluster, tmp_path: Path) -> None:
    def noted(shard: int) -> Iterator[int]:
        (tmp_path / f"{shard}-{os.getpid()}-{time.time_ns()}.open").touch()
        try:
            yield from range(100_000)
        finally:
            (tmp_path / f"{shard}-{os.getpid()}-{time.time_ns()}.closed").touch()

    def count(what: str) -> int:
        return len(list(tmp_path.glob(f"*.{what}")))

    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader.from_generator(noted, shards=[1, 2], batch_size=4, workers=pool) as loader,
    ):
        for _ in range(3):
            batches = iter(loader)
            next(batches)
            del batches
        next(iter(loader))
        until = time.monotonic() + 20
        while count("closed") < 6 and time.monotonic() < until:
            time.sleep(0.1)
        assert count("closed") >= 6, (count("open"), count("closed"))


def slow(item: int) -> Any:
    """Called once for each item of a cache."""
    time.sleep(0.002)
    return np.full((100,), item, np.int64)


def augment(sample: Any, rng: np.random.Generator) -> Any:
    return sample + rng.integers(1000)


@pytest.mark.parametrize("where", ["memory", "a directory"])
def test_a_cache_gives_the_same_bits_and_spares_calls(
    cluster: RayCluster, tmp_path: Path, where: str
) -> None:
    def cached(workers: int | lp.Pool, place: Path) -> lp.Loader:
        return lp.Loader(
            range(200), slow, augment=augment, batch_size=5, shuffle=True, seed=3,
            workers=workers, cache="memory" if where == "memory" else place,
        )  # fmt: skip

    with (
        cached(0, tmp_path / "here") as here,
        lp.RayPool(cluster.address) as pool,
        cached(pool, tmp_path / "there") as there,
    ):
        for _ in range(3):
            assert_same(read(there), read(here))
        until = time.monotonic() + 20  # the counts come with the nodes' heartbeats
        told = there.statistics().cache
        while told.hits + told.misses < 600 and time.monotonic() < until:
            time.sleep(0.1)
            told = there.statistics().cache
        assert told.hits + told.misses >= 600
        # Each node has its own cache in memory; all nodes of one machine share a directory.
        assert told.misses <= 3 * 200 + 10
        assert told.hits > 0 and told.bytes > 0


def test_a_cache_outlives_nodes(cluster: RayCluster) -> None:
    def cached(workers: int | lp.Pool) -> lp.Loader:
        return lp.Loader(
            range(200), slow, batch_size=5, shuffle=True, seed=3, workers=workers, cache="memory"
        )

    with cached(0) as here:
        expected = read(here, passes=2)

    def kill() -> None:
        with contextlib.suppress(IndexError):
            strike(cluster.actors, signal.SIGKILL)

    with impatient_pool(cluster.address, 5) as pool, cached(pool) as there:
        assert_same(read_while(there, {10: kill}) + read(there), expected)
