"""The sample that is blamed for a worker's death, samples that are not, and the end of retries."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ArgumentError, WorkerLostError
from tests.support.batches import kill_worker
from tests.support.processes import cpu_ns, is_alive, wait_until

ITEMS, BATCH = 96, 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def counted(path: Path) -> int:
    """Return the number of earlier calls with this path, in all processes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x")
    # the position of this write, even if other processes write
    count = os.lseek(file, 0, os.SEEK_CUR) - 1
    os.close(file)
    return count


def killing(at: set[int], shape: tuple[int, ...] = (3,)) -> Callable[[int], Any]:
    def fn(item: int) -> Any:
        if item in at:
            die()
        return np.full(shape, item, np.float32)

    return fn


def rows(loader: lp.Loader) -> list[int]:
    """Return the first value of each row."""
    return [int(row.flat[0]) for batch in loader for row in np.atleast_1d(batch)]


@pytest.mark.parametrize("shape", [(3,), (200, 200)], ids=["chunks", "single batches"])
def test_random_kills_convict_no_sample(tmp_path: Path, shape: tuple[int, ...]) -> None:
    # One batch ends workers until it is suspected, each time at another of its samples.
    def fn(item: int) -> Any:
        if 40 <= item < 44:
            count = counted(tmp_path / "seen")
            if count in (0, 2, 5, 9):
                die()
        return np.full(shape, item, np.float32)

    with lp.Loader(range(ITEMS), fn, batch_size=BATCH, workers=2) as loader:
        items = rows(loader)
        statistics = loader.statistics()
    assert items == list(range(ITEMS))
    assert statistics.restarts >= 1  # more, if the next epoch's prefetch does not use up the calls
    assert not statistics.skipped_indices


def test_one_kill_convicts_nobody_with_the_fewest_restarts(tmp_path: Path) -> None:
    def element(item: int) -> Any:
        if item in (0, 7) and not counted(
            tmp_path / f"{item}"
        ):  # the probe, and a sample that always runs alone
            die()
        return np.full((2,), item)

    with lp.Loader(
        range(12), element, batch_size=None, workers=1, limits=lp.Limits(restarts_per_item=2)
    ) as loader:
        assert [int(batch[0]) for batch in loader] == list(range(12))
        assert loader.statistics().restarts == 2


@pytest.mark.parametrize(
    ("action", "form"), [("skip", "fixed"), ("replace", "fixed"), ("replace", "varying")]
)
def test_samples_that_always_kill_are_left_out_or_replaced(action: str, form: str) -> None:
    at = {0, 41, 42, 95}

    def fn(item: int) -> Any:
        if item in at:
            die()
        return np.full((3 if form == "fixed" else 2 + item % 2,), item, np.float32)

    loader = lp.Loader(
        range(ITEMS), fn, batch_size=BATCH, workers=2, on_error=action, pad=form == "varying"
    )
    with loader:
        items = rows(loader)
        statistics = loader.statistics()
    left_out, stand_in = statistics.skipped_indices, {0: 1, 41: 43, 42: 43, 95: 94}
    if action == "skip":
        assert items == [item for item in range(ITEMS) if item not in at]
    else:
        left_out = statistics.replaced_indices
        assert items == [stand_in.get(item, item) for item in range(ITEMS)]
    assert sorted(left_out) == sorted(at)


def test_what_a_left_out_sample_did_is_in_the_budgets_error() -> None:
    loader = lp.Loader(
        range(ITEMS), killing({41}), batch_size=BATCH, workers=2, on_error=("skip", 0)
    )
    with (
        loader,
        pytest.raises(
            lp.SampleError, match=r"its worker again and again: killed by SIGKILL[\s\S]*index 41"
        ),
    ):
        list(loader)


def test_the_culprit_in_a_large_chunk_is_found() -> None:
    loader = lp.Loader(range(50_000), killing({31_234}, ()), batch_size=8, workers=2)
    with loader, pytest.raises(WorkerLostError, match="workers crashed on this task") as raised:
        for _ in loader:
            pass
    assert raised.value.index == 31_234


def test_a_storm_of_deaths_ends_with_an_error_that_says_so() -> None:
    def fn(item: int) -> Any:
        if item >= 20:
            die()
        return np.full((200, 200), item, np.float32)

    limits = lp.Limits(
        restarts=(3, 60.0), restarts_per_item=100
    )  # otherwise one worker could get the same sample three times
    loader = lp.Loader(range(ITEMS), fn, batch_size=BATCH, workers=2, limits=limits)
    with (
        loader,
        pytest.raises(WorkerLostError, match=r"more than restarts=\(3, 60\) allows") as raised,
    ):
        list(loader)
    assert raised.value.signal_name == "SIGKILL"


def test_deaths_that_a_convicted_sample_explains_are_no_storm() -> None:
    at = set(range(3, ITEMS, 8))
    limits = lp.Limits(restarts=(12, 600.0))
    with lp.Loader(
        range(ITEMS), killing(at), batch_size=BATCH, workers=2, on_error="skip", limits=limits
    ) as loader:
        items = rows(loader)
        assert loader.statistics().restarts > 12
    assert items == [item for item in range(ITEMS) if item not in at]


def test_no_limit_of_restarts(tmp_path: Path) -> None:
    def fn(item: int) -> Any:
        if counted(tmp_path / "calls") % 29 == 3:
            die()
        return np.full((200, 200), item, np.float32)

    # On a busy machine, a worker may be so late that several of these kills hit one sample, which
    # is not the cause.
    limits = lp.Limits(restarts=None, restarts_per_item=100)
    with lp.Loader(range(2000), fn, batch_size=BATCH, workers=2, limits=limits) as loader:
        items = rows(loader)
        assert loader.statistics().restarts > 50
    assert items == list(range(2000))


def test_kills_of_workers_that_wait_are_no_failure_to_start() -> None:
    # The consumer is busy, all slots are full, and something kills one idle worker after the other.
    with lp.Loader(
        range(ITEMS), batch_size=BATCH, workers=1, limits=lp.Limits(restarts=None)
    ) as loader:
        batches = iter(loader)
        items = next(batches).tolist()
        for restarts in range(1, 8):
            kill_worker(loader)
            wait_until(lambda restarts=restarts: loader.statistics().restarts == restarts)
            wait_until(lambda: has_begun(loader))
            time.sleep(0.1)  # it has finished its work
        items += [item for batch in batches for item in batch.tolist()]
    assert items == list(range(ITEMS))


def has_begun(loader: lp.Loader) -> bool:
    """Return True if the loader's only worker waits for work, so that it does not run any more."""
    pids = [worker.pid or 0 for worker in loader.statistics().workers]
    before = list(map(cpu_ns, pids))
    time.sleep(0.1)
    return len(pids) == 1 and is_alive(pids[0]) and list(map(cpu_ns, pids)) == before


def test_workers_that_cannot_start_end_the_pool_though_restarts_are_not_limited(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "flag"

    def arm() -> None:
        os.register_at_fork(after_in_child=lambda: flag.exists() and os._exit(3))

    class DyingForks:
        def __reduce__(self) -> Any:
            return arm, ()

    forks = DyingForks()
    loader = lp.Loader(
        range(8),
        lambda item: (item, forks)[0],
        batch_size=BATCH,
        workers=1,
        limits=lp.Limits(restarts=None),
    )
    with loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.5)  # all batches that may be made are made
        flag.touch()
        kill_worker(loader)
        with pytest.raises(
            WorkerLostError, match="exited with status 3 before it started any sample"
        ):
            time.sleep(2.0)  # a ticket that came in time would be blamed
            list(loader)


def test_a_pool_has_its_own_limit() -> None:
    with (
        lp.Pool(1) as pool,
        pytest.raises(ArgumentError, match=r"workers=pool and Limits\(restarts="),
    ):
        lp.Loader(range(4), workers=pool, limits=lp.Limits(restarts=3))


@pytest.mark.parametrize(
    ("unit", "at", "how"),
    [(unit, 0, how) for unit in ("sample", "element", "batch") for how in ("dies", "hangs")]
    + [("batch", 8, "dies"), ("element", 8, "hangs")],
)
def test_the_first_of_all_and_whole_batches_are_left_out_too(unit: str, at: int, how: str) -> None:
    def end(item: int) -> None:
        if item == at:
            die() if how == "dies" else threading.Event().wait(600)

    def fn(item: int) -> Any:
        end(item)
        return np.full(2, item, np.float32)

    def batch_fn(items: list[int]) -> Any:
        end(items[0])
        return np.array(items, np.float32)

    settings: dict[str, Any] = {
        "limits": lp.Limits(timeout_s=0.2),
        "workers": 2,
        "on_error": "skip",
    }
    if unit == "batch":
        loader = lp.Loader(range(32), batch_fn=batch_fn, batch_size=BATCH, **settings)
    else:
        loader = lp.Loader(
            range(32), fn, batch_size=BATCH if unit == "sample" else None, **settings
        )
    with loader:
        items = rows(loader)
        skipped = sorted(loader.statistics().skipped_indices)
    gone = list(range(at, at + BATCH)) if unit == "batch" else [at]
    expected = [item for item in range(32) if item not in gone]
    assert sorted(set(items)) == expected
    assert skipped == gone
