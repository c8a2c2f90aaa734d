"""A worker's threads: the same rows in the same order with their own streams; their end; and
refused functions.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.worker.tickets import Abandoned, WorkFailed
from tests.support.bench import bench_of_threads as bench

pytestmark = pytest.mark.no_leaks


def test_threads_see_what_setup_did_to_its_context() -> None:
    def setup() -> None:
        np.seterr(divide="raise")

    def fn(index: int) -> float:
        return float(np.float64(1) / np.float64(index - 5))

    with np.errstate(), bench(fn, setup=setup) as one:
        one.prepare()
        with pytest.raises(WorkFailed) as caught:
            one.fill(0)
    assert caught.value.failure.index == 5


# ---- errors ----


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt])
def test_the_first_failing_row_is_named_and_all_calls_are_over_before_it_is_told(
    kind: type[BaseException],
) -> None:
    running: set[int] = set()

    def fn(index: int) -> int:
        if index in (10, 13):
            raise kind("bad")
        running.add(index)
        time.sleep(0.02)
        running.discard(index)
        return index

    with bench(fn) as one:
        one.prepare()
        with pytest.raises(WorkFailed) as caught:
            one.fill(1)
        assert not running
        assert caught.value.failure.index == 10
        assert "worker/calls.py" not in caught.value.failure.traceback_text
        assert "in fn" in caught.value.failure.traceback_text
        assert one.make(0)[0].tolist() == list(range(8)), "the threads live"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("action", ["skip", "replace"])
def test_what_a_failed_call_held_is_gone_without_a_collection(
    action: str, threads: int, is_async: bool
) -> None:
    held: list[weakref.ref[Any]] = []

    def fn(index: int) -> int:
        large = np.empty(index)
        held.append(weakref.ref(large))
        if index % 2:
            raise ValueError("bad")
        return index

    async def awaits(index: int) -> int:
        await asyncio.sleep(0.001)
        return fn(index)

    with bench(awaits if is_async else fn, threads=threads, on_error=action) as one:
        one.prepare()
        gc.disable()
        try:
            one.fill(1)
            assert len(held) > 8
            assert not [each for each in held if each() is not None]
        finally:
            gc.enable()


def test_an_abandoned_ticket_begins_hardly_a_call_and_is_answered_when_none_runs() -> None:
    begun: list[int] = []
    over: list[int] = []

    def fn(index: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            begun.append(index)
            if index == 9:
                one.abandon()
            time.sleep(0.03)
            over.append(index)
        return index

    with bench(fn, threads=2) as one:
        one.prepare()
        assert one.begin(2)
        with pytest.raises(Abandoned):
            one.fill(1)
        with pytest.raises(Abandoned):
            one.fill(2)
        assert (
            len(begun) <= 8 + 2 + 2
        )  # all queued calls of the first ticket, the running ones, and one more for each thread
        assert sorted(over) == sorted(begun)


def test_a_ticket_that_is_dropped_before_its_turn_has_no_call_left() -> None:
    begun: list[int] = []
    over: list[int] = []

    def fn(index: int) -> int:
        begun.append(index)
        time.sleep(0.03)
        over.append(index)
        return index

    with bench(fn) as one:
        one.prepare()
        for batch in (1, 2):
            assert one.begin(batch)
            one.work.drop(one.place(batch)[0])
        assert not one.work._concurrent.begun
        assert len(begun) <= 1 + 4 + 4, "the one of the probe, and what each thread was at"
        assert sorted(begun) == sorted(over)


# ---- objects that threads must not share ----


def test_a_draw_that_does_not_come_again_costs_a_second_run_only() -> None:
    pauses = iter([10])
    calls: list[int] = []

    def fn(index: int) -> int:
        calls.append(index)
        if index == 10 and next(pauses, None):
            random.random()
        return index

    with bench(fn) as one:
        one.prepare()
        assert one.begin(2)
        assert one.make(1)[0].tolist() == list(range(8, 16))
        assert one.make(2)[0].tolist() == list(range(16, 24))
    assert calls.count(12) == 2


def test_draws_are_the_users_affair_without_seeding() -> None:
    with bench(lambda index: (index, random.random() * 0), seed_globals=False) as one:
        assert one.prepare().make(0)[0][0].tolist() == list(range(8))


@pytest.mark.parametrize(
    "view", [lambda buffer: buffer, lambda buffer: buffer[1:]], ids=["array", "view"]
)
def test_samples_that_share_a_buffer_are_refused(view: Any) -> None:
    buffer = np.zeros(4)

    def fn(index: int) -> Any:
        buffer[:] = index
        time.sleep(0.002)
        return view(buffer)

    with bench(fn) as one:
        one.prepare()
        assert one.begin(2)
        with pytest.raises(
            WorkFailed, match=r"Return a new one from each call, .* or set threads=1"
        ) as caught:
            one.make(1)
    assert isinstance(caught.value.error, lp.ArgumentError)


def test_rows_of_out_are_no_shared_memory() -> None:
    calls = []

    def fn(index: int, out: Any = None) -> Any:
        calls.append(index)
        out = np.empty(3) if out is None else out
        out[:] = index
        return out

    with bench(fn) as one:
        assert one.prepare().make(1)[0][:, 0].tolist() == list(range(8, 16))
    assert calls.count(12) == 1


def test_a_constant_that_cannot_be_written_to_is_no_such_buffer() -> None:
    mask, calls = np.arange(4), []
    mask.flags.writeable = False

    def fn(index: int) -> Any:
        calls.append(index)
        return {"index": index, "mask": mask}

    with bench(fn) as one:
        one.prepare()
        for batch in range(3):
            [made] = one.make(batch)
            assert made["index"].tolist() == list(range(8 * batch, 8 * batch + 8))
            assert (made["mask"] == mask).all()
    assert sorted(calls) == list(range(24))


def test_a_ticket_of_a_worker_that_died_runs_with_nothing_beside_it() -> None:
    looks: list[int] = []
    with bench(lambda index: time.sleep(0.01) or index) as one:
        one.prepare()
        one.work.look_ahead = lambda: looks.append(1) or True
        assert not one.begin(0, deaths=1)
        one.fill(0, deaths=1)
    assert not looks


def test_after_a_death_it_runs_on_one_thread_and_the_board_names_the_sample() -> None:
    named: list[tuple[int, int]] = []
    with bench(lambda index: named.append((index, one.told_index())) or index) as one:
        one.prepare().fill(1, deaths=1)
    assert named[1:] == [(index, index) for index in range(8, 16)]
