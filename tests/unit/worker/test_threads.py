"""A worker's threads: same rows, same order, streams of their own; what ends them, and what is refused. No process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.core.delivery import aligned_empty
from loaderpool.core.forms import choose_form, with_batches
from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.plan.order import Ticket
from loaderpool.trainer.arguments import check_arguments
from loaderpool.worker.jobs import Abandoned, Filled, Progress, WorkFailed
from loaderpool.worker.work import Work
from tests.support.batches import copied

RUN = 5
THREADS = 4
pytestmark = pytest.mark.no_leaks


class Bench:
    """A worker's Work, with a board and two slots, and some threads."""

    def __init__(
        self, fn: Any, size: int = 24, *, threads: int = THREADS, seed_globals: Any = "auto", **settings: Any
    ) -> None:
        settings = {"batch_size": 8, "threads": threads, "seed_globals": seed_globals, **settings}
        loader = lp.Loader(range(size), fn, workers=0, **settings)
        payload = check_arguments(loader._core.arguments).payload
        self.numbers = memoryview(bytearray(BOARD_BYTES)).cast("Q")
        self.work = Work(payload, Progress(self.numbers, Board.base(0), 0, BaseException))
        self.plan, self.config = payload["plan"], payload["config"]
        self.work.ensure_setup()

    def prepare(self) -> Bench:
        form = choose_form(self.work.probe(0), None, self.config, self.plan, self.work.unit)
        self.form = with_batches(form, 1)
        self.work.set_form(self.form, False)
        self.slots = [aligned_empty(max(self.form.slot_bytes, 1)) for _ in range(3)]
        return self

    def job(self, batch: int, epoch: int = 0, deaths: int = 0) -> Ticket:
        rows = self.plan.rows(epoch, batch)
        return Ticket(0, 0, RUN, epoch, batch, stop=rows, deaths=deaths)

    def begin(self, batch: int) -> bool:
        slot = self.slots[batch % 3]
        return self.work.begin(self.job(batch), slot, 0, slot.nbytes)

    def fill(self, batch: int, epoch: int = 0, deaths: int = 0) -> Filled:
        slot = self.slots[batch % 3]
        return self.work.fill(self.job(batch, epoch, deaths), slot, 0, slot.nbytes)

    def make(self, batch: int, epoch: int = 0, deaths: int = 0) -> Any:
        filled = self.fill(batch, epoch, deaths)
        slot = self.slots[batch % 3]
        if filled.oversize is not None:
            slot = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(slot, 0)
        ((_, parts),) = self.form.read(slot, self.plan.rows(0, batch), 1)
        return copied(self.form.spec.structure.unflatten(parts))

    def word(self, field: Field) -> int:
        return self.numbers[Board.base(0) + field]

    def abandon(self) -> None:
        self.numbers[Board.mark(RUN)] = RUN


def end_threads(calls: Any) -> None:
    for _ in range(calls._threads):
        calls._queue.put(None)
    for thread in threading.enumerate():
        if thread.name.startswith("loaderpool_"):
            thread.join(10)


@contextlib.contextmanager
def bench(fn: Any, size: int = 24, **settings: Any) -> Iterator[Bench]:
    made = Bench(fn, size, **settings)
    try:
        yield made
    finally:
        assert made.work._threads is not None
        end_threads(made.work._threads)


# ---- order and streams ----


def test_calls_of_a_batch_overlap_and_no_more_than_there_are_threads() -> None:
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Barrier(THREADS, timeout=20)

    def fn(index: int) -> int:
        nonlocal running, most
        if index == 0 and threading.current_thread() is threading.main_thread():
            return 0  # the probe
        with lock:
            running += 1
            most = max(most, running)
        if index < 1 + THREADS:
            gate.wait()  # passes when so many are at it at once
        with lock:
            running -= 1
        return index

    with bench(fn) as one:
        assert one.prepare().make(0).tolist() == list(range(8))
    assert most == THREADS


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


def test_the_probes_result_is_used() -> None:
    calls: list[int] = []

    def fn(index: int) -> int:
        calls.append(index)
        return index

    with bench(fn) as one:
        one.prepare().make(0)
    assert sorted(calls) == list(range(8))


# ---- tickets ahead ----


def test_calls_of_later_tickets_begin_while_a_straggler_of_this_one_runs() -> None:
    seen: list[int] = []
    later = threading.Event()

    def fn(index: int) -> int:
        seen.append(index)
        if index == 11:
            later.set()
        if index == 3:
            assert later.wait(20), "nothing of the next batch has begun"
        return index

    with bench(fn) as one:
        one.prepare()
        assert one.begin(1)
        assert one.make(0).tolist() == list(range(8))
        assert one.make(1).tolist() == list(range(8, 16))
    assert sorted(seen) == list(range(16)), "each once"


def test_tickets_may_be_found_while_one_is_waited_for() -> None:
    found = iter([1, 2])
    later = threading.Event()

    def fn(index: int) -> int:
        if index == 16:
            later.set()
        if index == 2:
            assert later.wait(20)
        return index

    with bench(fn) as one:
        one.prepare()

        def look() -> bool:
            batch = next(found, None)
            return batch is not None and one.begin(batch)

        one.work.look_ahead = look
        assert [one.make(batch)[0] for batch in range(3)] == [0, 8, 16]


def test_a_ticket_of_a_worker_that_died_runs_with_nothing_beside_it() -> None:
    looks = itertools.count()
    with bench(lambda index: time.sleep(0.01) or index) as one:
        one.prepare()
        one.work.look_ahead = lambda: bool(next(looks)) or True
        slot = one.slots[0]
        assert not one.work.begin(one.job(0, deaths=1), slot, 0, slot.nbytes)
        assert one.make(0, deaths=1).tolist() == list(range(8))
        assert next(looks) == 0


def test_after_two_deaths_it_runs_on_one_thread_and_the_board_names_the_sample() -> None:
    named: list[tuple[int, int]] = []
    with bench(lambda index: named.append((index, int(one.word(Field.INDEX)) - 1)) or index) as one:
        one.prepare()
        one.make(1, deaths=2)
    assert named[1:] == [(index, index) for index in range(8, 16)]


# ---- errors ----


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt])
def test_the_first_failing_row_is_named_and_all_calls_are_over_before_it_is_told(kind: type[BaseException]) -> None:
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
        assert one.make(0).tolist() == list(range(8)), "the threads live"


@pytest.mark.parametrize("threads", [1, THREADS])
@pytest.mark.parametrize("action", ["skip", "replace"])
def test_what_a_failed_call_held_is_gone_without_a_collection(action: str, threads: int) -> None:
    held: list[weakref.ref[Any]] = []

    def fn(index: int) -> int:
        large = np.empty(index)
        held.append(weakref.ref(large))
        if index % 2:
            raise ValueError("bad")
        return index

    made = Bench(fn, threads=threads, on_error=action).prepare()
    gc.disable()
    try:
        made.fill(1)
        assert len(held) > 8
        assert not [each for each in held if each() is not None]
    finally:
        gc.enable()
        if made.work._threads is not None:
            end_threads(made.work._threads)


def test_an_abandoned_ticket_begins_no_further_call_and_is_answered_when_none_runs() -> None:
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

    with bench(fn) as one:
        one.prepare()
        assert one.begin(2)
        with pytest.raises(Abandoned):
            one.fill(1)
        with pytest.raises(Abandoned):
            one.fill(2)
        assert len(begun) <= 8 + THREADS  # all of the first in the queue, and what ran beside the one that abandons
        assert sorted(over) == sorted(begun)


# ---- what threads must not share ----


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
        assert one.make(1).tolist() == list(range(8, 16))
        assert one.make(2).tolist() == list(range(16, 24))
    assert calls.count(12) == 2


def test_draws_are_the_users_affair_without_seeding() -> None:
    with bench(lambda index: (index, random.random() * 0), seed_globals=False) as one:
        assert one.prepare().make(0)[0].tolist() == list(range(8))


@pytest.mark.parametrize("view", [lambda buffer: buffer, lambda buffer: buffer[1:]], ids=["array", "view"])
def test_where_all_samples_share_a_buffer_one_thread_makes_them(view: Any) -> None:
    buffer = np.zeros(4)

    def fn(index: int) -> Any:
        buffer[:] = index
        time.sleep(0.002)
        return view(buffer)

    with bench(fn) as one:
        one.prepare()
        assert one.begin(2)
        with pytest.warns(lp.LoaderpoolWarning, match=r"threads=4 are not used. Return a new one"):
            assert one.make(1)[:, 0].tolist() == list(range(8, 16))
        assert not one.begin(2)
        assert one.make(2)[:, 0].tolist() == list(range(16, 24))


def test_rows_of_out_are_no_shared_memory() -> None:
    calls = []

    def fn(index: int, out: Any = None) -> Any:
        calls.append(index)
        out = np.empty(3) if out is None else out
        out[:] = index
        return out

    with bench(fn) as one:
        assert one.prepare().make(1)[:, 0].tolist() == list(range(8, 16))
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
            made = one.make(batch)
            assert made["index"].tolist() == list(range(8 * batch, 8 * batch + 8))
            assert (made["mask"] == mask).all()
    assert sorted(calls) == list(range(24))
