"""Faults of coroutines in a worker: the error names the sample, other calls continue, `finally`
blocks run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import rows
from tests.support.child import run_child
from tests.support.processes import is_first, wait_gone

ITEMS = 96


async def waits(item: int, rng: np.random.Generator) -> Any:
    first = rng.random()
    await asyncio.sleep(0.003 * (1 + item % 3))
    return item, first, rng.random()


def waiting(bad: Callable[[int], Any]) -> Any:
    """Return a function that fails for some samples while others wait."""

    async def fn(item: int, rng: np.random.Generator) -> Any:
        await bad(item)
        return await waits(item, rng)

    return fn


def expected() -> list[tuple[float, ...]]:
    with lp.Loader(range(ITEMS), waits, workers=0) as loader:
        return rows(loader)


SETTINGS: list[dict[str, Any]] = [
    {"batch_size": 2, "workers": 1, "threads": 30},
    {"batch_size": 32, "workers": 2, "threads": 200},
    {"batch_size": 4, "workers": 2, "threads": 1},
]
all_settings = pytest.mark.parametrize("settings", SETTINGS, ids=["small", "large", "one by one"])


@all_settings
def test_a_worker_that_is_killed_changes_no_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    async def bad(item: int) -> None:
        if item in (41, 77) and is_first(tmp_path / f"died {item}"):
            os.kill(os.getpid(), signal.SIGKILL)

    with lp.Loader(range(ITEMS), waiting(bad), **settings) as loader:
        assert rows(loader) == expected()
        assert loader.statistics().restarts == 2


@all_settings
def test_the_sample_that_crashes_is_named(settings: dict[str, Any]) -> None:
    async def bad(item: int) -> None:
        if item == 41:
            await asyncio.sleep(0.01)
            os._exit(3)

    delivered = []
    with (
        lp.Loader(range(ITEMS), waiting(bad), **settings) as loader,
        pytest.raises(lp.WorkerLostError, match="status 3") as caught,
    ):
        for batch in loader:
            delivered += batch[0].tolist()
    assert caught.value.index == 41
    assert delivered == list(range(41 // settings["batch_size"] * settings["batch_size"]))


def timeout_of(
    bad: Callable[[int], Any], settings: dict[str, Any], words: str
) -> tuple[lp.SampleTimeoutError, lp.Statistics]:
    """Return the error of a sample that takes too long, and the counts after it."""
    limits = lp.Limits(timeout_s=0.6)
    with (
        lp.Loader(range(ITEMS), waiting(bad), limits=limits, **settings) as loader,
        pytest.raises(lp.SampleTimeoutError, match=words) as caught,
    ):
        rows(loader)
    return caught.value, loader.statistics()


@all_settings
def test_a_coroutine_that_waits_too_long_is_canceled(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    async def bad(item: int) -> None:
        if item == 41:
            try:
                await asyncio.sleep(60)
            finally:
                (tmp_path / "ended").touch()

    error, told = timeout_of(bad, settings, "its coroutine was canceled")
    assert error.index == 41
    assert "in bad" in error.remote_traceback
    assert told.restarts == 0
    assert (tmp_path / "ended").exists()


@all_settings
def test_the_coroutine_that_blocks_the_loop_is_named(settings: dict[str, Any]) -> None:
    async def bad(item: int) -> None:
        if item == 41:
            time.sleep(60)

    error, _ = timeout_of(bad, settings, "its worker was replaced")
    assert error.index == 41
    assert "in bad" in error.remote_traceback.split("\n\n")[0]


@all_settings
@pytest.mark.parametrize("pause_s", [0.05, 60])
def test_a_coroutine_that_ignores_its_cancellation_is_named(
    settings: dict[str, Any], pause_s: float
) -> None:
    async def bad(item: int) -> None:
        while item == 41:
            try:
                await asyncio.sleep(pause_s)
            except BaseException:
                pass

    error, _ = timeout_of(bad, settings, "its worker was replaced")
    assert error.index == 41


@all_settings
def test_finally_blocks_may_run_after_the_limit(settings: dict[str, Any], tmp_path: Path) -> None:
    async def bad(item: int) -> None:
        if item == 41:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.4)
                (tmp_path / "ended").touch()

    error, told = timeout_of(bad, settings, "its coroutine was canceled")
    assert error.index == 41
    assert told.restarts == 0
    assert (tmp_path / "ended").exists()


@all_settings
def test_samples_that_crash_or_hang_are_left_out(settings: dict[str, Any]) -> None:
    async def bad(item: int) -> None:
        if item == 42:
            os._exit(3)
        if item == 20:
            await asyncio.sleep(60)
        if item == 77:
            time.sleep(60)

    limits = lp.Limits(timeout_s=0.6)
    with lp.Loader(
        range(ITEMS), waiting(bad), on_error="skip", limits=limits, **settings
    ) as loader:
        assert rows(loader) == [row for row in expected() if row[0] not in (20, 42, 77)]
        assert sorted(loader.statistics().skipped_indices) == [20, 42, 77]


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 9])
def test_the_first_failing_sample_is_named(kind: type[BaseException], threads: int) -> None:
    async def fn(item: int) -> int:
        await asyncio.sleep(0.002 * (20 - item % 20))
        if item in (10, 13):
            raise kind("bad")
        return item

    with (
        lp.Loader(range(40), fn, batch_size=8, workers=1, threads=threads) as loader,
        pytest.raises(lp.SampleError) as caught,
    ):
        list(loader)
    assert caught.value.index == 10
    assert "in fn" in caught.value.remote_traceback
    if kind is not StopIteration:  # Python raises a RuntimeError instead, in a frame of loaderpool
        assert "loaderpool/worker" not in caught.value.remote_traceback
    assert loader.statistics().restarts == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_canceled_task_is_an_error_of_its_sample(workers: int) -> None:
    async def fn(item: int) -> int:
        task = asyncio.create_task(asyncio.sleep(0))
        if item == 5:
            task.cancel()
        await task
        return item

    with (
        lp.Loader(range(8), fn, batch_size=2, workers=workers) as loader,
        pytest.raises(lp.SampleError, match="CancelledError") as caught,
    ):
        list(loader)
    assert caught.value.index == 5
    with lp.Loader(range(8), fn, batch_size=2, workers=workers, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [6, 7]]


# ---- the end ----


def lists(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(is_true: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_true()


@pytest.mark.parametrize("how", ["next pass", "close"])
def test_coroutines_of_an_abandoned_pass_are_canceled(how: str, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    begun.mkdir()
    ended.mkdir()

    async def fn(item: int) -> int:
        if item >= 8:
            (begun / str(item)).touch()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.01)
                (ended / str(item)).touch()
        return item

    with lp.Loader(range(64), fn, batch_size=4, workers=1, threads=10) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        until(lambda: len(lists(begun)) >= 10)
        if how == "next pass":
            del batches
            gc.collect()
            assert next(iter(loader)).tolist() == [0, 1, 2, 3]
            assert set(lists(ended)) >= {str(item) for item in range(8, 16)}
    until(lambda: lists(ended) == lists(begun))


def test_a_worker_ends_though_its_coroutines_do_not() -> None:
    async def fn(item: int) -> Any:
        while item >= 8:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
        return item, os.getpid()

    with lp.Loader(range(64), fn, batch_size=4, workers=1, threads=8) as loader:
        worker = int(next(iter(loader))[1][0])
    assert not wait_gone([worker], timeout_s=60)


def test_ctrl_c_cancels_the_coroutine_of_no_workers() -> None:
    run_child(
        """
        import asyncio, os, signal, threading
        import loaderpool as lp

        ended = []

        async def fn(item):
            if item == 5:
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.01)
                    ended.append(item)
            return item

        def take(loader):
            seen = []
            try:
                for batch in loader:
                    seen += batch.tolist()
            except KeyboardInterrupt:
                return seen

        def check():
            with lp.Loader(range(8), fn, batch_size=2, workers=0) as loader:
                assert take(loader) == [0, 1, 2, 3]
            assert ended.pop() == 5

        async def beside_a_loop():
            check()

        check()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(beside_a_loop())
        loop.close()
        """,
        timeout_s=60,
    ).check()


def test_a_fork_has_its_own_event_loop() -> None:
    run_child(
        """
        import asyncio, os
        import loaderpool as lp

        async def fn(item):
            await asyncio.sleep(0.001)
            return item

        def check():
            with lp.Loader(range(8), fn, batch_size=8, workers=0) as loader:
                for _ in range(2):
                    pid = os.fork()
                    assert next(iter(loader)).tolist() == list(range(8))
                    if pid == 0:
                        os._exit(0)
                    assert os.waitpid(pid, 0)[1] == 0
                    next(iter(loader))

        async def beside_a_loop():
            check()

        check()
        asyncio.run(beside_a_loop())
        """,
        timeout_s=30,
    ).check()
