"""Faults of generators: reused buffers, changed items, hangs, deaths, errors."""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, read
from tests.support.samples import fail_at

# ---- items ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"shuffle": 1}, {"batch_size": None}])
@pytest.mark.parametrize("kind", ["view", "bytes", "tuple", "dict", "ordered", "user"])
def test_a_buffer_that_is_filled_again_for_each_item(
    on: Place, workers: int, settings: dict[str, Any], kind: str
) -> None:
    def make(shard: int) -> Iterator[Any]:
        buffer, filled, ordered = (
            np.zeros(3),
            {"x": np.zeros(2)},
            collections.OrderedDict(x=np.zeros(2)),
        )
        user = collections.UserDict(x=np.zeros(2))
        memory = bytearray(24)
        for number in range(10):
            buffer[:] = number
            filled["x"] = ordered["x"] = user["x"] = np.full(2, float(number))
            np.frombuffer(memory)[:] = number
            yield {
                "view": buffer[::2], "bytes": np.frombuffer(memory), "tuple": (buffer, number), "dict": filled,
                "ordered": ordered, "user": user,
            }[kind]  # fmt: skip

    settings = {"shards": [0, 1], "batch_size": 4, **settings}
    with lp.Loader.from_generator(make, **on(workers), **settings) as loader:
        for _ in range(2):
            seen = []
            for batch in read(loader):
                rows = (
                    batch[0]
                    if kind == "tuple"
                    else batch["x"]
                    if kind in ("dict", "ordered", "user")
                    else batch
                )
                seen += rows.reshape(-1, rows.shape[-1])[:, 0].tolist()
            assert sorted(seen) == [n for n in range(10) for _ in range(2)]


def test_random_streams_of_processes_that_share_a_training_never_meet() -> None:
    def fn(item: Any, rng: np.random.Generator) -> Any:
        return rng.random()

    for settings in ({"shards": range(4)}, {"copies": 1}, {"copies": 1, "shuffle": 3}):
        drawn = []
        for shard in range(2):
            with lp.Loader.from_generator(
                lambda *_: range(8), fn=fn, workers=0, shard=lp.Shard(2, shard), **settings
            ) as loader:
                drawn += [float(value) for batch in read(loader) for value in batch]
        assert len(set(drawn)) == len(drawn) == (32 if "shards" in settings else 16)


# ---- hangs ----


def stuck(shard: int) -> Iterator[int]:
    for number in range(40):
        if shard == 1 and number == 22:
            wait_for_ever()
        yield 100 * shard + number


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_a_generator_that_hangs_is_an_error_that_shows_where(on_error: str) -> None:
    """No policy can skip it, because the generator yields no item after it."""
    got = []
    with lp.Loader.from_generator(
        stuck,
        workers=2,
        shards=range(3),
        batch_size=4,
        limits=lp.Limits(timeout_s=0.5),
        on_error=on_error,
    ) as loader:
        with pytest.raises(lp.SampleTimeoutError, match="has not yielded for") as raised:
            for batch in loader:
                got.append(int(batch[0]))
        assert "item 22 of generator 1" in str(raised.value)
        assert (
            "wait_for_ever" in raised.value.remote_traceback
            and "stuck" in raised.value.remote_traceback
        )
        assert raised.value.index == 22
        assert got == [100 * shard + number for number in range(0, 20, 4) for shard in range(3)] + [
            20
        ]
        assert next(iter(loader)).tolist() == [0, 1, 2, 3], "the workers serve on"


def test_a_sample_that_hangs_is_left_out_and_its_generator_goes_on() -> None:
    def fn(item: int) -> int:
        return item if item != 107 else wait_for_ever()  # type: ignore[func-returns-value,return-value]

    def make(shard: int) -> range:
        return range(100 * shard, 100 * shard + 12)

    settings: dict[str, Any] = {
        "shards": range(3),
        "batch_size": 4,
        "limits": lp.Limits(timeout_s=0.3),
    }
    with lp.Loader.from_generator(make, fn=fn, workers=2, on_error="skip", **settings) as loader:
        got = [n for batch in loader for n in batch.tolist()]
    assert sorted(got) == [n for shard in range(3) for n in make(shard) if n != 107]


def test_to_run_a_generator_again_is_no_hang(tmp_path: Path) -> None:
    """The repeat takes longer than the limit of a sample, but no single item does."""

    def make(shard: int) -> Iterator[int]:
        for number in range(40):
            time.sleep(0.02)
            if shard == 1 and number == 30 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield 100 * shard + number

    with lp.Loader.from_generator(
        make, workers=2, shards=range(2), batch_size=4, limits=lp.Limits(timeout_s=0.4)
    ) as loader:
        assert sorted(n for batch in read(loader) for n in batch.tolist()) == [
            *range(40),
            *range(100, 140),
        ]
        assert loader.statistics().restarts == 1


# ---- deaths and errors ----


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_generator_that_ends_its_worker_is_named(on_error: str) -> None:
    def make(shard: int) -> Iterator[int]:
        for number in range(40):
            if shard == 1 and number == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            yield 100 * shard + number

    with lp.Loader.from_generator(
        make, workers=2, shards=range(3), batch_size=4, on_error=on_error
    ) as loader:
        with pytest.raises(
            lp.WorkerLostError, match="SIGKILL while loading item 30 of generator 1"
        ) as raised:
            read(loader)
        assert (raised.value.index, raised.value.signal_name) == (30, "SIGKILL")
        assert loader.statistics().restarts <= 6, "another batch of it may have been dealt already"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_errors_say_which_generator_and_which_item(on: Place, workers: int, on_error: str) -> None:
    def make(shard: str) -> Iterator[int]:
        if shard == "c":
            raise FileNotFoundError("no such scene")
        for number in range(9):
            if shard == "b" and number == 7:
                raise LookupError("torn")
            yield number

    for shards, told, error in [
        (["a", "b"], "torn\nraised for item 7 of generator 1, epoch 0", LookupError),
        (["a", "c"], "no such scene\nraised for item 0 of generator 1", FileNotFoundError),
        (["c"], "no such scene\nraised for item 0 of generator 0", FileNotFoundError),
    ]:
        with lp.Loader.from_generator(
            make, shards=shards, batch_size=4, on_error=on_error, **on(workers)
        ) as loader:
            with pytest.raises(error, match=told) as raised:
                read(loader)
            assert "replay" not in str(raised.value)
            if sys.version_info >= (3, 11):
                assert f"while shard {shards[-1]!r} was read" in str(raised.value)

    def fn(item: int) -> Any:
        return item if item < 3 else "three"

    with (
        lp.Loader.from_generator(lambda: range(9), fn=fn, batch_size=4, **on(workers)) as loader,
        pytest.raises(lp.SpecMismatchError, match="of item 3 of generator 0: expected"),
    ):
        read(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_failed_items_name_their_shard(workers: int) -> None:
    shards = [range(5), range(10, 15)]
    given: dict[str, Any] = {
        "shards": shards,
        "fn": fail_at({13}),
        "batch_size": 5,
        "workers": workers,
    }
    with (
        lp.Loader.from_generator(iter, **given) as loader,
        pytest.raises(ValueError, match=r"item 3 of generator 1, .* shard range\(10, 15\)\."),
    ):
        list(loader)
    with lp.Loader.from_generator(iter, on_error="skip", **given) as loader:
        list(loader)
        assert loader.statistics().skipped_indices == ((1, 3),)
        with pytest.raises(lp.ArgumentError, match="replay needs a source index"):
            lp.replay(loader, 3)
