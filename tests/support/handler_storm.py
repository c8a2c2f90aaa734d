"""A storm of signals whose handlers raise, at random moments of passes and constructions.

Each shot: a signal after a random time, while a loader is made, iterated, left, dropped, resumed or closed. Its
exception comes out of what was under way, or a moment later, once; then a pass is whole and right. At the end no slot
is held by a pass that is over, and no process is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp

ITEMS = 24
WANTED = list(range(ITEMS))


class RequeueError(Exception):
    """What a scheduler's SIGUSR1 becomes."""


class Countdown:
    """A stream that a process of its own reads."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ITEMS))


def as_float(item: int) -> Any:
    """Make a sample."""
    return np.float32(item)


def indexed() -> lp.Loader:
    """Over indices, so that single batches are deliveries."""
    return lp.Loader(range(ITEMS), as_float, batch_size=4, workers=2)


def streamed() -> lp.Loader:
    """Over a stream."""
    return lp.Loader(Countdown(), as_float, batch_size=4, workers=2)


def generated() -> lp.Loader:
    """Over generators in workers."""
    return lp.Loader.from_generator(Countdown, workers=1, batch_size=4)


def local() -> lp.Loader:
    """In this process."""
    return lp.Loader(range(ITEMS), as_float, batch_size=4, workers=0)


def rows(batches: Any) -> list[float]:
    """Return the rows of the rest of these batches."""
    return [float(row) for batch in batches for row in batch]


def whole_pass(loader: lp.Loader) -> None:
    """Each batch dies as the next one comes."""
    for batch in loader:
        batch.sum()


def left_early(loader: lp.Loader) -> None:
    """Close an iterator in mid-pass."""
    batches: Any = iter(loader)
    next(batches)
    next(batches)
    batches.close()


def dropped(loader: lp.Loader) -> None:
    """Drop an iterator in mid-pass."""
    batches = iter(loader)
    next(batches)
    next(batches)
    del batches


def resumed(loader: lp.Loader) -> None:
    """Go on with a saved state."""
    batches: Any = iter(loader)
    next(batches)
    state = batches.state_dict()
    batches.close()
    loader.load_state_dict(state)
    for _ in loader:
        pass


def resized(loader: lp.Loader) -> None:
    """Other numbers of workers."""
    loader.resize(1)
    loader.resize(2)


class Signals:
    """Sends signals to this process; each has a handler that raises. Counts them, and what was caught."""

    RAISED = (TimeoutError, RequeueError, SystemExit)

    def __init__(self) -> None:
        self.came = self.caught = 0
        self.where = ""
        signal.signal(signal.SIGALRM, self._alarm)
        signal.signal(signal.SIGUSR1, self._requeue)
        signal.signal(signal.SIGTERM, self._end)

    def _note(self) -> None:
        self.came += 1
        self.where = "".join(traceback.format_stack())

    def check(self) -> None:
        """All that was raised was caught."""
        assert self.caught == self.came, (
            f"of {self.came} exceptions {self.caught} came; the last one was raised in\n{self.where}"
        )

    def _alarm(self, *_: object) -> None:
        self._note()
        raise TimeoutError("it takes too long")

    def _requeue(self, *_: object) -> None:
        self._note()
        raise RequeueError

    def _end(self, *_: object) -> None:
        self._note()
        sys.exit(143)

    def shoot(self, work: Callable[[], object], number: int, after_s: float) -> None:
        """Run it with a signal on the way; return when that has come."""
        before = self.came
        deadline_s = time.monotonic() + after_s + 10
        sender = threading.Timer(after_s, os.kill, (os.getpid(), number))
        try:
            if number == signal.SIGALRM:
                signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-6))
            else:
                sender.start()
            work()
            while self.came == before and time.monotonic() < deadline_s:
                time.sleep(0.0005)
            time.sleep(0.02)  # what was raised in a finalizer comes in a moment
        except self.RAISED:
            self.caught += 1
        if sender.ident is not None:
            sender.join()


def storm(make: Callable[[], lp.Loader], shots: int, seed: int, constructions: int) -> str:
    """Shoot at one kind of loader; return how many signals have come."""
    chance, signals = random.Random(seed), Signals()
    works = [whole_pass, left_early, dropped, resumed]
    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM]
    if make is indexed:
        works.append(resized)

    def made() -> None:
        with make() as loader:
            next(iter(loader))

    _rows_whatever_comes(local(), signals)  # imports: what is raised in Python's import machinery may be dropped there
    for _ in range(constructions):
        signals.shoot(made, chance.choice(numbers), chance.random() * 0.3)
        if signals.caught < signals.came:
            _rows_whatever_comes(local(), signals)
        signals.check()
    loader = make()
    for _ in range(3):
        assert rows(loader) == WANTED
    slots = loader.statistics().memory.buffers
    for _ in range(shots):
        work = chance.choice(works)
        signals.shoot(lambda work=work: work(loader), chance.choice(numbers), chance.random() ** 2 * 0.012)
        where = f"{make.__name__}, {work.__name__}"
        if work is resumed:  # it may have been broken off, and then the rest of an epoch comes first
            got = _rows_whatever_comes(loader, signals)
            assert got == WANTED[ITEMS - len(got) :], where
        got = _rows_whatever_comes(loader, signals)
        assert got == WANTED, (where, got)
        signals.check()
    assert loader.statistics().memory.buffers <= slots, (loader.statistics().memory.buffers, slots)
    loader.close()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    assert not children, children
    assert signals.came == shots + constructions, signals.came
    return f"{make.__name__}: {signals.came} signals"


def _rows_whatever_comes(loader: lp.Loader, signals: Signals) -> list[float]:
    """A whole pass, where an exception that a finalizer met may still come first."""
    try:
        return rows(loader)
    except signals.RAISED:
        signals.caught += 1
        return rows(loader)
