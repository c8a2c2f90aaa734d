"""Faults with threads in a worker: the error names the sample, the worker is replaced, nothing is
lost.
"""

from __future__ import annotations

import contextlib
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


def waits(index: int, rng: np.random.Generator) -> Any:
    time.sleep(0.003 * (1 + index % 3))
    return index, rng.random()


def waiting(bad: Callable[[int], None]) -> Callable[[int, np.random.Generator], Any]:
    """Return a function that fails for some samples while others wait."""

    def fn(index: int, rng: np.random.Generator) -> Any:
        bad(index)
        return waits(index, rng)

    return fn


def expected() -> list[tuple[float, ...]]:
    with lp.Loader(range(ITEMS), waits, workers=0) as loader:
        return rows(loader)


# With the first settings, threads work on several tickets at the same time.
SETTINGS: list[dict[str, Any]] = [
    {"batch_size": 2, "workers": 1, "threads": 8},
    {"batch_size": 32, "workers": 2, "threads": 4},
]
both_settings = pytest.mark.parametrize(
    "settings", SETTINGS, ids=["small batches", "large batches"]
)


@both_settings
def test_a_worker_that_is_killed_once_changes_no_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def bad(index: int) -> None:
        if index == 41 and is_first(tmp_path / "died"):
            os.kill(os.getpid(), signal.SIGKILL)

    with lp.Loader(range(ITEMS), waiting(bad), **settings) as loader:
        assert rows(loader) == expected()
        assert loader.statistics().restarts == 1


@both_settings
@pytest.mark.parametrize("how", ["kills", "hangs"])
def test_the_sample_that_kills_or_hangs_is_named_and_none_beside_it(
    how: str, settings: dict[str, Any]
) -> None:
    def bad(index: int) -> None:
        if index == 41:
            time.sleep(0.01 if how == "kills" else 60)  # other samples are in work, too
            os._exit(3)

    delivered = []
    error = lp.SampleTimeoutError if how == "hangs" else lp.WorkerLostError
    with (
        lp.Loader(
            range(ITEMS), waiting(bad), limits=lp.Limits(timeout_s=0.5), **settings
        ) as loader,
        pytest.raises(error) as caught,
    ):
        for batch in loader:
            delivered += batch[0].tolist()
    assert caught.value.index == 41
    assert delivered == list(range(41 // settings["batch_size"] * settings["batch_size"]))
    if isinstance(caught.value, lp.SampleTimeoutError):
        assert "in bad" in caught.value.remote_traceback.split("\n\n")[0], (
            "the first stack is the one that hangs"
        )
        assert "worker/calls.py" not in caught.value.remote_traceback
    else:
        assert "status 3" in str(caught.value)


@both_settings
def test_samples_that_kill_or_hang_are_left_out(settings: dict[str, Any]) -> None:
    def bad(index: int) -> None:
        if index in (41, 42):
            os._exit(3)
        if index == 77:
            time.sleep(60)

    with lp.Loader(
        range(ITEMS), waiting(bad), on_error="skip", limits=lp.Limits(timeout_s=0.5), **settings
    ) as loader:
        assert rows(loader) == [row for row in expected() if row[0] not in (41, 42, 77)]
        assert sorted(loader.statistics().skipped_indices) == [41, 42, 77]


def one_worker(items: int, fn: Callable[[int], int], threads: int) -> lp.Loader:
    """Return a loader with one worker, batches of 4, and a limit of a second for each sample."""
    limits = lp.Limits(timeout_s=1.0)
    return lp.Loader(range(items), fn, batch_size=4, workers=1, threads=threads, limits=limits)


def test_slow_samples_one_behind_the_other_are_left_alone() -> None:
    def fn(index: int) -> int:
        time.sleep(0.4)
        return index

    with one_worker(12, fn, threads=3) as loader:
        assert [batch[0] for batch in loader] == [0, 4, 8]
        assert loader.statistics().restarts == 0


def test_a_worker_ends_though_its_threads_do_not() -> None:
    def fn(index: int) -> Any:
        if index >= 8:
            time.sleep(600)
        return index, os.getpid()

    with lp.Loader(range(64), fn, batch_size=4, workers=1, threads=8) as loader:
        worker = int(next(iter(loader))[1][0])
    assert not wait_gone([worker], timeout_s=60)


def test_a_slot_without_memory_is_no_failure_of_a_sample_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While a call is waited for, later tickets start. A failure there was blamed on that
    sample.
    """
    monkeypatch.setenv("LOADERPOOL_FAULTS", str(tmp_path))

    def fn(index: int) -> int:
        if index == 1:
            (tmp_path / "machine.reserve").write_text("ENOMEM")
        time.sleep(0.01)
        return index

    with lp.Loader(range(ITEMS), fn, batch_size=4, workers=1, threads=4, on_error="skip") as loader:
        with contextlib.suppress(lp.MemoryLimitError):  # the error of the ticket whose turn it is
            assert np.concatenate(list(loader)).tolist() == list(range(ITEMS))
        assert not loader.statistics().skipped_indices
    assert (tmp_path / "machine.reserve.met").exists()


@pytest.mark.slow
def test_a_ticket_that_is_lost_beside_a_call_is_made_by_another_worker() -> None:
    """Samples that are left out make messages long, so that each needs a descriptor. Before a fix,
    the ticket was waited for forever.
    """
    run_child(
        """
        import os, resource, time
        import loaderpool as lp

        def fn(index):
            if index < 8:
                os._exit(3)
            if index == 200:
                held = []
                try:
                    while True:
                        held.append(os.open(os.devnull, os.O_RDONLY))
                except OSError:
                    time.sleep(0.5)
                for each in held:
                    os.close(each)
            time.sleep(0.003)
            return index

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            limits, items = lp.Limits(restarts=None), [*range(8, 58), *range(8), *range(58, 400)]
            with lp.Loader(items, fn, batch_size=4, workers=1, threads=4, on_error="skip", limits=limits) as loader:
                seen = []
                for batch in loader:
                    seen += batch.tolist()
                    time.sleep(0.02)
                assert seen == list(range(8, 400)), seen
        """,
        timeout_s=60,
    ).check()
