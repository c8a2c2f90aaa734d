"""A sample that exceeds `timeout_s`: its stack is shown, its worker is replaced, and it raises or
is left out.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest

import loaderpool as lp
from tests.support.batches import supervisor_of
from tests.support.samples import slow_number

HANGS_AT = 13


def hangs_once(index: int) -> int:
    if index == HANGS_AT:
        time.sleep(60)
    return index


def test_raises_with_index_epoch_and_stack_of_the_users_frames() -> None:
    with lp.Loader(
        range(20), hangs_once, batch_size=4, workers=2, limits=lp.Limits(timeout_s=0.3)
    ) as loader:
        batches = []
        with pytest.raises(lp.SampleTimeoutError, match=r"Limits\(timeout_s=0\.3\)") as caught:
            for batch in loader:
                batches.append(batch.tolist())
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert (caught.value.index, caught.value.epoch) == (HANGS_AT, 0)
    assert isinstance(caught.value, TimeoutError)
    assert "in hangs_once" in caught.value.remote_traceback
    assert "_fill_rows" not in caught.value.remote_traceback


def test_stuck_in_c_code_that_holds_the_gil() -> None:
    def spins(index: int) -> int:
        if index == 2:
            (10**7) ** (10**7)  # one bytecode that takes minutes and never releases the lock
        return index

    with (
        lp.Loader(
            range(4), spins, batch_size=1, workers=1, limits=lp.Limits(timeout_s=0.3)
        ) as loader,
        pytest.raises(lp.SampleTimeoutError) as caught,
    ):
        list(loader)
    assert caught.value.index == 2
    assert "in spins" in caught.value.remote_traceback


def test_a_sample_that_hangs_after_another_loaders_tickets_is_seen() -> None:
    """Before a fix, a pool stopped its checks when the worker got a ticket without a time limit."""

    def hangs_late(index: int) -> int:
        time.sleep(60 if index == 8 else 0.04)
        return index

    limits = lp.Limits(timeout_s=1.0)
    with (
        lp.Pool(1) as pool,
        lp.Loader(
            range(10_000), functools.partial(slow_number, wait_s=0.01), batch_size=1, workers=pool
        ) as endless,
        lp.Loader(range(16), hangs_late, batch_size=1, workers=pool, limits=limits) as loader,
    ):
        beside = iter(endless)
        with pytest.raises(lp.SampleTimeoutError):
            for _ in loader:
                for _ in range(3):
                    next(beside)


def wakes_of(pid: int) -> int:
    """Number of times that a process has waited so far."""
    status = Path(f"/proc/{pid}/status").read_text().split("\n")
    return sum(int(line.split()[1]) for line in status if line.startswith("voluntary"))


def test_a_closed_loaders_timeout_wakes_the_supervisor_no_more() -> None:
    def in_a_second() -> int:
        before = wakes_of(supervisor)
        time.sleep(1)
        return wakes_of(supervisor) - before

    with lp.Pool(1) as pool, lp.Loader(range(4), workers=pool) as other:
        list(other)
        limits = lp.Limits(timeout_s=0.08)
        with lp.Loader(range(4), workers=pool, limits=limits) as loader:
            list(loader)
            supervisor = supervisor_of(loader)
            assert in_a_second() > 30
        list(other)
        assert in_a_second() < 15
