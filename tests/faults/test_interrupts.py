"""A Ctrl-C at any bytecode of the package: the next pass is whole and right, and nothing is left
behind.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.cache.setting import CachePlan
from loaderpool.cache.store import SharedCache
from loaderpool.engine import local_engine
from loaderpool.system import interrupts
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing, checkpoint
from tests.support.child import run_child
from tests.support.handler_storm import (
    ITEMS,
    WANTED,
    Countdown,
    generated,
    indexed,
    local,
    rows,
    streamed,
    works_of,
)
from tests.support.interrupts import CountBytecodes, interrupted_at
from tests.support.processes import supervisors, wait_gone

# Number of places that are tried in each kind of work. They are spread evenly, and differ in each
# run. LOADERPOOL_INTERRUPTS=10000 takes most of an hour. (test_handlers_that_raise.py sends real
# signals.)
PLACES = int(os.environ.get("LOADERPOOL_INTERRUPTS", "30"))

# Python drops an exception at the first bytecode of a finalizer. Its cleanup is done later.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120 + PLACES),
]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handler, and locks that are still held, after each of these tests.

    A Ctrl-C between the last bytecode of a lock's `with` and the next one leaves the lock held. (A
    real Ctrl-C cannot come there.) The main thread could acquire it again, but other threads, also
    of TensorFlow, would wait forever.
    """
    monkeypatch.setattr(local_engine, "_alone", threading.RLock())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class KeptHere(Countdown):
    """A stream that a thread of this process reads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def streamed_here() -> lp.Loader:
    return lp.Loader(KeptHere(), np.float32, batch_size=4, workers=2)


def places(work: Callable[[], object], most: int = PLACES) -> range:
    """Return some of the package's bytecodes that a function runs."""
    work()
    with CountBytecodes() as counter:
        work()
    step = max(1, counter.count // most)
    return range(1 + random.Random(os.getpid()).randrange(step), counter.count + step, step)


# Each interrupt ends a stream's reader, which takes half a second.
slowly_streamed = pytest.param(streamed, marks=pytest.mark.slow)


def most_of(make: Callable[[], lp.Loader]) -> int:
    """Return the number of places that are tried in each kind of work, for such a loader."""
    return PLACES // 6 if make is streamed else PLACES


def buffers_of(loader: lp.Loader) -> int:
    """Return the number of batch buffers of a pass."""
    rows(loader)
    return loader.statistics().memory.buffers


def check_all_is_well(loader: lp.Loader, buffers: int, where: str) -> None:
    """Check that a pass is whole and right, and that no interrupted pass has batch buffers."""
    got = rows(loader)
    if len(got) < ITEMS:  # a resume was interrupted: this was the rest of that epoch
        assert got == WANTED[ITEMS - len(got) :], where
        got = rows(loader)
    assert got == WANTED, where
    assert buffers <= loader.statistics().memory.buffers <= 3 * buffers, where


@pytest.mark.parametrize("make", [indexed, slowly_streamed, streamed_here, generated, local])
def test_behind_an_interrupt_anywhere_the_next_pass_is_whole(make: Callable[[], lp.Loader]) -> None:
    with make() as loader:
        buffers = buffers_of(loader)
        for work in works_of(make):
            raised, tried = 0, places(lambda work=work: work(loader), most_of(make))
            for at in tried:
                was_raised, where = interrupted_at(at, lambda work=work: work(loader))
                raised += was_raised
                check_all_is_well(loader, buffers, where)
            assert raised > len(tried) / 6


@pytest.mark.parametrize("make", [indexed, slowly_streamed, generated])
def test_an_iterator_that_was_interrupted_goes_on_with_what_it_had_not_given(
    make: Callable[[], lp.Loader],
) -> None:
    with make() as loader:

        def some() -> None:
            nonlocal batches, seen
            batches, seen = iter(loader), []
            for batch in batches:
                seen.append(batch)

        batches: Any = iter(())
        seen: list[Any] = []
        for at in places(some, most_of(make)):
            batches = None
            _, where = interrupted_at(at, some)
            if batches is None:  # the interrupt came before there was an iterator
                continue
            got = rows(
                batches
            )  # between our return and the loop's variable, Python may lose a batch
            assert got == WANTED[ITEMS - len(got) :], where
            assert len(rows(seen)) + len(got) >= ITEMS - 4, where
            seen.clear()


def test_a_second_interrupt_while_the_first_is_handled_loses_nothing() -> None:
    """Before a fix, batches were left, but none was in front, and `next` never returned."""
    with lp.Loader(range(64), float, batch_size=4, workers=0) as loader:
        batches = iter(loader)
        next(batches)
        current: Any = batches._pass.current  # type: ignore[attr-defined]
        whole = current.convert

        def broken_off() -> Iterator[Any]:
            current.convert = interrupted
            raise KeyboardInterrupt
            yield

        def interrupted(_: Any) -> Any:
            current.convert = whole
            raise KeyboardInterrupt

        current.convert = lambda delivery: (broken_off(), whole(delivery)[1])
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert rows(batches) == list(range(4, 64))


@pytest.mark.parametrize("make", [indexed, slowly_streamed, streamed_here, generated])
def test_an_interrupt_anywhere_in_a_loaders_making_leaves_no_process(
    make: Callable[[], lp.Loader],
) -> None:
    def made_and_used() -> None:
        with make() as loader:
            next(iter(loader))

    before, _ = supervisors()
    # making a loader takes longer than a pass
    for at in places(made_and_used, max(3, PLACES // 8)):
        _, where = interrupted_at(at, made_and_used)
        gc.collect()
        assert wait_gone([pid for pid in supervisors()[0] if pid not in before], 5.0) == [], where


def shared() -> None:
    lp.share(np.arange(10_000))


def cached() -> None:
    SharedCache.create(CachePlan("memory", 1 << 20, 10)).close()


def mappings() -> int:
    return sum("loaderpool" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("work", [shared, cached])
def test_an_interrupt_anywhere_leaves_no_memory_file(work: Callable[[], None]) -> None:
    """A descriptor, or a mapping, keeps all of the file's memory."""
    tried = places(work, 3 * PLACES)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mappings()
    for at in tried:
        _, where = interrupted_at(at, work)
        assert (len(os.listdir("/proc/self/fd")), mappings()) == before, where


# ---- the primitives ----


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_what_is_held_is_told_at_the_end_of_the_outermost_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        with InterruptsHeld():
            press()
        reached.append("held")
    assert reached == ["held"]


def test_user_code_in_a_held_block_is_interrupted_at_once_and_the_rest_is_held_again() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsHeld():
        with pytest.raises(KeyboardInterrupt), InterruptsAllowed():
            press()
            reached.append("never")
        press()
        reached.append("held again")
    assert reached == ["held again"]


def test_a_checkpoint_and_user_code_are_told_of_what_came_before() -> None:
    for tell in (checkpoint, InterruptsAllowed().__enter__):
        with InterruptsHeld():
            press()
            with pytest.raises(KeyboardInterrupt):
                tell()


def test_a_handler_that_user_code_sets_stays_set() -> None:
    seen = []
    with InterruptsHeld():
        with InterruptsAllowed():
            signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        with InterruptsHeld():  # from the next block on, Ctrl-C waits, too
            press()
        assert not seen
    press()
    assert seen == [1, 1]


@pytest.mark.parametrize("since", ["before", "within"])
def test_nothing_is_done_where_ctrl_c_is_ignored(since: str) -> None:
    if since == "before":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with InterruptsHeld():
        with InterruptsAllowed():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        press()
        with InterruptsAllowed():
            press()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_fork_is_ended_by_its_own_ctrl_c() -> None:
    """Also a fork by a thread during a block of the main thread. No thread of the fork would ever
    leave that block.
    """
    run_child(
        """
        import os, signal, threading, time
        from loaderpool.system import interrupts
        from loaderpool.system.interrupts import InterruptsHeld

        def fork():
            child = os.fork()
            if not child:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(20)
                except KeyboardInterrupt:
                    os._exit(3)
                os._exit(4)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def wait_and_fork():
            while not interrupts._depth:
                time.sleep(0.001)
            codes.append(fork())
            forked.set()

        signal.signal(signal.SIGINT, signal.default_int_handler)
        codes, forked = [], threading.Event()
        thread = threading.Thread(target=wait_and_fork)
        thread.start()
        with InterruptsHeld():
            forked.wait()
        thread.join()
        assert [*codes, fork()] == [3, 3]
        """
    ).check()


class Owner:
    pass


def test_a_ctrl_c_in_a_finalizer_comes_a_moment_later_and_the_undoing_is_whole() -> None:
    done: list[int] = []

    def undo() -> None:
        press()
        done.append(1)

    interrupts.gate_handlers()
    owner = Owner()
    Undoing(owner, undo)
    with pytest.raises(KeyboardInterrupt):
        del owner
        time.sleep(10)
    assert done == [1]


def test_an_undoing_happens_once() -> None:
    done: list[int] = []
    owner = Owner()
    undo = Undoing(owner, lambda: done.append(1))
    undo.now()
    undo.now()
    del owner
    assert done == [1]
    owner = Owner()
    Undoing(owner, lambda: done.append(2)).forget()
    del owner
    assert done == [1]


class StatusError(Exception):
    """An error like TensorFlow's. A Ctrl-C comes while it is created."""

    def __init__(self) -> None:
        signal.raise_signal(signal.SIGINT)


StatusError.__module__ = "tensorflow.python.framework.errors_impl"


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_ctrl_c_while_an_error_of_tensorflows_is_made_comes_where_that_arrives(
    is_raised: bool,
) -> None:
    interrupts.gate_handlers()
    reached = []

    def make() -> StatusError:
        made = StatusError()
        reached.append("kept")
        return made

    with pytest.raises(KeyboardInterrupt):
        if is_raised:
            raise StatusError
        make()
    assert not reached
    assert sys.gettrace() is None


def test_a_ctrl_c_that_is_sent_again_to_a_handler_without_a_gate_comes_once() -> None:
    with InterruptsHeld():
        pass
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a notebook does this for each cell
    with pytest.raises(KeyboardInterrupt):
        interrupts.send_again()
        time.sleep(10)
    with InterruptsHeld():
        pass
