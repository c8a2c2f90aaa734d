"""A mix in a loader: in each source, an epoch continues where the epoch before stopped."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, calls_of, read
from tests.support.samples import fail_at

COMMON, RARE = np.arange(70), np.arange(70, 80)
STOPS: list[Any] = ["first", 33]


def mixed(stop: Any = "first") -> Any:
    return lp.mix([COMMON, RARE], weights=[1, 1], stop=stop, seed=1)


def rows_of(loader: lp.Loader, epochs: int) -> list[list[int]]:
    """Return the rows of some epochs, one list for each."""
    return [[int(row) for batch in loader for row in batch] for _ in range(epochs)]


def is_int(row: Any) -> Any:
    return np.array([row, type(row) is int])


def double(row: Any) -> Any:
    return 2 * row


def noisy(row: Any, rng: Any) -> Any:
    return row + rng.random()


def twice(row: Any, rng: Any) -> Any:
    return [row + rng.random(), row + rng.random()]


def pickled_unless(row: int) -> Any:
    return lambda each: each if each != row else (x for x in "a")


# ---- rows of epochs ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", STOPS)
def test_every_row_of_a_mix_is_read_in_time(on: Place, stop: Any, workers: int) -> None:
    with lp.Loader(mixed(stop), batch_size=8, shuffle=True, **on(workers)) as loader:
        epochs = rows_of(loader, 7)
    assert Counter(map(len, epochs)) == {len(mixed(stop)): 7}
    assert {row for rows in epochs for row in rows} == set(range(80))


def test_the_first_epoch_is_the_mix_as_a_sequence() -> None:
    with lp.Loader(mixed(), batch_size=8, workers=0) as loader:
        assert rows_of(loader, 1) == [list(mixed())]


def test_with_first_no_row_comes_twice_in_an_epoch() -> None:
    with lp.Loader(mixed(), batch_size=8, workers=0) as loader:
        for rows in rows_of(loader, 9):
            assert len(set(rows)) == len(rows) == len(mixed())


def test_a_mix_by_size_is_the_same_in_each_epoch() -> None:
    with lp.Loader(lp.mix([COMMON, RARE]), batch_size=8, workers=0) as loader:
        first, second = rows_of(loader, 2)
    assert first == second


# ---- processes that make batches ----


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_a_fork_makes_blocks_for_all() -> None:
    order, indices = lp.mix([range(10_000), range(30_000)]).order, np.arange(40_000)
    expected = lp.mix([range(10_000), range(30_000)]).order.records(0, indices)
    child = os.fork()
    if not child:
        order.records(0, indices)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found: list[int] = []
    assert calls_of(lambda: found.extend(order.records(0, indices).tolist())) < 60
    assert found == expected.tolist()


def test_the_first_shuffled_batch_waits_for_its_own_blocks() -> None:
    source = lp.mix([range(10**6), range(10**6)])
    with lp.Loader(source, batch_size=8, shuffle=True, workers=0) as loader:
        batches = iter(loader)
        assert calls_of(lambda: next(batches)) < 4000


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_items_of_ranges_are_integers(on: Place, size: int, workers: int) -> None:
    for parts in ([range(500), range(500, 900)], [range(500), range(0, 800, 2)]):
        items = list(lp.mix(parts))
        source = lp.mix(parts)
        settings: dict[str, Any] = {"batch_size": size, "drop_remainder": True, **on(workers)}
        with lp.Loader(source, is_int, **settings) as loader:
            rows = [row for batch in loader for row in batch.tolist()]
        assert rows == [[item, 1] for item in items][: len(rows)]


WAYS: dict[str, dict[str, Any]] = {
    "samples": {},
    "shuffled": {"shuffle": True},
    "whole batches": {"fn": None, "batch_fn": np.array},
    "elements": {"batch_size": None},
    "threads": {"threads": 3},
    "a shard": {"shard": lp.Shard(2, 1)},
    "several samples": {"fn": twice, "samples_per_item": 2, "shuffle": True},
    "random samples": {"fn": noisy},
    "an order": {"fn": noisy, "order": lp.Weighted(range(33))},
    "blocks": {"fn": noisy, "order": lp.Blocks(rows=4)},
    "indices": {"batch_indices": True, "shuffle": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_later_epochs_are_the_same_for_any_number_of_workers(on: Place, way: str) -> None:
    settings = {"fn": double, "batch_size": 4, "seed": 3, **WAYS[way]}
    source = mixed(33)
    if way == "random samples":  # a record comes several times in an epoch
        source = lp.mix([COMMON[:7], RARE], weights=[5, 1], stop="all")
    with lp.Loader(source, workers=0, **settings) as loader:
        expected = read(loader, passes=3)
    with lp.Loader(source, **on(2), **settings) as loader:
        assert_same(read(loader, passes=3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_has_the_rows_that_were_left(on: Place, workers: int) -> None:
    with lp.Loader(mixed(33), batch_size=4, workers=0) as loader:
        expected = rows_of(loader, 3)[2]
        loader.epoch = 2
        batches = iter(loader)
        taken = [int(row) for batch in itertools.islice(batches, 3) for row in batch]
        state = batches.state_dict()
    with lp.Loader(mixed(33), batch_size=4, **on(workers)) as loader:
        loader.load_state_dict(state)
        assert taken + rows_of(loader, 1)[0] == expected


def test_an_epoch_that_is_set_has_its_own_rows() -> None:
    with lp.Loader(mixed(33), batch_size=4, workers=0) as loader:
        first, second = rows_of(loader, 2)
        loader.epoch = 1
        assert rows_of(loader, 1) == [second]
        loader.epoch = 0
        assert rows_of(loader, 1) == [first]


def test_replay_makes_the_sample_of_that_epoch() -> None:
    with lp.Loader(mixed(33), double, batch_size=4, workers=0) as loader:
        epochs = rows_of(loader, 3)
        for epoch, rows in enumerate(epochs):
            for index in (0, 17, 32):
                assert lp.replay(loader, index, epoch) == rows[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_errors_index_and_epoch_lead_to_the_record(on: Place, workers: int) -> None:

    source = mixed(33)
    loader = lp.Loader(source, fail_at({50}), batch_size=4, **on(workers))
    with loader, pytest.raises(lp.SampleError, match="bad") as caught:
        rows_of(loader, 9)
    assert caught.value.epoch == 3
    assert source.origin(caught.value.index, caught.value.epoch) == (0, 50)


def test_indices_lead_to_the_records_of_their_epoch() -> None:
    source, settings = mixed(33), {"batch_size": 4, "shuffle": True, "batch_indices": True}
    with lp.Loader(source, workers=0, **settings) as loader:
        for epoch in range(3):
            for number, (indices, rows) in enumerate(loader):
                assert indices.tolist() == loader.indices(epoch, number).tolist()
                records = [source.origin(index, epoch) for index in indices.tolist()]
                assert rows.tolist() == [70 * part + record for part, record in records]


def test_a_cache_names_the_index_of_an_item(on: Place) -> None:
    source = mixed(33)
    loader = lp.Loader(source, pickled_unless(50), batch_size=4, cache="memory", **on(1))
    with loader, pytest.raises(lp.CacheError) as caught:
        rows_of(loader, 9)
    assert caught.value.index is not None and caught.value.epoch is not None
    assert source.origin(caught.value.index, caught.value.epoch) == (0, 50)
    assert f"fn for source index {caught.value.index}, a generator" in str(caught.value)


# ---- mixes of other sources, and other settings ----


def test_a_mix_of_mixes_reads_every_row() -> None:
    outer = lp.mix([mixed(), range(80, 90)], weights=[1, 1], stop=14, seed=2)
    with lp.Loader(outer, batch_size=8, workers=0) as loader:
        assert {row for rows in rows_of(loader, 40) for row in rows} == set(range(90))


def test_a_zip_has_item_i_of_a_mix_in_each_epoch(on: Place) -> None:
    source = lp.zip_sources(mixed(33), [int(row) for row in mixed(33)])
    with lp.Loader(source, batch_size=4, **on(1)) as loader:
        for rows, same in read(loader, passes=3):
            assert rows.tolist() == same.tolist()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_cache_has_an_entry_for_each_record(where: str, tmp_path: Path) -> None:
    calls = []

    def fn(row: int) -> int:
        calls.append(int(row))
        return 2 * row

    place = "memory" if where == "memory" else tmp_path / "cache"
    with lp.Loader(mixed(33), fn, batch_size=4, workers=0) as loader:
        expected = rows_of(loader, 7)
    calls.clear()
    with lp.Loader(mixed(33), fn, batch_size=4, workers=0, cache=place) as loader:
        assert rows_of(loader, 7) == expected
    assert sorted(calls) == list(range(80))


def test_a_cache_fits_other_weights_of_its_sources(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"fn": double, "batch_size": 4, "workers": 0}
    with lp.Loader(mixed(160), cache=tmp_path, **settings) as loader:
        rows_of(loader, 1)  # all 80 records
    for stop, seed in (("first", 5), ("all", 6)):
        source = lp.mix([COMMON, RARE], weights=[1, 3], stop=stop, seed=seed)
        with lp.Loader(source, **settings) as loader:
            expected = rows_of(loader, 2)
        with lp.Loader(source, cache=tmp_path, **settings) as loader:
            assert rows_of(loader, 2) == expected
            assert loader.statistics().cache.misses == 0


def test_a_cache_of_other_sources_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"fn": double, "cache": tmp_path, "workers": 0}
    lp.Loader(mixed(), **settings).close()
    with pytest.raises(lp.CacheError, match="another function or source: source"):
        lp.Loader(lp.mix([COMMON, RARE + 1], weights=[1, 1], seed=1), **settings)


def test_a_cached_mix_has_the_same_batches_in_workers(on: Place) -> None:
    with lp.Loader(mixed(33), double, batch_size=4, workers=0) as loader:
        expected = rows_of(loader, 7)
    with lp.Loader(mixed(33), double, batch_size=4, cache="memory", **on(2)) as loader:
        assert rows_of(loader, 7) == expected


def test_with_buckets_a_mix_has_the_rows_of_its_first_epoch() -> None:
    source = mixed(33)
    buckets = lp.Buckets([int(row) for row in source], [40], [4, 2])
    with lp.Loader(source, workers=0, buckets=buckets, batch_size=4) as loader:
        for rows in rows_of(loader, 2):
            assert sorted(rows) == sorted(source)
