"""What threads and interrupts can do to the runs of a pool, each race placed by hand; no process (tests/support)."""

from __future__ import annotations

import collections
import gc
import itertools
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import ClosedError, MemoryLimitError
from loaderpool.trainer.engine import subscription
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.engine.reorder_buffer import Arrived, UnorderedBuffer
from loaderpool.trainer.engine.run import Run
from loaderpool.trainer.engine.subscription import PoolSubscription
from loaderpool.trainer.session.lease import Lender
from loaderpool.transport.messages import Control
from tests.support.hand_pool import HandPool, check_all_slots_free, consume, first, hand_pool

BATCHES = 40
FIRSTS = list(range(0, 2 * BATCHES, 2))


def row(index: int) -> Any:
    return np.full(1000, index)


@pytest.fixture
def small() -> Iterator[HandPool]:
    """Room for few batches, so that every further pass has the others begin anew."""
    with pool_of() as pool:
        yield pool


def pool_of(**more: Any) -> Any:
    settings = {"source": range(2 * BATCHES), "fn": row, "batch_size": 2, "memory_limit": 5 * 16384, **more}
    return hand_pool(2, **settings)


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def run_of(pool: HandPool) -> PoolSubscription:
    (run,) = pool.sharing.active
    return run


# ---- passes side by side ----


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_passes_outgrow_their_slots(deterministic: bool) -> None:
    def grow(index: int) -> Any:
        return np.full(2000 if index < 40 else 5000 + index, index)

    with hand_pool(
        2, source=range(400), fn=grow, batch_size=4, pad=True, memory_limit="2MiB", deterministic=deterministic
    ) as pool:
        ahead, behind = pool.batches(), pool.batches()
        slot_bytes = pool.engine.form().slot_bytes
        firsts = first(ahead, 1), first(behind, 1)
        for numbers, one_pass in zip(firsts, (ahead, behind), strict=True):  # one reads to its end, and the other waits
            for batch in one_pass:
                numbers.append(int(batch[0, 0]))
                del batch
        assert [sorted(numbers) for numbers in firsts] == [list(range(0, 400, 4))] * 2
        assert pool.ring.slot_bytes > 2 * slot_bytes
        check_all_slots_free(pool)


def test_more_passes_than_slots_are_refused_and_leave_the_others_as_they_are(small: HandPool) -> None:
    begun = []
    with pytest.raises(MemoryLimitError, match="iterators of this loader are active"):
        while True:
            begun.append(small.batches())
            assert first(begun[-1], 1) == [0]
    epoch = small.book.epoch
    assert epoch == len(begun) - 1 == 5  # the refused one does not count
    for one_pass in begun[:-1]:
        assert consume(one_pass) == FIRSTS[1:]
    check_all_slots_free(small)


# ---- begun anew ----


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_begun_anew_again_and_again_gives_each_batch_once(deterministic: bool) -> None:
    # Tiny rows, so that tickets are chunks, which end elsewhere after each new begin.
    with hand_pool(
        3, source=range(400), fn=np.int64, batch_size=2, deterministic=deterministic, memory_limit="1MiB"
    ) as pool:
        for _ in range(3):
            numbers = []
            for at, batch in enumerate(pool.batches()):
                numbers.append(int(batch[0]))
                if at % 3 == 0:
                    with pool.session.lock:
                        pool.sharing.restart_all()
                for _ in range(at % 7):
                    pool.session.step()
            assert (numbers if deterministic else sorted(numbers)) == list(range(0, 400, 2))
        del batch
        check_all_slots_free(pool)


def test_batches_that_were_taken_before_a_new_begin_are_left_out_of_their_chunks() -> None:
    shelf = UnorderedBuffer(0, 100)
    for begin, count in ((1, 2), (4, 1), (6, 1), (7, 3)):
        shelf.put(Arrived(begin, count, 2, 1))
        shelf.drop_front()
    shelf = shelf.rest()
    assert shelf.begin_at == 0
    assert not shelf.put(Arrived(8, 2, 2, 1))  # all of them were
    assert shelf.put(Arrived(0, 6, 2, 1)) and shelf.put(Arrived(10, 4, 2, 2))
    assert (shelf.front().first, shelf.front().keep) == (0, (0, 3, 5))
    shelf.drop_front()
    assert shelf.begin_at == 10
    assert (shelf.front().first, shelf.front().keep) == (10, None)
    shelf.drop_front()
    assert shelf.begin_at == 14 == shelf.rest().begin_at


def test_a_stream_without_end_keeps_nothing_of_the_epochs_behind_it() -> None:
    shelf = UnorderedBuffer(0, 2)
    for batch in range(1000):
        shelf.put(Arrived(batch, 1, 2, 1))
        shelf.drop_front()
    assert not shelf._by_epoch and not shelf._taken


# ---- threads ----


def test_what_is_given_back_between_ready_and_taken_is_waited_for_again(
    small: HandPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_pass = small.batches()
    numbers = first(one_pass, 1)
    small.session.settle()
    is_ready, begun = PoolSubscription._is_ready, []

    def ready_but_then(self: PoolSubscription) -> bool:
        result = is_ready(self)
        if result and not begun:
            begun.append(None)  # another thread begins a pass, before this one has the lock
            on_another_thread(lambda: begun.append(small.engine.begin(1, 1, small.engine.plan, {})))
        return result

    monkeypatch.setattr(PoolSubscription, "_is_ready", ready_but_then)
    numbers += consume(one_pass)
    assert numbers == FIRSTS and len(begun) == 2


class Begun:
    """Counts what the supervisor is told of runs."""

    def __init__(self, pool: HandPool, monkeypatch: pytest.MonkeyPatch) -> None:
        order = pool.session.order
        self.begun: list[int] = []
        self.ended: collections.Counter[int] = collections.Counter()

        def listen(kind: Control, *words: int) -> None:
            if kind == Control.RUN_BEGIN:
                self.begun.append(words[0])
            elif kind == Control.RUN_END:
                self.ended[words[0]] += 1
            order(kind, *words)

        monkeypatch.setattr(pool.session, "order", listen)


@pytest.mark.parametrize("when", ["before", "during", "after it looked"])
def test_a_run_ended_while_it_begins_anew_is_ended_once_and_for_all(
    small: HandPool, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    told = Begun(small, monkeypatch)
    run = small.engine.begin(0, BATCHES, small.engine.plan, {})
    with small.session.lock, monkeypatch.context() as race:
        if when == "before":
            on_another_thread(run.end)
        elif when == "during":
            end_now = Run.end_now

            def ended_meanwhile(self: Run) -> None:
                on_another_thread(run.end)
                end_now(self)

            race.setattr(Run, "end_now", ended_meanwhile)
        else:
            begin = PoolSubscription._begin

            def begun_meanwhile(self: PoolSubscription, shelf: Any) -> Run:
                stretch = begin(self, shelf)
                on_another_thread(self.end)  # it sees the old stretch
                return stretch

            race.setattr(PoolSubscription, "_begin", begun_meanwhile)
        run.restart(2)
    small.session.settle()
    assert told.ended == dict.fromkeys(told.begun, 1)
    assert len(told.begun) == (1 if when == "before" else 2)
    check_all_slots_free(small)


def test_an_extension_reaches_the_stretch_that_a_restart_begins(
    small: HandPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small.engine.begin(0, 3, small.engine.plan, {})
    begin = PoolSubscription._begin

    def begin_while_another_extends(self: PoolSubscription, shelf: Any) -> Run:
        stretch = begin(self, shelf)
        late.start()  # it waits for the lock, or would tell the old stretch
        return stretch

    late = threading.Thread(target=lambda: run.extend(BATCHES))
    monkeypatch.setattr(PoolSubscription, "_begin", begin_while_another_extends)
    with small.session.lock:
        run.restart(2)
    late.join()
    assert [run.take().first for _ in range(BATCHES)] == list(range(BATCHES))
    run.end()


def test_a_consumer_that_waits_is_told_that_its_run_was_ended(small: HandPool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.engine.begin(0, 1, small.engine.plan, {})
    run.take()
    monkeypatch.setattr(small.session, "wait_for", lambda is_ready: on_another_thread(run.end))
    with pytest.raises(StopIteration):
        run.take()


def test_slots_that_finalizers_return_meanwhile_do_not_disturb_who_counts_them(small: HandPool) -> None:
    run = small.engine.begin(0, 1, small.engine.plan, {})
    lent, is_over = run._stretch.lent, threading.Event()

    def churn() -> None:
        for number in itertools.cycle(range(50)):
            lent[number] = None
            lent.pop((number + 25) % 50, None)
            if is_over.is_set():
                return

    thread = threading.Thread(target=churn)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            set(run.lent)
            small.ring.lent_count(but=())
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
        lent.clear()


# ---- interrupts ----


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before the lease", "in the lease", "before its turn", "copying", "viewing"])
def test_an_interrupt_on_the_way_to_the_consumer_loses_no_slot(
    small: HandPool, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    begun, lend = small.batches(), Lender.lend

    def lent_and_interrupted(*arguments: Any) -> Any:
        lend(*arguments)
        raise KeyboardInterrupt

    assert first(begun, 3) == FIRSTS[:3]
    small.session.settle()
    with monkeypatch.context() as now:
        if where == "before the lease":
            now.setattr(Lender, "lend", interrupted)
        elif where == "in the lease":
            now.setattr(Lender, "lend", lent_and_interrupted)
        elif where == "before its turn":
            now.setattr(PoolSubscription, "_may_lend", interrupted)
        elif where == "copying":
            now.setattr(PoolSubscription, "_may_lend", lambda *_: False)
            now.setattr(subscription, "aligned_empty", interrupted)
        else:
            now.setattr(subscription, "Delivery", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(begun)
    gc.collect()
    check_all_slots_free(small)
    assert consume(small.batches()) == FIRSTS


# ---- beginning and ending ----


def test_a_loader_that_cannot_be_told_of_leaves_nothing_in_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of() as pool:
        session: Any = pool.session
        before = session.arena.extents.taken_bytes, dict(session.routing.by_loader)
        monkeypatch.setattr(PoolEngine, "_load_words", lambda *_, **__: (2**64,))
        engine = pool.engine
        with pytest.raises(struct.error):
            PoolEngine(session, {}, engine.config, engine.plan, engine.unit, None, 0)
        assert (session.arena.extents.taken_bytes, session.routing.by_loader) == before


def test_a_run_that_cannot_be_told_of_leaves_nothing_in_its_pool(small: HandPool) -> None:
    with pytest.raises(struct.error):
        small.engine.begin(2**64, 1, small.engine.plan, {})
    assert not small.engine.runs and not small.session.routing.by_run and not small.quotas()


def test_a_ring_without_room_is_tried_again_by_the_next_who_asks(
    small: HandPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.session.settle()
    before = small.session.arena.extents.taken_bytes
    with monkeypatch.context() as full:
        full.setattr("loaderpool.trainer.engine.ring.Ring._take_extent", lambda self: full_machine())
        for _ in range(3):
            with pytest.raises(MemoryLimitError, match="full"):
                small.engine.form()
            assert small.ring is None and small.session.arena.extents.taken_bytes == before
    assert consume(small.batches()) == FIRSTS


def full_machine() -> Any:
    raise MemoryLimitError("full")


def test_slots_that_cannot_be_replaced_end_the_wait_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(index: int) -> Any:
        return np.full(20_000 if index < 400 else 100_000, index)

    with hand_pool(2, source=range(500), fn=grow, batch_size=2, pad=True, memory_limit="16MiB") as pool:
        begun = pool.batches()
        assert first(begun, 1) == [0]
        slot_bytes = pool.ring.plan.slot_bytes
        assert slot_bytes < 2 * 100_000 * 8, "none of the large ones was made so far"
        monkeypatch.setattr("loaderpool.trainer.engine.ring.Ring._take_extent", lambda self: full_machine())
        with pytest.raises(MemoryLimitError, match="full"):
            consume(begun)
        with pytest.raises(MemoryLimitError, match="full"):
            consume(pool.batches())


def test_a_closed_engine_holds_no_memory_but_what_is_looked_at(small: HandPool) -> None:
    begun = small.batches()
    kept = next(begun)
    extents = small.session.arena.extents
    small.session.is_closed = True
    small.session.arena.close_descriptor()
    small.engine.close()
    small.engine.close()
    assert extents.taken_bytes == small.ring.slot_bytes
    assert (kept[0] == 0).all() and (kept[1] == 1).all()
    with pytest.raises(ClosedError):
        next(begun)
    del kept
    assert extents.taken_bytes == 0 and small.ring.count == 0


def test_more_workers_get_more_slots_in_the_middle_of_a_pass() -> None:
    with pool_of(memory_limit="16MiB", fn=lambda index: np.int64(index), batch_size=1, source=range(80)) as pool:
        begun = pool.batches()
        assert first(begun, 1) == [0]
        before = pool.ring.count
        pool.session.workers_wanted = 32
        pool.session.order(Control.RESIZE, 32)
        assert consume(begun) == list(range(1, 80))
        assert pool.ring.count == pool.quotas()[0] > before
        assert consume(pool.batches()) == list(range(80))
