"""A pool serves several loaders, is resized, closed and dropped, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import loaderpool as lp
from tests.support.batches import indices_in
from tests.support.processes import descendants, wait_gone

# Each test has its own pool, so leaks are searched after each test (tests/conftest.py).


def who(index: int) -> Any:
    return index, os.getpid()


def pids_of(loader: lp.Loader) -> set[int]:
    return {worker.pid for worker in loader.statistics().workers}


def wait_for_workers(loader: lp.Loader, count: int) -> set[int]:
    """Wait until the pool has this number of workers. The test's timeout ends the wait."""
    while len(pids_of(loader)) != count:
        time.sleep(0.01)
    return pids_of(loader)


# ---- several loaders on one pool ----


def test_loaders_on_one_pool_share_its_workers() -> None:
    with lp.Pool(2) as pool:
        train = lp.Loader(range(100), who, batch_size=5, shuffle=True, workers=pool)
        valid = lp.Loader(range(1000, 1040), who, batch_size=5, workers=pool)
        pids: list[set[int]] = []
        for _ in range(3):
            assert sorted(indices_in(batch[0] for batch in train)) == list(range(100))
            assert indices_in(batch[0] for batch in valid) == list(range(1000, 1040))
            pids.append(
                {pid for loader in (train, valid) for batch in loader for pid in batch[1].tolist()}
            )
        assert train.workers == valid.workers == pool.workers == 2
        assert len(set.union(*pids)) <= 2
        assert os.getpid() not in pids[0]


def test_a_closed_loader_leaves_the_pool_to_the_others() -> None:
    with lp.Pool(2) as pool:
        closed = lp.Loader(range(1000), batch_size=2, workers=pool)
        stays = lp.Loader(range(40), batch_size=4, workers=pool)
        begun = iter(closed)
        next(begun)
        closed.close()
        closed.close()
        with pytest.raises(lp.ClosedError):
            iter(closed)
        assert indices_in(stays) == list(range(40))


# ---- resizing ----


def test_resizing_changes_who_works_and_not_what_is_made() -> None:
    with lp.Loader(range(400), who, batch_size=4, workers=3) as loader:
        loader.resize(1)  # before there is a worker
        batches = iter(loader)
        numbers = indices_in(next(batches)[0] for _ in range(5))
        assert len(wait_for_workers(loader, 1)) == 1
        for workers in (4, 2):
            loader.resize(workers)
            pids = wait_for_workers(loader, workers)
            assert loader.workers == workers
            numbers += indices_in(next(batches)[0] for _ in range(5))
        numbers += indices_in(batch[0] for batch in batches)
        assert numbers == list(range(400))
        loader.epoch = 5  # batches of epoch 1 were already started by more workers
        assert {pid for batch in loader for pid in batch[1].tolist()} <= pids


# ---- ending ----


class ClosedPool(NamedTuple):
    """A pool that was closed twice in the middle of a pass."""

    pool: lp.Pool
    batches: Iterator[Any]
    kept: Any
    processes: set[int]


def closed_pool() -> ClosedPool:
    before = set(descendants(os.getpid()))
    pool = lp.Pool(3)
    batches = iter(lp.Loader(range(1000), batch_size=2, workers=pool))
    kept = next(batches)
    started = set(descendants(os.getpid())) - before
    pool.close()
    pool.close()
    return ClosedPool(pool, batches, kept, started)


def test_closing_a_pool_ends_its_processes() -> None:
    closed = closed_pool()
    assert closed.pool.is_closed
    assert len(closed.processes) >= 2
    assert wait_gone(closed.processes, 10) == []


def test_closing_a_pool_closes_its_loaders() -> None:
    closed = closed_pool()
    with pytest.raises(lp.ClosedError):
        list(closed.batches)


def test_a_closed_pool_refuses_a_loader() -> None:
    closed = closed_pool()
    with pytest.raises(lp.ClosedError):
        lp.Loader(range(3), workers=closed.pool)


def test_batches_outlive_their_pool() -> None:
    closed = closed_pool()
    assert closed.kept.tolist() == [0, 1]


def test_a_loader_keeps_the_pool_that_it_was_given() -> None:
    loader = lp.Loader(range(30), batch_size=4, workers=lp.Pool(2))
    gc.collect()
    assert indices_in(loader) == list(range(30))


def test_an_iterator_keeps_its_loader() -> None:
    batches = iter(lp.Loader(range(30), batch_size=4, workers=2))
    gc.collect()
    assert indices_in(batches) == list(range(30))


def test_a_pool_that_nobody_used_starts_nothing() -> None:
    before = descendants(os.getpid())
    with lp.Pool(2):
        assert descendants(os.getpid()) == before
