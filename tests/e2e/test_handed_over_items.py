"""Items of generators that one worker reads for others: the bits stay the same."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, kill_supervisor, kill_worker, read, read_while
from tests.support.processes import count_fds, descendants

ITEMS = 60


def one_shard(shard: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yield small and large arrays."""
    for number in range(ITEMS):
        yield {"number": number, "large": np.full((20_000,), number), "noise": rng.random(2)}


def slow(item: Any, rng: np.random.Generator) -> Any:
    """Change the item in place."""
    time.sleep(0.002)
    item["large"] += rng.integers(1000)
    item["noise"] += rng.random()
    return item


def loader_of(workers: int, fn: Any = slow, shards: int = 1, **settings: Any) -> lp.Loader:
    settings = {"batch_size": 4, "seed": 5, **settings}
    return lp.Loader.from_generator(
        one_shard, shards=list(range(shards)), fn=fn, workers=workers, **settings
    )


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": 8}, {"batch_size": None}, {"deterministic": False}, {"drop_remainder": True}],
    ids=str,
)
def test_the_bits_are_the_same(shards: int, settings: dict[str, Any]) -> None:
    with (
        loader_of(0, shards=shards, **settings) as here,
        loader_of(3, shards=shards, **settings) as there,
    ):
        for _ in range(2):
            expected, got = read(here), read(there)
            if settings.get("deterministic") is False:
                expected, got = (
                    sorted(each, key=lambda batch: batch["noise"].tolist())
                    for each in (expected, got)
                )
            assert_same(got, expected)


def test_all_workers_call_the_function(tmp_path: Path) -> None:
    def noted(item: Any) -> Any:
        time.sleep(0.004)
        (tmp_path / f"made-{os.getpid()}").touch()
        return item["number"]

    def shard(name: str) -> Iterator[Any]:
        (tmp_path / f"read-{os.getpid()}").touch()
        for number in range(ITEMS):
            yield {"number": number}

    with lp.Loader.from_generator(shard, shards=["a"], fn=noted, batch_size=4, workers=3) as loader:
        numbers = np.concatenate(list(loader)).tolist()
    assert numbers == list(range(ITEMS))
    assert len(list(tmp_path.glob("read-*"))) <= 2  # one of the workers has made the first sample
    assert len(list(tmp_path.glob("made-*"))) == 3


@dataclasses.dataclass
class Record:
    """A class of this module."""

    number: int


def test_items_of_own_classes_and_whole_batches() -> None:
    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    def records(shard: int) -> Iterator[Any]:
        for number in range(ITEMS):
            yield (Record if number % 2 else Local)(number)

    def of_batch(items: list[Any], rng: np.random.Generator) -> Any:
        time.sleep(0.01)
        assert all(type(item) in (Record, Local) for item in items)
        return np.array([item.number for item in items]) + rng.integers(1000)

    def made(workers: int) -> lp.Loader:
        return lp.Loader.from_generator(
            records, shards=[0], batch_fn=of_batch, batch_size=4, workers=workers
        )

    with made(0) as here, made(3) as there:
        assert_same(read(there), read(here))


def test_items_that_cannot_be_pickled_stay_with_their_worker() -> None:
    def locks(shard: int) -> Iterator[Any]:
        for number in range(ITEMS):
            yield number, threading.Lock()

    def locked(item: Any) -> int:
        time.sleep(0.002)
        with item[1]:
            return int(item[0])

    with lp.Loader.from_generator(locks, shards=[0], fn=locked, batch_size=4, workers=3) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(ITEMS))


class Unpickled:
    """An object whose unpickling calls `refuse`."""

    def __init__(self, number: int, refuse: Any) -> None:
        self.number, self.refuse = number, refuse

    def __reduce__(self) -> Any:
        return self.refuse, (self.number, self.refuse, os.getpid())


def refuses(*_: Any) -> Any:
    raise ValueError("cannot be made again")


def refuses_elsewhere(number: int, refuse: Any, pid: int) -> Any:
    if number == 0 or os.getpid() == pid:
        return Unpickled(number, refuse)
    return refuses()


def unpickled(refuse: Any) -> Any:
    def shard(_: int) -> Iterator[Any]:
        for number in range(ITEMS):
            yield Unpickled(number, refuse)

    def numbered(item: Any) -> int:
        time.sleep(0.002)
        return int(item.number)

    return lp.Loader.from_generator(shard, shards=[0], fn=numbered, batch_size=4, workers=3)


def test_items_that_cannot_be_unpickled_stay_with_their_worker() -> None:
    with unpickled(refuses) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(ITEMS))
        assert loader.statistics().restarts == 0


def test_items_that_another_worker_cannot_unpickle_are_an_error() -> None:
    with (
        unpickled(refuses_elsewhere) as loader,
        pytest.raises(lp.SampleError, match="cannot be made again") as caught,
    ):
        list(loader)
    assert "which another worker read" in str(caught.value)
    assert loader.statistics().restarts == 0


@pytest.mark.parametrize("action", ["raise", "skip", "replace"])
def test_errors_come_in_their_turn(action: Any) -> None:
    def failing(item: Any) -> Any:
        time.sleep(0.002)
        if item["number"] == 33:
            raise ValueError("no such item")
        return item["number"]

    def results(workers: int) -> Any:
        got: list[Any] = []
        with loader_of(workers, failing, on_error=action) as loader:
            try:
                for batch in loader:
                    got.append(batch.tolist())
            except lp.SampleError as error:
                got.append((error.index, error.epoch, "no such item" in str(error)))
        return got

    assert results(3) == results(0)


@pytest.mark.parametrize("kill", [kill_worker, kill_supervisor])
def test_deaths_change_no_bit(kill: Any) -> None:
    with loader_of(0, shards=2) as here:
        expected = read(here, passes=2)
    with loader_of(4, shards=2) as loader:
        doing = dict.fromkeys(range(3, 25, 5), lambda: kill(loader))
        assert_same(read_while(loader, doing) + read(loader), expected)


def test_an_item_that_ends_its_worker_is_named_or_left_out() -> None:
    def ending(item: Any) -> Any:
        time.sleep(0.002)
        if item["number"] == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        return item["number"]

    with loader_of(3, ending) as loader, pytest.raises(lp.WorkerLostError, match="33"):
        list(loader)
    with loader_of(3, ending, on_error="skip") as loader:
        found = np.concatenate(list(loader)).tolist()
    assert found == [number for number in range(ITEMS) if number != 33]


def test_a_saved_place_is_found_again() -> None:
    with loader_of(0, shards=2) as here:
        expected = read(here)
    with loader_of(4, shards=2) as loader:
        batches = iter(loader)
        got = [part for _ in range(9) for part in read([next(batches)])]
        state = loader.state_dict()
    with loader_of(3, shards=2) as loader:
        loader.load_state_dict(state)
        assert_same(got + read(loader), expected)


def test_abandoned_passes_and_deaths_leave_no_file_open() -> None:
    with loader_of(3) as loader:
        read(loader)

        def fds() -> dict[int, int]:
            return {pid: count_fds(pid) for pid in descendants(os.getpid())}

        before = fds()
        for number in range(12):
            batches = iter(loader)
            for _ in range(1 + number):
                next(batches)
            del batches
        read(loader)
        after = fds()
        assert after.keys() == before.keys()
        assert all(after[pid] <= before[pid] + 1 for pid in after), (before, after)
