"""Exceptions of signal handlers: SIGTERM that calls `sys.exit`, SIGALRM of a time limit, SIGUSR1 of
a scheduler.

They interrupt the current code, or come at the next batch, once. Then a pass is whole, and nothing
is left behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child

# Signals for each kind of loader. LOADERPOOL_SIGNALS=1250 sends 5,000 for the four kinds, in five
# minutes.
SHOTS = int(os.environ.get("LOADERPOOL_SIGNALS", "24"))


@pytest.mark.timeout(120 + SHOTS)
@pytest.mark.parametrize(
    "kind",
    [
        "indexed",
        "local",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("streamed", "generated")),
    ],
)
def test_a_handler_that_raises_at_any_moment_leaves_the_next_pass_whole(kind: str) -> None:
    """Four signals are sent in turn, also that of Ctrl-C."""
    run_child(
        f"""
        from tests.support.handler_storm import {kind}, storm

        if __name__ == "__main__":
            storm({kind}, {SHOTS}, constructions=8, seed={os.getpid()})
        """,
        timeout_s=60 + SHOTS,
    ).check()


_PROGRAM = """
import random, signal, sys, threading, time, os
import numpy as np
import loaderpool as lp

def sample(item):
    return np.full(8, item, np.float32)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with lp.Loader(range(400), sample, batch_size=4, workers=2) as loader:
        iter(loader).close()
        next(iter(loader))
        threading.Timer(random.random() * 0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begun = time.monotonic()
        while time.monotonic() < begun + 20:
            for batch in loader:
                batch.sum()
    print("it went on")
"""


def test_sigterm_ends_a_training() -> None:
    ended = run_child(_PROGRAM, timeout_s=60)
    assert (ended.returncode, ended.stdout) == (143, ""), ended.stderr


_FINALIZED = """
import gc, os, signal, sys, time, weakref
import loaderpool as lp

TRAINER = os.getpid()

def numbers():
    try:
        yield from range(40)
    finally:  # in the worker, for which close() waits
        if WHERE == "in close":
            os.kill(TRAINER, signal.SIGTERM)

class Training:
    def __init__(self):
        self.loader = lp.Loader.from_generator(numbers, batch_size=4, workers=1)
        next(iter(self.loader))

def ends(loader):
    if WHERE == "before close":
        signal.raise_signal(signal.SIGTERM)
    loader.close()

class EndsItself(Training):
    def __del__(self):
        ends(self.loader)

def batches_of(loader):
    try:
        yield from loader
    finally:
        ends(loader)

def finalizer():
    training = EndsItself()
    del training

def collected_finalizer():
    training = EndsItself()
    training.itself = training
    del training
    gc.collect()

def weak_reference():
    training = Training()
    loader = training.loader
    reference = weakref.ref(training, lambda _: ends(loader))
    del training

def finalize():
    training = Training()
    weakref.finalize(training, ends, training.loader)
    del training

def dropped_generator():
    batches = batches_of(Training().loader)
    next(batches)
    del batches

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    WAY()
    time.sleep(20)
    print("it went on")
"""


@pytest.mark.parametrize("where", ["before close", "in close"])
@pytest.mark.parametrize(
    "way", ["finalizer", "collected_finalizer", "weak_reference", "finalize", "dropped_generator"]
)
def test_sigterm_in_a_finalizer_ends_a_training(way: str, where: str) -> None:
    """Python drops exceptions in finalizers, so the signal is sent again afterwards."""
    ended = run_child(_FINALIZED.replace("WHERE", repr(where)).replace("WAY", way), timeout_s=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "")


def test_other_errors_of_finalizers_are_shown_as_before() -> None:
    shown = run_child(
        """
        import sys
        import numpy as np
        import loaderpool as lp

        class Broken:
            def __del__(self):
                raise LookupError("in a finalizer")

        sys.unraisablehook = lambda dropped: print("shown:", dropped.exc_value)
        with lp.Loader(range(8), np.float32, batch_size=4, workers=0) as loader:
            list(loader)
            broken = Broken()
            del broken
        """
    ).check()
    assert shown.stdout == "shown: in a finalizer\n"


_WAITS = """
import signal, time
import numpy as np
import loaderpool as lp

def slow(item):
    time.sleep(0.02)
    return np.float32(item)

if __name__ == "__main__":
    said = []
    with lp.Pool(2) as pool:
        loader = lp.Loader(range(40), slow, batch_size=4, workers=pool)
        beside = lp.Loader(range(8), np.float32, batch_size=4, workers=pool)
        batches = iter(loader)
        next(batches)

        def handler(*_):
            try:
                said.append(WHAT)
            except lp.LoaderpoolError as error:
                said.append(error)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        rest = [float(row) for batch in batches for row in batch]
        assert rest == list(range(4, 40)), rest
        print(said[0])
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "[float(row) for batch in beside for row in batch]",
            str([float(item) for item in range(8)]),
        ),
        ("len([row for batch in loader for row in batch])", "40"),
        ("loader.statistics().batches", ""),
        (
            "next(batches)",
            "next() was called while the same thread is inside next() of this iterator",
        ),
    ],
)
def test_a_handler_may_use_the_pool_for_which_the_main_thread_waits(what: str, says: str) -> None:
    """Before a fix it hung, and Ctrl-C did not end it. The interrupted iterator itself is
    refused.
    """
    assert says in run_child(_WAITS.replace("WHAT", what), timeout_s=30).check().stdout


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Let SIGALRM raise a TimeoutError."""

    def limit(*_: object) -> Any:
        raise TimeoutError("it takes too long")

    before = signal.signal(signal.SIGALRM, limit)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit")
def test_an_iterator_goes_on_behind_a_time_limit() -> None:
    """The exception does not end the pass: the next call returns the batch that was waited for."""

    def slow(item: int) -> Any:
        time.sleep(0.1)
        return np.float32(item)

    with lp.Loader(range(8), slow, batch_size=4, workers=1) as loader:
        batches = iter(loader)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError, match="it takes too long"):
            next(batches)
        assert [float(row) for batch in batches for row in batch] == list(range(8))
        assert loader.last_error is None


@pytest.mark.usefixtures("time_limit")
def test_a_handlers_error_is_no_samples_error() -> None:
    """With `workers=0` it comes out of the function, but `on_error="skip"` does not count it."""

    def sample(item: int) -> Any:
        if item == 5:
            signal.raise_signal(signal.SIGALRM)
        return np.float32(item)

    loader = lp.Loader(range(8), sample, batch_size=4, workers=0, on_error="skip")
    with loader, pytest.raises(TimeoutError) as raised:
        list(loader)
    assert type(raised.value) is TimeoutError
