"""Generators that stop anywhere and continue in another loader have the same bits as uninterrupted
ones.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_generators import SHARDS, WAYS, of_shard
from tests.e2e.test_resume import over_json
from tests.support.batches import Place, assert_same, copied, read


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [copied(batch) for batch in itertools.islice(batches, count)]


def copies(worker: lp.WorkerInfo) -> Iterator[Any]:
    for number in range(17 + 9 * worker.index):
        yield worker.index, number, random.random()


def failing(item: Any, rng: np.random.Generator) -> tuple[int, float]:
    if item[0] % 10 > 3:
        raise ValueError("bad")
    return int(item[0]), rng.random()


@pytest.mark.parametrize("way", [*WAYS, "skipping"])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (3, 1)])
def test_the_rest_is_the_same_to_the_bit(on: Place, way: str, before: int, after: int) -> None:
    make, settings = WAYS.get(way, (of_shard, {"fn": failing, "on_error": "skip"}))
    settings = {"shards": SHARDS, "cycle_length": 4, "batch_size": 4, "seed": 3, **settings}
    with lp.Loader.from_generator(make, workers=0, **settings) as reference:
        first, second = read(reference), read(reference)
    for taken in {0, 1, len(first) // 2, len(first) - 1, len(first)}:
        with lp.Loader.from_generator(make, **on(before), **settings) as stopped:
            batches = iter(stopped)
            assert_same(take(batches, taken), first[:taken])
            state = over_json(batches.state_dict())  # type: ignore[attr-defined]
            del batches
        with lp.Loader.from_generator(
            make, **on(after), **settings, limits=lp.Limits(memory="8MiB")
        ) as again:
            again.load_state_dict(state)
            assert_same(read(again), first[taken:] or second)
            if first[taken:]:
                assert_same(read(again), second)


@pytest.mark.parametrize("taken", [0, 1, 5, 11, 12])
def test_copies_go_on_where_each_stood(on: Place, taken: int) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "seed": 8}
    with lp.Loader.from_generator(copies, **on(2), **settings) as reference:
        expected = read(reference)
    assert len(expected) == 12
    with lp.Loader.from_generator(copies, **on(2), **settings) as stopped:
        batches = iter(stopped)
        take(batches, taken)
        state = over_json(stopped.state_dict())
        del batches
    with lp.Loader.from_generator(copies, **on(2), **settings) as again:
        again.load_state_dict(state)
        assert_same(read(again)[: 12 - taken], expected[taken:])
    with (
        lp.Loader.from_generator(copies, **on(3), **settings) as other,
        pytest.raises(lp.StateError, match="generators: saved '2 copies', current '3 copies'"),
    ):
        other.load_state_dict(state)


def test_a_generator_without_end_is_saved_in_few_words(on: Place) -> None:
    with lp.Loader.from_generator(itertools.count, copies=2, batch_size=1, **on(2)) as loader:
        batches = iter(loader)
        got = take(batches, 3001)
        state = over_json(batches.state_dict())  # type: ignore[attr-defined]
        assert state["lanes"] == {"taken": [1501, 1500], "over": []}
        assert int(got[-1][0]) == 1500
        del batches
    with lp.Loader.from_generator(itertools.count, copies=2, batch_size=1, **on(2)) as again:
        again.load_state_dict(state)
        assert [int(batch[0]) for batch in itertools.islice(again, 3)] == [1500, 1501, 1501]


def test_states_of_others_are_refused(on: Place) -> None:
    settings: dict[str, Any] = {
        "shards": SHARDS,
        "cycle_length": 4,
        "batch_size": 4,
        "shard": lp.Shard(2, 0),
    }
    with lp.Loader.from_generator(of_shard, **on(1), **settings) as loader:
        batches = iter(loader)
        take(batches, 3)
        state = over_json(batches.state_dict())  # type: ignore[attr-defined]
        del batches
        changes: list[tuple[dict[str, Any], str]] = [
            ({"shards": SHARDS[:-1]}, "generators: saved '11 shards"),
            ({"cycle_length": 3}, "4 at once', current"),
            ({"shard": lp.Shard(2, 1)}, "share: saved '0 of 2', current '1 of 2'"),
            ({"shuffle": 3}, "shuffle"),
        ]
        for change, told in changes:
            with (
                lp.Loader.from_generator(of_shard, **on(1), **{**settings, **change}) as other,
                pytest.raises(lp.StateError, match=told),
            ):
                other.load_state_dict(state)
        with (
            lp.Loader.from_generator(lambda shard: iter(shard), **on(1), **settings) as other,
            pytest.raises(lp.StateError, match="source"),
        ):
            other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_where_nothing_was_left_the_next_epoch_begins(on: Place, workers: int) -> None:
    """The end of a stream is known only when it is reached, so an earlier state does not contain
    it.
    """

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    def loader(kind: str) -> lp.Loader:
        if kind == "stream":
            return lp.Loader(Numbers(), batch_size=4, **on(workers))
        return lp.Loader.from_generator(
            list, shards=[range(4), range(4, 8)], batch_size=4, **on(workers)
        )

    for kind in ("stream", "generators"):
        with loader(kind) as stopped:
            batches = iter(stopped)
            take(batches, 2)
            state = over_json(batches.state_dict())  # type: ignore[attr-defined]
            assert state["epoch"] == 0
            del batches
        with loader(kind) as again:
            again.load_state_dict(state)
            for epoch in (2, 3):
                assert [batch.tolist() for batch in again] == [[0, 1, 2, 3], [4, 5, 6, 7]]
                assert again.epoch == epoch


@pytest.mark.parametrize("kind", ["stream", "generators"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_that_takes_long_reports_its_progress(
    workers: int, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Uses its own processes, because those of a shared pool have another stderr."""

    class Items:
        def __iter__(self) -> Iterator[int]:
            for item in range(44):
                time.sleep(float((tmp_path / "pause_s").read_text()))
                yield item

    def loader() -> lp.Loader:
        if kind == "stream":
            return lp.Loader(Items(), batch_size=4, workers=workers)
        return lp.Loader.from_generator(lambda: Items(), batch_size=4, workers=min(workers, 1))

    (tmp_path / "pause_s").write_text("0")
    with loader() as first:
        batches = iter(first)
        take(batches, 10)
        state = over_json(batches.state_dict())  # type: ignore[attr-defined]
    reports = []
    for pause_s in ("0", "0.08"):
        (tmp_path / "pause_s").write_text(pause_s)
        with loader() as again:
            again.load_state_dict(state)
            assert next(iter(again)).tolist() == [40, 41, 42, 43]
        reports.append([line for line in capfd.readouterr().err.splitlines() if "resuming" in line])
    what = "the stream" if kind == "stream" else "generator 0"
    (line,) = reports[1]
    assert re.fullmatch(
        rf"loaderpool: resuming: \d+ of (36|40) items of {what} were read again in 2\.\d+ s", line
    )
    assert reports[0] == []
