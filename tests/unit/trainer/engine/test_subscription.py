"""What threads and interrupts can do to the runs of a pool, each race placed by hand; no process (tests/support)."""

from __future__ import annotations

import collections
import gc
import pickle
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.engine import subscription
from loaderpool.trainer.engine.reorder_buffer import OrderedBuffer
from loaderpool.trainer.engine.run import Run
from loaderpool.trainer.engine.subscription import PoolSubscription
from loaderpool.trainer.session.lease import Lender
from loaderpool.transport.messages import Control, Notice, Report, Status, Words, join32
from loaderpool.transport.reports import LostReport, Verdict
from tests.support.hand_pool import (
    BATCHES,
    FIRSTS,
    HandPool,
    check_all_slots_free,
    consume,
    first,
    hand_pool,
    small_pool,
)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_begun_anew_again_and_again_gives_each_batch_once(deterministic: bool) -> None:
    # Tiny rows, so that tickets are chunks, which end elsewhere after each new begin.
    with hand_pool(
        3,
        source=range(400),
        fn=np.int64,
        batch_size=2,
        deterministic=deterministic,
        limits=lp.Limits(memory="1MiB"),
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


# ---- threads ----


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_what_is_given_back_between_ready_and_taken_is_waited_for_again(
    small: HandPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_pass = small.batches()
    numbers = first(one_pass, 1)
    small.session.settle()
    is_ready, begun = OrderedBuffer.is_ready, []

    def ready_but_then(self: OrderedBuffer) -> bool:
        result = is_ready(self)
        if result and not begun:
            begun.append(None)  # another thread begins a pass, before this one has the lock
            on_another_thread(lambda: begun.append(small.engine.begin(1, 1, small.engine.plan, {})))
        return result

    monkeypatch.setattr(OrderedBuffer, "is_ready", ready_but_then)
    numbers += consume(one_pass)
    assert numbers == FIRSTS and len(begun) == 2


class Begun:
    """Counts what the supervisor is told of runs."""

    def __init__(self, pool: HandPool, monkeypatch: pytest.MonkeyPatch) -> None:
        send = pool.session.send
        self.begun: list[int] = []
        self.ended: collections.Counter[int] = collections.Counter()

        def listen(kind: Control, *words: int) -> None:
            if kind == Control.RUN_BEGIN:
                self.begun.append(words[0])
            elif kind == Control.RUN_END:
                self.ended[words[0]] += 1
            send(kind, *words)

        monkeypatch.setattr(pool.session, "send", listen)


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
                run = begin(self, shelf)
                on_another_thread(self.end)  # it sees the old run
                return run

            race.setattr(PoolSubscription, "_begin", begun_meanwhile)
        run.restart(2)
    small.session.settle()
    assert told.ended == dict.fromkeys(told.begun, 1)
    assert len(told.begun) == (1 if when == "before" else 2)
    check_all_slots_free(small)


def test_an_extension_reaches_the_run_that_a_restart_begins(small: HandPool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.engine.begin(0, 3, small.engine.plan, {})
    begin = PoolSubscription._begin

    def begin_while_another_extends(self: PoolSubscription, shelf: Any) -> Run:
        run = begin(self, shelf)
        late.start()  # it waits for the lock, or would tell the old run
        return run

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


def test_a_slot_that_a_finalizer_returns_while_a_runs_slots_are_counted_disturbs_nothing(small: HandPool) -> None:
    run = small.engine.begin(0, BATCHES, small.engine.plan, {})
    kept = [run.take() for _ in range(3)]
    counted = iter(run.lent)
    slots = [next(counted)]
    kept.clear()  # their finalizers, as any collection may run them, on any thread
    slots += counted
    assert len(set(slots)) == 3 and not list(run.lent)
    run.end()


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


def test_a_run_that_cannot_be_told_of_leaves_nothing_in_its_pool(small: HandPool) -> None:
    with pytest.raises(struct.error):
        small.engine.begin(2**64, 1, small.engine.plan, {})
    assert not small.engine.runs and not small.session.routing.by_run and not small.quotas()


# ---- what the dispatcher of a pool with hosts tells ----


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_over_which_hosts_died_is_named_with_its_indices(shuffle: bool) -> None:
    """The batches before it come first."""
    with small_pool(shuffle=shuffle, seed=3) as pool:
        make = pool._make

        def dies_over_the_fourth(session: Any, worker: int, words: Words) -> None:
            if words[3] != 3:
                make(session, worker, words)
                return
            report = LostReport(Verdict.HOST, None, 0, None, None, deaths=4, hosts=(("10.0.0.7", "silent"),))
            completion = (Notice.COMPLETION, *words[1:7], join32(Status.LOST, worker))
            session.notices.append((completion, pickle.dumps(report)))
            session.obey(session.state.on_report((Report.DONE, words[1], worker, Status.LOST, 0, 0, 1, 0)))

        pool._make = dies_over_the_fourth  # type: ignore[method-assign]
        batches = pool.batches()
        assert len(first(batches, 3)) == 3
        with pytest.raises(lp.WorkerLostError) as caught:
            next(batches)
        error, indices = caught.value, pool.plan.indices(0, pool.plan.positions(0, 3))
        assert (error.batch, error.epoch, error.indices) == (3, 0, tuple(indices))
        assert f"batch 3 of epoch 0 (source indices {indices})" in str(error)
