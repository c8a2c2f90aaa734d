"""A Ctrl-C at any bytecode of ours: the next pass is whole and right, and nothing is left."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import textwrap
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
from loaderpool.core import local_engine
from loaderpool.system import interrupts
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing, checkpoint, undo_orphans
from tests.support.child import run_child
from tests.support.handler_storm import (
    ITEMS,
    WANTED,
    Countdown,
    as_float,
    dropped,
    generated,
    indexed,
    left_early,
    local,
    resized,
    resumed,
    rows,
    streamed,
)
from tests.support.interrupts import CountBytecodes, interrupted_at
from tests.support.processes import supervisors, wait_gone

# Of the places in each kind of work so many are tried, evenly spread, others in each run; and so many signals are real.
# With LOADERPOOL_INTERRUPTS=10000 it takes the better part of an hour.
PLACES = int(os.environ.get("LOADERPOOL_INTERRUPTS", "60"))


# Python drops what is raised as the first bytecode of a finalizer runs; what it was to do is done later all the same.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests after one of these meet neither its handler nor a lock that it left taken.

    A Ctrl-C between a lock's last bytecode in a `with` and the next one, where no real one can come, leaves it taken.
    The main thread would take it again, and other threads, TensorFlow's among them, would wait for ever.
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
    return lp.Loader(KeptHere(), as_float, batch_size=4, workers=2)


def whole_pass(loader: lp.Loader) -> None:
    for _ in loader:
        pass


def places(count: int) -> range:
    step = max(1, count // PLACES)
    return range(1 + random.Random(os.getpid()).randrange(step), count + step, step)


def bytecodes_of(work: Callable[[], object]) -> int:
    work()
    counter = CountBytecodes()
    counter.start()
    work()
    counter.stop()
    return counter.count


def buffers_of(loader: lp.Loader) -> int:
    """How many batch buffers a pass has."""
    rows(loader)
    return loader.statistics().memory.buffers


def check_all_is_well(loader: lp.Loader, buffers: int, where: str) -> None:
    """A pass comes, is whole and right, and none that was broken off has batch buffers."""
    got = rows(loader)
    if len(got) < ITEMS:  # a resume was broken off: the rest of that epoch
        assert got == WANTED[ITEMS - len(got) :], where
        got = rows(loader)
    assert got == WANTED, where
    assert buffers <= loader.statistics().memory.buffers <= 3 * buffers, where


@pytest.mark.parametrize("work", [whole_pass, left_early, dropped, resumed])
@pytest.mark.parametrize("make", [indexed, streamed, streamed_here, generated, local])
def test_behind_an_interrupt_anywhere_the_next_pass_is_whole(
    make: Callable[[], lp.Loader], work: Callable[[lp.Loader], None]
) -> None:
    with make() as loader:
        raised, buffers = 0, buffers_of(loader)
        for at in places(bytecodes_of(lambda: work(loader))):
            _, was_raised, where = interrupted_at(at, lambda: work(loader))
            raised += was_raised
            check_all_is_well(loader, buffers, where)
        assert raised > PLACES / 6


def test_behind_an_interrupt_anywhere_in_a_resize_the_next_pass_is_whole() -> None:
    with indexed() as loader:
        buffers = buffers_of(loader)
        for at in places(bytecodes_of(lambda: resized(loader))):
            _, _, where = interrupted_at(at, lambda: resized(loader))
            check_all_is_well(loader, buffers, where)


@pytest.mark.parametrize("make", [indexed, streamed, generated])
def test_an_iterator_that_was_interrupted_goes_on_with_what_it_had_not_given(make: Callable[[], lp.Loader]) -> None:
    with make() as loader:

        def some() -> None:
            nonlocal batches, seen
            batches, seen = iter(loader), []
            for batch in batches:
                seen.append(batch)

        batches: Any = iter(())
        seen: list[Any] = []
        for at in places(bytecodes_of(some)):
            batches = None
            _, _, where = interrupted_at(at, some)
            if batches is None:  # it came before there was an iterator
                continue
            got = rows(batches)  # a batch may be lost between our return and the loop's variable, in Python's hands
            assert got == WANTED[ITEMS - len(got) :], where
            assert len(rows(seen)) + len(got) >= ITEMS - 4, where
            seen.clear()


@pytest.mark.parametrize("make", [indexed, streamed, streamed_here, generated])
def test_an_interrupt_anywhere_in_a_loaders_making_leaves_no_process(make: Callable[[], lp.Loader]) -> None:
    def made_and_used() -> None:
        with make() as loader:
            next(iter(loader))

    before, _ = supervisors()
    count = bytecodes_of(made_and_used)
    for at in itertools.islice(places(count), 0, None, 12):  # a loader takes longer than a pass
        _, _, where = interrupted_at(at, made_and_used)
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
    count = bytecodes_of(work)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mappings()
    for at in range(1, count + 1, max(1, count // (2 * PLACES))):
        _, _, where = interrupted_at(at, work)
        undo_orphans()
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
        with InterruptsHeld():  # from the next block on it waits, too
            press()
        assert not seen
    press()
    assert seen == [1, 1]


def test_nothing_is_done_where_ctrl_c_is_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with InterruptsHeld():
        press()
        with InterruptsAllowed():
            press()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize("chosen", [signal.SIG_IGN, signal.SIG_DFL])
def test_user_code_may_have_ctrl_c_ignored_or_end_the_process(chosen: Any) -> None:
    """It was a TypeError, and no Ctrl-C came any more."""
    with InterruptsHeld():
        with InterruptsAllowed():
            signal.signal(signal.SIGINT, chosen)
        if chosen == signal.SIG_IGN:
            press()
        with InterruptsAllowed():
            assert signal.getsignal(signal.SIGINT) == chosen
    assert signal.getsignal(signal.SIGINT) == chosen


_FORK = """
import os, signal, sys, threading, time
import loaderpool as lp
from loaderpool.system import ctrl_c, interrupts
from loaderpool.system.interrupts import InterruptsHeld

signal.signal(signal.SIGINT, signal.default_int_handler)


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
"""


def test_a_fork_that_a_thread_makes_while_the_main_thread_waits_is_ended_by_ctrl_c() -> None:
    """It had the handler of the main thread's block, which no thread of its own would ever leave."""
    run_child(
        _FORK
        + textwrap.dedent("""
        def wait_and_fork():
            while not interrupts._depth:
                time.sleep(0.001)
            codes.append(fork())
            forked.set()

        codes, forked = [], threading.Event()
        thread = threading.Thread(target=wait_and_fork)
        thread.start()
        with InterruptsHeld():
            forked.wait()
        thread.join()
        assert codes == [3], codes
        """),
        timeout_s=60,
    ).check()


def test_what_a_fork_is_sent_is_not_told_to_the_trainers_waits() -> None:
    run_child(
        _FORK
        + textwrap.dedent("""
        ctrl_c.watch()
        assert fork() == 3
        assert ctrl_c.note_signals() is None
        """),
        timeout_s=60,
    ).check()


class Owner:
    pass


CLOSED = Undoing(Owner, bool)


@pytest.mark.parametrize("make_good", [undo_orphans, lambda: Undoing(Owner(), bool), lambda: CLOSED.now()])
def test_an_undoing_that_a_ctrl_c_kept_from_running_is_made_good(
    make_good: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    owner = Owner()
    lost = Undoing(owner, lambda: done.append("lost"))
    with monkeypatch.context() as now:
        now.setattr(interrupts, "undo_orphans", interrupted)
        del owner
        with pytest.raises(KeyboardInterrupt):  # it was not lost either, but is sent again in a moment
            time.sleep(10)
    assert not done
    make_good()
    assert done == ["lost"]
    lost.now()
    assert done == ["lost"]


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
    """As TensorFlow's are: a Ctrl-C comes while one is made."""

    def __init__(self) -> None:
        signal.raise_signal(signal.SIGINT)


StatusError.__module__ = "tensorflow.python.framework.errors_impl"


def test_a_ctrl_c_while_an_error_of_tensorflows_is_made_comes_after_that() -> None:
    interrupts.gate_handlers()
    with pytest.raises(StatusError):
        raise StatusError
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)


# ---- real ones ----


def test_real_interrupts_at_random_moments_leave_every_next_pass_whole() -> None:
    """Construction, begin, wait, take, end, resize, close and resume, with signals from a thread."""
    run_child(
        f"""
        turns = {max(20, PLACES // 3)}
        """
        """
        import os, random, signal, threading, time
        import numpy as np
        import loaderpool as lp
        from tests.faults.test_interrupts import (
            ITEMS, WANTED, dropped, generated, indexed, left_early, local, resized, resumed, rows, streamed, whole_pass
        )

        chance = random.Random(os.getpid())
        main = threading.main_thread().ident
        works = [whole_pass, left_early, dropped, resumed]
        presses = came = 0
        for make in (indexed, streamed, generated, local):
            loader = make()
            rows(loader)
            for turn in range(turns):
                work = chance.choice(works + [resized] * (make is indexed))
                timer = threading.Timer(chance.random() * 0.02, signal.pthread_kill, (main, signal.SIGINT))
                try:
                    timer.start()
                    if turn % 20 == 19:
                        loader.close()
                        loader = make()
                    work(loader)
                    timer.join()
                    time.sleep(0.1)
                except KeyboardInterrupt:
                    came += 1
                timer.join()
                presses += 1
                try:
                    got = rows(loader)
                except lp.ClosedError:
                    loader = make()
                    got = rows(loader)
                if len(got) < ITEMS:  # a resume was broken off: the rest of that epoch
                    assert got == WANTED[ITEMS - len(got) :], (make, work)
                    got = rows(loader)
                assert got == WANTED, (make, work)
            loader.close()
        assert came > presses // 2, (came, presses)
        children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        assert not children, children
        """,
        timeout_s=100 + PLACES,
    ).check()
