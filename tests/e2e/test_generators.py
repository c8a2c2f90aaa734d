"""Generators that run as copies in workers: their files, random streams and shares. No item is
lost.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import (
    Place,
    assert_same,
    copied,
    indices_in,
    kill_supervisor,
    kill_worker,
    read,
)

SHARDS = [range(100 * shard, 100 * shard + 3 + 2 * shard) for shard in range(11)]


def of_shard(shard: range, rng: np.random.Generator) -> Iterator[Any]:
    for number in shard:
        yield number, rng.random(2)


def with_globals(shard: range) -> Iterator[Any]:
    for number in shard:
        yield number, random.random(), np.random.normal()


def nothing() -> list[int]:
    return []


def of_varied_length(shard: range) -> Iterator[Any]:
    for number in shard:
        yield number, np.arange(number % 5)


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "own streams": (of_shard, {}),
    "globals": (with_globals, {}),
    "globals of few": (with_globals, {"seed_globals": True}),
    "padded": (of_varied_length, {"pad": True}),
    "ragged": (of_varied_length, {"ragged": True}),
    "elements": (of_shard, {"batch_size": None}),
    "shuffled": (of_shard, {"shuffle": True}),
    "in a window": (with_globals, {"shuffle": 7}),
    "all open": (of_shard, {"cycle_length": 100}),
    "one open": (of_shard, {"cycle_length": 1}),
    "dropping": (of_shard, {"drop_remainder": True}),
    "a process's share": (of_shard, {"shard": lp.Shard(3, 1)}),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_with_shards_the_bits_are_the_same_for_any_number_of_workers(
    on: Place, way: str, workers: int
) -> None:
    make, settings = WAYS[way]
    settings = {"shards": SHARDS, "cycle_length": 4, "batch_size": 4, "seed": 3, **settings}
    with lp.Loader.from_generator(make, workers=0, **settings) as loader:
        expected = read(loader, passes=2)
    with lp.Loader.from_generator(make, **on(workers), **settings) as loader:
        assert_same(read(loader, passes=2), expected)


def test_shards_come_in_another_order_each_epoch_only_if_asked(on: Place) -> None:
    settings: dict[str, Any] = {"shards": SHARDS, "cycle_length": 2, "batch_size": 4, **on(2)}
    with lp.Loader.from_generator(of_shard, **settings) as loader:
        first, second = read(loader), read(loader)
        assert indices_in(first) == indices_in(second)
        assert not np.array_equal(
            first[0][1], second[0][1]
        )  # each epoch has its own random streams
    with lp.Loader.from_generator(of_shard, shuffle=True, **settings) as loader:
        first, second = read(loader), read(loader)
        assert indices_in(first) != indices_in(second)
        assert sorted(indices_in(first)) == sorted(indices_in(second))


def test_processes_of_a_training_share_the_shards() -> None:
    seen = []
    for shard in range(3):
        with lp.Loader.from_generator(
            of_shard, workers=0, shards=SHARDS, shard=lp.Shard(3, shard), shuffle=True, batch_size=4
        ) as loader:
            seen += indices_in(read(loader))
    assert sorted(seen) == [number for shard in SHARDS for number in shard]


def test_copies_are_told_which_they_are(on: Place) -> None:
    def tell(worker: lp.WorkerInfo) -> Iterator[Any]:
        assert worker.shard is None
        for _ in range(3):
            yield worker.index, worker.count, worker.epoch, worker.seed & 0xFFFF

    loader = lp.Loader.from_generator(tell, batch_size=2, shard=lp.Shard(2, 1), **on(2))
    with loader:
        epochs = [read(loader), read(loader)]
    assert {int(n) for batch in epochs[0] for n in batch[0]} == {2, 3}
    assert {int(n) for batch in epochs[0] for n in batch[1]} == {4}
    assert [{int(n) for batch in batches for n in batch[2]} for batches in epochs] == [{0}, {1}]
    assert len({int(n) for batches in epochs for batch in batches for n in batch[3]}) == 4


def test_generators_of_shards_are_told_which_they_are(on: Place) -> None:
    def tell(shard: str | None, worker: lp.WorkerInfo, rng: np.random.Generator) -> Iterator[Any]:
        assert worker.shard == shard
        yield worker.index, worker.count, rng.random() < 1

    with lp.Loader.from_generator(tell, shards=["a", "b", None], batch_size=1, **on(2)) as loader:
        assert [(int(index[0]), int(count[0])) for index, count, _ in read(loader)] == [
            (0, 3),
            (1, 3),
            (2, 3),
        ]


def counting() -> Iterator[int]:
    yield from range(10)


def its_part(worker: lp.WorkerInfo) -> Iterator[int]:
    yield from range(worker.index, 10, worker.count)


class Parts:
    def __call__(self, worker: lp.WorkerInfo | None = None) -> Iterator[int]:
        assert worker is not None
        return its_part(worker)


def drawing(rng: np.random.Generator) -> Iterator[int]:
    yield from rng.permutation(10)


def test_a_generator_that_cannot_tell_its_copies_apart_runs_once(on: Place) -> None:
    for where in ({}, on(2), {"workers": 1}, {"workers": 0}):
        with lp.Loader.from_generator(counting, batch_size=4, **where) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            workers: Any = where.get("workers", 1)
            assert loader.workers == (workers.workers if isinstance(workers, lp.Pool) else workers)


@pytest.mark.parametrize("settings", [{"workers": 2}, {"workers": 0, "shard": lp.Shard(2, 0)}])
def test_copies_that_would_all_yield_the_same_are_refused(settings: dict[str, Any]) -> None:
    for make in (counting, lambda: counting(), itertools.count):
        with pytest.raises(
            lp.ArgumentError, match="2 replicas would yield the same items"
        ) as raised:
            lp.Loader.from_generator(make, **settings)
        for way_out in ("shards=", "parameter worker", "workers=", "copies="):
            assert way_out in str(raised.value)


@pytest.mark.parametrize("make", [its_part, drawing, Parts(), lambda worker: its_part(worker)])
def test_copies_that_differ_are_as_many_as_workers(on: Place, make: Any) -> None:
    for where in (on(2), {"workers": 2}):
        with lp.Loader.from_generator(make, batch_size=5, **where) as loader:
            batches = read(loader)
    whole = list(range(10)) * (2 if make is drawing else 1)
    assert sorted(indices_in(batches)) == sorted(whole)


def test_copies_that_are_meant(on: Place) -> None:
    for where in (on(2), {"workers": 0}):
        with lp.Loader.from_generator(counting, copies=3, batch_size=5, **where) as loader:
            assert [int(batch[0]) for batch in loader] == [0, 0, 0, 5, 5, 5]
            with loader.replace(batch_size=10) as other:
                assert [len(batch) for batch in other] == [10, 10, 10]
    with lp.Loader.from_generator(its_part, copies=1, batch_size=10, **on(2)) as loader:
        assert indices_in(read(loader)) == list(range(10))


def test_a_slow_copy_holds_up_the_others_only_in_order(on: Place) -> None:
    def make(worker: lp.WorkerInfo) -> Iterator[int]:
        for number in range(40):
            if worker.index == 0:
                time.sleep(0.02)
            yield 1000 * worker.index + number

    with lp.Loader.from_generator(make, batch_size=4, **on(2)) as loader:
        assert [int(batch[0]) // 1000 for batch in read(loader)] == [0, 1] * 10
    with lp.Loader.from_generator(make, batch_size=4, deterministic=False, **on(2)) as loader:
        order = [int(batch[0]) // 1000 for batch in read(loader)]
    assert sorted(order) == [0] * 10 + [1] * 10
    assert order.index(1) < order.index(0) + 2
    assert order[-1] == 0
    assert order != [0, 1] * 10


def test_deaths_in_mid_pass_change_no_bit() -> None:
    def slow(shard: range) -> Iterator[Any]:
        for number in shard:
            time.sleep(0.002)
            yield number, np.random.rand()

    shards = [range(a * 100, a * 100 + 30 + a * 7) for a in range(9)]
    settings: dict[str, Any] = {"shards": shards, "cycle_length": 4, "batch_size": 4}
    with lp.Loader.from_generator(slow, workers=0, **settings) as loader:
        expected = read(loader)
    with lp.Loader.from_generator(
        slow, workers=3, limits=lp.Limits(restarts=None), **settings
    ) as loader:
        got = []
        for number, batch in enumerate(loader):
            got.append(copied(batch))
            if number % 20 == 7:
                kill_worker(loader)
            if number in (20, 70):
                kill_supervisor(loader)
            if number in (40, 60):
                loader.resize({40: 1, 60: 4}[number])
        told = loader.statistics()
        assert told.supervisor_restarts == 2
        assert told.restarts >= 3
    assert_same(got, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_generator_comes_in_its_turn(on: Place, workers: int) -> None:
    def make(worker: lp.WorkerInfo) -> Iterator[int]:
        yield from range(9)
        if worker.index == worker.count - 1:
            raise LookupError("no such scene")

    got = []
    with lp.Loader.from_generator(make, batch_size=4, **on(workers)) as loader:
        with pytest.raises(LookupError, match="no such scene") as raised:
            for batch in loader:
                got.append(batch.tolist())
        assert isinstance(raised.value, lp.SampleError)
        copies = max(workers, 1)
        assert got == [[0, 1, 2, 3]] * copies + [[4, 5, 6, 7]] * copies + [[8]] * (copies - 1)


def test_generators_that_are_dropped_are_closed(tmp_path: Path) -> None:
    def make(worker: lp.WorkerInfo) -> Iterator[int]:
        begun = tmp_path / f"begun-{worker.epoch}-{worker.index}"
        begun.touch()
        try:
            yield from itertools.count()
        finally:
            begun.rename(tmp_path / f"{worker.epoch}-{worker.index}")

    with lp.Loader.from_generator(make, batch_size=4, workers=2) as loader:
        for _ in range(2):
            for _batch in itertools.islice(loader, 5):
                pass
        next(iter(loader))
        for _ in range(100):
            if len(list(tmp_path.glob("[01]-*"))) == 4:
                break
            time.sleep(0.05)
        last = iter(loader)
        next(last)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (
        names[:5] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
        and "3-0" in names
        and not list(tmp_path.glob("begun-*"))
    )


def test_a_generator_may_close_its_own_loader() -> None:
    def make() -> Iterator[int]:
        yield from range(4)
        loader.close()
        yield from range(4, 8)

    loader = lp.Loader.from_generator(make, batch_size=4, workers=0)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    assert next(batches).tolist() == [4, 5, 6, 7]
    with pytest.raises(lp.ClosedError):
        next(batches)


def test_mistakes_are_named() -> None:
    make: Any
    for make, settings, error, match in [
        (nothing(), {}, lp.ArgumentError, "must be a function that returns a generator, got list$"),
        ((n for n in ()), {}, lp.ArgumentError, "got generator: pass the generator function"),
        (of_shard, {}, lp.ArgumentError, r"must be callable as make_generator\(\)"),
        (
            nothing,
            {"shards": [1]},
            lp.ArgumentError,
            r"must be callable as make_generator\(shard\)",
        ),
        (of_shard, {"shards": range(1 << 23)}, lp.ArgumentError, "shards has 8,388,608 elements"),
        *(
            (of_shard, {"shards": each}, lp.ArgumentError, "shards must be a sequence")
            for each in ([], 3, {"a", "b"})
        ),
        (
            of_shard,
            {"shards": [1], "shard": lp.Shard(2, 0)},
            lp.ArgumentError,
            "each of num_shards=2 processes, got 1",
        ),
        (
            of_shard,
            {"shards": [1], "cycle_length": 0},
            lp.ArgumentError,
            "cycle_length must be at least 1",
        ),
        (nothing, {"cycle_length": 2}, lp.ArgumentError, "cycle_length needs shards"),
        (nothing, {"shuffle": True}, lp.ArgumentError, "has no shards. Pass shards="),
        (nothing, {"on_error": ("skip", 0.5)}, lp.ArgumentError, "must be an integer"),
        (nothing, {"copies": 0}, lp.ArgumentError, "copies must be at least 1"),
        (
            of_shard,
            {"copies": 2, "shards": [1]},
            lp.ArgumentError,
            "copies and shards cannot be combined",
        ),
    ]:
        with pytest.raises(error, match=match):
            lp.Loader.from_generator(make, workers=0, **settings)
    with (
        lp.Loader.from_generator(lambda: 5, workers=0) as loader,
        pytest.raises(lp.SampleError, match="got int"),
    ):
        next(iter(loader))
    for workers in (0, 1):
        loader = lp.Loader.from_generator(nothing, workers=workers)
        with (
            loader,
            pytest.raises(
                lp.SourceError, match=r"^source is empty: the stream ended before its first item$"
            ),
        ):
            next(iter(loader))
    with (
        lp.Loader.from_generator(itertools.count, workers=0) as loader,
        pytest.raises(TypeError, match="unknown"),
    ):
        len(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lengths", [None, 5])
def test_short_batches_of_small_shards_are_told_once(workers: int, lengths: int | None) -> None:
    given: dict[str, Any] = {"shards": [range(n, n + 5) for n in range(20)], "workers": workers}
    with lp.Loader.from_generator(iter, batch_size=32, shard_lengths=lengths, **given) as loader:
        with pytest.warns(lp.LoaderpoolWarning, match=r"16 of 16 .*batch_size=32.*cycle_length=2"):
            assert sum(map(len, loader)) == 100
        assert sum(map(len, loader)) == 100
        assert "16 of 16 batches had fewer rows than batch_size=32" in loader.explain().why


@pytest.mark.parametrize(
    "settings",
    [
        {"cycle_length": 2},
        {"drop_remainder": True, "batch_size": 5},
        {"batch_size": 5},
        {"on_error": "skip"},
        {"batch_fn": np.array},
    ],
)
def test_batches_short_for_another_reason_are_no_warning(settings: dict[str, Any]) -> None:
    shards = [range(n, n + 5) for n in range(20)]
    given = {"batch_size": 32, "workers": 0, **settings}
    with lp.Loader.from_generator(iter, shards=shards, **given) as loader:
        assert sum(map(len, loader)) == 100


def test_random_and_numpy_draw_different_numbers_in_a_generator() -> None:
    def draw(shard: int) -> Iterator[Any]:
        for _ in range(4):
            yield random.random(), np.random.random()

    with lp.Loader.from_generator(draw, shards=[0, 1], batch_size=4, workers=0) as loader:
        numbers = np.concatenate([column for batch in loader for column in batch])
    assert len(np.unique(numbers)) == 16
