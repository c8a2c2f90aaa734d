"""A storm of signals whose handlers raise, also Ctrl-C, at random moments of passes and
constructions.

Each shot is a signal after a random time, while a loader is made, iterated, abandoned, dropped,
resumed or closed. Its exception interrupts the current code, or comes a moment later, once. Then a
pass is whole and right. At the end, no finished pass holds a slot, and no process is left.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import loaderpool as lp
from tests.support.processes import descendants

ITEMS = 24
WANTED = list(range(ITEMS))


class RequeueError(Exception):
    """The exception of a scheduler's SIGUSR1."""


RAISED = {
    signal.SIGALRM: TimeoutError,
    signal.SIGUSR1: RequeueError,
    signal.SIGTERM: SystemExit,
    signal.SIGINT: KeyboardInterrupt,
}


class Countdown:
    """A stream that is read by a process of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ITEMS))


def as_float(item: int) -> Any:
    return np.float32(item)


def indexed() -> lp.Loader:
    return lp.Loader(range(ITEMS), as_float, batch_size=4, workers=2)


def streamed() -> lp.Loader:
    return lp.Loader(Countdown(), as_float, batch_size=4, workers=2)


def generated() -> lp.Loader:
    return lp.Loader.from_generator(Countdown, workers=1, batch_size=4)


def local() -> lp.Loader:
    return lp.Loader(range(ITEMS), as_float, batch_size=4, workers=0)


def rows(batches: Any) -> list[float]:
    """Return the rows of the remaining batches."""
    return [float(row) for batch in batches for row in batch]


def whole_pass(loader: lp.Loader) -> None:
    for batch in loader:
        batch.sum()


def left_early(loader: lp.Loader) -> None:
    batches: Any = iter(loader)
    next(batches)
    next(batches)
    batches.close()


def dropped(loader: lp.Loader) -> None:
    batches = iter(loader)
    next(batches)
    next(batches)
    del batches


def resumed(loader: lp.Loader) -> None:
    batches: Any = iter(loader)
    next(batches)
    state = batches.state_dict()
    batches.close()
    loader.load_state_dict(state)
    for _ in loader:
        pass


def resized(loader: lp.Loader) -> None:
    loader.resize(1)
    loader.resize(2)


def works_of(make: Callable[[], lp.Loader]) -> list[Callable[[lp.Loader], None]]:
    """Return the kinds of work with such a loader."""
    return [whole_pass, left_early, dropped, resumed, *([resized] if make is indexed else [])]


class Signals:
    """Sends signals, whose handlers raise, to this process. Counts them, and the caught
    exceptions.
    """

    def __init__(self) -> None:
        self.came = self.caught = 0
        self.where = ""
        for number, error in RAISED.items():
            signal.signal(number, functools.partial(self._raise, error))

    def _raise(self, error: type[BaseException], *_: object) -> None:
        self.came += 1
        self.where = "".join(traceback.format_stack())
        raise error(143)

    def check(self) -> None:
        """Check that all raised exceptions were caught."""
        assert self.caught == self.came, (
            f"of {self.came} exceptions {self.caught} came; the last one was raised in\n{self.where}"
        )

    def shoot(self, work: Callable[[], object], number: int, after_s: float) -> None:
        """Run a function, and send a signal meanwhile. Return when its exception has come."""
        before = self.came
        deadline_s = time.monotonic() + after_s + 10
        sender = threading.Timer(after_s, os.kill, (os.getpid(), number))
        try:
            sender.start()
            work()
            while self.came == before and time.monotonic() < deadline_s:
                time.sleep(0.0005)
            time.sleep(0.02)  # an exception in a finalizer comes a moment later
        except tuple(RAISED.values()):
            self.caught += 1
        sender.join()

    def rows_whatever_comes(self, loader: lp.Loader) -> list[float]:
        """Return the rows of a whole pass. An exception that came in a finalizer may be raised
        first.
        """
        try:
            return rows(loader)
        except tuple(RAISED.values()):
            self.caught += 1
            return rows(loader)


def storm(make: Callable[[], lp.Loader], shots: int, constructions: int, seed: int) -> None:
    """Send signals during all kinds of work with one kind of loader."""

    def made() -> None:
        with make() as loader:
            next(iter(loader))

    assert lp.Loader, (
        "imported: before a loader gates the handlers, Python's search for modules drops a TimeoutError"
    )
    chance, signals = random.Random(seed), Signals()
    for _ in range(constructions):
        signals.shoot(made, chance.choice(list(RAISED)), chance.random() * 0.3)
        if signals.caught < signals.came:
            signals.rows_whatever_comes(local())
        signals.check()
    loader = make()
    for _ in range(3):
        assert rows(loader) == WANTED
    slots = loader.statistics().memory.buffers
    for _ in range(shots):
        work = chance.choice(works_of(make))
        signals.shoot(
            lambda work=work: work(loader),
            chance.choice(list(RAISED)),
            chance.random() ** 2 * 0.012,
        )
        where = f"{make.__name__}, {work.__name__}"
        if (
            work is resumed
        ):  # a pass may have been interrupted, and then the rest of its epoch comes first
            got = signals.rows_whatever_comes(loader)
            assert got == WANTED[ITEMS - len(got) :], where
        got = signals.rows_whatever_comes(loader)
        assert got == WANTED, (where, got)
        signals.check()
    assert loader.statistics().memory.buffers <= slots, (loader.statistics().memory.buffers, slots)
    loader.close()
    assert not descendants(os.getpid())
    assert signals.came == shots + constructions, signals.came
